"""Batches with a position, and the samples that are left out."""

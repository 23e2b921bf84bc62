"""Prometheus rules and example configurations, as plain files."""

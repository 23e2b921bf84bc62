"""What went wrong, from signals alone: pure, with no torch, clock or file."""

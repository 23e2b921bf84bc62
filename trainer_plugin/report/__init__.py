"""A run's folder told as one page: what happened, what was done about it, and what it cost. No torch."""

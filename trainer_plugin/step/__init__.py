"""One step as it is measured and shielded, before the optimizer; no policy in here."""

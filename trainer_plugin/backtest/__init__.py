"""Old logs, and what the detectors would have said about them; needs no torch."""

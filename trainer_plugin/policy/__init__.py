"""What is to be done about it: pure, with no torch, clock or file."""

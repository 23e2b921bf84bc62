"""What an incident began with, kept for whoever looks for its cause."""

"""The demo: a small GPT on real text, a fault on purpose, and real servers around it."""

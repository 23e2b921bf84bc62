"""A spike scene run again in a fresh process: the recorded loss, and then why it was so."""

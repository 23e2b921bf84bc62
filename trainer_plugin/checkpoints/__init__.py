"""The state that goes back, and the folders in which it lies whole."""

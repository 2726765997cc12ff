"""Bugs that are put into the core on purpose, one at a time, to see whether a test finds them."""

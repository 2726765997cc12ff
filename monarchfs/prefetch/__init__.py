"""Copying: files that are on their way into a tier, in which order, and how they are read."""

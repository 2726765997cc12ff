"""The caches of a node: which there are, whose they are, which are in use; and their removal."""

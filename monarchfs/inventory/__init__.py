"""The caches of a node: what there are, whose they are, which are in use, and how they go."""

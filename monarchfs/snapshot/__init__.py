"""A dataset's names and attributes in a file, so that one look at the source serves many nodes."""

"""A dataset's names and attributes in a file, so that one walk over the source serves many
nodes."""

"""monarchfs: a read-only FUSE mirror of a dataset directory, served from node-local storage."""

__version__ = "0.1.0"

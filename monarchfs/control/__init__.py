"""The control socket: what is said on it, who may ask, and where it is found."""

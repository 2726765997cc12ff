"""What a file system of a mirrored directory means, whatever it is mounted with."""

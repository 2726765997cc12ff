"""The process that answers the kernel: its parts, put together."""

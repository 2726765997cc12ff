"""The source: the only package that touches the parallel file system.

``posix`` has the blocking functions; ``source`` calls them in threads.
"""

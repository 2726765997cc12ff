"""Checking a cache that no mount uses: the index against what lies in the tiers.

Runs in a process of its own (``python -I -m monarchfs.fsck``), as the user whose cache it is,
because a damaged index can end whoever opens it by a signal, and because root must not touch what a
user could have put there. ``monarchfs.cli.fsck`` starts it and holds the state directory's lock.
"""

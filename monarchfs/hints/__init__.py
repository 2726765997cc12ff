"""What a job may tell its mount about the files that it will read. For use inside a job.

    from monarchfs import hints

    sampler = hints.announce(sampler, files)

Hints cost nothing if there is no mount, and never fail: a job must not depend on them. Nothing here
needs the libraries of the daemon.
"""

from monarchfs.hints.order import Announced, announce, announce_files
from monarchfs.hints.weights import weigh

__all__ = ["Announced", "announce", "announce_files", "weigh"]

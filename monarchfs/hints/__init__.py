"""What a job may tell its mount about the files that it will read. For use inside a job.

Hints cost nothing if there is no mount, and never fail: a job must not depend on them. Nothing here
needs the libraries of the daemon.
"""

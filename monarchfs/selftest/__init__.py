"""Checks on a site's own file system, from an installed package: ``monarchfs selftest``."""

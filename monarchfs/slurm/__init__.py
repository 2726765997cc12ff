"""Mounts for the jobs of Slurm, and of other batch systems: what a prolog, an epilog and a task
prolog do (docs/SLURM.md, docs/BATCH.md).

``prolog``, ``epilog`` and ``recordings`` are run for jobs. ``site`` says what a job may have,
``job`` what it asks for. ``inventory`` (``monarchfs cache``) and ``leftovers`` (``gc``) are about
all that is on a node, also of other mounts.
"""

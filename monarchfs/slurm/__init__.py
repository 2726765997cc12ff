"""Mounts for Slurm jobs: what a prolog, an epilog and a task prolog do (docs/SLURM.md)."""

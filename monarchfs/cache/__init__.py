"""Replicas: where they are, who uses them, how one comes to be and goes."""

"""Metrics for Prometheus: their values now, as text, over HTTP."""

"""What is counted (``counts``), and under which names it is exported (``names``)."""

from monarchfs.metrics.counts import (
    DURATION_BOUNDS_NS,
    NS,
    ErrorCounts,
    Histogram,
    Metrics,
    Requests,
)

__all__ = ["DURATION_BOUNDS_NS", "NS", "ErrorCounts", "Histogram", "Metrics", "Requests"]

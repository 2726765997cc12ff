"""Every count that the worker keeps, with its unit and meaning, in one place.

Plain integers, changed on the event loop only: counting an open must not cost more than an
addition. What the source layer counts about itself is in ``monarchfs.source``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def _count(unit: str, meaning: str) -> int:
    value: int = field(default=0, metadata={"unit": unit, "help": meaning})
    return value


@dataclass(slots=True)
class Metrics:
    """What happened since this worker started."""

    local_opens: int = _count("opens", "Files opened whose replica was complete")
    source_opens: int = _count("opens", "Files opened that had to ask the source")
    local_file_bytes: int = _count("bytes", "Sizes of the files counted by local_opens")
    source_file_bytes: int = _count("bytes", "Sizes of the files counted by source_opens")
    relayed_bytes: int = _count("bytes", "Bytes handed to the kernel in answers to READ")
    stale_answers: int = _count(
        "answers", "Answers from known metadata because the source did not answer in time"
    )
    interrupted_requests: int = _count("requests", "Requests given up because their process died")
    copies_completed: int = _count("files", "Replicas that became complete")
    copies_failed: int = _count("files", "Copies given up after an error")
    copies_outdated: int = _count("files", "Copies thrown away because the source changed")
    copies_refused: int = _count("files", "Files not copied for want of room")
    chunks_dropped: int = _count(
        "chunks", "Fetched chunks that were not kept because the tiers were too far behind"
    )
    tier_errors: int = _count("errors", "Errors of tiers that were routed around")
    replicas_lost: int = _count("files", "Replicas found missing or damaged, and dropped")
    replicas_corrupt: int = _count("files", "Replicas whose bytes were found to be wrong")
    replicas_adopted: int = _count("files", "Replicas that an earlier index had left in a tier")
    replicas_moved: int = _count("files", "Replicas promoted or demoted")
    evictions_outdated: int = _count("files", "Replicas evicted as outdated or of unknown files")
    evictions_policy: int = _count("files", "Replicas evicted by the policy for a file in demand")
    evictions_pressure: int = _count("files", "Replicas evicted to stay within capacity or reserve")
    scrubbed_bytes: int = _count("bytes", "Bytes of replicas that were compared with a checksum")

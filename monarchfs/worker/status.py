"""The worker's answer to ``status``: the keys that the command line promises, and how they are
counted (docs/USAGE.md)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from monarchfs.config.model import Profile
from monarchfs.prefetch.fill import Fill
from monarchfs.worker.composition import Composition

if TYPE_CHECKING:
    from monarchfs.worker.peering import Peering


MOST_PEERS = 128
"""In a status, which has to stay small; ``monarchfs peers`` shows all."""


def status(worker: Composition) -> dict[str, Any]:
    """One JSON-able object. Costs a statvfs a tier; never asks the source."""
    counters = worker.source.counters
    metrics = worker.metrics
    worker.count()
    of_tiers = worker.index.replicas.tier_totals()
    totals = [held for tier, held in of_tiers.items() if tier in worker.cache.tiers]
    return {
        "source": worker.config.source,
        "mountpoint": worker.config.mountpoint,
        "state": "serving" if worker.source.responding else "source not responding",
        "data_path": worker.data_path,
        "metrics_port": worker.config.metrics_port,
        "freshness": worker.config.freshness.mode.value,
        **_profile(worker.config.profile),
        "tiers": worker.cache.usage.report(),
        "other_tiers": [
            {
                "path": path,
                "files": held.resident + held.partial + held.found,
                "used_bytes": held.allocated_bytes,
            }
            for tier, path in sorted(worker.index.meta.tier_paths().items())
            if tier not in worker.cache.tiers and (held := of_tiers.get(tier)) is not None
        ],
        "files": {
            "known": worker.index.nodes.count_nodes(),
            "resident": sum(tier.resident for tier in totals),
            "partial": sum(tier.partial for tier in totals),
            "copying": worker.copier.jobs.filling,
        },
        "source_io": {
            "read_bytes": counters.read_bytes,
            "demand_read_bytes": counters.demand_read_bytes,
            "prefetch_read_bytes": counters.prefetch_read_bytes,
            "operations": counters.operations,
            "operation_seconds": round(counters.seconds, 6),
            "errors": counters.errors,
            "stuck": counters.stuck,
            "closing": worker.source.releases.pending,
            "responding": worker.source.responding,
            "renumbered_files": metrics.renumbered_files,
        },
        "served": {
            "local_opens": metrics.local_opens,
            "source_opens": metrics.source_opens,
            "peer_opens": metrics.peer_opens,
            "local_file_bytes": metrics.local_file_bytes,
            "source_file_bytes": metrics.source_file_bytes,
            "peer_file_bytes": metrics.peer_file_bytes,
            "peer_names": metrics.peer_names,
            "peer_files": metrics.peer_files,
            "peer_bytes": metrics.peer_bytes,
            "relayed_bytes": metrics.relayed_bytes,
            "stale_answers": metrics.stale_answers,
            "passthrough_opens": metrics.passthrough_opens,
        },
        "passthrough": {
            "backing_files": worker.passthrough.ids,
            "refused": metrics.backing_refused,
        },
        "prefetch": {
            "queued": len(worker.copier.jobs.queue),
            "active": worker.copier.jobs.active,
            "left_bytes": sum(map(_left, worker.copier.jobs.background)),
            "scanning": worker.scan.running,
            "idle_since_uptime_seconds": worker.copy_idle.since_uptime_seconds,
            "share": round(worker.copier.governor.share, 3),
            "held_back": worker.copier.governor.reason,
            "completed": metrics.copies_completed,
            "failed": metrics.copies_failed,
            "refused": metrics.copies_refused,
            "outdated": metrics.copies_outdated,
        },
        "evictions": {
            "outdated": metrics.evictions_outdated,
            "policy": metrics.evictions_policy,
            "pressure": metrics.evictions_pressure,
            "manual": metrics.evictions_manual,
        },
        "replicas": {
            "lost": metrics.replicas_lost,
            "corrupt": metrics.replicas_corrupt,
            "adopted": metrics.replicas_adopted,
            "moved": metrics.replicas_moved,
            "scrubbed_bytes": metrics.scrubbed_bytes,
        },
        "window": {
            "capacity_bytes": worker.window.size.limit_bytes,
            "used_bytes": worker.window.size.used_bytes,
            "orders": len(worker.window.orders),
            "orders_learned": metrics.orders_learned,
            "orders_given_up": metrics.orders_given_up,
            "files": metrics.window_files,
            "hits": metrics.window_hits,
            "hit_bytes": metrics.window_hit_bytes,
            "wasted_bytes": metrics.window_wasted_bytes,
        },
        "peers": _peers(worker.peering),
        "touch": {"completed": metrics.touches_completed, "failed": metrics.touches_failed},
        "index": {"frozen": worker.index.environment.frozen},
        "requests": {
            "waiting": worker.requests_waiting,
            "interrupted": metrics.interrupted_requests,
        },
        "worker": {"pid": os.getpid(), "restarts": worker.restarts},
    }


def _profile(profile: Profile) -> dict[str, str]:
    return {} if profile is Profile.NONE else {"profile": profile.value}


def _left(fill: Fill) -> int:
    """How much of a file that is being copied is still to be read."""
    chunks = fill.copy.chunks
    return max(0, fill.copy.size - chunks.present_count * chunks.chunk_bytes)


def _peers(peering: Peering | None) -> list[dict[str, Any]]:
    """In order: those first that do not answer."""
    rows = [] if peering is None else peering.status()
    return sorted(rows, key=lambda row: row["error"] is None and not row["avoided"])[:MOST_PEERS]

"""What nodes that share a dataset keep of it, and what each reads from where. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Fits(Enum):
    """Where there is room for all of a dataset."""

    EACH_NODE = "each node"
    ALL_TOGETHER = "all together"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes of one epoch, in which each node reads the dataset once: ``source_bytes`` of all nodes,
    ``network_bytes`` that each gets from others."""

    source_bytes: int
    network_bytes: int


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """``own_bytes`` and ``foreign_bytes``: what each node keeps of its own files and of others'."""

    fits: Fits
    own_bytes: int
    foreign_bytes: int
    first_epoch: Reads
    later_epoch: Reads


def plan_sharing(
    dataset_bytes: int, room_bytes: int, nodes: int, *, own_first: bool, keeps_foreign: bool
) -> SharedPlan:
    """``room_bytes``: how much of the dataset each node can keep; all are alike, and own as much.
    ``own_first``: a node's own files push out others' (else whatever comes first stays)."""
    room = min(room_bytes, dataset_bytes)
    share = dataset_bytes / nodes
    if not keeps_foreign:
        own, foreign = min(share, room), 0.0
    elif own_first:
        own = min(share, room)
        foreign = room - own
    else:
        own = room / nodes
        foreign = room - own
    owned = own / share if share else 1.0  # how much of what is owned its owner has
    had_elsewhere = owned * (dataset_bytes - share)
    # What its owner does not keep is read from the source by each node that does not keep it.
    unowned = (1 - owned) * dataset_bytes
    kept_unowned = max(0.0, foreign - had_elsewhere) if own_first else foreign * (1 - owned)
    network = max(0.0, had_elsewhere - (foreign - kept_unowned))
    return SharedPlan(
        _fits(dataset_bytes, room, nodes),
        round(own),
        round(foreign),
        Reads(round(owned * dataset_bytes + nodes * unowned), round(had_elsewhere)),
        Reads(round(nodes * (unowned - kept_unowned)), round(network)),
    )


def _fits(dataset_bytes: int, room_bytes: int, nodes: int) -> Fits:
    if room_bytes >= dataset_bytes:
        return Fits.EACH_NODE
    return Fits.ALL_TOGETHER if nodes * room_bytes >= dataset_bytes else Fits.NOWHERE

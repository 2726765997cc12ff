"""What holds of placement's accounts at any moment."""

from monarchfs.cache.placement.ledger import Ledger
from monarchfs.cache.placement.placement import Placement
from monarchfs.cache.placement.traffic import MOST_MOVES, Traffic


def check_accounts(placement: Placement) -> None:
    """They agree with copies, moves and what is leaving."""
    _check_traffic(placement._traffic)
    copies = placement._copies._copies.values()
    moves = placement._traffic._moves.values()
    assert all(copy.tier in placement._ledgers for copy in copies)
    for tier, ledger in placement._ledgers.items():
        assert ledger.used_bytes >= ledger.departing_bytes, ledger
        bytes_ = ledger.departing_bytes, ledger.reserved_bytes, ledger.leaving_bytes
        assert min(*bytes_, ledger.files, ledger.copies, ledger.leaving_files) >= 0, ledger
        here = [copy for copy in copies if copy.tier == tier]
        coming = [move for move in moves if move.to == tier]
        reserved = [copy.reserved_bytes for copy in here] + [move.reserved_bytes for move in coming]
        assert ledger.reserved_bytes == sum(reserved)
        assert ledger.copies == sum(not copy.resumed for copy in here) + len(coming)
        assert ledger.used_bytes >= sum(copy.base_bytes for copy in here)
        assert ledger.files >= sum(copy.resumed for copy in here)
    assert placement._usable == [one for one in placement._ledgers.items() if one[1].usable]


def _check_traffic(traffic: Traffic) -> None:
    for tier, ledger in traffic._ledgers.items():
        leaving = (sizes for (_, at), sizes in traffic._leaving.items() if at == tier)
        sizes = [size for files in leaving for size in files]
        assert ledger.leaving_bytes == sum(sizes)
        assert ledger.leaving_files == len(sizes)
        going = [move for move in traffic._moves.values() if move.tier == tier and not move.dropped]
        assert ledger.departing_bytes == sum(move.allocated_bytes for move in going)
    assert all(traffic._leaving.values())
    assert len(traffic._moves) <= MOST_MOVES


def writable_bytes(ledger: Ledger, written_bytes: int) -> int:
    """How much of what is reserved may be written now, if all copies and moves in progress have
    written ``written_bytes``; at 0 no file may be made either.

    The rest waits for what is leaving.
    """
    if ledger.leaving_files and ledger.room_inodes() < ledger.leaving_files:
        return 0
    in_capacity = ledger.capacity_bytes - ledger.used_bytes
    in_file_system = ledger.free_bytes - ledger.kept_free_bytes
    return max(0, min(in_capacity, in_file_system) - ledger.leaving_bytes - written_bytes)

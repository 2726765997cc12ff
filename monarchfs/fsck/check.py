"""The whole check: the index first, then each tier that it knows."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarchfs.fsck.report import FindingKind, FsckReport
from monarchfs.fsck.tier import FAN_OUTS, TierCheck, forget_lost
from monarchfs.index import Index, LastClose, last_close, problems, remove_aside, set_aside
from monarchfs.store.tier import Tier
from monarchfs.types import IndexUnusable, TierTotals

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ASIDE = re.compile(r"index\.bad-[0-9]+")


@dataclass(frozen=True, slots=True)
class Task:
    """What to check. ``state`` is the open state directory, locked by who started this;
    ``directories`` are the names of the dataset's directories by their tiers' paths, and in others
    it is called ``dataset_id``, as earlier releases did; ``tiers`` are the paths of those of the
    last mount, for where the index does not know."""

    state: int
    dataset_id: str
    directories: dict[str, str]
    tiers: tuple[str, ...]
    repair: bool
    checksum: bool


class CacheCheck:
    """Constant: the task. Changing: what was seen."""

    def __init__(self, task: Task, report: FsckReport) -> None:
        self._task = task
        self._report = report
        self._directory = f"/proc/self/fd/{task.state}"
        self._tiers: list[dict[str, Any]] = []
        self._checked: Counter[str] = Counter(checked_files=0, checked_bytes=0)

    def run(self) -> dict[str, Any]:
        """The keys of ``--json`` but ``state_dir``. Raises OSError of the state directory,
        IndexWriteError, IndexUnusable."""
        self._clear_set_aside()
        found, index = self._open_index()
        if index is None:
            for path in self._task.tiers:
                self._only_count(path)
        else:
            clean = False
            try:
                self._check_tiers(index)
                clean = True
            finally:
                index.close(clean=clean)
        return {
            "index": found,
            "tiers": self._tiers,
            **self._checked,
            **self._report.summary(),
        }

    # -- the index

    def _open_index(self) -> tuple[str, Index | None]:
        """How it was found, and the open index; None if it cannot be used, nor is replaced."""
        self._report.progress("checking the index", 0, 1)
        if last_close(self._directory) is LastClose.NEW:
            return "missing", self._replaced(FindingKind.INDEX_MISSING, "it is not there")
        wrong = problems(self._directory)
        if wrong:
            return "damaged", self._replaced(FindingKind.INDEX_DAMAGED, "; ".join(wrong))
        try:
            return "clean", self._open()
        except IndexUnusable as error:
            return "foreign", self._replaced(FindingKind.INDEX_FOREIGN, str(error))

    def _replaced(self, kind: FindingKind, detail: str) -> Index | None:
        if not self._task.repair:
            self._report.found(kind, "index", detail)
            return None
        aside = set_aside(self._directory)
        index = self._open()
        for path in self._task.tiers:
            index.meta.tier_number(path)
        done = "made a new one" + (f", kept it as {os.path.basename(aside)}" if aside else "")
        self._report.found(kind, "index", detail, done)
        return index

    def _open(self) -> Index:
        return Index.open(self._directory, source_id=self._task.dataset_id, trust_after_kill=True)

    def _clear_set_aside(self) -> None:
        """Indexes that were set aside earlier: nobody needs them but who wants to know why."""
        for name in sorted(os.listdir(self._directory)):
            if _ASIDE.fullmatch(name):
                removed = self._task.repair and remove_aside(self._directory, name)
                done = "removed" if removed else None
                self._report.found(FindingKind.INDEX_SET_ASIDE, name, "set aside earlier", done)

    # -- the tiers

    def _check_tiers(self, index: Index) -> None:
        if self._task.repair:
            index.replicas.begin_boot(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip())
            forget_lost(index, self._report)
        for number, path in sorted(index.meta.tier_paths().items()):
            seen = self._check_tier(index, number, path)
            totals = index.replicas.tier_totals().get(number, TierTotals())
            self._tiers.append(
                {
                    "path": path,
                    **seen,
                    "files": totals.resident + totals.partial + totals.found,
                    **totals._asdict(),
                }
            )

    def _check_tier(self, index: Index, number: int, path: str) -> dict[str, Any]:
        """Whether the tier is there, and what is in it beside replicas."""
        try:
            tier = self._open_tier(path, number)
        except OSError as error:
            # One that an earlier mount had and that holds nothing is missed by nobody.
            if number in index.replicas.tier_totals():
                detail = f"cannot be opened, what is recorded of it stays: {error.strerror}"
                self._report.found(FindingKind.TIER_GONE, path, detail)
            return {"present": False}
        check = TierCheck(
            index, tier, self._report, repair=self._task.repair, checksum=self._task.checksum
        )
        try:
            check.run()
            tier.segments.lists.count()
            tier.segments.trees.count()
            tier.segments.trees.measure()
        except OSError as error:
            self._report.found(FindingKind.TIER_FAILED, path, f"{error.strerror}: left as it is")
        finally:
            overhead = tier.overhead_bytes
            tier.close()
            self._checked["checked_files"] += check.checked_files
            self._checked["checked_bytes"] += check.checked_bytes
        return {"present": True, "overhead_bytes": overhead, "gap_bytes": check.gap_bytes}

    def _only_count(self, path: str) -> None:
        """What lies in a tier of which nothing is known."""
        files = allocated = 0
        present = True
        try:
            tier = self._open_tier(path, 0)
            try:
                for fan_out in range(FAN_OUTS):
                    here = tier.files.complete(fan_out)
                    files += len(here)
                    allocated += sum(file.allocated_bytes for file in here)
                for segment in tier.segments.found():
                    files += len(tier.segments.noted(segment))
                    allocated += tier.segments.blocks(segment)
            finally:
                tier.close()
        except OSError:
            present = False
        self._tiers.append(
            {"path": path, "present": present, "files": files, "allocated_bytes": allocated}
        )

    def _open_tier(self, path: str, number: int) -> Tier:
        """Raises OSError, also for a directory that is not ours alone."""
        name = os.path.join(path, self._task.directories.get(path, self._task.dataset_id))
        directory = os.open(name, _DIRECTORY)
        try:
            st = os.fstat(directory)
            if st.st_uid != os.geteuid() or st.st_mode & 0o022:
                raise PermissionError(0, "it is open to others", name)
            return Tier(directory, path, number)
        finally:
            os.close(directory)

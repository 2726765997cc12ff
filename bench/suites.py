"""Which measurements there are, and what ``make bench`` and ``make bench-full`` run of them."""

from __future__ import annotations

from dataclasses import dataclass

from bench.task import Size


@dataclass(frozen=True, slots=True)
class Measurement:
    """``module`` has ``run(task: Task) -> Result``. ``quick_minutes`` and ``full_minutes`` is about
    how long it takes with 2 processors; ``suites``: in which it is, in their order."""

    module: str
    what: str
    quick_minutes: float
    full_minutes: float
    suites: tuple[Size, ...] = (Size.FULL,)

    def minutes(self, size: Size) -> float:
        return self.quick_minutes if size is Size.QUICK else self.full_minutes


BOTH = (Size.QUICK, Size.FULL)

MEASUREMENTS = {
    "monarch": Measurement("bench.monarch", "MONARCH's experiment: epochs by arm", 5, 90, BOTH),
    "dlio": Measurement("bench.dlio", "DLIO: accelerator utilisation by arm", 2, 20, BOTH),
    "loaders": Measurement("bench.loaders", "real loaders: torch, HDF5, tars, parquet", 4, 20),
    "ingest": Measurement("bench.ingest", "first epochs of a source without latency", 8, 90),
    "programs": Measurement(
        "bench.programs", "rclone, juicefs, bindfs, mergerfs, cp -r first", 3, 25, BOTH
    ),
    "staging": Measurement("bench.staging", "cp -r, squashfs and a mount: break-evens", 2, 12),
    "sharing": Measurement("bench.sharing", "nodes that share what they have", 3, 8),
    "order": Measurement("bench.order", "epochs that do not fit, by announced order", 6, 25),
    "announced": Measurement("bench.announced", "PyTorch and webdataset, order announced", 3, 5),
    "nodes": Measurement("bench.nodes", "3 and 8 nodes with links of their own, faults", 3, 8),
    "scale": Measurement("bench.scale", "owners on 3 to 4,096 nodes, simulated", 1, 1),
    "bricks": Measurement("bench.bricks", "a GlusterFS that dies under nodes that share", 1, 2),
    "copying": Measurement("bench.copying", "copy rate against cp -r and rsync", 3, 25, BOTH),
    "datapath": Measurement("bench.datapath", "reads of resident files by every way", 2, 20, BOTH),
    "sizes": Measurement("bench.filesizes", "throughput by file size", 1, 2, BOTH),
    "names": Measurement("bench.names", "stat, find, ls -l and du, cold and known", 2, 9, BOTH),
    "patterns": Measurement("bench.patterns", "first reads by pattern, beside the source", 2, 5),
    "calls": Measurement("bench.calls", "what a Lustre client would ask, by kind", 1, 4),
    "growth": Measurement("bench.growth", "from 1,000 to 1,000,000 files", 2, 25, BOTH),
    "calibrate": Measurement("bench.calibrate", "the emulated file system itself", 1, 5),
    "insight": Measurement("bench.insight", "what analyze says, and what is so", 1, 6),
    "epochs": Measurement("bench.epochs", "two epochs of mixed files", 2, 2),
    "hdf5": Measurement("bench.records", "random records of one HDF5 file", 3, 3),
    "frozen": Measurement("bench.frozen", "local files while the source hangs", 1, 1),
    "jobs": Measurement("bench.twojobs", "two jobs on a node, one dataset", 3, 8),
    "governor": Measurement("bench.governor", "copies beside another job on the source", 4, 12),
    "mirror": Measurement("bench.mirror", "each name and byte compared with the source", 8, 8),
    "capacity": Measurement("bench.capacity", "a tier that is too small, by policy", 3, 3),
    "importance": Measurement(
        "bench.importance", "files read more often than others, by policy, simulated", 2, 2
    ),
    "kill": Measurement("bench.kill", "everything killed, and reboots", 2, 20),
    "restarts": Measurement("bench.restarts", "the worker killed under readers", 4, 30),
}


def suite(size: Size) -> list[str]:
    return [name for name, one in MEASUREMENTS.items() if size in one.suites]

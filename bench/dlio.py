"""DLIO, the deep-learning I/O benchmark: how busy the accelerator is kept, over each arm.

DLIO 2.0.0 itself drives the loaders of PyTorch and TensorFlow; its accelerator is a sleep of
``computation_time`` for each batch. Accelerator utilisation (AU) is the share of the time in which
it sleeps, the first batch of an epoch left out. `SHAPES` are published workloads; `scaled` makes
them smaller without changing what storage sees of them: how large reads are against files, how many
files make a dataset, and how many bytes a second the accelerator takes.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.arms import COLD, DIRECT, LOCAL, WARM, Reached, place_for, tree_bytes
from bench.frameworks import program, run_program
from bench.harness import Unusable, drop_caches, drop_pages, memory_place
from bench.pfs import PROFILES, Counts, ParallelFileSystem
from bench.report import Kind, Result, Series, point
from bench.task import Task

ARMS = (DIRECT, LOCAL, COLD, WARM)
# The one that is slower than the accelerators of all the workloads.
PROFILE = PROFILES["crowded"]
EPOCHS = 5
GOAL_POINTS = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload; sizes in bytes, ``compute_seconds`` for each batch."""

    name: str
    config: str
    """The file of DLIO's own ``configs/workload`` that has whatever is not said here."""
    format: str
    files: int
    samples_per_file: int
    record_bytes: float
    record_deviation: float
    resized_bytes: int
    """The tensor that DLIO hands on for each record; 0: one of the record's size."""
    batch: int
    compute_seconds: float
    readers: int
    shuffled: bool
    note: str = ""

    @property
    def dataset_bytes(self) -> float:
        return self.files * self.samples_per_file * self.record_bytes

    @property
    def demand(self) -> float:
        """Bytes a second that keep the accelerator busy."""
        return self.batch * self.record_bytes / self.compute_seconds


def scaled(
    shape: Shape, *, files: int, samples: float = 1.0, record: float = 1.0, batch: float = 1.0
) -> Shape:
    """The shape with so many files, and its samples a file, bytes a record and records a batch
    divided by these. The time of a batch is divided by what the batch has fewer bytes, so demand
    stays. Raises ValueError where less than one sample or record is left."""
    smaller = replace(
        shape,
        files=files,
        samples_per_file=int(shape.samples_per_file / samples),
        record_bytes=shape.record_bytes / record,
        record_deviation=shape.record_deviation / record,
        resized_bytes=int(shape.resized_bytes / record),
        batch=int(shape.batch / batch),
    )
    if min(smaller.samples_per_file, smaller.batch, files) < 1 or smaller.record_bytes < 1:
        raise ValueError(f"{shape.name} cannot be made that small")
    whole = smaller.batch * smaller.record_bytes / (shape.batch * shape.record_bytes)
    return replace(smaller, compute_seconds=shape.compute_seconds * whole)


# Of CosmoFlow on a V100: what the two shapes get that are published without a time for a batch.
USUAL_DEMAND = 2_828_486 / 0.00936

# The first three as DLIO 2.0.0's configs/workload has them. Numbers and sizes of files of the last
# two: Devarajan et al., DLIO (CCGrid 2021). Their records are the networks' inputs, 32-bit floats:
# 224 x 224 x 3 (of which 402 make 242 MB) and 768 x 1152 x 16 (one makes 56.6 MB).
UNET3D = Shape(
    *("unet3d", "unet3d_v100", "npz", 168, 1, 146_600_628, 68_341_808, 2_097_152, 4, 1.3604, 4),
    shuffled=True,
    note="V100",
)
RESNET50 = Shape(
    *("resnet50", "resnet50_h100", "tfrecord", 1024, 1251, 114_660.07, 0, 150_528, 400, 0.224, 8),
    shuffled=False,
    note="H100",
)
COSMOFLOW = Shape(
    *("cosmoflow", "cosmoflow_v100", "tfrecord", 524_288, 1, 2_828_486, 71_311, 0, 1, 0.00936, 4),
    shuffled=True,
    note="V100",
)
HEPCNNB = Shape(
    *("hepcnnb", "default", "hdf5", 2048, 402, 602_112, 0, 0, 16, 16 * 602_112 / USUAL_DEMAND, 4),
    shuffled=True,
    note="global shuffle; time of a batch chosen",
)
CDB = Shape(
    *("cdb", "default", "hdf5", 62_738, 1, 56_623_104, 0, 0, 2, 2 * 56_623_104 / USUAL_DEMAND, 4),
    shuffled=True,
    note="global shuffle; time of a batch chosen",
)
# Each about 480 MB.
SHAPES = {
    shape.name: (shape, small)
    for shape, small in (
        (UNET3D, scaled(UNET3D, files=40, record=12)),
        (RESNET50, scaled(RESNET50, files=40, samples=12, batch=10)),
        (COSMOFLOW, scaled(COSMOFLOW, files=176)),
        (HEPCNNB, scaled(HEPCNNB, files=24, samples=12)),
        (CDB, scaled(CDB, files=68, record=8)),
    )
}


def overrides(shape: Shape, data: Path, output: Path, *, generate: bool, epochs: int) -> list[str]:
    """The command line of DLIO after its name; what it writes goes to ``output``."""
    settings = {
        "workflow.generate_data": generate,
        "workflow.train": not generate,
        "workflow.checkpoint": False,
        "workflow.evaluation": False,
        "dataset.data_folder": data,
        "dataset.format": shape.format,
        "dataset.num_files_train": shape.files,
        "dataset.num_files_eval": 0,
        "dataset.num_subfolders_train": 0,
        "dataset.num_subfolders_eval": 0,
        "dataset.num_samples_per_file": shape.samples_per_file,
        # Later releases call it record_length_bytes; this one passes over that name.
        "dataset.record_length": int(shape.record_bytes),
        "dataset.record_length_stdev": int(shape.record_deviation),
        "dataset.record_length_resize": shape.resized_bytes,
        # Otherwise it makes up 2 GiB of records for each HDF5 file, and takes what it needs.
        "dataset.generation_buffer_size": int(shape.samples_per_file * shape.record_bytes),
        "reader.batch_size": shape.batch,
        "reader.read_threads": shape.readers,
        "reader.file_shuffle": "seed" if shape.shuffled else "off",
        "reader.sample_shuffle": "seed" if shape.shuffled else "off",
        # As DLIO's shuffled TFRecord workloads have it. The default, 1,024, is more records than
        # there are: all of them would be read before the first batch, which AU leaves out.
        "reader.shuffle_size": 2,
        "train.epochs": epochs,
        "train.computation_time": round(shape.compute_seconds, 6),
        "output.folder": output,
    }
    words = [f"++workload.{name}={value}" for name, value in settings.items()]
    return [
        *(f"workload={shape.config}", *words),
        *(f"hydra.run.dir={output / 'hydra'}", "hydra.output_subdir=null"),
    ]


@dataclass(frozen=True, slots=True)
class Epoch:
    """``utilisation`` is in percent; ``asked`` is what the parallel file system had to do."""

    utilisation: float
    samples_per_second: float
    asked: Counts = Counts()  # noqa: RUF009 - a tuple


def read_summary(path: Path) -> list[Epoch]:
    """The epochs in DLIO's summary.json. Raises Unusable where they are not in it."""
    try:
        metric = json.loads(path.read_text())["metric"]
        utilisation = metric["train_au_percentage"]
        speed = metric["train_throughput_samples_per_second"]
        return [Epoch(float(u), float(s)) for u, s in zip(utilisation, speed, strict=True)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"DLIO left no summary that can be read: {error!r}") from None


def epochs_begun(log: str) -> int:
    """How many epochs have begun by DLIO's log."""
    return len(re.findall(r" Starting epoch \d+:", log))


@contextmanager
def at_epochs(log: Path, action: Callable[[int], None], pause: float = 0.02) -> Iterator[None]:
    """Calls ``action`` with the number of each epoch that begins while the block runs, in a
    thread. What it raises is raised at the block's end."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def watch() -> None:
        begun = 0
        while not ended.wait(pause):
            try:
                text = log.read_text(errors="replace") if log.exists() else ""
                for number in range(begun + 1, epochs_begun(text) + 1):
                    action(number)
                    begun = number
            except Exception as error:  # noqa: BLE001 - raised below
                failed.append(error)
                return

    thread = threading.Thread(target=watch, name="epochs")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


def generate(shape: Shape, data: Path, place: Path) -> None:
    """Has DLIO write the dataset. ``place`` is for its logs."""
    words = overrides(shape, data, place / "generated", generate=True, epochs=1)
    # It indexes each TFRecord file for DALI with a program of DALI's, and nobody here reads that.
    tools = place / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "tfrecord2idx").symlink_to("/bin/true")
    search = {"PATH": f"{tools}:{os.environ['PATH']}"}
    run_program([program("dlio_benchmark"), *words], place / "generate.log", search)


def train(shape: Shape, data: Reached, place: Path, pfs: ParallelFileSystem) -> list[Epoch]:
    """Has DLIO train over ``data``. Before each epoch the page cache is emptied, as it would be by
    a dataset that is larger than memory."""
    output = place / "trained"
    marks: list[Counts] = []

    def begin(number: int) -> None:
        if number == 1:
            pfs.restart_noise()
        marks.append(pfs.counts())
        drop_pages()

    drop_caches()
    words = overrides(shape, data.path, output, generate=False, epochs=EPOCHS)
    with at_epochs(output / "dlio.log", begin):
        run_program([program("dlio_benchmark"), *words], place / "train.log")
    marks.append(pfs.counts())
    epochs = read_summary(output / "summary.json")
    if len(marks) != len(epochs) + 1:
        raise Unusable(f"DLIO tells of {len(epochs)} epochs and began {len(marks) - 1}")
    return [
        replace(epoch, asked=after - before)
        for epoch, before, after in zip(epochs, marks, marks[1:], strict=False)
    ]


Rounds = dict[str, list[list[Epoch]]]
"""By arm, then by round, then by epoch."""


def alternate(shape: Shape, task: Task, place: Path, rounds: int) -> tuple[Rounds, int]:
    """Runs DLIO over each arm in turn, ``rounds`` times; what was found, and the dataset's size."""
    found: Rounds = {arm.name: [] for arm in ARMS}
    with memory_place() as memory:
        backing = memory / "backing"
        task.say(f"{shape.name}: writing {shape.dataset_bytes / 1e6:.0f} MB")
        generate(shape, backing, place)
        size = tree_bytes(backing)
        with ParallelFileSystem(backing, place / "pfs", PROFILE) as pfs:
            for number in range(rounds):
                for arm in ARMS:
                    task.say(f"{shape.name}: round {number + 1} of {rounds}, {arm.name}")
                    with (
                        place_for(memory, arm) as own,
                        arm.reach(pfs, own, capacity=None) as reached,
                    ):
                        found[arm.name].append(train(shape, reached, own, pfs))
    return found, size


def later(epochs: Sequence[Epoch]) -> float:
    """Utilisation from the second epoch on, in percent."""
    return statistics.mean(epoch.utilisation for epoch in epochs[1:])


def speed(epochs: Sequence[Epoch]) -> float:
    """Samples a second from the second epoch on."""
    return statistics.mean(epoch.samples_per_second for epoch in epochs[1:])


def tell(result: Result, shape: Shape, rounds: Rounds, size: int) -> None:
    """Adds the figures of one shape, of which the dataset is ``size`` bytes."""
    name = shape.name
    local = [later(epochs) for epochs in rounds[LOCAL.name]]
    plot = "DLIO: accelerator utilisation"
    for arm, runs in rounds.items():
        first = [epochs[0].utilisation for epochs in runs]
        rest = [later(epochs) for epochs in runs]
        result.figure(f"{name}: AU, epoch 1", statistics.median(first), "%", values=first, arm=arm)
        result.compare(
            f"{name}: AU, epochs 2 to {EPOCHS}", "%", rest, local, against=LOCAL.name, arm=arm
        )
        for panel, values in (("epoch 1", first), (f"epochs 2 to {EPOCHS}", rest)):
            result.series.append(
                Series(
                    *(arm, "workload", "accelerator utilisation (%)", [point(name, values)]),
                    *(Kind.BARS, plot, panel),
                )
            )
    direct = [speed(epochs) for epochs in rounds[DIRECT.name]]
    for arm in (COLD.name, WARM.name):
        runs = rounds[arm]
        behind = [a - later(epochs) for a, epochs in zip(local, runs, strict=True)]
        result.figure(
            f"{name}: AU behind all local, epochs 2 to {EPOCHS}",
            *(statistics.median(behind), "points"),
            at_most=GOAL_POINTS,
            values=behind,
            arm=arm,
            headline=f"DLIO {name}, {arm}: AU behind all local" if arm == COLD.name else "",
        )
        result.compare(
            f"{name}: samples/s, epochs 2 to {EPOCHS}",
            *("1/s", [speed(epochs) for epochs in runs], direct),
            against=DIRECT.name,
            arm=arm,
        )
    for when, part in (("epoch 1", slice(0, 1)), (f"epochs 2 to {EPOCHS}", slice(1, None))):
        read = [
            sum(e.asked.read_bytes for e in epochs[part]) / size for epochs in rounds[COLD.name]
        ]
        what = f"{name}: read of the parallel FS, {when}"
        result.figure(what, statistics.median(read), "x data", values=read, arm=COLD.name)


def described(published: Shape, shape: Shape) -> str:
    """How a shape was scaled."""
    return (
        f"{shape.name} ({shape.note}): {shape.files} files for {published.files:,},"
        f" {shape.samples_per_file} samples a file for {published.samples_per_file},"
        f" {shape.record_bytes:,.0f} bytes a sample for {published.record_bytes:,.0f},"
        f" {shape.batch} samples a batch for {published.batch},"
        f" {shape.compute_seconds * 1000:.1f} ms a batch for"
        f" {published.compute_seconds * 1000:.1f}; both take {shape.demand / 1e6:.0f} MB/s"
    )


def run(task: Task) -> Result:
    program("dlio_benchmark")
    names = ["unet3d"] if task.quick else list(SHAPES)
    result = Result("dlio", "How busy DLIO 2.0.0 keeps the accelerator, by arm and workload")
    for name in names:
        published, shape = SHAPES[name]
        own = task.place / name
        own.mkdir()
        try:
            rounds, size = alternate(shape, task, own, task.rounds_or(1, 5))
        except Unusable as error:
            result.leave_out(name, str(error))
            continue
        tell(result, shape, rounds, size)
        result.notes.append(described(published, shape))
    result.freshness = {arm.name: arm.freshness for arm in ARMS}
    result.notes += [
        f"{EPOCHS} epochs a run, one process, profile {PROFILE.name}; the accelerator is DLIO's"
        " sleep; AU leaves out the first batch of an epoch",
        "the page cache is emptied when an epoch begins, as a dataset larger than memory would do;"
        " replicas and local copies lie on tmpfs, and all are whole",
    ]
    return result

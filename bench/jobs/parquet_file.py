"""One parquet file, mapped into memory by pyarrow: row groups in random order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.jobs.files import SEED, Epochs, batch_of, main, seen
from bench.jobs.training import Batch

ROW_BYTES = 2_000
GROUP_ROWS = 1_000
NAME = "rows.parquet"


def generate(root: Path, size: int) -> None:
    rng = np.random.default_rng(SEED)
    schema = pa.schema([("features", pa.binary(ROW_BYTES)), ("label", pa.int64())])
    with pq.ParquetWriter(root / NAME, schema, compression="none", use_dictionary=False) as writer:
        for _ in range(max(1, size // (ROW_BYTES * GROUP_ROWS))):
            buffer = pa.py_buffer(rng.bytes(ROW_BYTES * GROUP_ROWS))
            features = pa.Array.from_buffers(schema[0].type, GROUP_ROWS, [None, buffer])
            labels = pa.array(rng.integers(0, 1000, GROUP_ROWS))
            writer.write_table(pa.Table.from_arrays([features, labels], schema=schema))


def look(table: Any) -> Batch:
    """Of one row group; a chunk of a column counts as a sample."""
    buffers = [chunk.buffers()[1] for column in table.columns for chunk in column.chunks]
    return batch_of(*zip(*map(seen, buffers), strict=True))


def epochs(root: Path) -> Epochs:
    def epoch(number: int) -> Iterator[Batch]:
        file = pq.ParquetFile(root / NAME, memory_map=True)
        for group in np.random.default_rng(number).permutation(file.num_row_groups).tolist():
            yield look(file.read_row_group(group))

    return epoch


if __name__ == "__main__":
    main(generate, epochs)

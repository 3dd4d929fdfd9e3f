"""Hugging Face datasets out of Arrow tables: in memory when small, a memory-mapped file when large.

Large ones are written to `<cache>/arrow/<fingerprint>.arrow` (cache: `GR_CACHE`, else
`XDG_CACHE_HOME/gr`, else `~/.cache/gr`) and read back by page, so a dataset may be larger than
memory. The fingerprint hashes the content: the same data is the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from datasets import Dataset

IN_MEMORY_BYTES = 64 * 2**20
ROWS_PER_BATCH = 1_000


def cache_folder() -> Path:
    """The folder for everything that can be made or fetched again."""
    if own := os.environ.get("GR_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gr"


def to_dataset(
    tables: Iterable[pa.Table],
    schema: pa.Schema,
    info: dict[str, Any],
    cache_dir: str | Path | None = None,
    in_memory_bytes: int = IN_MEMORY_BYTES,
) -> Dataset:
    """A dataset of all `tables` in turn; `info` is kept as JSON in `dataset.info.description`.

    Up to `in_memory_bytes` it lives in memory, above that in a file under `cache_dir`.
    """
    from datasets import Dataset, DatasetInfo
    from datasets.table import InMemoryTable

    about = DatasetInfo(description=json.dumps(info))
    held: list[pa.Table] = []
    size = 0
    stream = iter(tables)
    for table in stream:
        held.append(table.cast(schema))
        size += table.nbytes
        if size > in_memory_bytes:
            folder = Path(cache_dir) if cache_dir is not None else cache_folder() / "arrow"
            file = _write(held, stream, schema, folder)
            return Dataset.from_file(str(file), info=about)
    whole = pa.concat_tables(held) if held else schema.empty_table()
    return Dataset(InMemoryTable(whole.combine_chunks()), info=about)


def _write(held: list[pa.Table], rest: Iterator[pa.Table], schema: pa.Schema, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(str(schema).encode())
    handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            while held:
                _hash_table(digest, held[0])
                writer.write_table(held.pop(0))
            for table in rest:
                _hash_table(digest, table.cast(schema))
                writer.write_table(table.cast(schema))
        target = folder / f"{digest.hexdigest()[:32]}.arrow"
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _hash_table(digest: Any, table: pa.Table) -> None:
    for column in table.columns:
        for chunk in column.chunks:
            # Arrow may lay slices out with an offset; a fresh copy has none.
            for buffer in pa.concat_arrays([chunk]).buffers():
                if buffer is not None:
                    digest.update(buffer)


def batches(dataset: Dataset, rows: int = ROWS_PER_BATCH) -> Iterator[pa.Table]:
    """The rows as Arrow tables of at most `rows` rows; honours `select` and `filter`."""
    view = dataset.with_format("arrow")
    for start in range(0, len(dataset), rows):
        yield view[start : min(start + rows, len(dataset))]


def info_of(dataset: Dataset) -> dict[str, Any]:
    """What `to_dataset` was told; empty for a dataset that comes from elsewhere."""
    try:
        loaded = json.loads(dataset.info.description or "{}")
    except (json.JSONDecodeError, TypeError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def list_lengths(column: pa.ChunkedArray | pa.ListArray) -> npt.NDArray[np.int64]:
    """Length of each list, int64 [rows]."""
    lengths: npt.NDArray[np.int64] = np.diff(one_array(column).offsets.to_numpy())
    return lengths.astype(np.int64)


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 0:
        return pa.array([], column.type)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def gather(
    values: pa.Array, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> pa.ListArray:
    """Lists `values[start : start + length]`, one per row; `starts` and `lengths` are [rows]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    at = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1], dtype=np.int64)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values.take(pa.array(at)))

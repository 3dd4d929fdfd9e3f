"""From events to one row per user: the histories that models read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gr.data import columns as cols
from gr.data.arrow_store import IN_MEMORY_BYTES, gather, info_of, to_dataset
from gr.data.errors import DataError
from gr.data.schema import Interactions

if TYPE_CHECKING:
    from datasets import Dataset

EVENTS_PER_BLOCK = 2_000_000


def build_sequences(
    interactions: Interactions,
    extra: Sequence[str] = (),
    *,
    cache_dir: str | Path | None = None,
    in_memory_bytes: int = IN_MEMORY_BYTES,
) -> Dataset:
    """One row per user, users in order of first appearance, events oldest first.

    Columns: `user_id` string, and the lists `item_id` string, `action` string, `timestamp` int64
    (seconds; for order-only data the order values: see `time_unit`). `extra` adds lists out of
    `value` and `scenario`. Events of one time keep their order in the source (a stable sort).
    Up to `in_memory_bytes` the dataset lives in memory, above that in a memory-mapped Arrow file
    under `cache_dir` (default: the `arrow` folder of the cache).
    """
    events = interactions.events
    time_column = interactions.time_column
    for name in extra:
        if name not in ("value", "scenario") or name not in events.column_names:
            raise DataError(
                f"{interactions.name}: extra column {name!r}: wanted value or scenario where the "
                f"events have it, seen {events.column_names}"
            )
    sources = {"item_id": "item_id", "action": "action", "timestamp": time_column}
    sources |= {name: name for name in extra}
    fields = [pa.field("user_id", pa.string())]
    fields += [pa.field(n, pa.list_(events.schema.field(s).type)) for n, s in sources.items()]
    unit = "order" if time_column == "order" else "seconds"
    info = {
        "name": interactions.name,
        "time_unit": unit,
        "relative_time": interactions.relative_time,
    }
    tables = _blocks(events, time_column, sources)
    return to_dataset(tables, pa.schema(fields), info, cache_dir, in_memory_bytes)


def time_unit(dataset: Dataset) -> str:
    """`"seconds"` or `"order"`: what `timestamp` counts in a dataset of sequences or a split part.

    A dataset that does not come from `build_sequences` counts seconds.
    """
    return str(info_of(dataset).get("time_unit", "seconds"))


def _blocks(events: pa.Table, time_column: str, sources: dict[str, str]) -> Iterator[pa.Table]:
    users = cols.codes(events["user_id"])
    order = np.lexsort((events[time_column].to_numpy(), users))  # stable: ties keep their rows
    ends = np.cumsum(np.bincount(users))
    first_user = 0
    while first_user < len(ends):
        # Whole users, about EVENTS_PER_BLOCK events: bounds the memory and Arrow's 32-bit offsets.
        begin = int(ends[first_user - 1]) if first_user else 0
        past = int(np.searchsorted(ends, begin + EVENTS_PER_BLOCK, side="right"))
        last_user = max(first_user + 1, past)
        rows = order[begin : ends[last_user - 1]]
        block = events.take(pa.array(rows)).combine_chunks()
        starts = np.concatenate([[begin], ends[first_user : last_user - 1]]) - begin
        lengths = ends[first_user:last_user] - begin - starts
        columns = {"user_id": block["user_id"].take(pa.array(starts))}
        for name, source in sources.items():
            values = block[source].combine_chunks()
            flat = values if isinstance(values, pa.Array) else pa.concat_arrays(values.chunks)
            columns[name] = gather(flat, starts, lengths)
        yield pa.table(columns)
        first_user = last_user

"""Splits into train, validation and test, each with a hash that says which targets were asked for.

`split_hash` is the first 16 hex digits of a SHA-256 over, for train, validation and test: the rows
sorted by user id (rows of one user keep their order), and of each the user id, the history item
ids, and the target item id. It does not depend on the order of users, on actions or times, nor on
how the data lies in memory or on disk. Two results can be compared if and only if it is equal.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gr.data.arrow_store import batches, gather, info_of, list_lengths, one_array, to_dataset
from gr.data.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger("gr.data")
PARTS = ("train", "validation", "test")
Lengths = npt.NDArray[np.int64]


@dataclass
class Split:
    """Three datasets and their `split_hash`.

    `train` rows are sequences without the held-out events. `validation` and `test` rows hold one
    target each: `user_id`, the history lists `item_id, action, timestamp`, and `target_item_id`,
    `target_action`, `target_timestamp`. `repairs` counts rows that were shortened or left out.
    """

    train: Dataset
    validation: Dataset
    test: Dataset
    split_hash: str
    name: str
    repairs: dict[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """One line to print beside every result."""
        notes = "".join(f", {what} {count:,}" for what, count in self.repairs.items())
        return (
            f"{self.name}: {len(self.train):,} train, {len(self.validation):,} validation, "
            f"{len(self.test):,} test rows{notes}, split_hash {self.split_hash}"
        )


def leave_one_out(sequences: Dataset, short_users: str = "error") -> Split:
    """Last event = test, second to last = validation, the rest = train.

    The test history is everything but the last event; the validation history everything but the
    last two. A user with fewer than three events raises `DataError`; `short_users="train"` keeps
    such users whole in the training part and counts them in `repairs["short_users"]`.
    """
    if short_users not in ("error", "train"):
        raise DataError(f"short_users: {short_users!r}, wanted 'error' or 'train'")
    _check_sequences(sequences)
    short = 0
    for table in batches(sequences):
        lengths = list_lengths(table["item_id"])
        few = lengths < 3
        if few.any() and short_users == "error":
            at = int(few.argmax())
            raise DataError(
                f"leave_one_out: user {table['user_id'][at].as_py()!r} has {lengths[at]} events, "
                "wanted at least 3 (train, validation, test). Filter with min_events(…, 3), or "
                "pass short_users='train'"
            )
        short += int(few.sum())

    def train() -> Iterator[pa.Table]:
        for table in batches(sequences):
            lengths = list_lengths(table["item_id"])
            yield _heads(table, np.where(lengths < 3, lengths, lengths - 2))

    def held_out(back: int) -> Iterator[pa.Table]:
        for table in batches(sequences):
            lengths = list_lengths(table["item_id"])
            rows = np.flatnonzero(lengths >= 3)
            yield _targets(table, rows, lengths[rows] - back, lengths[rows] - back)

    info = info_of(sequences)
    row_schema, target_schema = _schemas(sequences)
    parts = {
        "train": to_dataset(train(), row_schema, info),
        "validation": to_dataset(held_out(2), target_schema, info),
        "test": to_dataset(held_out(1), target_schema, info),
    }
    return _finish(parts, "leave-one-out", {"short_users": short} if short else {})


def global_temporal(
    sequences: Dataset,
    *,
    horizon: int | None = None,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
    history: str = "window",
    max_history: int = 1_000,
) -> Split:
    """Cut all users at the same two moments, as NEO evaluates (global temporal evaluation).

    Train is everything before the validation window, validation targets lie in that window, test
    targets in the one after it: no model sees the time it is tested on. With `horizon` (seconds)
    each window is that long and the test window ends with the data; otherwise the windows hold
    about `validation_fraction` and `test_fraction` of all events. Equal times are never parted.

    One row per target event. `history="window"` (NEO) stops every history at the start of the
    window; `"rolling"` runs it up to the target. Histories keep their last `max_history` events
    (a user with n events would otherwise take n² memory), counted in
    `repairs["histories_cut"]`; targets of users without any earlier event are left out and counted
    in `repairs["targets_without_history"]`.
    Raises `DataError` for order-only or relative times and for an empty part.
    """
    if history not in ("window", "rolling"):
        raise DataError(f"history: {history!r}, wanted 'window' or 'rolling'")
    if max_history < 1:
        raise DataError(f"max_history: {max_history}, wanted at least 1")
    _check_sequences(sequences)
    info = info_of(sequences)
    if info.get("time_unit") == "order" or info.get("relative_time"):
        raise DataError(
            f"global_temporal: {info.get('name')} has no clock shared by users (time_unit "
            f"{info.get('time_unit')!r}, relative_time {info.get('relative_time')}), "
            "wanted unix seconds; leave_one_out needs none"
        )
    validation_from, test_from = _cut_times(sequences, horizon, validation_fraction, test_fraction)
    repairs: dict[str, int] = {}

    def train() -> Iterator[pa.Table]:
        for table in batches(sequences):
            before = _count_before(table, validation_from)
            kept = np.flatnonzero(before > 0)
            yield _heads(table.take(pa.array(kept)), before[kept])

    def window(begin: int, end: int | None) -> Iterator[pa.Table]:
        for table in batches(sequences):
            lengths = list_lengths(table["item_id"])
            first = _count_before(table, begin)
            last = lengths if end is None else _count_before(table, end)
            rows = np.repeat(np.arange(len(lengths)), last - first)
            nth = np.arange(len(rows)) - np.repeat(
                np.cumsum(last - first) - (last - first), last - first
            )
            target = first[rows] + nth
            known = first[rows] if history == "window" else target
            _count(repairs, "targets_without_history", int((known == 0).sum()))
            _count(repairs, "histories_cut", int((known > max_history).sum()))
            good = known > 0
            yield _targets(table, rows[good], known[good], target[good], max_history)

    row_schema, target_schema = _schemas(sequences)
    parts = {
        "train": to_dataset(train(), row_schema, info),
        "validation": to_dataset(window(validation_from, test_from), target_schema, info),
        "test": to_dataset(window(test_from, None), target_schema, info),
    }
    for name, part in parts.items():
        if not len(part):
            raise DataError(
                f"global_temporal: the {name} part is empty (validation from {validation_from}, "
                f"test from {test_from}); wanted another horizon or fraction"
            )
    return _finish(parts, "global-temporal", repairs)


def held_out_users(
    sequences: Dataset, *, validation_fraction: float = 0.05, test_fraction: float = 0.1
) -> Split:
    """The users who came last are the held-out ones; their last event is the target.

    Users are ordered by the time (or order) of their first event. The last `test_fraction` of them
    are test rows, those before them validation rows, and the rest are for training, whole. This is
    how HSTU's synthetic stream is evaluated (appendix C).
    Raises `DataError` for fractions without a training user, for users without a shared order, and
    for a held-out user with fewer than two events.
    """
    _check_sequences(sequences)
    info = info_of(sequences)
    if info.get("relative_time"):
        raise DataError(f"held_out_users: {info.get('name')} has no clock or order shared by users")
    first = np.concatenate(
        [pc.list_element(one_array(t["timestamp"]), 0).to_numpy() for t in batches(sequences)]
    )
    order = np.argsort(first, kind="stable")
    total = len(order)
    tests, validations = (round(total * f) for f in (test_fraction, validation_fraction))
    if min(tests, validations) < 1 or tests + validations >= total:
        raise DataError(
            f"held_out_users: fractions {validation_fraction} and {test_fraction} of {total} users "
            f"are {validations} and {tests}, wanted at least 1 each and 1 more for training"
        )
    bounds = np.array([0, total - tests - validations, total - tests, total])
    info_schemas = _schemas(sequences)
    parts = {}
    for name, begin, end in zip(PARTS, bounds[:-1], bounds[1:], strict=True):
        chosen = sequences.select(order[begin:end])
        if name == "train":
            parts[name] = to_dataset(batches(chosen), info_schemas[0], info)
        else:
            parts[name] = to_dataset(_last_events(chosen), info_schemas[1], info)
    return _finish(parts, "held-out users", {})


def _last_events(sequences: Dataset) -> Iterator[pa.Table]:
    for table in batches(sequences):
        lengths = list_lengths(table["item_id"])
        if (lengths < 2).any():
            at = int((lengths < 2).argmax())
            raise DataError(
                f"held_out_users: user {table['user_id'][at].as_py()!r} has {lengths[at]} events, "
                "wanted at least 2 (a history and a target)"
            )
        yield _targets(table, np.arange(len(lengths)), lengths - 1, lengths - 1)


def split_hash(train: Dataset, validation: Dataset, test: Dataset) -> str:
    """16 hex digits over user, history and target of every row; see the top of this file."""
    digest = hashlib.sha256()
    for name, part in zip(PARTS, (train, validation, test), strict=True):
        digest.update(name.encode())
        digest.update(_part_digest(part))
    return digest.hexdigest()[:16]


def _finish(parts: dict[str, Dataset], name: str, repairs: dict[str, int]) -> Split:
    found = split_hash(parts["train"], parts["validation"], parts["test"])
    split = Split(**parts, split_hash=found, name=name, repairs=repairs)
    if repairs:
        log.warning("%s", split.summary())
    return split


def _check_sequences(sequences: Dataset) -> None:
    wanted = ("user_id", "item_id", "action", "timestamp")
    missing = [c for c in wanted if c not in sequences.column_names]
    if missing:
        raise DataError(f"sequences lack columns {missing}; seen {sequences.column_names}")
    if not len(sequences):
        raise DataError("sequences are empty: 0 users, wanted at least 1")
    for table in batches(sequences):
        lengths = list_lengths(table["item_id"])
        for name in ("action", "timestamp"):
            if not np.array_equal(list_lengths(table[name]), lengths):
                raise DataError(f"sequences: lists item_id and {name} differ in length")
        times = one_array(table["timestamp"]).flatten().to_numpy()
        back = np.zeros(len(times), dtype=bool)
        back[1:] = times[1:] < times[:-1]
        starts = np.cumsum(lengths) - lengths
        back[starts[lengths > 0]] = False  # the first event of a user follows nobody's
        if back.any():
            row = int(np.searchsorted(np.cumsum(lengths), int(back.argmax()), side="right"))
            raise DataError(
                f"sequences: timestamps of user {table['user_id'][row].as_py()!r} go back in time, "
                "wanted oldest first (build_sequences sorts)"
            )


def _schemas(sequences: Dataset) -> tuple[pa.Schema, pa.Schema]:
    fields = list(next(batches(sequences, 1)).schema)
    lists = [f for f in fields if pa.types.is_list(f.type)]
    fields = [pa.field(f.name, f.type) for f in fields if f.name == "user_id" or f in lists]
    targets = [pa.field(f"target_{f.name}", f.type.value_type) for f in lists]
    return pa.schema(fields), pa.schema(fields + targets)


def _list_names(table: pa.Table) -> list[str]:
    return [f.name for f in table.schema if pa.types.is_list(f.type)]


def _heads(table: pa.Table, lengths: Lengths) -> pa.Table:
    """Each list cut to its first `lengths` values."""
    columns: dict[str, Any] = {"user_id": table["user_id"]}
    for name in _list_names(table):
        lists = one_array(table[name])
        columns[name] = gather(lists.values, lists.offsets.to_numpy()[:-1], lengths)
    return pa.table(columns)


def _targets(
    table: pa.Table, rows: Lengths, known: Lengths, target: Lengths, limit: int | None = None
) -> pa.Table:
    """One output row per (row, known, target): history = first `known` values, target = that value.

    With `limit`, only the last `limit` values of the history are kept.
    """
    kept = known if limit is None else np.minimum(known, limit)
    columns: dict[str, Any] = {"user_id": table["user_id"].take(pa.array(rows))}
    answers: dict[str, Any] = {}
    for name in _list_names(table):
        lists = one_array(table[name])
        starts = lists.offsets.to_numpy()[:-1][rows].astype(np.int64)
        columns[name] = gather(lists.values, starts + known - kept, kept)
        answers[f"target_{name}"] = lists.values.take(pa.array(starts + target))
    return pa.table(columns | answers)


def _count_before(table: pa.Table, moment: int) -> Lengths:
    """Events of each row earlier than `moment` (times in a row never decrease), int64 [rows]."""
    lists = one_array(table["timestamp"])
    offsets = lists.offsets.to_numpy()
    earlier = np.concatenate([[0], np.cumsum(lists.values.to_numpy() < moment)])
    result: Lengths = (earlier[offsets[1:]] - earlier[offsets[:-1]]).astype(np.int64)
    return result


def _cut_times(
    sequences: Dataset, horizon: int | None, validation_fraction: float, test_fraction: float
) -> tuple[int, int]:
    times = np.concatenate(
        [one_array(table["timestamp"]).flatten().to_numpy() for table in batches(sequences)]
    )
    if horizon is not None:
        if horizon < 1:
            raise DataError(f"horizon: {horizon} seconds, wanted at least 1")
        end = int(times.max()) + 1
        return end - 2 * horizon, end - horizon
    total = validation_fraction + test_fraction
    if validation_fraction <= 0 or test_fraction <= 0 or total >= 1:
        raise DataError(
            f"fractions {validation_fraction} and {test_fraction}: wanted both above 0 and their "
            "sum below 1"
        )
    times.sort()
    n = len(times)
    return int(times[int(n * (1 - total))]), int(times[int(n * (1 - test_fraction))])


def _count(repairs: dict[str, int], name: str, count: int) -> None:
    if count:
        repairs[name] = repairs.get(name, 0) + count


def _part_digest(part: Dataset) -> bytes:
    """Streams of lengths and bytes are hashed apart, so that no block size enters the result."""
    streams = [hashlib.sha256() for _ in range(7)]
    order: Any = np.zeros(0, dtype=np.int64)
    if len(part):
        users = pa.concat_tables(batches(part.select_columns(["user_id"]), 100_000))
        order = pc.sort_indices(users["user_id"]).to_numpy().astype(np.int64)
    for table in batches(part.select(order)):
        history = one_array(table["item_id"])
        _feed(streams[0:2], one_array(table["user_id"]))
        streams[2].update(list_lengths(history).astype("<i8").tobytes())
        _feed(streams[3:5], history.flatten())
        if "target_item_id" in table.column_names:
            _feed(streams[5:7], one_array(table["target_item_id"]))
    return b"".join(stream.digest() for stream in streams)


def _feed(streams: list[Any], texts: pa.Array) -> None:
    array = pa.concat_arrays([texts.cast(pa.large_string())])
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    streams[0].update(np.diff(offsets).astype("<i8").tobytes())
    if data is not None and len(array):
        streams[1].update(memoryview(data)[offsets[0] : offsets[-1]])

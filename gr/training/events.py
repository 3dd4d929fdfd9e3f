"""Sequences as flat arrays, and windows cut from them.

Strings are looked up once, in Arrow, when training starts; a batch then needs table lookups only.
Legend: U users, E events of all users one after another, n windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gr.tokenizer import Catalog

IntArray = npt.NDArray[np.int64]

COLUMNS = ("item_id", "action", "timestamp")


@dataclass(frozen=True, eq=False)
class EventArrays:
    """The events of all users, oldest first within a user.

    Attributes:
        item: int32 [E], rows of the catalogue.
        action: int16 [E], positions among the actions of the vocabulary, -1 for none of them.
        is_target: bool [E], False where the item is no retrieval target because of its action.
        timestamp: int64 seconds [E], or None where the data has an order and no clock.
        offsets: int64 [U + 1]; user u's events are ``offsets[u]:offsets[u + 1]``.
        unknown: number of events left out because the catalogue does not have their item.
    """

    item: npt.NDArray[np.int32]
    action: npt.NDArray[np.int16]
    is_target: npt.NDArray[np.bool_]
    timestamp: IntArray | None
    offsets: IntArray
    unknown: int

    def __len__(self) -> int:
        return len(self.item)

    @classmethod
    def from_sequences(
        cls,
        sequences: Any,
        catalog: Catalog,
        actions: Sequence[str] = (),
        positive_actions: Sequence[str] = (),
        has_clock: bool = True,
    ) -> EventArrays:
        """Look up every event of a ``datasets.Dataset`` with list columns ``COLUMNS``.

        Args:
            sequences: one row per user.
            catalog: gives items their rows.
            actions: the vocabulary's actions; empty for streams of items only.
            positive_actions: items of other actions are context, never retrieval targets; empty
                means that all are targets.
            has_clock: False where ``timestamp`` holds an order instead of seconds.

        Raises:
            ValueError: a missing column, lists of different lengths, times that go backwards, no
                event left, or no event with any of the actions asked for.
        """
        missing = [name for name in COLUMNS if name not in sequences.column_names]
        if missing:
            raise ValueError(
                f"sequences have columns {sequences.column_names}: wanted also {missing}"
            )
        table: pa.Table = sequences.with_format("arrow")[:]
        lengths = _list_lengths(table, "item_id")
        for name in COLUMNS[1:]:
            other = _list_lengths(table, name)
            if (other != lengths).any():
                row = int((other != lengths).argmax())
                raise ValueError(
                    f"sequences row {row}: {name} has {other[row]} entries and item_id "
                    f"{lengths[row]}, wanted one for each event"
                )
        item = _positions(table, "item_id", catalog.item_ids)
        action = _positions(table, "action", actions)
        if len(actions) and len(action) and (action < 0).all():
            raise ValueError(
                f"sequences: no event has one of the actions {tuple(actions)}; "
                f"seen {_some_values(table, 'action')}"
            )
        if positive_actions:
            is_target = _positions(table, "action", positive_actions) >= 0
            if not is_target.any():
                raise ValueError(
                    f"positive_actions: no event has one of {tuple(positive_actions)}; "
                    f"seen {_some_values(table, 'action')}"
                )
        else:
            is_target = np.ones(len(item), dtype=np.bool_)
        timestamp = _flat(table, "timestamp", np.dtype(np.int64))
        user = np.repeat(np.arange(len(lengths)), lengths)
        backwards = (np.diff(timestamp) < 0) & (np.diff(user) == 0)
        if backwards.any():
            row = int(user[int(backwards.argmax())])
            raise ValueError(
                f"sequences row {row}: timestamps go backwards, wanted oldest event first"
            )
        known = item >= 0
        if not known.any():
            raise ValueError(
                f"sequences: none of the {len(item)} events has an item of the catalogue"
            )
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(np.bincount(user[known], minlength=len(lengths)), out=offsets[1:])
        return cls(
            item=item[known].astype(np.int32),
            action=action[known].astype(np.int16),
            is_target=is_target[known],
            timestamp=timestamp[known] if has_clock else None,
            offsets=offsets,
            unknown=int((~known).sum()),
        )


@dataclass(frozen=True, eq=False)
class Windows:
    """Pieces of users' histories, as positions in ``EventArrays``.

    Attributes:
        start, stop: int64 [n], the events of a window.
        first_target: int64 [n]; events before it are context that another window has as targets.
        bare: bool [n], True where actions and times are hidden from the model: it reads [UNK] for
            every action, and one time for all events.
        tie_draw: uint64 [n], the number from which the order of a window's simultaneous events is
            drawn; None leaves them in the order of the data.
        kept: the events of the windows one after another, int64 [e], where a window does not hold
            all from ``start`` to ``stop``, and int64 [n + 1] where each begins in them.
    """

    start: IntArray
    stop: IntArray
    first_target: IntArray
    bare: npt.NDArray[np.bool_]
    tie_draw: npt.NDArray[np.uint64] | None = None
    kept: tuple[IntArray, IntArray] | None = None

    def __len__(self) -> int:
        return len(self.start)

    def positions(self) -> tuple[IntArray, IntArray]:
        """The windows' events one after another, int64 [e], and how many each has, int64 [n]."""
        if self.kept is not None:
            return self.kept[0], np.diff(self.kept[1])
        count = self.stop - self.start
        return ranges(self.start, count), count

    def take(self, index: IntArray) -> Windows:
        """The windows at positions ``index``, int64 [k]."""
        kept = None
        if self.kept is not None:
            position, offsets = self.kept
            count = np.diff(offsets)[index]
            kept = position[ranges(offsets[index], count)], np.append(0, np.cumsum(count))
        return Windows(
            self.start[index],
            self.stop[index],
            self.first_target[index],
            self.bare[index],
            None if self.tie_draw is None else self.tie_draw[index],
            kept,
        )


def ranges(start: IntArray, count: IntArray) -> IntArray:
    """``start, start + 1, …``, ``count`` of them, one range after another: int64."""
    before = np.cumsum(count) - count
    position: IntArray = np.arange(int(count.sum())) + np.repeat(start - before, count)
    return position


def draw_ties(
    position: IntArray, window: IntArray, timestamp: IntArray, tie_draw: npt.NDArray[np.uint64]
) -> IntArray:
    """Events of windows with those of one time in an order drawn for each window.

    Args:
        position: int64 [e], the windows' events one after another, as positions in `EventArrays`.
        window: int64 [e], ascending, the window of each.
        timestamp: int64 [e].
        tie_draw: uint64 [n], see `Windows`.

    Returns:
        int64 [e]: ``position``, re-ordered among equals.
    """
    # SplitMix64's finaliser: a draw for each event that depends on nothing else of the batch.
    bits = tie_draw[window] + position.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn: IntArray = position[np.lexsort((bits ^ (bits >> np.uint64(31)), timestamp, window))]
    return drawn


def cut_windows(
    offsets: IntArray,
    max_events: int,
    context: int = 0,
    rng: np.random.Generator | None = None,
) -> Windows:
    """Cut every user into windows such that each event is a target exactly once.

    A user's first window has targets only; later ones begin with ``context`` events of the window
    before. With ``rng`` the length of the first window of a user who needs several is drawn, so
    that the cuts fall elsewhere in every epoch.

    Args:
        offsets: int64 [U + 1], see ``EventArrays``.
        max_events: most events of a window, context included.

    Raises:
        ValueError: ``max_events`` or ``context`` leave no room for targets.
    """
    if max_events < 1 or not 0 <= context < max_events:
        raise ValueError(
            f"max_events: {max_events}, context: {context}; wanted 0 <= context < max_events"
        )
    begin, count = offsets[:-1], np.diff(offsets)
    begin, count = begin[count > 0], count[count > 0]
    first = np.minimum(count, max_events)
    if rng is not None:
        drawn = rng.integers(1, max_events + 1, size=len(count))
        first = np.where(count > max_events, drawn, first)
    stride = max_events - context
    pieces = 1 + -(-(count - first) // stride)
    ends = np.cumsum(pieces)
    user = np.repeat(np.arange(len(count)), pieces)
    place = np.arange(len(user)) - (ends - pieces)[user]
    stop = np.minimum(first[user] + place * stride, count[user])
    target = np.where(place > 0, first[user] + (place - 1) * stride, 0)
    start = np.maximum(target - context, 0)
    return Windows(
        begin[user] + start,
        begin[user] + stop,
        begin[user] + target,
        np.zeros(len(user), dtype=np.bool_),
    )


def _list_lengths(table: pa.Table, column: str) -> IntArray:
    lengths: IntArray = pc.fill_null(pc.list_value_length(table[column]), 0).to_numpy()
    return lengths.astype(np.int64)


def _values(table: pa.Table, column: str) -> list[pa.Array]:
    return [chunk.flatten() for chunk in table[column].chunks]


def _some_values(table: pa.Table, column: str) -> list[Any]:
    seen: list[Any] = []
    for values in _values(table, column):
        seen.extend(v for v in pc.unique(values).to_pylist() if v not in seen)
        if len(seen) >= 5:
            break
    return seen[:5]


def _flat(table: pa.Table, column: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    parts = []
    for values in _values(table, column):
        if values.null_count:
            raise ValueError(f"sequences: {column} has {values.null_count} nulls, wanted none")
        parts.append(values.to_numpy(zero_copy_only=False).astype(dtype))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _positions(table: pa.Table, column: str, known: Sequence[str]) -> IntArray:
    """Position of every value among ``known``, -1 for others: int64 [E]."""
    parts = [np.zeros(0, dtype=np.int64)]
    for values in _values(table, column):
        if not len(known):
            parts.append(np.full(len(values), -1, dtype=np.int64))
            continue
        found = pc.index_in(values, value_set=pa.array(list(known), values.type))
        parts.append(pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64))
    return np.concatenate(parts)

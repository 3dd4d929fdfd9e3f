"""The questions of an evaluation: one row per target, histories as catalogue rows, in batches.

A model is asked with an `EvaluationBatch`, which does not hold the answer: the target's item and
action stay behind in the `EvaluationSet`. What is known when a recommendation is asked for is
there: the history with its actions and timestamps, and the time of the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gr.eval.metrics import IntArray

_HISTORY_COLUMNS = ("item_id", "action", "timestamp")
_READ_ROWS = 2048


class ItemIndex(Protocol):
    """What evaluation needs of a catalogue; `gr.tokenizer.Catalog` has it."""

    def __len__(self) -> int: ...

    def index(self, item_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Catalogue rows int64 [k] of the item ids, -1 where unknown."""
        ...


class RowSource(Protocol):
    """Split rows as columns; a `datasets.Dataset` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class EvaluationBatch:
    """What a model is told about B rows.

    histories: catalogue rows of the known items of each history, oldest first, int64. item_ids,
    actions, timestamps: the history as it was recorded, unknown items included; None where the
    data has no such column. request_times: the time of the next event of each row, in the unit of
    `timestamps` (seconds, or order), which a served model knows; None without times.
    """

    user_ids: list[str]
    histories: list[npt.NDArray[np.int64]]
    item_ids: list[list[str]] | None = None
    actions: list[list[str]] | None = None
    timestamps: list[list[int]] | None = None
    request_times: list[int] | None = None

    def __len__(self) -> int:
        return len(self.histories)


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """N rows: a user, a history and a target each.

    `user_ids` [N], `targets` int64 [N] as catalogue rows (-1: unknown to the catalogue), and the
    histories as one array `items` cut at `offsets` [N + 1].

    `unknown_history` counts history events whose item the catalogue lacks; they are not in
    `histories`.
    """

    user_ids: npt.NDArray[np.str_]
    items: IntArray
    offsets: IntArray
    targets: IntArray
    num_items: int
    unknown_history: int = 0
    catalog: ItemIndex | None = None
    source: RowSource | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    @classmethod
    def from_rows(
        cls, rows: RowSource | Sequence[Mapping[str, Any]], catalog: ItemIndex
    ) -> EvaluationSet:
        """Reads split rows: `user_id`, `item_id` (history, oldest first), `target_item_id`.

        `action`, `timestamp` and `target_timestamp` are passed on to the model where they exist.
        Rows may be a `datasets.Dataset` or a list of dicts. Raises ValueError for no rows or a
        missing column.
        """
        source: RowSource = _ListSource(rows) if isinstance(rows, Sequence) else rows
        users: list[str] = []
        items: list[IntArray] = []
        lengths: list[IntArray] = []
        targets: list[IntArray] = []
        unknown = 0
        for start in range(0, len(source), _READ_ROWS):
            part = source[slice(start, start + _READ_ROWS)]
            for column in ("user_id", "item_id", "target_item_id"):
                if column not in part:
                    raise ValueError(
                        f"evaluation rows need the column {column!r}, got {sorted(part)}"
                    )
            histories = part["item_id"]
            sizes = np.array([len(history) for history in histories], dtype=np.int64)
            found = np.asarray(
                catalog.index([str(item) for history in histories for item in history]),
                dtype=np.int64,
            )
            row = np.repeat(np.arange(len(sizes)), sizes)
            known = found >= 0
            unknown += int((~known).sum())
            items.append(found[known])
            lengths.append(np.bincount(row[known], minlength=len(sizes)).astype(np.int64))
            targets.append(
                np.asarray(
                    catalog.index([str(item) for item in part["target_item_id"]]), dtype=np.int64
                )
            )
            users.extend(str(user) for user in part["user_id"])
        if not users:
            raise ValueError("there are no rows to evaluate")
        return cls(
            user_ids=np.array(users),
            items=np.concatenate(items),
            offsets=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64),
            targets=np.concatenate(targets),
            num_items=len(catalog),
            unknown_history=unknown,
            catalog=catalog,
            source=source,
        )

    @classmethod
    def from_indices(
        cls,
        histories: Sequence[npt.ArrayLike],
        targets: npt.ArrayLike,
        num_items: int,
        user_ids: Sequence[object] | None = None,
    ) -> EvaluationSet:
        """Rows given as catalogue rows in [0, num_items) and targets in [-1, num_items).

        Every row is its own user unless `user_ids` says otherwise.
        """
        arrays = [np.asarray(history, dtype=np.int64).reshape(-1) for history in histories]
        items = np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
        target = np.asarray(targets, dtype=np.int64)
        users = list(range(len(arrays))) if user_ids is None else list(user_ids)
        if not arrays:
            raise ValueError("there are no rows to evaluate")
        if target.shape != (len(arrays),) or len(users) != len(arrays):
            raise ValueError(
                f"wanted one target and one user a history, got {len(arrays)} histories, targets "
                f"{target.shape} and {len(users)} users"
            )
        if items.size and (items.min() < 0 or items.max() >= num_items):
            raise ValueError(
                f"history items must lie in [0, {num_items}), got {items.min()} ... {items.max()}"
            )
        if target.min() < -1 or target.max() >= num_items:
            raise ValueError(
                f"targets must lie in [-1, {num_items}), got {target.min()} ... {target.max()}"
            )
        return cls(
            user_ids=np.array([str(user) for user in users]),
            items=items,
            offsets=np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(
                np.int64
            ),
            targets=target,
            num_items=num_items,
        )

    def history(self, row: int) -> IntArray:
        """Catalogue rows of one history, oldest first."""
        return self.items[self.offsets[row] : self.offsets[row + 1]]

    def batches(self, size: int) -> Iterator[tuple[int, EvaluationBatch]]:
        """(first row, batch) over all rows in order."""
        if size < 1:
            raise ValueError(f"batch_size must be >= 1, got {size}")
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            recorded: Mapping[str, Any] = (
                {} if self.source is None else self.source[slice(start, stop)]
            )
            told = {name: list(recorded[name]) for name in _HISTORY_COLUMNS if name in recorded}
            times = recorded.get("target_timestamp")
            yield (
                start,
                EvaluationBatch(
                    user_ids=[str(user) for user in self.user_ids[start:stop]],
                    histories=[self.history(row) for row in range(start, stop)],
                    item_ids=told.get("item_id"),
                    actions=told.get("action"),
                    timestamps=told.get("timestamp"),
                    request_times=None if times is None else [int(time) for time in times],
                ),
            )

    def seen(self, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """(batch row, item) of every history event of rows start ... stop, repeats included."""
        sizes = np.diff(self.offsets[start : stop + 1])
        row = np.repeat(np.arange(stop - start, dtype=np.int64), sizes)
        return row, self.items[self.offsets[start] : self.offsets[stop]]

    def target_seen(self) -> npt.NDArray[np.bool_]:
        """Whether each row's target already occurs in its history, bool [N]."""
        row = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        repeats = np.bincount(row[self.items == self.targets[row]], minlength=len(self))
        return np.asarray(repeats > 0)


class _ListSource:
    """A list of row dicts, read by columns."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice, /) -> Mapping[str, Any]:
        part = self.rows[rows]
        shared = set(part[0]).intersection(*part) if part else set()
        return {name: [row[name] for row in part] for name in shared}

"""`{user: [item, item, …]}` as one JSON object; each list is in time order, oldest first."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from gr.data.checks import Repairs, build_interactions
from gr.data.errors import DataError
from gr.data.readers.item_json import read_item_json, read_json_object
from gr.data.schema import Interactions


def read_user_items(
    path: str | Path,
    items: str | Path | pa.Table | None = None,
    *,
    repair: Iterable[str] = (),
    name: str | None = None,
) -> Interactions:
    """Read the file into order-only `Interactions` (`order` counts from 0 per user).

    `items`: a table with `item_id, title, …`, or a JSON file `{item: {"title": …}}`.
    Raises `DataError` for a user whose entry is not a list, for an empty list, for lists that mix
    text and numbers.
    """
    path = Path(path)
    fixes = Repairs.of(repair)
    lists: dict[str, list[object]] = {}
    for user, history in read_json_object(path).items():
        if not isinstance(history, list):
            raise DataError(
                f"{path}: user {user!r} has {type(history).__name__} {str(history)[:40]!r}, "
                "wanted a list of items"
            )
        lists[user] = history
    empty = [user for user, history in lists.items() if not history]
    if empty:
        problem = f"{path}: user {empty[0]!r} has no events, wanted at least one; {len(empty)} such"
        fixes.need("nan", len(empty), problem, str(path))
        lists = {user: history for user, history in lists.items() if history}
    raw = flat_events(
        list(lists), [len(history) for history in lists.values()], _flat_items(path, lists)
    )
    table = items if items is None or isinstance(items, pa.Table) else read_item_json(items)
    return build_interactions(raw, name or path.stem, str(path), items=table, repairs=fixes)


def flat_events(users: list[str], lengths: list[int], items: pa.Array) -> pa.Table:
    """Events table of sequences laid end to end, with the position in each as `order`."""
    counts = np.asarray(lengths, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(users)), counts)
    order = np.arange(len(owner), dtype=np.int64) - starts[owner]
    user_column = pa.array(users, pa.string()).take(pa.array(owner))
    return pa.table({"user_id": user_column, "item_id": items, "order": order})


def _flat_items(path: Path, lists: dict[str, list[object]]) -> pa.Array:
    try:
        # No type asked for: Arrow would quietly cut 1.5 down to an integer.
        found = pa.array(list(chain.from_iterable(lists.values())))
        if found.type in (pa.int64(), pa.string()):
            return found
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        pass
    for user, history in lists.items():  # only reached with an error: find it
        large = [item for item in history if isinstance(item, int) and abs(item) >= 2**63]
        if large:
            raise DataError(f"{path}: user {user!r} has item {large[0]}, wanted text or an int64")
        kinds = {type(item).__name__ for item in history}
        if len(kinds) > 1 or not kinds <= {"int", "str"}:
            raise DataError(
                f"{path}: user {user!r} has items of mixed types {sorted(kinds)}, "
                "wanted all text or all integers"
            )
    raise DataError(f"{path}: items are text for some users and numbers for others, wanted one")

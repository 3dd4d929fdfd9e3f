"""Filters and labels on `Interactions`. Each returns a new object and counts what it removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gr.data import columns as cols
from gr.data.errors import DataError
from gr.data.schema import Interactions


def k_core(interactions: Interactions, k: int) -> Interactions:
    """Keep the users and items that have at least `k` events among themselves (the k-core).

    Metadata rows of items that lost all their events go too. `repairs["k_core"]` counts the events
    removed. Raises `DataError` where nothing is left.
    """
    if k < 1:
        raise DataError(f"k_core: k is {k}, wanted at least 1")
    users = cols.codes(interactions.events["user_id"])
    items = cols.codes(interactions.events["item_id"])
    keep = np.ones(len(users), dtype=bool)
    while True:
        # Removing a user can push an item below k, and the other way round: repeat until stable.
        per_user = np.bincount(users[keep], minlength=int(users.max()) + 1)
        per_item = np.bincount(items[keep], minlength=int(items.max()) + 1)
        still = keep & (per_user[users] >= k) & (per_item[items] >= k)
        if still.sum() == keep.sum():
            break
        keep = still
    result = _filtered(interactions, keep, "k_core", f"k={k}")
    if interactions.items is not None and not keep.all():
        used = pc.unique(result.events["item_id"])
        metadata = interactions.items.filter(
            pc.is_in(interactions.items["item_id"], value_set=used)
        )
        result = replace(result, items=metadata)
    return result


def min_events(interactions: Interactions, n: int) -> Interactions:
    """Keep the users with at least `n` events. `repairs["min_events"]` counts the events removed.

    Item metadata stays whole. Raises `DataError` where nothing is left.
    """
    if n < 1:
        raise DataError(f"min_events: n is {n}, wanted at least 1")
    users = cols.codes(interactions.events["user_id"])
    return _filtered(interactions, np.bincount(users)[users] >= n, "min_events", f"n={n}")


def actions_from_value(
    interactions: Interactions, rules: Sequence[tuple[str, float | None, float | None]]
) -> Interactions:
    """Name each event's action by its `value`.

    A rule is `(action, low, high)` and holds where low <= value < high; `None` is no bound. The
    first rule that holds names the event, so
    `[("like", 4.0, None), ("dislike", None, 4.0)]` splits ratings at 4.
    Raises `DataError` without a value column, for an empty rule, and for a value no rule covers.
    """
    events = interactions.events
    if "value" not in events.column_names:
        raise DataError(
            f"{interactions.name}: actions_from_value needs a column 'value', "
            f"seen {events.column_names}"
        )
    if not rules:
        raise DataError("actions_from_value: no rules, wanted at least one (action, low, high)")
    values: npt.NDArray[np.float64] = events["value"].to_numpy()
    chosen = np.full(len(values), -1, dtype=np.int64)
    for index, (action, low, high) in enumerate(rules):
        if low is not None and high is not None and low >= high:
            raise DataError(f"actions_from_value: rule ({action!r}, {low}, {high}) never holds")
        holds = chosen < 0
        if low is not None:
            holds &= values >= low
        if high is not None:
            holds &= values < high
        chosen[holds] = index
    if (chosen < 0).any():
        at = int((chosen < 0).argmax())
        raise DataError(
            f"{interactions.name}: event {at + 1} has value {values[at]}, which no rule covers "
            f"({int((chosen < 0).sum()):,} such events); rules: {list(rules)}"
        )
    names = pa.array([str(action) for action, _, _ in rules], pa.string())
    column = events.column_names.index("action")
    labelled = events.set_column(column, "action", names.take(pa.array(chosen)))
    return replace(interactions, events=labelled)


def _filtered(
    interactions: Interactions, keep: npt.NDArray[np.bool_], name: str, argument: str
) -> Interactions:
    if not keep.any():
        raise DataError(
            f"{interactions.name}: {name}({argument}) leaves no events of "
            f"{interactions.num_events:,}, wanted a smaller {argument[0]}"
        )
    repairs = dict(interactions.repairs)
    if not keep.all():
        repairs[name] = repairs.get(name, 0) + int((~keep).sum())
    return replace(interactions, events=interactions.events.filter(pa.array(keep)), repairs=repairs)

"""Every event passes here on its way in: types, missing values, times, duplicates, metadata.

A problem is a `DataError` unless its repair was asked for; a repair is counted under its name and
logged as a warning. Nothing is dropped in silence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from gr.data import columns as cols
from gr.data.errors import DataError
from gr.data.schema import DEFAULT_ACTION, EVENT_COLUMNS, ID_COLUMNS, TIME_COLUMNS, Interactions

log = logging.getLogger("gr.data")

REPAIRS: dict[str, str] = {
    "nan": "drop rows with a missing value",
    "float_ids": "write ids such as 7.0 as 7",
    "fractional_seconds": "round fractional timestamps down",
    "milliseconds": "divide timestamps that are milliseconds by 1000",
    "negative": "drop rows with a negative timestamp",
    "future": "drop rows with a timestamp in the future",
    "duplicates": "keep the first of equal rows",
    "metadata": "add an empty title for items without metadata",
    "encoding": "read files that are not UTF-8 as latin-1",
    "trailing_delimiter": "cut a delimiter at the end of every line",
}

# Seconds stay below 1e11 until the year 5138; milliseconds have been above it since 1973.
MILLISECONDS_FROM = 100_000_000_000
MICROSECONDS_FROM = 100_000_000_000_000
UNITS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
DAY = 86_400


@dataclass
class Repairs:
    """Which repairs are allowed, and how many rows each one changed so far."""

    allowed: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str] | Repairs) -> Repairs:
        if isinstance(names, Repairs):
            return names
        allowed = frozenset([names] if isinstance(names, str) else names)
        unknown = sorted(allowed - REPAIRS.keys())
        if unknown:
            raise DataError(f"repair: unknown {unknown}, wanted some of {sorted(REPAIRS)}")
        return cls(allowed)

    def need(self, name: str, count: int, problem: str, where: str) -> None:
        """Count `count` rows under `name`, or raise `problem` where the repair is not allowed."""
        if name not in self.allowed:
            raise DataError(f"{problem}. repair={{{name!r}}} would {REPAIRS[name]}")
        self.counts[name] = self.counts.get(name, 0) + count
        log.warning("%s: repair %r (%s): %s", where, name, REPAIRS[name], f"{count:,}")


def build_interactions(
    raw: pa.Table,
    name: str,
    where: str,
    *,
    time_unit: str = "s",
    items: pa.Table | None = None,
    users: pa.Table | None = None,
    repairs: Iterable[str] | Repairs = (),
    relative_time: bool = False,
) -> Interactions:
    """Turn a table with schema column names and any types into checked `Interactions`.

    `where` (usually the file) starts every message. `time_unit` is the unit of `timestamp` in
    `raw`: "s", "ms", "us" or "ns" (typed Arrow timestamps bring their own); finer units are rounded
    down to seconds, and rows are first put in the order of the finer time so that events of one
    second keep their true order.
    Raises `DataError` for every problem that `repairs` does not cover.
    """
    fixes = Repairs.of(repairs)
    if time_unit not in UNITS_PER_SECOND:
        raise DataError(f"time_unit: {time_unit!r}, wanted one of {sorted(UNITS_PER_SECOND)}")
    events = check_events(raw, where, fixes, time_unit=time_unit)
    if items is not None:
        items = check_items(items, events, where, fixes)
    return Interactions(name, events, items, users, dict(fixes.counts), relative_time)


def validate_interactions(interactions: Interactions, now: float | None = None) -> None:
    """`Interactions.validate`: the checks of `build_interactions` with no repair allowed."""
    events, where = interactions.events, interactions.name
    wanted = {"user_id": pa.string(), "item_id": pa.string(), "action": pa.string()}
    wanted |= {interactions.time_column: pa.int64()}
    wanted |= {"value": pa.float64()} if "value" in events.column_names else {}
    wanted |= {"scenario": pa.string()} if "scenario" in events.column_names else {}
    for column, kind in wanted.items():
        seen = events.schema.field(column).type if column in events.column_names else None
        if seen != kind:
            raise DataError(f"{where}: events column {column!r} is {seen}, wanted {kind}")
    check_events(events, where, Repairs(), now=now)
    if interactions.items is not None:
        check_items(interactions.items, events, where, Repairs())


def check_events(
    raw: pa.Table, where: str, fixes: Repairs, time_unit: str = "s", now: float | None = None
) -> pa.Table:
    time_column = next((c for c in TIME_COLUMNS if c in raw.column_names), None)
    missing = [c for c in ID_COLUMNS if c not in raw.column_names]
    if missing or time_column is None:
        wanted = missing or ["timestamp or order"]
        raise DataError(f"{where}: no column {', '.join(wanted)}; seen {raw.column_names}")
    if raw.num_rows == 0:
        raise DataError(f"{where}: no events: 0 rows, wanted at least 1")

    other_time = {c for c in TIME_COLUMNS if c != time_column}
    kept = [c for c in EVENT_COLUMNS if c in raw.column_names and c not in other_time]
    rows = pa.array(np.arange(1, raw.num_rows + 1))
    table = raw.select(kept).unify_dictionaries().append_column("row", rows)
    table = _drop_missing(table, where, fixes)

    kind = table.schema.field(time_column).type
    time_unit = kind.unit if pt.is_timestamp(kind) else time_unit
    for column in table.column_names:
        order = None
        if column in (*ID_COLUMNS, "action", "scenario"):
            done = cols.to_text(table, column, where, fixes)
        elif column == "value":
            done = cols.to_float(table, column, where)
        elif column == time_column:
            done, order = cols.to_integer(table, column, where, fixes)
        else:
            continue
        table = table.set_column(table.column_names.index(column), column, done)
        table = table if order is None else table.take(pa.array(order))
    if "action" not in table.column_names:
        action = pa.array([DEFAULT_ACTION]).take(pa.array(np.zeros(table.num_rows, np.int64)))
        table = table.add_column(table.column_names.index(time_column) + 1, "action", action)
    if time_column == "timestamp":
        table = _check_times(table, where, fixes, time_unit, time.time() if now is None else now)
    table = _drop_duplicates(table, time_column, where, fixes)
    return table.drop_columns(["row"])


def _drop_missing(table: pa.Table, where: str, fixes: Repairs) -> pa.Table:
    bad = np.zeros(table.num_rows, dtype=bool)
    first: tuple[int, str] | None = None
    for column in table.column_names:
        gone = cols.missing(table[column])
        if gone.any():
            at = int(gone.argmax())
            first = min(first, (at, column)) if first else (at, column)
            bad |= gone
    if first is None:
        return table
    at, column = first
    problem = (
        f"{where}: data row {at + 1}: {column} is missing (empty, null or NaN), wanted a value; "
        f"{int(bad.sum()):,} such rows of {table.num_rows:,}"
    )
    fixes.need("nan", int(bad.sum()), problem, where)
    return _keep(table, ~bad, where, "nan")


def _check_times(
    table: pa.Table, where: str, fixes: Repairs, time_unit: str, now: float
) -> pa.Table:
    ticks: npt.NDArray[np.int64] = table["timestamp"].to_numpy()
    scale = np.full(1, UNITS_PER_SECOND[time_unit], dtype=np.int64)
    if time_unit == "s":
        fine = ticks >= MILLISECONDS_FROM
        if fine.any():
            at = int(fine.argmax())
            seen = f"{where}: data row {_row(table, at)}: timestamp {ticks[at]}"
            if ticks.max() >= MICROSECONDS_FROM:
                raise DataError(
                    f"{seen} is too large for seconds: micro- or nanoseconds? "
                    "Pass time_unit='us' or 'ns'"
                )
            problem = (
                f"{seen} looks like milliseconds, wanted unix seconds; {int(fine.sum()):,} rows of "
                f"{len(ticks):,}. Pass time_unit='ms' if the whole column is"
            )
            fixes.need("milliseconds", int(fine.sum()), problem, where)
            scale = np.where(fine, 1000, 1)
    if scale.max() > 1:
        # Sort by the finer time first: after rounding, events of one second would be ties.
        order = np.argsort(ticks * (1000 // scale) if time_unit == "s" else ticks, kind="stable")
        seconds = (ticks // scale)[order]
        at_column = table.column_names.index("timestamp")
        table = table.take(order).set_column(at_column, "timestamp", pa.array(seconds))
    table = _drop_times(
        table, cols.numbers(table, "timestamp") < 0, "negative", "is negative", where, fixes
    )
    late = cols.numbers(table, "timestamp") > now + DAY
    return _drop_times(table, late, "future", f"lies after now ({int(now)})", where, fixes)


def _drop_times(
    table: pa.Table, bad: npt.NDArray[np.bool_], name: str, what: str, where: str, fixes: Repairs
) -> pa.Table:
    if not bad.any():
        return table
    at = int(bad.argmax())
    problem = (
        f"{where}: data row {_row(table, at)}: timestamp {table['timestamp'][at].as_py()} {what}, "
        f"wanted unix seconds between 1970 and now; {int(bad.sum()):,} such rows"
    )
    fixes.need(name, int(bad.sum()), problem, where)
    return _keep(table, ~bad, where, name)


def _drop_duplicates(table: pa.Table, time_column: str, where: str, fixes: Repairs) -> pa.Table:
    key = [
        c
        for c in ("user_id", "item_id", time_column, "action", "scenario")
        if c in table.column_names
    ]
    codes = pd.DataFrame({c: cols.codes(table[c]) for c in key})
    again = codes.duplicated(keep="first").to_numpy()
    if not again.any():
        return table
    at = int(again.argmax())
    first = int((codes == codes.iloc[at]).all(axis=1).to_numpy().argmax())
    shown = ", ".join(f"{c}={table[c][at].as_py()!r}" for c in key)
    problem = (
        f"{where}: data row {_row(table, at)} repeats data row {_row(table, first)} ({shown}), "
        f"wanted each event once; {int(again.sum()):,} duplicate events"
    )
    fixes.need("duplicates", int(again.sum()), problem, where)
    return _keep(table, ~again, where, "duplicates")


def check_items(items: pa.Table, events: pa.Table, where: str, fixes: Repairs) -> pa.Table:
    """Metadata with text columns, one row per item and a row for every item of `events`."""
    if "item_id" not in items.column_names or "title" not in items.column_names:
        raise DataError(
            f"{where}: item metadata has columns {items.column_names}, wanted item_id and title"
        )
    about = f"{where} (item metadata)"
    nameless = cols.missing(items["item_id"])
    if nameless.any():
        problem = (
            f"{about}: data row {int(nameless.argmax()) + 1}: item_id is missing, wanted a value; "
            f"{int(nameless.sum()):,} such rows of {items.num_rows:,}"
        )
        fixes.need("nan", int(nameless.sum()), problem, where)
    numbered = pa.table(
        {"item_id": items["item_id"], "row": pa.array(np.arange(1, items.num_rows + 1))}
    ).filter(pa.array(~nameless))
    items = items.filter(pa.array(~nameless))
    names = ["item_id", "title", *[c for c in items.column_names if c not in ("item_id", "title")]]
    id_column = cols.to_text(numbered, "item_id", about, fixes)
    others = [cols.to_plain_text(items[c], f"{about}: column {c!r}") for c in names[1:]]
    items = pa.table([id_column, *others], names=names)
    again = pd.Series(cols.codes(items["item_id"])).duplicated().to_numpy()
    if again.any():
        seen = items["item_id"][int(again.argmax())].as_py()
        problem = f"{where}: item metadata describes item {seen!r} more than once"
        fixes.need("duplicates", int(again.sum()), problem, where)
        items = items.filter(pa.array(~again))
    used = pc.unique(events["item_id"])
    unknown = used.filter(pc.invert(pc.is_in(used, value_set=items["item_id"])))
    if len(unknown):
        shown = ", ".join(repr(i) for i in unknown.slice(0, 3).to_pylist())
        problem = (
            f"{where}: {len(unknown):,} of {len(used):,} items have events but no metadata "
            f"(first: {shown}), wanted a row for each"
        )
        fixes.need("metadata", len(unknown), problem, where)
        empty = pa.array([""]).take(pa.array(np.zeros(len(unknown), np.int64)))
        more = pa.table([unknown, *[empty] * (len(names) - 1)], names=names)
        items = pa.concat_tables([items, more])
    return items.combine_chunks()


def _keep(table: pa.Table, keep: npt.NDArray[np.bool_], where: str, name: str) -> pa.Table:
    if not keep.any():
        raise DataError(f"{where}: no events left after repair {name!r}")
    return table.filter(pa.array(keep))


def _row(table: pa.Table, at: int) -> int:
    return int(table["row"][at].as_py())

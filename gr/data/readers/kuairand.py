"""KuaiRand logs: one row per shown video, time in milliseconds, many 0/1 action columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gr.data import columns as cols
from gr.data.checks import Repairs, build_interactions
from gr.data.errors import DataError
from gr.data.schema import Interactions
from gr.data.text_files import TextFormat, missing_column, read_delimited

# (column of the log, action), the most telling first: an event is named after the first that is 1.
ACTIONS: tuple[tuple[str, str], ...] = (
    ("is_hate", "hate"),
    ("is_like", "like"),
    ("is_follow", "follow"),
    ("is_forward", "forward"),
    ("is_comment", "comment"),
    ("is_profile_enter", "profile"),
    ("long_view", "long_view"),
    ("is_click", "click"),
)
NO_ACTION = "skip"


def read_kuairand(
    path: str | Path,
    *,
    actions: Sequence[tuple[str, str]] | None = None,
    combine: str = "first",
    repair: Iterable[str] = (),
    name: str | None = None,
) -> Interactions:
    """Read one log, or every `log_*.csv` and `*.tsv` of a folder (in name order).

    `time_ms` becomes `timestamp` in seconds (rows are put in millisecond order first), `tab`
    becomes `scenario`, `play_time_ms` becomes `value` in seconds.
    `actions` lists `(column, action)`; default: `ACTIONS`, those that the log has. A log that has
    neither `is_like` nor `is_hate` but `label` (1 liked, 0 hated) takes the action from `label`.
    `combine="first"` names an event after the first action that is 1, `"all"` joins all of them
    ("like+click"); an event with none is a "skip".
    Raises `DataError` for a missing column, a signal that is not 0 or 1, and everything
    `read_table` refuses.
    """
    path = Path(path)
    if combine not in ("first", "all"):
        raise DataError(f"combine: {combine!r}, wanted 'first' or 'all'")
    fixes = Repairs.of(repair)
    files = sorted([*path.glob("log_*.csv"), *path.glob("*.tsv")]) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no log_*.csv and no *.tsv in this folder")
    parts = []
    for file in files:
        delimiter = "\t" if file.suffix == ".tsv" else ","
        log = read_delimited(file, TextFormat(delimiter, quoted=False), fixes)
        parts.append(_schema_columns(log, file, actions, combine))
    columns = set(parts[0].column_names)
    for file, part in zip(files, parts, strict=True):
        if set(part.column_names) != columns:
            raise DataError(f"{file}: columns differ from {files[0].name}, wanted the same")
    raw = pa.concat_tables([part.select(parts[0].column_names) for part in parts])
    return build_interactions(raw, name or path.stem, str(path), time_unit="ms", repairs=fixes)


def _schema_columns(
    log: pa.Table, file: Path, actions: Sequence[tuple[str, str]] | None, combine: str
) -> pa.Table:
    for column in ("user_id", "video_id", "time_ms"):
        if column not in log.column_names:
            name = {"video_id": "item_id", "time_ms": "timestamp"}.get(column, column)
            raise missing_column(name, column, log.column_names, str(file))
    table = {
        "user_id": log["user_id"],
        "item_id": log["video_id"],
        "timestamp": log["time_ms"],
        "action": _action(log, file, actions, combine),
    }
    if "play_time_ms" in log.column_names:
        numbered = log.append_column("row", pa.array(np.arange(1, log.num_rows + 1)))
        seconds = cols.to_float(numbered, "play_time_ms", str(file))
        table["value"] = pc.divide(seconds, 1000.0)
    if "tab" in log.column_names:
        table["scenario"] = log["tab"]
    return pa.table(table)


def _action(
    log: pa.Table, file: Path, actions: Sequence[tuple[str, str]] | None, combine: str
) -> pa.ChunkedArray:
    if actions is None:
        judged = {"is_like", "is_hate"} & set(log.column_names)
        if "label" in log.column_names and not judged:
            return pc.if_else(_signal(log, "label", file), "like", "hate")
        actions = [pair for pair in ACTIONS if pair[0] in log.column_names]
    for column, name in actions:
        if column not in log.column_names:
            raise missing_column(f"action {name!r}", column, log.column_names, str(file))
    if not actions:
        raise DataError(f"{file}: no action column; seen {log.column_names}")
    flags = [_signal(log, column, file).to_numpy() for column, _ in actions]
    names = [name for _, name in actions]
    if combine == "all":
        return cols.join_flags(flags, names, "+", NO_ACTION)
    chosen = np.select(flags, list(range(len(names))), len(names))
    return pa.chunked_array([pa.array([*names, NO_ACTION], pa.string()).take(pa.array(chosen))])


def _signal(log: pa.Table, column: str, file: Path) -> pa.ChunkedArray:
    values = log[column]
    known = pc.is_in(values, value_set=pa.array(["0", "1"]))
    at = pc.index(known, False).as_py()
    if at >= 0:
        raise DataError(
            f"{file}: data row {at + 1}: {column} is {values[at].as_py()!r}, wanted 0 or 1"
        )
    return pc.equal(values, "1")

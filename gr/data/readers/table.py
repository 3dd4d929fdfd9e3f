"""Any table of events: csv, tsv, Parquet or JSON lines, with a mapping of its column names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from gr.data.checks import Repairs, build_interactions
from gr.data.errors import DataError
from gr.data.schema import EVENT_COLUMNS, Interactions
from gr.data.text_files import (
    TextFormat,
    missing_column,
    pick_columns,
    read_delimited,
    read_text,
)

SUFFIXES = {".csv": ",", ".tsv": "\t", ".tab": "\t", ".txt": "\t", ".dat": "::"}


def read_table(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    *,
    items: str | Path | pa.Table | None = None,
    time_unit: str = "s",
    delimiter: str | None = None,
    encoding: str = "utf-8",
    repair: Iterable[str] = (),
    name: str | None = None,
) -> Interactions:
    """Read one file of events; its suffix says the format (.csv .tsv .txt .dat .parquet .jsonl).

    `columns` maps schema names (`user_id item_id timestamp order action value scenario`) to the
    names in the file; a name left out is looked for under its own name. Of `timestamp` and `order`
    one is needed. `time_unit` is the unit of `timestamp` ("s", "ms", "us", "ns"); typed Arrow
    timestamps need none. `items`: a table, or a file in one of the same formats, with `item_id`,
    `title` and any other columns; for a file, `columns` may name `title`, too, and `item_id` is
    looked for under its name in the events, then under its own. `repair` is a set of names out of
    `gr.data.REPAIRS`.
    Raises `DataError` naming file, row, value seen and value wanted.
    """
    path = Path(path)
    fixes = Repairs.of(repair)
    from_file = isinstance(items, (str, Path))
    table = _read_any(path, delimiter, encoding, fixes)
    chosen = {k: v for k, v in (columns or {}).items() if not (from_file and k == "title")}
    raw = pick_columns(table, chosen, EVENT_COLUMNS, str(path))
    if isinstance(items, (str, Path)):
        found = _read_any(Path(items), delimiter, encoding, fixes)
        items = _item_columns(found, columns or {}, str(items))
    return build_interactions(
        raw, name or path.stem, str(path), time_unit=time_unit, items=items, repairs=fixes
    )


def _item_columns(table: pa.Table, columns: Mapping[str, str], where: str) -> pa.Table:
    """Item metadata with `item_id` and `title` under these names, other columns behind them."""
    seen = table.column_names
    item = columns.get("item_id", "item_id")
    sources = {
        "item_id": item if item in seen else "item_id",
        "title": columns.get("title", "title"),
    }
    for name, source in sources.items():
        if source not in seen:
            raise missing_column(name, source, seen, where)
    others = [c for c in seen if c not in sources.values() and c not in sources]
    return table.select([*sources.values(), *others]).rename_columns([*sources, *others])


def _read_any(path: Path, delimiter: str | None, encoding: str, fixes: Repairs) -> pa.Table:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return _read_parquet(path)
    if suffix in (".jsonl", ".ndjson"):
        return _read_json_lines(path, encoding, fixes)
    if delimiter is None:
        if suffix not in SUFFIXES:
            known = [*SUFFIXES, ".parquet", ".jsonl"]
            raise DataError(
                f"{path}: unknown suffix {suffix!r}, wanted one of {known} or a delimiter"
            )
        delimiter = SUFFIXES[suffix]
    return read_delimited(path, TextFormat(delimiter, encoding, quoted=delimiter != "::"), fixes)


def _read_parquet(path: Path) -> pa.Table:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty, wanted a Parquet file")
    try:
        return pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error


def _read_json_lines(path: Path, encoding: str, fixes: Repairs) -> pa.Table:
    data = read_text(path, encoding, fixes)
    try:
        # One block: Arrow guesses types per block, and the row it reports counts within one.
        options = pj.ReadOptions(use_threads=False, block_size=min(len(data) + 1, 2**31 - 1))
        return pj.read_json(pa.BufferReader(data), options)
    except pa.ArrowInvalid as error:
        # Arrow counts rows from 0 and says which column changed its type.
        raise DataError(
            f"{path}: bad JSON line or mixed types in a column, wanted one object a line and one "
            f"type a column; the parser says (counting rows from 0): {error}"
        ) from error

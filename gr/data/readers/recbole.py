"""RecBole atomic files: tab separated, header fields written `name:type`, no quoting.

`<name>.inter` holds the events; `<name>.item` and `<name>.user` beside it hold metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from gr.data.checks import Repairs, build_interactions
from gr.data.columns import to_plain_text
from gr.data.errors import DataError
from gr.data.schema import EVENT_COLUMNS, Interactions
from gr.data.text_files import TextFormat, pick_columns, read_delimited

FIELD_TYPES = ("token", "token_seq", "float", "float_seq")
TITLE_FIELDS = ("title", "movie_title", "item_name", "name")
VALUE_FIELDS = ("value", "rating")


def read_recbole(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    *,
    time_unit: str = "s",
    repair: Iterable[str] = (),
    name: str | None = None,
) -> Interactions:
    """Read a folder with one `.inter` file, or that file itself.

    `columns` maps schema names to field names without their type. A field `rating` becomes `value`
    and the item field `title`, `movie_title`, `item_name` or `name` becomes `title`.
    Raises `DataError` for a header without types and everything `read_table` refuses.
    """
    events_path = _events_file(Path(path))
    fixes = Repairs.of(repair)
    table = _read_atomic(events_path, fixes)
    mapping = dict(columns or {})
    rating = next((f for f in VALUE_FIELDS if f in table.column_names), None)
    if rating and "value" not in mapping:
        mapping["value"] = rating
    raw = pick_columns(table, mapping, EVENT_COLUMNS, str(events_path))

    items = users = None
    if (item_path := events_path.with_suffix(".item")).is_file():
        items = _read_atomic(item_path, fixes)
        items = _rename(items, {mapping.get("item_id", "item_id"): "item_id"}, item_path)
        title = next((f for f in TITLE_FIELDS if f in items.column_names), None)
        if title is None:
            empty = pa.array([""] * items.num_rows, pa.string())
            items = items.append_column("title", empty)
        else:
            items = _rename(items, {title: "title"}, item_path)
    if (user_path := events_path.with_suffix(".user")).is_file():
        users = _read_atomic(user_path, fixes)
        users = _rename(users, {mapping.get("user_id", "user_id"): "user_id"}, user_path)
    return build_interactions(
        raw,
        name or events_path.stem,
        str(events_path),
        time_unit=time_unit,
        items=items,
        users=users,
        repairs=fixes,
    )


def _events_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    found = sorted(path.glob("*.inter"))
    if len(found) != 1:
        raise DataError(
            f"{path}: {len(found)} files *.inter ({[f.name for f in found]}), wanted exactly one; "
            "pass the file itself"
        )
    return found[0]


def _read_atomic(path: Path, fixes: Repairs) -> pa.Table:
    table = read_delimited(path, TextFormat("\t", quoted=False), fixes)
    names = []
    for field in table.column_names:
        name, _, kind = field.rpartition(":")
        if not name or kind not in FIELD_TYPES:
            raise DataError(
                f"{path}: header field {field!r} has no type, wanted 'name:type' with a type out "
                f"of {FIELD_TYPES}"
            )
        names.append(name)
    if len(set(names)) < len(names):
        raise DataError(f"{path}: header names a field twice: {table.column_names}")
    return table.rename_columns(names)


def _rename(table: pa.Table, change: Mapping[str, str], path: Path) -> pa.Table:
    for old in change:
        if old not in table.column_names:
            raise DataError(f"{path}: no field {old!r}; the file has {table.column_names}")
    names = [change.get(c, c) for c in table.column_names]
    plain = [to_plain_text(table[c], f"{path}: field {c!r}") for c in table.column_names]
    return pa.table(plain, names=names)

"""Item metadata as one JSON object: `{item: {field: text or list of texts}}`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa

from gr.data.errors import DataError


def read_json_object(path: str | Path) -> dict[str, object]:
    """Parse a file that holds one JSON object; `DataError` names file and line.

    A key that comes twice in an object is refused: JSON readers keep only the last.
    """
    path = Path(path)

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = Counter(key for key, _ in pairs)
            key, times = keys.most_common(1)[0]
            raise DataError(f"{path}: key {key!r} comes {times} times in one object, wanted once")
        return entries

    if not path.is_file():
        raise DataError(f"{path}: no such file")
    data = path.read_bytes()
    if not data.strip():
        raise DataError(f"{path}: the file is empty, wanted a JSON object")
    try:
        loaded = json.loads(data.decode("utf-8-sig"), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: line {line} is not UTF-8, wanted JSON in UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: holds a {type(loaded).__name__}, wanted an object {{key: ...}}")
    if not loaded:
        raise DataError(f"{path}: the object is empty, wanted at least one entry")
    return loaded


def read_item_json(path: str | Path, title_field: str = "title") -> pa.Table:
    """Table `item_id, title, …` of strings; lists are joined by ", ", absent fields are empty.

    `title_field` is the field that becomes `title` (it also stays under its own name).
    """
    entries = read_json_object(path)
    fields: dict[str, None] = {}
    for item, entry in entries.items():
        if not isinstance(entry, dict):
            raise DataError(
                f"{path}: item {item!r} is {type(entry).__name__}, wanted an object of fields"
            )
        fields.update(dict.fromkeys(str(key) for key in entry))
    if title_field not in fields:
        raise DataError(f"{path}: no field {title_field!r} for the title; fields: {list(fields)}")
    rows = list(entries.values())
    table = {"item_id": pa.array([str(item) for item in entries], pa.string())}
    for name in ["title", *[f for f in fields if f not in ("title", "item_id")]]:
        source = title_field if name == "title" else name
        texts = [_text(row.get(source)) for row in rows if isinstance(row, dict)]
        table[name] = pa.array(texts, pa.string())
    return pa.table(table)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(_text(part) for part in value)
    return str(value)

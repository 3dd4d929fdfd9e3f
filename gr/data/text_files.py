"""Delimited text as an Arrow table of strings, with messages for the ways such files go wrong."""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv

from gr.data.checks import Repairs
from gr.data.errors import DataError

DELIMITERS = ("\t", ",", ";", "|", "::")
_ONE_BYTE = "\x1f"  # what stands in for a delimiter of several characters


@dataclass(frozen=True)
class TextFormat:
    """How a file is written. `header` names the columns of a file that has no header line."""

    delimiter: str = ","
    encoding: str = "utf-8"
    header: tuple[str, ...] | None = None
    quoted: bool = True


def read_text(path: Path, encoding: str, fixes: Repairs) -> bytes:
    """The file as UTF-8 without a byte order mark; empty files and wrong encodings raise."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    data = path.read_bytes()
    if not data.strip():
        raise DataError(f"{path}: the file is empty, wanted a header and at least one row")
    try:
        text = data.decode(encoding)
    except LookupError as error:
        raise DataError(f"{path}: unknown encoding {encoding!r}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = (
            f"{path}: line {line} is not {encoding} (byte 0x{data[error.start]:02x} at offset "
            f"{error.start}), wanted {encoding}. encoding='latin-1' reads many old files"
        )
        fixes.need("encoding", 1, problem, str(path))
        return data.decode("latin-1").encode()
    if codecs.lookup(encoding).name == "utf-8":  # no second copy of the usual file
        data = data.removeprefix(codecs.BOM_UTF8)
    else:
        data = text.removeprefix("\ufeff").encode()
    # Line ends as a Mac once wrote them; and a file of one line has a line end, too.
    return data if b"\n" in data else data.replace(b"\r", b"\n") + b"\n"


def read_delimited(
    path: str | Path, form: TextFormat, fixes: Repairs, min_columns: int = 2
) -> pa.Table:
    """Read `path`; every column is a string column. Raises `DataError` naming file and row."""
    path = Path(path)
    data = read_text(path, form.encoding, fixes)
    delimiter = form.delimiter
    _look_at_delimiter(path, data, delimiter, min_columns)
    if len(delimiter) > 1:
        data, delimiter = data.replace(delimiter.encode(), _ONE_BYTE.encode()), _ONE_BYTE
    if form.quoted:
        _look_at_quotes(path, data, delimiter)
    try:
        names = list(form.header or _fields(_first_line(data), delimiter, form.quoted))
    except csv.Error as error:
        raise DataError(f"{path}: line 1 is not a header: {error}") from error
    twice = sorted({n for n in names if n and names.count(n) > 1})
    if twice:
        raise DataError(f"{path}: header names {twice} more than once, wanted each column once")
    blank = [i for i, n in enumerate(names) if not n.strip()]
    if blank and blank != [len(names) - 1]:
        raise DataError(f"{path}: header {names} has a column without a name")
    names = [n if n.strip() else "" for n in names]

    skip = 0 if form.header else 1
    bad: list[pv.InvalidRow] = []
    table = _parse(path, data, names, delimiter, form.quoted, skip, bad)
    if bad and _is_trailing(bad[0], delimiter):
        problem = (
            f"{path}: data row {bad[0].number - skip}: every line must have {len(names)} columns, "
            f"this one ends with one more {form.delimiter!r}"
        )
        pattern = re.escape(delimiter.encode()) + rb"(?=\r?(?:\n|\Z))"
        data, count = re.subn(pattern, b"", data)
        fixes.need("trailing_delimiter", count, problem, str(path))
        bad = []
        table = _parse(path, data, names, delimiter, form.quoted, skip, bad)
    if bad:
        row = bad[0]
        raise DataError(
            f"{path}: data row {row.number - skip} has {row.actual_columns} columns, wanted "
            f"{row.expected_columns} (delimiter {form.delimiter!r}): {row.text[:80]!r}"
        )
    assert table is not None
    return table.drop_columns([""]) if "" in table.column_names else table


def _parse(
    path: Path,
    data: bytes,
    names: Sequence[str],
    delimiter: str,
    quoted: bool,
    skip: int,
    bad: list[pv.InvalidRow],
) -> pa.Table | None:
    def stop(row: pv.InvalidRow) -> str:
        bad.append(row)
        return "error"

    try:
        return pv.read_csv(
            io.BytesIO(data),
            # One thread: only then does Arrow know the number of a bad row.
            pv.ReadOptions(use_threads=False, column_names=list(names), skip_rows=skip),
            pv.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if quoted else False,
                newlines_in_values=quoted,
                invalid_row_handler=stop,
            ),
            pv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
    except pa.ArrowInvalid as error:
        if not bad:
            if "Empty CSV" in str(error):
                return pa.table({name: pa.array([], pa.string()) for name in names})
            raise DataError(f"{path}: not a delimited text file: {error}") from error
        return None


def _is_trailing(row: pv.InvalidRow, delimiter: str) -> bool:
    text = row.text.rstrip("\r\n")
    return bool(row.actual_columns == row.expected_columns + 1 and text.endswith(delimiter))


def _first_line(data: bytes) -> str:
    return data.split(b"\n", 1)[0].rstrip(b"\r").decode()


def _fields(line: str, delimiter: str, quoted: bool) -> list[str]:
    if not quoted:
        return line.split(delimiter)
    return next(csv.reader([line], delimiter=delimiter))


def _look_at_quotes(path: Path, data: bytes, delimiter: str) -> None:
    """Refuse a quote that is opened and not closed: it would take in the rows that follow."""
    raw = np.frombuffer(data, np.uint8)
    quotes = np.searchsorted(np.flatnonzero(raw == ord("\n")), np.flatnonzero(raw == ord('"')))
    if not (np.bincount(quotes) % 2).any():
        return  # what is opened in a line is closed in it
    rows = csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter, strict=True)
    line = 0
    try:
        for _ in rows:
            line = rows.line_num
    except csv.Error as error:
        raise DataError(
            f"{path}: line {line + 1} has a quote that is not closed as it should be ({error}), "
            'wanted "text" with a quote inside written as ""'
        ) from error


def _look_at_delimiter(path: Path, data: bytes, delimiter: str, min_columns: int) -> None:
    line = _first_line(data)
    if min_columns < 2 or line.count(delimiter) + 1 >= min_columns:
        return
    others = [d for d in DELIMITERS if d != delimiter and line.count(d) + 1 >= min_columns]
    hint = f" The line has {others[0]!r}: pass delimiter={others[0]!r}." if others else ""
    raise DataError(
        f"{path}: first line has {line.count(delimiter) + 1} columns with delimiter "
        f"{delimiter!r}, wanted at least {min_columns}: {line[:80]!r}.{hint}"
    )


def pick_columns(
    table: pa.Table, columns: Mapping[str, str], allowed: Sequence[str], where: str
) -> pa.Table:
    """Rename the file's columns to schema names: `columns` maps schema name -> name in the file.

    Schema names that `columns` leaves out are taken under their own name where the file has them.
    """
    wrong = sorted(set(columns) - set(allowed))
    if wrong:
        raise DataError(f"columns: unknown schema names {wrong}, wanted some of {list(allowed)}")
    chosen: dict[str, str] = {}
    for name in allowed:
        source = columns.get(name, name)
        if source in table.column_names:
            chosen[name] = source
        elif name in columns:
            raise missing_column(name, source, table.column_names, where)
    for name in ("user_id", "item_id"):
        if name in allowed and name not in chosen:
            raise missing_column(name, name, table.column_names, where)
    if "timestamp" in allowed and not {"timestamp", "order"} & set(chosen):
        raise missing_column("timestamp", "timestamp", table.column_names, where)
    if {"timestamp", "order"} <= set(chosen):
        # A file may have both; the one that `columns` names wins, else the clock.
        del chosen["timestamp" if "order" in columns and "timestamp" not in columns else "order"]
    return table.select(list(chosen.values())).rename_columns(list(chosen))


def missing_column(name: str, source: str, seen: Sequence[str], where: str) -> DataError:
    """The error for a column that is not there, with the likeliest other name."""
    plain = {_plain(c): c for c in seen}
    near = difflib.get_close_matches(_plain(source), list(plain), n=1, cutoff=0.6)
    hint = f" Did you mean {plain[near[0]]!r}?" if near else ""
    needed = name if name == source else f"{name} (asked for as {source!r})"
    extra = " (or an order column)" if name == "timestamp" else ""
    return DataError(
        f"{where}: no column for {needed}{extra}; the file has {list(seen)}.{hint} "
        f"Say which with columns={{{name!r}: ...}}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())

"""Casts of one column, vectorised: each either gives the schema's type or names the first bad row.

The tables carry a column `row`: the 1-based number of the data row in the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from gr.data.errors import DataError

if TYPE_CHECKING:
    from gr.data.checks import Repairs

# Text that stands for "no value" in delimited files.
NULL_TEXTS = ("", "nan", "NaN", "NAN", "null", "NULL", "<NA>")


def is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pt.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column


def missing(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """True where a value is null, NaN or one of `NULL_TEXTS`."""
    column = _decoded(column)
    gone = pc.is_null(column, nan_is_null=pt.is_floating(column.type))
    if is_text(column.type):
        gone = pc.or_(gone, pc.is_in(column, value_set=pa.array(NULL_TEXTS, column.type)))
    result: npt.NDArray[np.bool_] = gone.to_numpy()
    return result


def codes(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Equal values get equal integers, numbered by first appearance."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # more text than one array can hold
        array = array.cast(pa.large_string()).combine_chunks()
    result: npt.NDArray[np.int64] = (
        array.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return result


def numbers(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    result: npt.NDArray[np.int64] = table[column].to_numpy()
    return result


def to_plain_text(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Metadata: any type as text, null as the empty string; ``name`` begins the error."""
    column = _decoded(column)
    if not is_text(column.type) and not pt.is_null(column.type):
        try:
            column = column.cast(pa.string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{name} is {column.type}, wanted text") from error
    return pc.fill_null(column.cast(pa.string()), "")


def to_text(table: pa.Table, column: str, where: str, fixes: Repairs) -> pa.ChunkedArray:
    """Ids, actions, scenarios: text stays as it is ("007" is not "7"), integers become text."""
    values = _decoded(table[column])
    if is_text(values.type) or pt.is_integer(values.type):
        return values.cast(pa.string())
    if pt.is_floating(values.type):
        floats = values.to_numpy()
        # From 2^53 on, neighbouring integers are one float: two ids may have become one.
        broken = ~((np.abs(floats) < 2.0**53) & (floats == np.floor(floats)))
        if broken.any():
            at = int(broken.argmax())
            raise _bad(table, at, where, column, floats[at], "text or an integer below 2^53")
        problem = (
            f"{where}: {column} is {values.type} (first value {floats[0]}), wanted text or integers"
        )
        fixes.need("float_ids", len(floats), problem, where)
        return pa.chunked_array([pa.array(floats.astype(np.int64)).cast(pa.string())])
    raise DataError(f"{where}: {column} is {values.type}, wanted text or integers")


def to_float(table: pa.Table, column: str, where: str) -> pa.ChunkedArray:
    """`value`: finite float64."""
    values = _decoded(table[column])
    floats = _parse(table, values, column, where, "a number").astype(np.float64)
    broken = ~np.isfinite(floats)
    if broken.any():
        at = int(broken.argmax())
        raise _bad(table, at, where, column, floats[at], "a finite number")
    return pa.chunked_array([pa.array(floats)])


def to_integer(
    table: pa.Table, column: str, where: str, fixes: Repairs
) -> tuple[pa.ChunkedArray, npt.NDArray[np.int64] | None]:
    """`timestamp` and `order`: int64, Arrow timestamps in their own unit.

    Where fractions were rounded down, also the order of the rows by what they were: events of one
    second are ties afterwards.
    """
    values = _decoded(table[column])
    if pt.is_timestamp(values.type):
        return values.cast(pa.int64()), None
    if pt.is_float32(values.type) or pt.is_float16(values.type):
        raise DataError(
            f"{where}: {column} is {values.type}, which cannot tell seconds apart, wanted int64"
        )
    parsed = _parse(table, values, column, where, "an integer number of seconds")
    order = None
    if parsed.dtype.kind == "u" and (parsed >= 2**63).any():
        at = int((parsed >= 2**63).argmax())
        raise _bad(table, at, where, column, parsed[at], "an int64")
    if parsed.dtype.kind == "f":
        broken = ~(np.isfinite(parsed) & (np.abs(parsed) < 2.0**63))
        if broken.any():
            at = int(broken.argmax())
            raise _bad(table, at, where, column, parsed[at], "an int64")
        fraction = parsed != np.floor(parsed)
        if fraction.any():
            at = int(fraction.argmax())
            problem = str(_bad(table, at, where, column, parsed[at], "a whole number"))
            fixes.need("fractional_seconds", int(fraction.sum()), problem, where)
            order = np.argsort(parsed, kind="stable")
        parsed = np.floor(parsed)
    return pa.chunked_array([pa.array(parsed.astype(np.int64))]), order


def join_flags(
    flags: Sequence[npt.NDArray[np.bool_]], names: Sequence[str], separator: str, none: str
) -> pa.ChunkedArray:
    """The names of the flags that are set in each row, joined; `none` where no flag is set."""
    # Few patterns occur: join each once. (Arrow's binary_join_element_wise loses rows of nulls.)
    matrix = np.stack(flags, axis=1)
    patterns, which = np.unique(matrix, axis=0, return_inverse=True)
    texts = [
        separator.join(name for name, on in zip(names, row, strict=True) if on) or none
        for row in patterns
    ]
    return pa.chunked_array([pa.array(texts, pa.string()).take(pa.array(which.reshape(-1)))])


def _parse(
    table: pa.Table, values: pa.ChunkedArray, column: str, where: str, wanted: str
) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    result: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    if pt.is_integer(values.type) or pt.is_floating(values.type) or pt.is_decimal(values.type):
        result = (
            values.cast(pa.float64()).to_numpy()
            if pt.is_decimal(values.type)
            else (values.to_numpy())
        )
        return result
    if not is_text(values.type):
        raise DataError(f"{where}: {column} is {values.type}, wanted {wanted}")
    for kind in (pa.int64(), pa.float64()):
        try:
            result = values.cast(kind).to_numpy()
            return result
        except pa.ArrowInvalid:
            continue
    parsed: npt.NDArray[np.float64] = pd.to_numeric(values.to_pandas(), errors="coerce").to_numpy(
        dtype=np.float64
    )
    broken = np.isnan(parsed)
    if not broken.any():  # pandas reads a few spellings that Arrow does not, such as " 12 "
        return parsed
    at = int(broken.argmax())
    raise _bad(table, at, where, column, values[at].as_py(), wanted)


def _bad(table: pa.Table, at: int, where: str, column: str, seen: object, wanted: str) -> DataError:
    row = table["row"][at].as_py()
    shown = repr(seen) if isinstance(seen, str) else str(seen)
    return DataError(f"{where}: data row {row}: {column} is {shown}, wanted {wanted}")

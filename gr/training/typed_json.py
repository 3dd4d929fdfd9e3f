"""JSON as frozen dataclasses: unknown keys and values of a wrong type are refused where they are
read, by their full name in the document."""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """Refuse a value.

    Raises:
        ValueError: naming it, unless ``holds``.
    """
    if not holds:
        raise ValueError(f"{name}: {value!r}, wanted {wanted}")


def unknown_key(where: str, key: str, known: list[str]) -> ValueError:
    """The error for a key that is not known, with the nearest that is."""
    close = difflib.get_close_matches(key, known, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ValueError(f"{where}: unknown key {key!r}{hint}, wanted some of {sorted(known)}")


def read_dataclass(cls: type[T], data: object, where: str) -> T:
    """A dataclass from a mapping; keys that are left out keep their defaults.

    Args:
        where: what the document is called in messages.

    Raises:
        ValueError: an unknown key, or a value of a wrong type or out of range.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where}: {data!r}, wanted an object with keys")
    assert is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    values = {}
    for key, value in data.items():
        if key not in known:
            raise unknown_key(where, key, known)
        values[key] = convert(value, hints[key], f"{where}.{key}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(
            str(error) if str(error).startswith(where) else f"{where}.{error}"
        ) from error


def convert(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotated type, JSON's lists as tuples."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return read_dataclass(typing.cast(type, hint), value, where)
    if origin is types.UnionType or origin is typing.Union:
        if value is None:
            return None
        return convert(value, next(p for p in parts if p is not type(None)), where)
    if origin is Literal:
        require(value in parts, where, value, f"one of {list(parts)}")
        return value
    if origin is tuple:
        require(isinstance(value, (list, tuple)), where, value, "a list")
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(convert(v, parts[0], f"{where}[{i}]") for i, v in enumerate(value))
        require(len(value) == len(parts), where, value, f"a list of {len(parts)}")
        return tuple(
            convert(v, p, f"{where}[{i}]")
            for i, (v, p) in enumerate(zip(value, parts, strict=True))
        )
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = origin or hint
    # bool is an int to Python, and never one that a recipe means.
    fits = isinstance(value, plain) and (plain is bool or not isinstance(value, bool))
    require(fits, where, value, f"a value of type {plain.__name__}")
    return value

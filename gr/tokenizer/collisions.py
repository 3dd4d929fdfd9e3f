"""What to do when several items get the same semantic ID.

Legend: n items, M levels, K codes of the last level. A bucket is the set of items with one ID.

- ``popularity``: nothing moves. The most popular item speaks for its bucket; all stay in the
  catalogue (NEO).
- ``extra_level``: one more code tells the items of a bucket apart, the most popular first (TIGER).
- ``reassign``: the most popular item keeps the ID, each other one moves to the nearest free code of
  the last level under the same prefix, and where that prefix is full, under the nearest one that
  is not. Items share an ID only when every prefix in use is full.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gr.tokenizer.quantizers.base import (
    CodeArray,
    FloatArray,
    Quantizer,
    QuantizerWarning,
    checked_codes,
    checked_points,
)
from gr.tokenizer.vocabulary import IntArray

POLICIES = ("popularity", "extra_level", "reassign")

_SPARE = 8  # codes of the extra level kept free for items that come later


class Resolved(NamedTuple):
    """Codes int32 [n, M'] and the codes per level, length M' (M + 1 under ``extra_level``)."""

    codes: CodeArray
    level_sizes: tuple[int, ...]


def resolve(
    codes: npt.ArrayLike,
    level_sizes: tuple[int, ...],
    policy: str = "popularity",
    *,
    popularity: npt.ArrayLike | None = None,
    quantizer: Quantizer | None = None,
    embeddings: npt.ArrayLike | None = None,
) -> Resolved:
    """Apply a collision policy to all items of one type.

    Args:
        codes: int [n, M] as a quantizer gave them.
        level_sizes: codes per level.
        policy: one of ``POLICIES``.
        popularity: int [n], who goes first in a bucket; without it, the earlier row.
        quantizer: measures distances for ``reassign`` (its ``decode``).
        embeddings: float [n, d], the points that were encoded, for ``reassign``.

    Warns:
        QuantizerWarning: ``reassign`` found every prefix in use full; the surplus still shares an
            ID, and the warning says how many.

    Raises:
        ValueError: unknown policy, a code outside its level, ``reassign`` without quantizer or
            embeddings, or arrays of different lengths.
    """
    sizes = tuple(int(k) for k in level_sizes)
    own = _checked(codes, sizes, policy)
    order = _by_popularity(popularity, len(own))
    if policy == "popularity":
        return Resolved(own.astype(np.int32), sizes)
    if policy == "extra_level":
        extra = _places(own, order, {})
        size = int(extra.max(initial=0)) + 1 + _SPARE
        return Resolved(np.column_stack([own, extra]).astype(np.int32), (*sizes, size))
    taken: defaultdict[bytes, set[int]] = defaultdict(set)
    return Resolved(_reassign(own, order, sizes, taken, quantizer, embeddings), sizes)


def append(
    codes: npt.ArrayLike,
    level_sizes: tuple[int, ...],
    new_codes: npt.ArrayLike,
    policy: str = "popularity",
    *,
    popularity: npt.ArrayLike | None = None,
    quantizer: Quantizer | None = None,
    embeddings: npt.ArrayLike | None = None,
) -> CodeArray:
    """Codes for new items beside published ones, which keep theirs.

    Args:
        codes: int [n, M'] published, after :func:`resolve`.
        level_sizes: codes per level, as :func:`resolve` returned them.
        new_codes: int [k, M] as the quantizer encodes the new items (M' levels without the extra
            one).
        popularity, quantizer, embeddings: of the k new items, as in :func:`resolve`.

    Returns:
        int32 [k, M'].

    Warns:
        QuantizerWarning: no free code is left for some new items, which then share an ID; the
            warning says how many.

    Raises:
        ValueError: as :func:`resolve`.
    """
    sizes = tuple(int(k) for k in level_sizes)
    published = _checked(codes, sizes, policy)
    base = sizes[:-1] if policy == "extra_level" else sizes
    new = checked_codes(new_codes, base)
    if new.shape[1] != len(base):
        raise ValueError(f"new_codes have {new.shape[1]} levels: wanted {len(base)}")
    order = _by_popularity(popularity, len(new))
    if policy == "popularity":
        return new.astype(np.int32)
    if policy == "extra_level":
        next_free: dict[bytes, int] = {}
        for row in published:
            key = row[:-1].tobytes()
            next_free[key] = max(next_free.get(key, 0), int(row[-1]) + 1)
        extra = _places(new, order, next_free)
        full = int((extra >= sizes[-1]).sum())
        if full:
            _warn_shared(full, len(new), f"the extra level's {sizes[-1]} codes are used up")
        extra = np.minimum(extra, sizes[-1] - 1)
        return np.column_stack([new, extra]).astype(np.int32)
    taken: defaultdict[bytes, set[int]] = defaultdict(set)
    for row in published:
        taken[row[:-1].tobytes()].add(int(row[-1]))
    return _reassign(new, order, sizes, taken, quantizer, embeddings)


def _checked(codes: npt.ArrayLike, sizes: tuple[int, ...], policy: str) -> IntArray:
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: wanted one of {POLICIES}")
    own = np.ascontiguousarray(checked_codes(codes, sizes))
    if own.shape[1] != len(sizes):
        raise ValueError(f"codes have {own.shape[1]} levels: level_sizes has {len(sizes)}")
    return own


def _by_popularity(popularity: npt.ArrayLike | None, n: int) -> IntArray:
    """Rows, most popular first; equals in row order."""
    if popularity is None:
        return np.arange(n, dtype=np.int64)
    counts = np.asarray(popularity)
    if counts.shape != (n,):
        raise ValueError(f"popularity has shape {counts.shape}: wanted one per item, ({n},)")
    return np.argsort(-counts, kind="stable").astype(np.int64)


def _places(codes: IntArray, order: IntArray, next_free: dict[bytes, int]) -> IntArray:
    """Each item's place in its bucket, counted on from ``next_free``."""
    out = np.zeros(len(codes), dtype=np.int64)
    for row in order.tolist():
        key = codes[row].tobytes()
        out[row] = next_free.get(key, 0)
        next_free[key] = int(out[row]) + 1
    return out


def _reassign(
    codes: IntArray,
    order: IntArray,
    sizes: tuple[int, ...],
    taken: defaultdict[bytes, set[int]],
    quantizer: Quantizer | None,
    embeddings: npt.ArrayLike | None,
) -> CodeArray:
    if quantizer is None or embeddings is None:
        missing = "quantizer" if quantizer is None else "embeddings"
        raise ValueError(f"policy 'reassign' needs {missing} to find the nearest free code")
    if quantizer.level_sizes != sizes:
        raise ValueError(f"quantizer has level sizes {quantizer.level_sizes}: codes have {sizes}")
    points = checked_points(embeddings)
    if len(points) != len(codes):
        raise ValueError(f"embeddings have {len(points)} rows: there are {len(codes)} items")
    out = codes.copy()
    # First all that can keep their ID keep it, then the others look for a place: a moved item
    # must not push out one whose own ID was free.
    movers: list[int] = []
    for row in order.tolist():
        used = taken[codes[row, :-1].tobytes()]
        last = int(codes[row, -1])
        if last in used:
            movers.append(row)
        used.add(last)
    shared = 0
    nearest = _PrefixesWithRoom(taken, sizes, quantizer)
    for row in movers:
        prefix = codes[row, :-1]
        if len(taken[prefix.tobytes()]) >= sizes[-1]:
            other = nearest.to(points[row])
            if other is None:
                shared += 1
                continue
            prefix = other
        used = taken[prefix.tobytes()]
        free = np.array([c for c in range(sizes[-1]) if c not in used], dtype=np.int64)
        best = int(free[_distances(points[row], prefix, free, quantizer).argmin()])
        out[row] = [*prefix, best]
        used.add(best)
    if shared:
        _warn_shared(shared, len(codes), f"every prefix in use has all its {sizes[-1]} codes taken")
    return out.astype(np.int32)


class _PrefixesWithRoom:
    """The prefixes in use, and which of them still has a free last code."""

    def __init__(
        self, taken: dict[bytes, set[int]], sizes: tuple[int, ...], quantizer: Quantizer
    ) -> None:
        self._taken, self._sizes, self._quantizer = taken, sizes, quantizer
        self._keys: list[bytes] = []

    def to(self, point: FloatArray) -> IntArray | None:
        """The nearest prefix int64 [M - 1] with room, or None."""
        if len(self._sizes) == 1:
            return None
        if not self._keys:
            self._keys = list(self._taken)
            self._codes = np.array([np.frombuffer(key, dtype=np.int64) for key in self._keys])
            self._centres = self._quantizer.decode(self._codes)
        distance = ((self._centres - point) ** 2).sum(axis=1)
        full = [len(self._taken[key]) >= self._sizes[-1] for key in self._keys]
        distance[np.array(full)] = np.inf
        best = int(distance.argmin())
        chosen: IntArray = self._codes[best]
        return chosen if np.isfinite(distance[best]) else None


def _distances(
    point: FloatArray, prefix: IntArray, last: IntArray, quantizer: Quantizer
) -> FloatArray:
    candidates = np.column_stack([np.tile(prefix, (len(last), 1)), last])
    out: FloatArray = ((quantizer.decode(candidates) - point) ** 2).sum(axis=1)
    return out


def _warn_shared(shared: int, of: int, why: str) -> None:
    warnings.warn(
        f"{shared} of {of} items still share a semantic ID: {why}", QuantizerWarning, stacklevel=3
    )

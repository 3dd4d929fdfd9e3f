"""Finding the fitted point that a vector is: exactly, or else the nearest one."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from gr.tokenizer.quantizers.base import FloatArray
from gr.tokenizer.quantizers.clustering import assign
from gr.tokenizer.vocabulary import IntArray


def match_rows(x: FloatArray, known: FloatArray) -> IntArray:
    """Row of ``known`` for each row of ``x``: int64 [n].

    Equal vectors (two items with the same text) are told apart by their order: the first one of a
    call is the first known one, the second the second. A vector that is not known, or comes more
    often than it is known, gets the nearest row.
    """
    if x.shape == known.shape and np.array_equal(x, known):
        return np.arange(len(known), dtype=np.int64)
    rows: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for row, vector in enumerate(known):
        rows[vector.tobytes()].append(row)
    out = np.full(len(x), -1, dtype=np.int64)
    for i, vector in enumerate(x):
        free = rows.get(vector.tobytes())
        if free:
            out[i] = free.popleft()
    new = np.flatnonzero(out < 0)
    if len(new):
        out[new], _ = assign(x[new], known)
    return out

"""Atomic IDs: one level, one code per item. The classic item-level model is this special case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gr.tokenizer.quantizers.base import (
    CodeArray,
    FloatArray,
    Quantizer,
    checked_codes,
    checked_points,
    fitted,
)
from gr.tokenizer.quantizers.known_points import match_rows


class AtomicQuantizer(Quantizer):
    """M = 1 and K = the number of fitted points, or ``capacity`` codes to leave room for new items.

    ``encode`` gives the j-th fitted point code j; equal points keep different codes (told apart by
    their order), and a point that was not fitted gets the code of the nearest one.

    Raises:
        ValueError: capacity below 1, or below the number of points at ``fit``.
    """

    kind: ClassVar[str] = "atomic"

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity is {capacity}: wanted a number >= 1")
        self.capacity = capacity
        self.points: FloatArray | None = None

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """One level.

        Raises:
            RuntimeError: not fitted, and no capacity given.
        """
        if self.capacity is not None:
            return (self.capacity,)
        return (len(fitted(self.points, self)),)

    def fit(self, x: npt.ArrayLike) -> AtomicQuantizer:
        """Remember float [n, d]; without embeddings, ``np.arange(n)[:, None]`` will do."""
        points = checked_points(x)
        if not points.size:
            raise ValueError(f"x has shape {points.shape}: wanted at least one point")
        if self.capacity is not None and len(points) > self.capacity:
            raise ValueError(f"x has {len(points)} points: capacity is {self.capacity}")
        self.points = points.copy()
        return self

    def encode(self, x: npt.ArrayLike) -> CodeArray:
        """Codes int32 [n, 1] of float [n, d]."""
        points: FloatArray = fitted(self.points, self)
        rows = match_rows(checked_points(x, points.shape[1]), points)
        return rows.astype(np.int32)[:, None]

    def decode(self, codes: npt.ArrayLike) -> FloatArray:
        """The points themselves, float32 [n, d]; the mean point for a spare code."""
        points: FloatArray = fitted(self.points, self)
        index = checked_codes(codes, self.level_sizes)[:, 0]
        out = points[np.minimum(index, len(points) - 1)]
        out[index >= len(points)] = points.mean(axis=0)
        return out

    def _state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        points: FloatArray = fitted(self.points, self)
        return {"points": points}, {"capacity": self.capacity}

    @classmethod
    def _from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> AtomicQuantizer:
        out = cls(settings["capacity"])
        out.points = arrays["points"]
        return out

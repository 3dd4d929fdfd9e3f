"""Locality-sensitive hashing: semantic IDs from random hyperplanes, with nothing learned.

Legend: n points, d dimensions, M levels, b bits of a level, K = 2^b.

Bit j of a level is 1 where (x - mean) . w_j > 0; the bits of a level, first one highest, are its
code. A baseline that keeps neighbours together without fitting the data (used so by TIGER,
section 4). Decoding is the least-squares map from the signs back to the points it was fitted on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    sizes_per_level,
)

_RIDGE = 1e-3  # share of n added to the diagonal: keeps the map finite for repeated sign patterns


class LSHQuantizer(Quantizer):
    """Random-hyperplane codes.

    Args:
        levels: M; left out, it follows from a sequence of sizes.
        codebook_size: codes per level, powers of two.
        seed: chooses the hyperplanes.

    Raises:
        ValueError: a size that is no power of two of at least 2.
    """

    kind: ClassVar[str] = "lsh"

    def __init__(
        self,
        levels: int | None = None,
        codebook_size: int | Sequence[int] = 256,
        seed: int = 0,
    ) -> None:
        self._sizes = sizes_per_level(levels, codebook_size)
        for size in self._sizes:
            if size < 2 or size & (size - 1):
                raise ValueError(f"codebook_size {size}: wanted a power of two, 2 or more")
        self._bits = [size.bit_length() - 1 for size in self._sizes]
        self.seed = int(seed)
        self.mean: FloatArray | None = None
        self.planes: FloatArray | None = None
        self.back: FloatArray | None = None

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Codes per level."""
        return self._sizes

    def fit(self, x: npt.ArrayLike) -> LSHQuantizer:
        """Draw the hyperplanes for float [n, d] and centre them on its mean."""
        points = checked_points(x)
        if not points.size:
            raise ValueError(f"x has shape {points.shape}: wanted at least one point")
        rng = np.random.default_rng(self.seed)
        bits = sum(self._bits)
        self.mean = points.mean(axis=0, dtype=np.float64).astype(np.float32)
        self.planes = rng.standard_normal((points.shape[1], bits)).astype(np.float32)
        centred = (points - self.mean).astype(np.float64)
        signs = np.where(centred @ self.planes > 0, 1.0, -1.0)
        gram = signs.T @ signs + _RIDGE * len(points) * np.eye(bits)
        self.back = np.linalg.solve(gram, signs.T @ centred).astype(np.float32)
        return self

    def encode(self, x: npt.ArrayLike) -> CodeArray:
        """Codes int32 [n, M] of float [n, d]."""
        mean: FloatArray = fitted(self.mean, self)
        points = checked_points(x, len(mean))
        ones = (points - mean).astype(np.float64) @ fitted(self.planes, self) > 0
        codes = np.zeros((len(points), len(self._sizes)), dtype=np.int32)
        at = 0
        for level, bits in enumerate(self._bits):
            powers = 1 << np.arange(bits - 1, -1, -1)
            codes[:, level] = ones[:, at : at + bits] @ powers
            at += bits
        return codes

    def decode(self, codes: npt.ArrayLike) -> FloatArray:
        """Approximate points float32 [n, d] of int [n, m]; levels left out count as undecided."""
        mean: FloatArray = fitted(self.mean, self)
        back: FloatArray = fitted(self.back, self)
        array = checked_codes(codes, self._sizes)
        signs = np.zeros((len(array), len(back)), dtype=np.float32)
        at = 0
        for level in range(array.shape[1]):
            bits = self._bits[level]
            shifts = np.arange(bits - 1, -1, -1)
            ones = (array[:, level, None] >> shifts) & 1
            signs[:, at : at + bits] = 2 * ones - 1
            at += bits
        out: FloatArray = mean + signs @ back
        return out

    def _state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        mean: FloatArray = fitted(self.mean, self)
        arrays: dict[str, npt.NDArray[Any]] = {
            "mean": mean,
            "planes": fitted(self.planes, self),
            "back": fitted(self.back, self),
        }
        return arrays, {"seed": self.seed}

    @classmethod
    def _from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> LSHQuantizer:
        out = cls(codebook_size=settings["level_sizes"], seed=settings["seed"])
        out.mean, out.planes, out.back = arrays["mean"], arrays["planes"], arrays["back"]
        return out

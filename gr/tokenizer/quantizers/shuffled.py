"""Semantic IDs dealt out at random: what is left of an ID's use when its meaning is taken away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gr.tokenizer.quantizers.base import (
    CodeArray,
    FloatArray,
    Quantizer,
    checked_points,
    fitted,
)
from gr.tokenizer.quantizers.known_points import match_rows

_BASE = "base."


class ShuffledQuantizer(Quantizer):
    """The codes of ``base``, permuted over the fitted points.

    Sizes, collisions and code frequencies stay exactly those of ``base``; only which item has which
    ID changes. Any difference in a model's quality is what the IDs' meaning is worth. A point that
    was not fitted gets the code dealt to the nearest fitted one.
    """

    kind: ClassVar[str] = "shuffled"

    def __init__(self, base: Quantizer, seed: int = 0) -> None:
        self.base = base
        self.seed = int(seed)
        self.points: FloatArray | None = None
        self.codes: CodeArray | None = None

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Those of the base quantizer."""
        return self.base.level_sizes

    def fit(self, x: npt.ArrayLike) -> ShuffledQuantizer:
        """Fit the base on float [n, d], then deal its codes out to the n points."""
        points = checked_points(x)
        codes = self.base.fit(points).encode(points)
        order = np.random.default_rng(self.seed).permutation(len(points))
        self.points, self.codes = points.copy(), codes[order]
        return self

    def encode(self, x: npt.ArrayLike) -> CodeArray:
        """Codes int32 [n, M] of float [n, d]."""
        points: FloatArray = fitted(self.points, self)
        codes: CodeArray = fitted(self.codes, self)
        return codes[match_rows(checked_points(x, points.shape[1]), points)]

    def decode(self, codes: npt.ArrayLike) -> FloatArray:
        """What the base makes of the codes, float32 [n, d]: not the point that was encoded."""
        return self.base.decode(codes)

    def _state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        points: FloatArray = fitted(self.points, self)
        arrays, settings = self.base._state()
        out: dict[str, npt.NDArray[Any]] = {_BASE + k: v for k, v in arrays.items()}
        out |= {"points": points, "codes": fitted(self.codes, self)}
        about = {"kind": self.base.kind, "level_sizes": list(self.level_sizes), **settings}
        return out, {"seed": self.seed, "base": about}

    @classmethod
    def _from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> ShuffledQuantizer:
        inner = {k.removeprefix(_BASE): v for k, v in arrays.items() if k.startswith(_BASE)}
        about = settings["base"]
        base = Quantizer._kinds[about["kind"]]._from_state(inner, about)
        out = cls(base, settings["seed"])
        out.points, out.codes = arrays["points"], arrays["codes"]
        return out

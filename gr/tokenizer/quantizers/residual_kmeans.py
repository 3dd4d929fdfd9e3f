"""Residual k-means: each level quantises what the levels before it left over.

Legend: n points, d dimensions, M levels, K codes of a level.

    r_1 = x;   c_l = argmin_k |r_l - C_l[k]|;   r_{l+1} = r_l - C_l[c_l];   x ~ sum_l C_l[c_l]

Source: residual quantisation as used for semantic IDs by TIGER (section 3.1, with k-means in place
of the RQ-VAE, as later systems do). Deviations: centroids of a level without points are moved to
badly fitted points, and with no more distinct points than codes each distinct point is a centroid
and the other codes stay unused.

Sizes are a choice per level, and they matter. With 1,700 items, 3 x 256 codes are far too many:
hardly any two items share the second code under the same first one, so the later levels say nothing
about neighbours and a model has to learn them by heart. Too few codes make items share IDs. The
quality report shows both (prefixes shared by neighbours; collision rate) for any choice.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gr.tokenizer.quantizers.base import (
    CodeArray,
    FloatArray,
    Quantizer,
    QuantizerWarning,
    checked_codes,
    checked_points,
    fitted,
    sizes_per_level,
)
from gr.tokenizer.quantizers.clustering import (
    assign,
    distinct_rows,
    resolve_backend,
    train_centroids,
)


class ResidualKMeans(Quantizer):
    """Residual k-means with M levels.

    Args:
        levels: M; left out, it follows from a sequence of sizes.
        codebook_size: codes per level, one number for all or one per level.
        seed: the same seed, data and backend give the same codes.
        backend: ``"faiss"`` (on a GPU where faiss has one), ``"sklearn"``, or ``"auto"``.
        iterations: Lloyd iterations per level.

    Raises:
        ValueError: sizes that do not match the levels, a size below 1, an unknown backend.
        ImportError: a backend asked for by name is not installed.
    """

    kind: ClassVar[str] = "residual_kmeans"

    def __init__(
        self,
        levels: int | None = None,
        codebook_size: int | Sequence[int] = 256,
        seed: int = 0,
        backend: str = "auto",
        iterations: int = 25,
    ) -> None:
        self._sizes = sizes_per_level(levels, codebook_size)
        if iterations < 1:
            raise ValueError(f"iterations is {iterations}: wanted a number >= 1")
        resolve_backend(backend)
        self.seed = int(seed)
        self.backend = backend
        self.iterations = int(iterations)
        self.codebooks: list[FloatArray] | None = None
        self.used_codes: tuple[int, ...] | None = None

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Codes per level, as asked for."""
        return self._sizes

    def fit(self, x: npt.ArrayLike) -> ResidualKMeans:
        """Learn the codebooks from float [n, d], one level after another.

        Warns:
            QuantizerWarning: a level has no more distinct points than codes; it names both.

        Raises:
            ValueError: no rows, not two-dimensional, or a value that is not finite.
        """
        residual = checked_points(x).copy()
        if not residual.size:
            raise ValueError(f"x has shape {residual.shape}: wanted at least one point")
        backend = resolve_backend(self.backend)
        scale = float(np.abs(residual).max())
        codebooks: list[FloatArray] = []
        used: list[int] = []
        for level, size in enumerate(self._sizes):
            first = distinct_rows(residual, size, scale)
            if first is None:
                book = train_centroids(residual, size, self.seed + level, backend, self.iterations)
                active = size
            else:
                active = len(first)
                if active < size:
                    warnings.warn(
                        f"level {level}: {active} distinct points (of {len(residual)}) for {size} "
                        f"codes: {size - active} codes stay unused",
                        QuantizerWarning,
                        stacklevel=2,
                    )
                # Unused codes repeat the first centroid, so that decoding them stays finite.
                book = np.repeat(residual[first[:1]], size, axis=0)
                book[:active] = residual[first]
            index, _ = assign(residual, book[:active])
            residual = residual - book[index]
            codebooks.append(book)
            used.append(active)
        self.codebooks, self.used_codes = codebooks, tuple(used)
        return self

    def encode(self, x: npt.ArrayLike) -> CodeArray:
        """Codes int32 [n, M] of float [n, d]; each row's codes depend on that row alone."""
        books: list[FloatArray] = fitted(self.codebooks, self)
        used: tuple[int, ...] = fitted(self.used_codes, self)
        residual = checked_points(x, books[0].shape[1]).copy()
        codes = np.empty((len(residual), len(books)), dtype=np.int32)
        for level, book in enumerate(books):
            index, _ = assign(residual, book[: used[level]])
            codes[:, level] = index
            residual = residual - book[index]
        return codes

    def decode(self, codes: npt.ArrayLike) -> FloatArray:
        """Sum of the centroids, float32 [n, d], of int [n, m]; m < M stops after m levels."""
        books: list[FloatArray] = fitted(self.codebooks, self)
        array = checked_codes(codes, self._sizes)
        out = np.zeros((len(array), books[0].shape[1]), dtype=np.float32)
        for level in range(array.shape[1]):
            out += books[level][array[:, level]]
        return out

    def _state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        books: list[FloatArray] = fitted(self.codebooks, self)
        used: tuple[int, ...] = fitted(self.used_codes, self)
        arrays: dict[str, npt.NDArray[Any]] = {f"codebook.{i}": b for i, b in enumerate(books)}
        settings = {
            "seed": self.seed,
            "backend": self.backend,
            "iterations": self.iterations,
            "used_codes": list(used),
        }
        return arrays, settings

    @classmethod
    def _from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> ResidualKMeans:
        # The backend only matters for fitting: a saved quantizer encodes wherever numpy is.
        out = cls(
            codebook_size=settings["level_sizes"],
            seed=settings["seed"],
            iterations=settings["iterations"],
        )
        out.backend = settings["backend"]
        out.codebooks = [arrays[f"codebook.{i}"] for i in range(len(out._sizes))]
        out.used_codes = tuple(settings["used_codes"])
        return out

"""What every quantizer does, and how it is stored.

Legend: n points, d dimensions, M levels, K codes of a level.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gr.data.whole_file import whole_file
from gr.tokenizer.vocabulary import IntArray

FloatArray = npt.NDArray[np.float32]
CodeArray = npt.NDArray[np.int32]

WEIGHTS_NAME = "quantizer.safetensors"
JSON_NAME = "quantizer.json"


class QuantizerWarning(UserWarning):
    """Codes will stay unused, or items will share one, because of what the data is like."""


class Quantizer(ABC):
    """Turns vectors into M codes each, and codes back into approximate vectors."""

    kind: ClassVar[str]
    _kinds: ClassVar[dict[str, type[Quantizer]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Quantizer._kinds[cls.kind] = cls

    @property
    @abstractmethod
    def level_sizes(self) -> tuple[int, ...]:
        """Codes per level, length M."""

    @abstractmethod
    def fit(self, x: npt.ArrayLike) -> Quantizer:
        """Learn from float [n, d] and return self.

        Raises:
            ValueError: no rows, not two-dimensional, or a value that is not finite.
        """

    @abstractmethod
    def encode(self, x: npt.ArrayLike) -> CodeArray:
        """Codes int32 [n, M] of float [n, d].

        Raises:
            RuntimeError: not fitted.
            ValueError: another d than fitted, or a value that is not finite.
        """

    @abstractmethod
    def decode(self, codes: npt.ArrayLike) -> FloatArray:
        """Vectors float32 [n, d] of int [n, m]; with m < M only the first m levels count.

        Raises:
            RuntimeError: not fitted.
            ValueError: a code outside its level.
        """

    @abstractmethod
    def _state(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Arrays for safetensors and settings for JSON."""

    @classmethod
    @abstractmethod
    def _from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> Quantizer:
        """The inverse of :meth:`_state`."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``quantizer.safetensors`` and ``quantizer.json``, each whole or not at all.

        Raises:
            RuntimeError: not fitted.
        """
        arrays, settings = self._state()
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with whole_file(path / WEIGHTS_NAME) as temporary:
            save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, temporary)
        about = {"kind": self.kind, "level_sizes": list(self.level_sizes), **settings}
        with whole_file(path / JSON_NAME) as temporary:
            temporary.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Quantizer:
        """Read what :meth:`save_pretrained` wrote; on the base class, whichever kind it is.

        Raises:
            FileNotFoundError: a file of the pair is missing.
            ValueError: the folder holds another kind of quantizer, or a file that is cut short.
        """
        path = Path(folder)
        for name in (JSON_NAME, WEIGHTS_NAME):
            if not (path / name).is_file():
                raise FileNotFoundError(f"{path / name} is missing: wanted a saved quantizer")
        try:
            settings = json.loads((path / JSON_NAME).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path / JSON_NAME} is not JSON: {error}") from error
        kind = settings.get("kind")
        stored = Quantizer._kinds.get(kind)
        if stored is None:
            raise ValueError(f"{path / JSON_NAME}: kind {kind!r}, wanted one of {list(cls._kinds)}")
        if not issubclass(stored, cls):
            raise ValueError(
                f"{path / JSON_NAME} holds a {stored.__name__}, not a {cls.__name__}: use "
                "Quantizer.from_pretrained to load any kind"
            )
        try:
            arrays = load_file(path / WEIGHTS_NAME)
        except SafetensorError as error:
            raise ValueError(f"{path / WEIGHTS_NAME} is not a safetensors file: {error}") from error
        return stored._from_state(arrays, settings)


def checked_points(x: npt.ArrayLike, dimensions: int | None = None) -> FloatArray:
    """Points as float32 [n, d], refused where they are not finite or of another width."""
    points = np.ascontiguousarray(x, dtype=np.float32)
    if points.ndim != 2:
        raise ValueError(f"x has shape {points.shape}: wanted [n, d]")
    if dimensions is not None and points.shape[1] != dimensions:
        raise ValueError(f"x has {points.shape[1]} dimensions: the quantizer has {dimensions}")
    finite = np.isfinite(points)
    if not finite.all():
        row, column = (int(v) for v in np.argwhere(~finite)[0])
        raise ValueError(f"x[{row}, {column}] is {points[row, column]}: wanted finite values")
    return points


def checked_codes(codes: npt.ArrayLike, level_sizes: tuple[int, ...]) -> IntArray:
    """Codes as int64 [n, m <= M], refused where one is outside its level."""
    array = np.asarray(codes, dtype=np.int64)
    if array.ndim != 2 or not 1 <= array.shape[1] <= len(level_sizes):
        raise ValueError(
            f"codes have shape {array.shape}: wanted [n, m] with 1 <= m <= {len(level_sizes)}"
        )
    bad = (array < 0) | (array >= np.asarray(level_sizes)[: array.shape[1]])
    if bad.any():
        row, level = (int(v) for v in np.argwhere(bad)[0])
        raise ValueError(
            f"codes[{row}, {level}] is {array[row, level]}: level {level} has "
            f"{level_sizes[level]} codes"
        )
    return array


def fitted(value: Any, of: Quantizer) -> Any:
    """``value``, or an error that says to fit first."""
    if value is None:
        raise RuntimeError(f"{type(of).__name__} is not fitted: call fit(x) first")
    return value


def sizes_per_level(levels: int | None, codebook_size: int | Sequence[int]) -> tuple[int, ...]:
    """Codes per level from one number or a sequence; 3 levels where neither says how many."""
    if isinstance(codebook_size, (int, np.integer)):
        sizes = (int(codebook_size),) * (3 if levels is None else levels)
    else:
        sizes = tuple(int(size) for size in codebook_size)
        if levels is not None and levels != len(sizes):
            raise ValueError(f"codebook_size has {len(sizes)} sizes {sizes}: levels is {levels}")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"level sizes are {sizes}: wanted one or more sizes >= 1")
    return sizes

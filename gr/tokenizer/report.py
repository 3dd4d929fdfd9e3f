"""How good a set of semantic IDs is, in numbers and plots.

Legend: n items, d dimensions, M levels, K codes of a level.

A collapsed tokenizer shows as a high collision rate, a large bucket and low perplexity; codes
without meaning as neighbours that share a prefix no more often than chance.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gr.data.whole_file import whole_file
from gr.tokenizer.catalog import Catalog
from gr.tokenizer.quantizers.base import (
    FloatArray,
    Quantizer,
    checked_codes,
    checked_points,
)
from gr.tokenizer.vocabulary import IntArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NEIGHBOUR_ITEMS = 2000  # items whose neighbours are looked up; more change the shares little
_CHUNK = 256


@dataclass(frozen=True)
class LevelQuality:
    """One level. ``usage``: share of its codes that items have. ``perplexity``: exp of the entropy
    of its codes, at most K. ``error``: squared distance between items and their IDs up to this
    level, as a share of the variance (None without quantizer). ``neighbours_sharing_prefix`` and
    ``pairs_sharing_prefix``: share of nearest neighbours, and of any two items, whose IDs agree
    up to this level (the first None without embeddings).
    """

    codes: int
    usage: float
    perplexity: float
    error: float | None
    neighbours_sharing_prefix: float | None
    pairs_sharing_prefix: float


@dataclass(frozen=True)
class QualityReport:
    """Semantic IDs of one entity type.

    ``collision_rate`` is the share of items whose ID is not theirs alone; ``bucket_sizes[s]`` the
    number of IDs that s items share (index 0: always 0).
    """

    items: int
    distinct_ids: int
    collision_rate: float
    largest_bucket: int
    bucket_sizes: tuple[int, ...]
    levels: tuple[LevelQuality, ...]
    neighbours: int
    code_counts: tuple[tuple[int, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Numbers for a JSON file, without the count of every code."""
        out = asdict(self)
        del out["code_counts"]
        return out

    def plot(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the plots as PNG files and return their paths."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        files = [
            _figure(path / "code_usage.png", _plot_usage, self, len(self.levels)),
            _figure(path / "bucket_sizes.png", _plot_buckets, self, 1),
        ]
        if self.levels[0].error is not None:
            files.append(_figure(path / "quantisation_error.png", _plot_error, self, 1))
        if self.levels[0].neighbours_sharing_prefix is not None:
            files.append(_figure(path / "neighbours.png", _plot_neighbours, self, 1))
        return files


def quality_report(
    codes: npt.ArrayLike,
    level_sizes: tuple[int, ...],
    *,
    embeddings: npt.ArrayLike | None = None,
    quantizer: Quantizer | None = None,
    neighbours: int = 10,
    seed: int = 0,
) -> QualityReport:
    """Measure semantic IDs of one type.

    Args:
        codes: int [n, M'].
        level_sizes: codes per level, length M'.
        embeddings: float [n, d] the IDs were made from, for errors and neighbours.
        quantizer: the one that made them; levels it does not have (an extra collision level) get
            no error.
        neighbours: nearest neighbours by Euclidean distance, of at most 2,000 items.
        seed: picks those items.

    Raises:
        ValueError: no items, a code outside its level, other embeddings than items, or
            ``neighbours`` below 1.
    """
    sizes = tuple(int(k) for k in level_sizes)
    ids = np.ascontiguousarray(checked_codes(codes, sizes))
    n = len(ids)
    if not n:
        raise ValueError("codes have no rows: wanted at least one item")
    points = None if embeddings is None else checked_points(embeddings)
    if neighbours < 1:
        raise ValueError(f"neighbours is {neighbours}: wanted a number >= 1")
    if points is not None and len(points) != n:
        raise ValueError(f"embeddings have {len(points)} rows: there are {n} items")
    prefixes = _prefix_ids(ids)
    counts = np.bincount(prefixes[:, -1])
    near = (
        None if points is None or n < 2 else _neighbour_shares(points, prefixes, neighbours, seed)
    )
    levels: list[LevelQuality] = []
    code_counts: list[tuple[int, ...]] = []
    for level in range(ids.shape[1]):
        used = np.bincount(ids[:, level], minlength=sizes[level])
        share = used[used > 0] / n
        in_prefix = np.bincount(prefixes[:, level]).astype(np.float64)
        pairs = (in_prefix * (in_prefix - 1)).sum() / (n * (n - 1)) if n > 1 else 1.0
        levels.append(
            LevelQuality(
                codes=sizes[level],
                usage=float((used > 0).mean()),
                perplexity=float(np.exp(-(share * np.log(share)).sum())),
                error=_error(points, ids[:, : level + 1], quantizer),
                neighbours_sharing_prefix=None if near is None else float(near[level]),
                pairs_sharing_prefix=float(pairs),
            )
        )
        code_counts.append(tuple(int(c) for c in used))
    return QualityReport(
        items=n,
        distinct_ids=len(counts),
        collision_rate=float(counts[counts > 1].sum() / n),
        largest_bucket=int(counts.max()),
        bucket_sizes=tuple(int(c) for c in np.bincount(counts)),
        levels=tuple(levels),
        neighbours=neighbours,
        code_counts=tuple(code_counts),
    )


def catalog_report(
    catalog: Catalog,
    item_type: str | None = None,
    *,
    embeddings: npt.ArrayLike | None = None,
    quantizer: Quantizer | None = None,
) -> QualityReport:
    """:func:`quality_report` of one type of a catalogue (its first if None).

    ``embeddings`` are of the type's items, in catalogue order.

    Raises:
        KeyError: the catalogue has no such type.
    """
    name = catalog.types[0] if item_type is None else item_type
    if name not in catalog.level_sizes:
        raise KeyError(f"item type {name!r} is not one of {catalog.types}")
    sizes = catalog.level_sizes[name]
    rows = catalog.type_index == catalog.types.index(name)
    return quality_report(
        catalog.codes[rows][:, : len(sizes)], sizes, embeddings=embeddings, quantizer=quantizer
    )


def _prefix_ids(ids: IntArray) -> IntArray:
    """A number for each distinct prefix: int64 [n, M], column l for the first l + 1 codes."""
    out = np.empty_like(ids)
    current = np.zeros(len(ids), dtype=np.int64)
    for level in range(ids.shape[1]):
        # Numbers are made dense again at each level, so that the product cannot overflow.
        key = current * (int(ids[:, level].max()) + 1) + ids[:, level]
        _, current = np.unique(key, return_inverse=True)
        out[:, level] = current
    return out


def _error(
    points: FloatArray | None, prefix: IntArray, quantizer: Quantizer | None
) -> float | None:
    if points is None or quantizer is None or prefix.shape[1] > len(quantizer.level_sizes):
        return None
    wide = points.astype(np.float64)
    variance = ((wide - wide.mean(axis=0)) ** 2).sum()
    error = ((wide - quantizer.decode(prefix)) ** 2).sum()
    return float(error / variance) if variance else float(error > 0)


def _neighbour_shares(
    points: FloatArray, prefixes: IntArray, neighbours: int, seed: int
) -> npt.NDArray[np.float64]:
    """Share of nearest neighbours with the same prefix, per level: [M]."""
    n = len(points)
    k = min(neighbours, n - 1)
    rng = np.random.default_rng(seed)
    asked = np.sort(rng.choice(n, size=min(n, _NEIGHBOUR_ITEMS), replace=False))
    wide = points.astype(np.float64)
    wide -= wide.mean(axis=0)
    norms = (wide**2).sum(axis=1)
    same = np.zeros(prefixes.shape[1])
    for start in range(0, len(asked), _CHUNK):
        rows = asked[start : start + _CHUNK]
        distance = norms - 2 * wide[rows] @ wide.T
        distance[np.arange(len(rows)), rows] = np.inf
        nearest = np.argpartition(distance, k - 1, axis=1)[:, :k]
        same += (prefixes[nearest] == prefixes[rows][:, None, :]).sum(axis=(0, 1))
    return same / (len(asked) * k)


def _figure(path: Path, draw: Any, report: QualityReport, panels: int) -> Path:
    # The Agg canvas directly: no display, no global pyplot state, no back end chosen for others.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 1.2 + 1.8 * panels), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    draw(report, list(axes))
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def _plot_usage(report: QualityReport, axes: list[Axes]) -> None:
    for level, (axis, counts) in enumerate(zip(axes, report.code_counts, strict=True)):
        heights = sorted(counts, reverse=True)
        axis.bar(range(len(heights)), heights, width=1.0)
        quality = report.levels[level]
        axis.set_title(
            f"level {level}: {quality.usage:.0%} of {quality.codes} codes used, "
            f"perplexity {quality.perplexity:.1f}",
            fontsize="medium",
        )
        axis.set_ylabel("items")
    axes[-1].set_xlabel("codes, most used first")


def _plot_buckets(report: QualityReport, axes: list[Axes]) -> None:
    sizes = [size for size, ids in enumerate(report.bucket_sizes) if ids]
    axes[0].bar(
        [str(size) for size in sizes], [report.bucket_sizes[size] for size in sizes], width=0.8
    )
    axes[0].set_yscale("log")
    axes[0].set_ylim(bottom=0.5)  # a single ID is a visible bar, too
    axes[0].set_xlabel("items that share one semantic ID")
    axes[0].set_ylabel("semantic IDs")
    axes[0].set_title(f"{report.collision_rate:.1%} of {report.items} items share theirs")


def _plot_error(report: QualityReport, axes: list[Axes]) -> None:
    errors = [level.error for level in report.levels if level.error is not None]
    axes[0].plot(range(1, len(errors) + 1), errors, marker="o")
    axes[0].set_xticks(range(1, len(errors) + 1))
    axes[0].set_ylim(0.0, 1.05 * (max(errors) or 1.0))
    axes[0].set_xlabel("levels used")
    axes[0].set_ylabel("share of variance lost")
    axes[0].set_title("quantisation error")


def _plot_neighbours(report: QualityReport, axes: list[Axes]) -> None:
    at = range(1, len(report.levels) + 1)
    near = [level.neighbours_sharing_prefix or 0.0 for level in report.levels]
    axes[0].plot(at, near, marker="o", label=f"{report.neighbours} nearest neighbours")
    axes[0].plot(
        at, [level.pairs_sharing_prefix for level in report.levels], marker="o", label="any two"
    )
    axes[0].set_xticks(list(at))
    axes[0].set_ylim(0.0, 1.0)
    axes[0].set_xlabel("levels of the prefix")
    axes[0].set_ylabel("share of pairs with it in common")
    axes[0].legend()

"""One level of k-means: two training backends, one assignment, no empty cluster left behind.

Legend: n points, d dimensions, K centroids asked for, k <= K centroids in use.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

from gr.tokenizer.quantizers.base import FloatArray
from gr.tokenizer.vocabulary import IntArray

BACKENDS = ("auto", "faiss", "sklearn")

_CHUNK_VALUES = 4_000_000  # distances held at once: 32 MB of float64
_SAME = 1e-6  # points closer than this share of the largest coordinate are one point
_REPAIRS = 50
_SAMPLE_PER_CENTROID = 256  # training points per centroid beyond which more change little


def resolve_backend(backend: str) -> str:
    """``"faiss"`` or ``"sklearn"``; ``"auto"`` prefers faiss where it is installed.

    Raises:
        ValueError: unknown name.
        ImportError: faiss asked for by name and not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: wanted one of {BACKENDS}")
    has_faiss = importlib.util.find_spec("faiss") is not None
    if backend == "auto":
        return "faiss" if has_faiss else "sklearn"
    if backend == "faiss" and not has_faiss:
        raise ImportError("backend 'faiss' needs faiss-cpu or faiss-gpu: neither is installed")
    return backend


def assign(x: FloatArray, centroids: FloatArray) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Nearest centroid of each point and the squared distance to it: [n] and [n].

    In float64, so that the nearest centroid does not depend on how many points come at once; the
    lower index wins a tie.
    """
    n, k = len(x), len(centroids)
    wide = centroids.astype(np.float64)
    # Distances from a common origin near the data lose fewer digits in |x|^2 - 2xc + |c|^2.
    origin = wide.mean(axis=0)
    wide -= origin
    norms = (wide**2).sum(axis=1)
    index = np.empty(n, dtype=np.int64)
    distance = np.empty(n, dtype=np.float64)
    step = max(1, _CHUNK_VALUES // max(k, x.shape[1]))
    for start in range(0, n, step):
        chunk = x[start : start + step].astype(np.float64) - origin
        scores = norms - 2.0 * (chunk @ wide.T)
        best = scores.argmin(axis=1)
        index[start : start + step] = best
        near = (chunk - wide[best]) ** 2
        distance[start : start + step] = near.sum(axis=1)
    return index, distance


def distinct_rows(x: FloatArray, more_than: int, scale: float) -> IntArray | None:
    """First positions of the distinct points, or None when there are more than ``more_than``.

    ``scale`` is the largest absolute coordinate of the original data: residuals that differ only by
    rounding count as one point.
    """
    grid = max(scale * _SAME, float(np.finfo(np.float32).tiny))

    def firsts(rows: FloatArray) -> IntArray:
        _, first = np.unique(np.round(rows / grid) + 0.0, axis=0, return_index=True)  # -0 is 0
        return np.sort(first).astype(np.int64)

    sample = 4 * more_than + 1
    if len(x) > sample:
        # Sorting all of a large catalogue is slow, and a few rows nearly always settle it.
        picked = np.linspace(0, len(x) - 1, sample).astype(np.int64)
        if len(firsts(x[picked])) > more_than:
            return None
    first = firsts(x)
    return None if len(first) > more_than else first


def train_centroids(x: FloatArray, k: int, seed: int, backend: str, iterations: int) -> FloatArray:
    """k centroids of more than k distinct points, each the nearest of at least one point."""
    rng = np.random.default_rng(seed)
    train = x
    if len(x) > k * _SAMPLE_PER_CENTROID:
        picked = rng.choice(len(x), size=k * _SAMPLE_PER_CENTROID, replace=False)
        train = np.ascontiguousarray(x[np.sort(picked)])
    run = _train_faiss if backend == "faiss" else _train_sklearn
    # Both square float32. A power of two is taken out (exactly), or large values overflow.
    exponent = int(np.frexp(np.abs(train).max())[1])
    centroids = np.ldexp(run(np.ldexp(train, -exponent), k, seed, iterations), exponent)
    return _fill_empty(x, centroids)


def _train_faiss(x: FloatArray, k: int, seed: int, iterations: int) -> FloatArray:
    import faiss

    settings: dict[str, Any] = {
        "niter": iterations,
        "seed": seed,
        "gpu": bool(faiss.get_num_gpus()),
        # The defaults warn below 39 points per centroid and subsample above 256; both are ours.
        "min_points_per_centroid": 1,
        "max_points_per_centroid": len(x),
    }
    kmeans = faiss.Kmeans(x.shape[1], k, **settings)
    kmeans.train(x)
    return np.asarray(kmeans.centroids, dtype=np.float32).reshape(k, x.shape[1])


def _train_sklearn(x: FloatArray, k: int, seed: int, iterations: int) -> FloatArray:
    from sklearn.cluster import KMeans

    kmeans = KMeans(k, n_init=1, max_iter=iterations, random_state=seed, algorithm="lloyd")
    return np.asarray(kmeans.fit(x).cluster_centers_, dtype=np.float32)


def _fill_empty(x: FloatArray, centroids: FloatArray) -> FloatArray:
    """Move centroids without points (or not finite) to the points that fit their own worst."""
    out = centroids.copy()
    broken = ~np.isfinite(out).all(axis=1)
    out[broken] = x[0]
    for _ in range(_REPAIRS):
        index, distance = assign(x, out)
        counts = np.bincount(index, minlength=len(out))
        empty = np.flatnonzero(counts == 0)
        if not len(empty):
            break
        # One point per donor cluster and round: two far points of a cluster may well be equal.
        order = np.lexsort((np.arange(len(x)), -distance))
        _, first = np.unique(index[order], return_index=True)
        farthest = order[np.sort(first)]
        farthest = farthest[distance[farthest] > 0][: len(empty)]
        if not len(farthest):
            break
        out[empty[: len(farthest)]] = x[farthest]
    return out

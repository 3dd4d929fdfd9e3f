"""Distances and time buckets between queries and keys, computed once for all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

# Width of a bucket on the natural logarithm of seconds; 0.301 is HSTU's constant.
BUCKET_WIDTH = 0.301


def time_bucket(seconds: Tensor, num_buckets: int) -> Tensor:
    """floor(ln(max(1, |Δ|)) / 0.301), at most ``num_buckets``; Δ is int64 seconds.

    The difference is exact because it is taken in int64; only then does it become a float.
    """
    magnitude = seconds.abs().clamp_min(1).to(torch.float32)
    return (magnitude.log() / BUCKET_WIDTH).to(torch.int64).clamp_max(num_buckets)


class Tile(NamedTuple):
    """What a run of queries reads: they see no key past ``keys``.

    The indices are flat and contiguous, as a fast gather and its backward want them.
    """

    start: int
    end: int
    keys: int
    hidden_BqK: Tensor
    distance: Tensor
    bucket: Tensor | None


@dataclass(frozen=True)
class Geometry:
    """Legend: B batch (1 for distances that all rows share), Q queries, K keys.

    Attributes:
        mask_BQK: bool, which keys a query sees.
        distance_BQK: int64, how many positions back each key lies, cut to the table.
        bucket_BQK: int64, time bucket of ``t_{i+1} − t_j``; None without a clock.
        causal: no query sees a key that comes after it on the key axis.
    """

    mask_BQK: Tensor
    distance_BQK: Tensor
    bucket_BQK: Tensor | None
    causal: bool
    _tiles: dict[int, list[Tile]] = field(default_factory=dict, repr=False, compare=False)

    def tiles(self, size: int) -> list[Tile]:
        """Runs of ``size`` queries, computed once for all layers."""
        if size not in self._tiles:
            self._tiles[size] = list(self._cut(size))
        return self._tiles[size]

    def _cut(self, size: int) -> Iterator[Tile]:
        _, num_queries, num_keys = self.mask_BQK.shape
        for start in range(0, num_queries, size):
            end = min(start + size, num_queries)
            keys = num_keys - num_queries + end if self.causal else num_keys
            yield Tile(
                start,
                end,
                keys,
                ~self.mask_BQK[:, start:end, :keys],
                self.distance_BQK[:, start:end, :keys].flatten(),
                None if self.bucket_BQK is None else self.bucket_BQK[:, start:end, :keys].flatten(),
            )


def build_geometry(
    mask_BQK: Tensor,
    position_BQ: Tensor,
    position_BK: Tensor,
    query_time_BQ: Tensor | None,
    time_BK: Tensor | None,
    *,
    max_distance: int,
    num_buckets: int,
    causal: bool,
) -> Geometry:
    """Positions and times (int64, seconds) of queries and keys to what the attention reads."""
    if _rows_agree(position_BK):
        position_BQ, position_BK = position_BQ[:1], position_BK[:1]
    distance = position_BQ[:, :, None] - position_BK[:, None, :]
    bucket = None
    if time_BK is not None and query_time_BQ is not None:
        bucket = time_bucket(query_time_BQ[:, :, None] - time_BK[:, None, :], num_buckets)
    return Geometry(mask_BQK, distance.clamp(0, max_distance - 1), bucket, causal)


def _rows_agree(position_BK: Tensor) -> bool:
    # Asking costs a device synchronisation on a GPU and a graph break in a compiled model.
    if position_BK.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool((position_BK == position_BK[:1]).all())

"""Distances and time buckets between queries and keys, computed once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from gr.kernels.hstu_attention.visibility import Visibility

T = TypeVar("T")

# Width of a bucket on the natural logarithm of seconds; 0.301 is HSTU's constant.
BUCKET_WIDTH = 0.301
ALL = slice(None)


def time_bucket(seconds: Tensor, num_buckets: int) -> Tensor:
    """floor(ln(max(1, |Δ|)) / 0.301), at most ``num_buckets``; Δ is int64 seconds.

    The difference is exact because it is taken in int64; only then does it become a float.
    """
    magnitude = seconds.abs().clamp_(min=1).to(torch.float32)
    return magnitude.log_().div_(BUCKET_WIDTH).to(torch.int64).clamp_(max=num_buckets)


@cache
def bucket_starts(num_buckets: int) -> Tensor:
    """The smallest |Δ| that ``time_bucket`` puts into bucket t or a later one, int64 [T + 1].

    Found by bisecting ``time_bucket`` itself, so that whoever compares with these integers agrees
    with it whatever the rounding of the logarithm. A bucket no int64 reaches has the largest one.
    """
    bucket = torch.arange(num_buckets + 1)
    low = torch.ones_like(bucket)
    high = torch.full_like(bucket, torch.iinfo(torch.int64).max)
    for _ in range(63):
        middle = low + (high - low) // 2
        reached = time_bucket(middle, num_buckets) >= bucket
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
        low = torch.minimum(low, high)
    return high


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
    """Legend: B batch (or 1 where all rows agree), Q queries, K keys, q and k a range of them.

    Attributes:
        visible: which keys a query sees: the rule, or a bool matrix [B, Q, K].
        position_BQ, position_BK: int64 positions.
        query_time_BQ, time_BK: int64 seconds, or None without a clock.
        max_distance: distances are cut to ``max_distance - 1``.
        num_buckets: the largest time bucket.
        causal: no query sees a key that comes after it on the key axis.
    """

    visible: Visibility | Tensor
    position_BQ: Tensor
    position_BK: Tensor
    query_time_BQ: Tensor | None
    time_BK: Tensor | None
    max_distance: int
    num_buckets: int
    causal: bool
    _derived: dict[object, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def mask_BQK(self) -> Tensor:
        """``visible`` written out."""
        return self.visible if isinstance(self.visible, Tensor) else self.visible.mask_BQK

    @property
    def has_clock(self) -> bool:
        return self.time_BK is not None and self.query_time_BQ is not None

    def distance(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """How many positions back each key lies, int64 [B, q, k], cut to the table."""
        distance = self.position_BQ[:, queries, None] - self.position_BK[:, None, keys]
        return distance.clamp_(0, self.max_distance - 1)

    def bucket(self, queries: slice = ALL, keys: slice = ALL) -> Tensor | None:
        """Time bucket of ``t_{i+1} − t_j``, int64 [B, q, k]; None without a clock."""
        if self.query_time_BQ is None or self.time_BK is None:
            return None
        elapsed = self.query_time_BQ[:, queries, None] - self.time_BK[:, None, keys]
        return time_bucket(elapsed, self.num_buckets)

    def tiles(self, size: int) -> list[Tile]:
        """Runs of ``size`` queries, computed once for all layers."""
        return self.once(("tiles", size), lambda: list(self._cut(size)))

    def once(self, key: object, compute: Callable[[], T]) -> T:
        """What ``compute`` returns, kept for the layers that follow."""
        if key not in self._derived:
            self._derived[key] = compute()
        return cast(T, self._derived[key])

    def _cut(self, size: int) -> Iterator[Tile]:
        mask_BQK = self.mask_BQK
        _, num_queries, num_keys = mask_BQK.shape
        for start in range(0, num_queries, size):
            end = min(start + size, num_queries)
            last = num_keys - num_queries + end if self.causal else num_keys
            queries, keys = slice(start, end), slice(0, last)
            bucket = self.bucket(queries, keys)
            yield Tile(
                start,
                end,
                last,
                ~mask_BQK[:, queries, keys],
                self.distance(queries, keys).flatten(),
                None if bucket is None else bucket.flatten(),
            )


def build_geometry(
    visible: Visibility | Tensor,
    position_BQ: Tensor,
    position_BK: Tensor,
    query_time_BQ: Tensor | None,
    time_BK: Tensor | None,
    *,
    max_distance: int,
    num_buckets: int,
    causal: bool = False,
) -> Geometry:
    """A geometry; positions that all rows share are kept once.

    Args:
        visible: a rule whose positions are ``position_BK``, or any matrix [B, Q, K].
        causal: that a matrix shows no query a key after it; a rule knows by itself.
    """
    if _rows_agree(position_BK):
        position_BQ, position_BK = position_BQ[:1], position_BK[:1]
    return Geometry(
        visible,
        position_BQ,
        position_BK,
        query_time_BQ,
        time_BK,
        max_distance,
        num_buckets,
        causal if isinstance(visible, Tensor) else visible.causal,
    )


def _rows_agree(position_BK: Tensor) -> bool:
    # Asking costs a device synchronisation on a GPU and a graph break in a compiled model.
    if position_BK.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return bool((position_BK == position_BK[:1]).all())

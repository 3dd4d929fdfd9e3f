"""CPU path of the context: per tile of queries one fused attention over the keys it can see.

A tile of T queries reads T + window − 1 keys and the sinks before them. Memory beside inputs and
output is that of one tile.

Legend: B batch, G key heads, R query heads per key head, H = G R, Q queries (the last Q keys), t
those of a tile, K keys, S sinks, k keys that a tile reads, d, e head sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.flash_cpu import flash_backward, flash_forward
from gr.kernels.sparse_attention.mask import SparseMask, first_token

TILE = 128


class _Tiles:
    """What each tile of queries reads, and how gradients go back to where it was read."""

    def __init__(
        self, num_queries: int, num_keys: int, valid_BK: Tensor | None, mask: SparseMask
    ) -> None:
        self.num_queries, self.num_keys, self.valid_BK = num_queries, num_keys, valid_BK
        self.window = num_keys if mask.window is None else mask.window
        device = torch.device("cpu") if valid_BK is None else valid_BK.device
        self.first_B1 = first_token(valid_BK, num_keys, device)[:, None]
        self.num_sink = min(mask.num_sink, num_keys)
        self.sink_BS = self.first_B1 + torch.arange(self.num_sink, device=device)
        self.column_BS = self.sink_BS.clamp_max(num_keys - 1)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Queries and, past the sinks, keys of each tile."""
        shift = self.num_keys - self.num_queries
        for start in range(0, self.num_queries, TILE):
            end = min(start + TILE, self.num_queries)
            low = max(0, shift + start - self.window + 1)
            yield slice(start, end), slice(low, shift + end)

    def index_BGSd(self, x_BGKd: Tensor) -> Tensor:
        shape = (len(x_BGKd), x_BGKd.shape[1], -1, x_BGKd.shape[3])
        return self.column_BS[:, None, :, None].expand(shape)

    def sinks(self, x_BGKd: Tensor) -> Tensor:
        return x_BGKd.gather(2, self.index_BGSd(x_BGKd))

    def far(self, keys: slice) -> bool:
        """Whether sinks may lie before the keys of a tile."""
        return self.num_sink > 0 and keys.start > 0

    def read(self, x_BGKd: Tensor, sinks_BGSd: Tensor, keys: slice) -> Tensor:
        near = x_BGKd[:, :, keys]
        return torch.cat([sinks_BGSd, near], dim=2) if self.far(keys) else near

    def bias(self, queries: slice, keys: slice, repeat: int, dtype: torch.dtype) -> Tensor:
        """0 where a query sees a key, −inf elsewhere; [B or 1, 1, R t, k]."""
        shift = self.num_keys - self.num_queries
        key = torch.arange(keys.start, keys.stop, device=self.first_B1.device)
        query_t1 = key[shift + queries.start - keys.start :, None]
        sink_B1k = (key < self.first_B1 + self.num_sink)[:, None]
        seen = (key <= query_t1) & ((query_t1 - key < self.window) | sink_B1k)
        if self.valid_BK is not None:
            seen = seen & self.valid_BK[:, None, keys]
        if self.far(keys):
            before_B1S = (self.sink_BS < keys.start)[:, None]
            if self.valid_BK is not None:
                before_B1S = before_B1S & self.valid_BK.gather(1, self.column_BS)[:, None]
            seen = torch.cat([before_B1S.expand(-1, seen.shape[1], -1), seen], dim=-1)
        if self.valid_BK is not None:
            own = slice(shift + queries.start, shift + queries.stop)
            seen = seen & self.valid_BK[:, own, None]
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill_(~seen, -torch.inf)[:, None].repeat(1, 1, repeat, 1)

    def give_back(
        self, total_BGKd: Tensor, sinks_BGSd: Tensor, keys: slice, grad_BGkd: Tensor
    ) -> None:
        if self.far(keys):
            sinks_BGSd += grad_BGkd[:, :, : self.num_sink]
            grad_BGkd = grad_BGkd[:, :, self.num_sink :]
        total_BGKd[:, :, keys] += grad_BGkd


def _fold(x_BHQd: Tensor, groups: int, queries: slice) -> Tensor:
    """The heads of a group see the same keys: their queries are one list, [B, G, R t, d]."""
    split: Tensor = x_BHQd[:, :, queries].unflatten(1, (groups, x_BHQd.shape[1] // groups))
    return split.flatten(2, 3)


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: _Tiles, scale: float) -> Tensor:
        batch, heads, num_queries, _ = q.shape
        groups = k.shape[1]
        out = v.new_empty(batch, heads, num_queries, v.shape[-1])
        k_sinks, v_sinks = tiles.sinks(k), tiles.sinks(v)
        sums = []
        for queries, keys in tiles:
            part, lse = flash_forward(
                _fold(q, groups, queries),
                tiles.read(k, k_sinks, keys),
                tiles.read(v, v_sinks, keys),
                tiles.bias(queries, keys, heads // groups, q.dtype),
                scale,
            )
            out[:, :, queries] = part.reshape(batch, heads, -1, v.shape[-1])
            # A query that sees nothing has weights exp(−inf − 0) = 0.
            sums.append(lse.masked_fill(lse == -torch.inf, 0.0))
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHQe: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *sums = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        groups = k.shape[1]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        k_sinks, v_sinks = tiles.sinks(k), tiles.sinks(v)
        grad_q = torch.empty_like(q)
        totals = [torch.zeros_like(x, dtype=wide) for x in (k, v)]
        sinks = [torch.zeros_like(x, dtype=wide) for x in (k_sinks, v_sinks)]
        for (queries, keys), lse in zip(tiles, sums, strict=True):
            part, *grads = flash_backward(
                _fold(grad_BHQe, groups, queries),
                _fold(q, groups, queries),
                tiles.read(k, k_sinks, keys),
                tiles.read(v, v_sinks, keys),
                _fold(out, groups, queries),
                lse,
                tiles.bias(queries, keys, q.shape[1] // groups, q.dtype),
                ctx.scale,
            )
            grad_q[:, :, queries] = part.reshape(*q.shape[:2], -1, q.shape[-1])
            for total, sink, grad in zip(totals, sinks, grads, strict=True):
                tiles.give_back(total, sink, keys, grad)
        for total, sink in zip(totals, sinks, strict=True):
            total.scatter_add_(2, tiles.index_BGSd(total), sink)
        return grad_q, *(total.to(q.dtype) for total in totals), None, None


def windowed_attention(
    q_BHQd: Tensor,
    k_BGKd: Tensor,
    v_BGKe: Tensor,
    mask: SparseMask,
    valid_BK: Tensor | None,
    scale: float,
) -> Tensor:
    """The context's part of ``gr.kernels.sparse_attention``: no candidates among the keys."""
    num_queries, num_keys = q_BHQd.shape[2], k_BGKd.shape[2]
    if valid_BK is not None:
        # Whatever padding holds, a product with weight 0 must be 0.
        hidden = ~valid_BK[:, None, :, None]
        k_BGKd, v_BGKe = k_BGKd.masked_fill(hidden, 0.0), v_BGKe.masked_fill(hidden, 0.0)
        q_BHQd = q_BHQd.masked_fill(hidden[:, :, num_keys - num_queries :], 0.0)
    tiles = _Tiles(num_queries, num_keys, valid_BK, mask)
    out: Tensor = _Windowed.apply(q_BHQd, k_BGKd, v_BGKe, tiles, scale)
    return out

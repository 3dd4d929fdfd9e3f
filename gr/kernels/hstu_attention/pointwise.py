"""CPU path: tiles of queries, scores kept or recomputed, table gradients by scatter-add.

Autograd through ``table[index]`` ends in an accumulating ``index_put``, which costs more than the
rest of the layer on a CPU; ``index_select`` and ``scatter_add`` on flat indices are several times
faster. Keys after the last query of a tile are skipped in a causal stream, which halves the work.

Legend: B batch, H heads, q queries of a tile, K keys a tile sees, d, e head sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.hstu_attention.geometry import Geometry, Tile

TILE = 64
# Scores up to this size stay for the backward pass; beyond it memory matters more than the matmul.
KEEP_BYTES = 2**28
# SiLU and its slope are exactly 0 here in every floating dtype: masking by value, not by product.
HIDDEN = -1e4


def _bias(table_P: Tensor, index: Tensor, tile: Tile) -> Tensor:
    """Table entries of a tile, [B or 1, 1, q, K]."""
    shape = (-1, 1, tile.end - tile.start, tile.keys)
    return table_P.index_select(0, index).view(shape)


def _scores(
    q: Tensor,
    k: Tensor,
    tile: Tile,
    position_table: Tensor | None,
    time_table: Tensor | None,
    scale: float,
) -> Tensor:
    score = q[:, :, tile.start : tile.end] @ k[:, :, : tile.keys].transpose(-1, -2)
    if scale != 1.0:
        score *= scale
    if position_table is not None:
        score += _bias(position_table, tile.distance, tile)
    if time_table is not None and tile.bucket is not None:
        score += _bias(time_table, tile.bucket, tile)
    return score.masked_fill_(tile.hidden_BqK[:, None], HIDDEN)


def _add_table_gradient(total_P: Tensor, index: Tensor, grad_BqK: Tensor) -> None:
    if index.numel() != grad_BqK.numel():
        grad_BqK = grad_BqK.sum(0)
    total_P.scatter_add_(0, index, grad_BqK.flatten().to(total_P.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_table: Tensor | None,
        time_table: Tensor | None,
        geometry: Geometry,
        scale: float,
        norm_length: float,
    ) -> Tensor:
        tiles = geometry.tiles(TILE)
        size = q.shape[0] * q.shape[1] * q.element_size()
        keep = size * sum((t.end - t.start) * t.keys for t in tiles) <= KEEP_BYTES
        out = v.new_empty(*q.shape[:3], v.shape[-1])
        scores = []
        for tile in tiles:
            score = _scores(q, k, tile, position_table, time_table, scale)
            if keep and any(ctx.needs_input_grad):
                scores.append(score)
            out[:, :, tile.start : tile.end] = F.silu(score) @ v[:, :, : tile.keys]
        ctx.save_for_backward(q, k, v, position_table, time_table, *scores)
        ctx.geometry, ctx.scale, ctx.norm_length = geometry, scale, norm_length
        return out.div_(norm_length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHQe: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_table, time_table, *scores = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        grad_out = grad_BHQe / ctx.norm_length
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_position = grad_time = None
        if position_table is not None:
            grad_position = torch.zeros_like(position_table, dtype=_wide(position_table.dtype))
        if time_table is not None:
            grad_time = torch.zeros_like(time_table, dtype=_wide(time_table.dtype))
        for number, tile in enumerate(geometry.tiles(TILE)):
            queries, keys = slice(tile.start, tile.end), slice(0, tile.keys)
            if scores:
                score = scores[number]
            else:
                score = _scores(q, k, tile, position_table, time_table, ctx.scale)
            gate = torch.sigmoid(score)
            weight = score * gate
            grad = grad_out[:, :, queries]
            grad_v[:, :, keys] += weight.transpose(-1, -2) @ grad
            # d SiLU(s)/ds = σ(s) + SiLU(s) (1 − σ(s))
            slope = torch.addcmul(weight, gate, 1 - weight)
            grad_score = (grad @ v[:, :, keys].transpose(-1, -2)).mul_(slope)
            grad_q[:, :, queries] = grad_score @ k[:, :, keys]
            grad_k[:, :, keys] += grad_score.transpose(-1, -2) @ q[:, :, queries]
            if grad_position is not None or grad_time is not None:
                shared = grad_score.sum(1)
                if grad_position is not None:
                    _add_table_gradient(grad_position, tile.distance, shared)
                if grad_time is not None and tile.bucket is not None:
                    _add_table_gradient(grad_time, tile.bucket, shared)
        if ctx.scale != 1.0:
            grad_q *= ctx.scale
            grad_k *= ctx.scale
        return (
            grad_q,
            grad_k,
            grad_v,
            None if grad_position is None else grad_position.to(position_table.dtype),
            None if grad_time is None else grad_time.to(time_table.dtype),
            None,
            None,
            None,
        )


def pointwise_attention(
    q_BHQd: Tensor,
    k_BHKd: Tensor,
    v_BHKe: Tensor,
    geometry: Geometry,
    position_table_P: Tensor | None,
    time_table_T: Tensor | None,
    scale: float,
    norm_length: float,
) -> Tensor:
    """See ``gr.kernels.hstu_attention``."""
    out: Tensor = _Pointwise.apply(
        q_BHQd, k_BHKd, v_BHKe, position_table_P, time_table_T, geometry, scale, norm_length
    )
    return out

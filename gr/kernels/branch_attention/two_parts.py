"""CPU path: the prefix as one fused attention or matrix product, the ancestors by gather.

The softmax is taken in two parts that are merged by their log-sum-exps:

    l = ln(exp l₁ + Σ_a exp s_a)        out = exp(l₁ − l) out₁ + Σ_a exp(s_a − l) v_a

What stays for the backward pass is q, k, v, and for a softmax out and l; scores are made again, a
tile at a time.

Legend: B batch, G key heads, R query heads per key head, H = G R, N nodes that ask, n those of a
tile, A all nodes, P prefix keys, L most ancestors, d, e head sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.flash_cpu import flash_backward, flash_forward

# Gathered rows of a tile; they are read twice and should still be in the cache then.
GATHER_BYTES = 2**21
# Scores of a tile of the silu form; products of fewer rows than that are slower.
SCORE_BYTES = 2**24


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _split(x_BHNd: Tensor, groups: int) -> Tensor:
    """[B, G, R, N, d]."""
    split: Tensor = x_BHNd.unflatten(1, (groups, x_BHNd.shape[1] // groups))
    return split


class _Nodes:
    """Rows of the nodes by number; "no ancestor" is a row of zeros behind them."""

    def __init__(self, x_BGAd: Tensor) -> None:
        self.shape = x_BGAd.shape
        batch, groups, num_nodes, size = x_BGAd.shape
        self.rows = F.pad(x_BGAd.reshape(-1, size), (0, 0, 0, 1))
        first = torch.arange(batch * groups, device=x_BGAd.device) * num_nodes
        self.first_BG11 = first.view(batch, groups, 1, 1)

    def at(self, ancestors_BnL: Tensor) -> Tensor:
        """Numbers of the rows, [B, G, n, L]."""
        ancestors = ancestors_BnL[:, None]
        return torch.where(ancestors < 0, len(self.rows) - 1, ancestors + self.first_BG11)

    def gather(self, at_BGnL: Tensor) -> Tensor:
        """[B, G, 1, n, L, d], in float32 at least."""
        rows = self.rows.index_select(0, at_BGnL.flatten())
        return rows.to(_wide(rows.dtype)).view(*at_BGnL.shape, self.shape[-1]).unsqueeze(2)

    def gradient(self) -> Tensor:
        """What to add the gradients of rows to."""
        return torch.zeros_like(self.rows, dtype=_wide(self.rows.dtype))

    def total(self, grad: Tensor) -> Tensor:
        return grad[:-1].view(self.shape).to(self.rows.dtype)


def _node_tiles(ancestors_BNL: Tensor, groups: int, heads: int, size: int) -> Iterator[slice]:
    batch, num_queries, length = ancestors_BNL.shape
    step = max(16, GATHER_BYTES // max(1, 4 * batch * max(groups * length, heads) * size))
    for start in range(0, num_queries, step):
        yield slice(start, min(start + step, num_queries))


def _add(total: Tensor, at_BGnL: Tensor, grad_BGRnLd: Tensor) -> None:
    total.index_add_(0, at_BGnL.flatten(), grad_BGRnLd.sum(2).flatten(0, 3))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k_prefix: Tensor,
        v_prefix: Tensor,
        k_nodes: Tensor,
        v_nodes: Tensor,
        ancestors: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        groups, wide = k_prefix.shape[1], _wide(q.dtype)
        keys, values = _Nodes(k_nodes), _Nodes(v_nodes)
        # Heads of one group see the same keys: their queries are one longer list.
        folded = _split(q, groups).flatten(2, 3)
        part, part_lse = flash_forward(folded, k_prefix, v_prefix, mask, scale)
        shape = _split(q, groups).shape[:-1]
        part = part.reshape(*shape, v_prefix.shape[-1])
        part_lse = part_lse.reshape(shape)
        out = v_prefix.new_empty(*q.shape[:3], v_prefix.shape[-1])
        lse = q.new_empty(shape, dtype=wide)
        for tile in _node_tiles(ancestors, groups, q.shape[1], q.shape[-1]):
            at = keys.at(ancestors[:, tile])
            query = _split(q[:, :, tile], groups).to(wide)
            score = torch.linalg.vecdot(keys.gather(at), query[..., None, :]) * scale
            score.masked_fill_((ancestors[:, tile] < 0)[:, None, None], -torch.inf)
            old = part_lse[..., tile]
            total = torch.cat([old[..., None], score], dim=-1).logsumexp(-1)
            # Who sees nothing divides by 1.
            total.masked_fill_(total == -torch.inf, 0.0)
            weight = (score - total[..., None]).exp()
            merged = (weight[..., None, :] @ values.gather(at)).squeeze(-2)
            merged.addcmul_(part[..., tile, :].to(wide), (old - total).exp()[..., None])
            _split(out[:, :, tile], groups).copy_(merged)
            lse[..., tile] = total
        ctx.save_for_backward(
            q, k_prefix, v_prefix, k_nodes, v_nodes, ancestors, mask, out, lse.flatten(2, 3)
        )
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHNe: Tensor) -> tuple[Tensor | None, ...]:
        q, k_prefix, v_prefix, k_nodes, v_nodes, ancestors, mask, out, lse = ctx.saved_tensors
        groups, wide, scale = k_prefix.shape[1], _wide(q.dtype), ctx.scale
        folded = (_split(x, groups).flatten(2, 3) for x in (grad_BHNe, q, out))
        grad, query, result = folded
        part_q, grad_k, grad_v = flash_backward(
            grad, query, k_prefix, v_prefix, result, lse, mask, scale
        )
        grad_q = part_q.reshape(q.shape)
        keys, values = _Nodes(k_nodes), _Nodes(v_nodes)
        key_rows, value_rows = keys.gradient(), values.gradient()
        lse = lse.reshape(_split(q, groups).shape[:-1])
        for tile in _node_tiles(ancestors, groups, q.shape[1], q.shape[-1]):
            at = keys.at(ancestors[:, tile])
            query = _split(q[:, :, tile], groups).to(wide)
            grad = _split(grad_BHNe[:, :, tile], groups).to(wide)
            mean = (grad * _split(out[:, :, tile], groups)).sum(-1, keepdim=True)
            k, v = keys.gather(at), values.gather(at)
            score = torch.linalg.vecdot(k, query[..., None, :]) * scale
            score.masked_fill_((ancestors[:, tile] < 0)[:, None, None], -torch.inf)
            weight = (score - lse[..., tile, None]).exp()
            change = torch.linalg.vecdot(v, grad[..., None, :]).sub_(mean).mul_(weight).mul_(scale)
            _split(grad_q[:, :, tile], groups).add_((change[..., None, :] @ k).squeeze(-2))
            _add(key_rows, at, change[..., None] * query[..., None, :])
            _add(value_rows, at, weight[..., None] * grad[..., None, :])
        return grad_q, grad_k, grad_v, keys.total(key_rows), values.total(value_rows), *[None] * 3


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k_prefix: Tensor,
        v_prefix: Tensor,
        k_nodes: Tensor,
        v_nodes: Tensor,
        ancestors: Tensor,
        scale: float,
        norm_length: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k_prefix, v_prefix, k_nodes, v_nodes, ancestors)
        ctx.scale, ctx.norm_length = scale, norm_length
        groups, wide = k_prefix.shape[1], _wide(q.dtype)
        keys, values = _Nodes(k_nodes), _Nodes(v_nodes)
        out = v_prefix.new_empty(*q.shape[:3], v_prefix.shape[-1])
        for tile in _score_tiles(q, k_prefix):
            query = _split(q[:, :, tile], groups) * scale
            score = query.flatten(2, 3) @ k_prefix.transpose(-1, -2)
            part = F.silu(score, inplace=True) @ v_prefix
            _split(out[:, :, tile], groups).copy_(part.view(*query.shape[:-1], v_prefix.shape[-1]))
        for tile in _node_tiles(ancestors, groups, q.shape[1], q.shape[-1]):
            at = keys.at(ancestors[:, tile])
            query = _split(q[:, :, tile], groups).to(wide)
            weight = F.silu(torch.linalg.vecdot(keys.gather(at), query[..., None, :]) * scale)
            own = (weight[..., None, :] @ values.gather(at)).squeeze(-2)
            _split(out[:, :, tile], groups).add_(own)
        return out.div_(norm_length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHNe: Tensor) -> tuple[Tensor | None, ...]:
        q, k_prefix, v_prefix, k_nodes, v_nodes, ancestors = ctx.saved_tensors
        groups, wide, scale = k_prefix.shape[1], _wide(q.dtype), ctx.scale
        grad_out = grad_BHNe / ctx.norm_length
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k_prefix, dtype=wide)
        grad_v = torch.zeros_like(v_prefix, dtype=wide)
        for tile in _score_tiles(q, k_prefix):
            query = _split(q[:, :, tile], groups).flatten(2, 3) * scale
            grad = _split(grad_out[:, :, tile], groups).flatten(2, 3)
            score = query @ k_prefix.transpose(-1, -2)
            gate = torch.sigmoid(score)
            weight = score.mul_(gate)
            grad_v += weight.transpose(-1, -2) @ grad
            # d SiLU(s)/ds = σ(s) + SiLU(s) (1 − σ(s))
            change = torch.addcmul(weight, gate, 1 - weight)
            change.mul_(grad @ v_prefix.transpose(-1, -2))
            grad_k += change.transpose(-1, -2) @ query
            part = (change @ k_prefix).mul_(scale)
            target = _split(grad_q[:, :, tile], groups)
            target.copy_(part.view(target.shape))
        keys, values = _Nodes(k_nodes), _Nodes(v_nodes)
        key_rows, value_rows = keys.gradient(), values.gradient()
        for tile in _node_tiles(ancestors, groups, q.shape[1], q.shape[-1]):
            at = keys.at(ancestors[:, tile])
            query = _split(q[:, :, tile], groups).to(wide)
            grad = _split(grad_out[:, :, tile], groups).to(wide)
            k, v = keys.gather(at), values.gather(at)
            score = torch.linalg.vecdot(k, query[..., None, :]) * scale
            gate = torch.sigmoid(score)
            weight = score * gate
            change = torch.addcmul(weight, gate, 1 - weight).mul_(scale)
            change.mul_(torch.linalg.vecdot(v, grad[..., None, :]))
            _split(grad_q[:, :, tile], groups).add_((change[..., None, :] @ k).squeeze(-2))
            _add(key_rows, at, change[..., None] * query[..., None, :])
            _add(value_rows, at, weight[..., None] * grad[..., None, :])
        return (
            grad_q,
            grad_k.to(q.dtype),
            grad_v.to(q.dtype),
            keys.total(key_rows),
            values.total(value_rows),
            *[None] * 3,
        )


def _score_tiles(q: Tensor, k_prefix: Tensor) -> Iterator[slice]:
    batch, heads, num_queries, _ = q.shape
    row = batch * heads * k_prefix.shape[2] * q.element_size()
    step = max(16, SCORE_BYTES // max(1, row))
    for start in range(0, num_queries, step):
        yield slice(start, min(start + step, num_queries))


def two_part_attention(
    q_BHNd: Tensor,
    k_prefix_BGPd: Tensor,
    v_prefix_BGPe: Tensor,
    k_nodes_BGAd: Tensor,
    v_nodes_BGAe: Tensor,
    ancestors_BNL: Tensor,
    valid_BP: Tensor | None,
    scale: float,
    norm_length: float | None,
) -> Tensor:
    """See ``gr.kernels.branch_attention``; ``norm_length`` is None for a softmax."""
    mask = None
    if valid_BP is not None:
        hidden = ~valid_BP[:, None, :, None]
        # A key of zeros scores 0, which SiLU takes to 0; and whatever padding holds is not read.
        k_prefix_BGPd = k_prefix_BGPd.masked_fill(hidden, 0.0)
        v_prefix_BGPe = v_prefix_BGPe.masked_fill(hidden, 0.0)
        mask = torch.zeros_like(hidden, dtype=q_BHNd.dtype).masked_fill_(hidden, -torch.inf)
        mask = mask.transpose(-1, -2)
    tensors = (q_BHNd, k_prefix_BGPd, v_prefix_BGPe, k_nodes_BGAd, v_nodes_BGAe)
    ancestors_BNL = ancestors_BNL.expand(len(q_BHNd), -1, -1)
    out: Tensor
    if norm_length is None:
        out = _Softmax.apply(*tensors, ancestors_BNL, mask, scale)
    else:
        out = _Silu.apply(*tensors, ancestors_BNL, scale, norm_length)
    return out

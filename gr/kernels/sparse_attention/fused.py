"""Triton path of the context: no scores and no mask in memory, forward or backward.

What stays for the backward pass is q, k, v, the output and one number per query. Sums are in
float32, whatever the inputs are; nothing is added with atomics, so gradients repeat exactly.
Products of float32 inputs follow ``torch.get_float32_matmul_precision()``, as torch's own do.

Legend: B batch, H query heads, G key heads, Q queries (the last Q keys), K keys, d, e head sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.branch_attention.fused import (
    allocate,
    blocks,
    launch,
    rows,
    strides,
    tile_size,
    why_not,
)
from gr.kernels.sparse_attention import fused_kernels as kernels
from gr.kernels.sparse_attention.mask import SparseMask, first_token

__all__ = ["fused_attention", "why_not"]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: SparseMask,
        valid: Tensor | None,
        scale: float,
    ) -> Tensor:
        q, k, v = rows(q), rows(k), rows(v)
        batch, heads, queries, _ = q.shape
        num_keys = k.shape[2]
        first = first_token(valid, num_keys, q.device).to(torch.int32).expand(batch).contiguous()
        valid = None if valid is None else valid.to(torch.int8).contiguous()
        out = allocate(q, batch, heads, queries, v.shape[-1])
        lse = allocate(q, batch, heads, queries, dtype=torch.float32)
        tile = tile_size(q, v)
        numbers = {
            **strides(q=q, k=k, v=v),
            "heads": heads,
            "num_queries": queries,
            "num_keys": num_keys,
            "window": num_keys if mask.window is None else min(mask.window, num_keys),
            "sinks": min(mask.num_sink, num_keys),
            "scale": float(scale),
            "VALID": valid is not None,
            "REPEAT": heads // k.shape[1],
            **blocks(q, v, tile),
        }
        ctx.save_for_backward(q, k, v, out, lse, first, valid)
        ctx.numbers = numbers
        tensors = _tensors(q, k, v, lse, first, valid)
        arguments = numbers | tensors | {"out": out} | strides(out=out)
        launch(kernels.forward, batch * heads * triton.cdiv(queries, tile), arguments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHQe: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, first, valid = ctx.saved_tensors
        grad = rows(grad_BHQe.to(v.dtype))
        batch, heads, queries, _ = q.shape
        grad_q = allocate(q, *q.shape)
        grad_k, grad_v = allocate(k, *k.shape), allocate(v, *v.shape)
        shared = ctx.numbers | _tensors(q, k, v, lse, first, valid)
        shared |= {"grad": grad, "mean": allocate(lse, *lse.shape), **strides(grad=grad)}
        tile = ctx.numbers["TILE"]
        by_query = {"out": out, "grad_q": grad_q, **strides(out=out, grad_q=grad_q)}
        programs = batch * heads * triton.cdiv(queries, tile)
        launch(kernels.backward_queries, programs, shared | by_query)
        by_key = {"grad_k": grad_k, "grad_v": grad_v, **strides(grad_k=grad_k, grad_v=grad_v)}
        programs = batch * k.shape[1] * triton.cdiv(k.shape[2], tile)
        launch(kernels.backward_keys, programs, shared | by_key)
        return grad_q, grad_k, grad_v, None, None, None


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, first: Tensor, valid: Tensor | None
) -> dict[str, Tensor]:
    return {
        "q": q,
        "k": k,
        "v": v,
        "lse": lse,
        "first_token": first,
        # A kernel never reads the stand-in for what is not there.
        "valid": q if valid is None else valid,
    }


def _apply(
    q_BHQd: Tensor,
    k_BGKd: Tensor,
    v_BGKe: Tensor,
    mask: SparseMask,
    valid_BK: Tensor | None,
    scale: float,
) -> Tensor:
    """The context's part of ``gr.kernels.sparse_attention``: no candidates among the keys."""
    out: Tensor = _Fused.apply(q_BHQd, k_BGKd, v_BGKe, mask, valid_BK, scale)
    return out


# Under torch.compile the launch stays outside of the graph.
fused_attention: Callable[..., Tensor] = torch.compiler.disable(_apply)

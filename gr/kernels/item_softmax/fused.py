"""Triton path: scores are made three times, tile by tile, and never stored.

What stays for the backward pass is one number per target. All sums are in float32. Nothing is added
with atomics, so gradients repeat exactly. Products of float32 inputs follow
``torch.get_float32_matmul_precision()``.

Legend: T targets, D width, C rows that compete.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.item_softmax import fused_kernels as kernels
from gr.kernels.item_softmax.tiled import smoothing
from gr.kernels.triton_path import interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_T, BLOCK_R = 64, 64
# Wider products go through their columns in parts.
MAX_BLOCK_D = 128


def why_not(hidden: Tensor, negative: Tensor | None) -> str | None:
    """What this path lacks for these arguments, or None."""
    if hidden.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        return f"hidden_TD has dtype {hidden.dtype}; wanted one of {names}"
    if negative is not None and negative.dim() == 2:
        return "negatives differ from target to target; wanted shared ones, of shape [R]"
    return None


def _allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _options(hidden: Tensor, bias: Tensor | None, sampled: bool) -> dict[str, Any]:
    width = hidden.shape[1]
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "D": width,
        "BIAS": bias is not None,
        "SAMPLED": sampled,
        "BLOCK_T": BLOCK_T,
        "BLOCK_R": BLOCK_R,
        "BLOCK_D": min(max(16, triton.next_power_of_2(width)), MAX_BLOCK_D),
        "PRECISION": "ieee" if exact else "tf32",
        "WIDE": interpreted(),
    }


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        rows_CD: Tensor,
        bias_C: Tensor | None,
        target_T: Tensor,
        row_id_C: Tensor | None,
        positive_T: Tensor | None,
    ) -> Tensor:
        hidden_TD, rows_CD = hidden_TD.contiguous(), rows_CD.contiguous()
        bias_C = None if bias_C is None else bias_C.contiguous()
        count = len(hidden_TD)
        lse_T = _allocate(hidden_TD, count, dtype=torch.float32)
        own_T = _allocate(hidden_TD, count, dtype=torch.float32)
        if count:
            kernels.forward[(triton.cdiv(count, BLOCK_T),)](
                hidden_TD,
                rows_CD,
                bias_C,
                row_id_C,
                target_T.contiguous(),
                positive_T,
                lse_T,
                own_T,
                count,
                len(rows_CD),
                **_options(hidden_TD, bias_C, row_id_C is not None),
            )
        ctx.save_for_backward(hidden_TD, rows_CD, bias_C, target_T, row_id_C, own_T, lse_T)
        ctx.positive_dtype = None if positive_T is None else positive_T.dtype
        return lse_T - own_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden, rows, bias, target, row_id, own_T, lse_T = ctx.saved_tensors
        grad_T, target = grad_T.contiguous().float(), target.contiguous()
        options = _options(hidden, bias, row_id is not None)
        (count, width), competing = hidden.shape, len(rows)
        parts = triton.cdiv(width, options["BLOCK_D"])
        grad_hidden = _allocate(hidden, count, width)
        grad_rows = _allocate(rows, competing, width)
        grad_bias = None if bias is None else _allocate(bias, competing, dtype=torch.float32)
        inputs = (hidden, rows, bias, row_id, target, lse_T, grad_T)
        sizes = (count, competing)
        if count:
            kernels.backward_hidden[(triton.cdiv(count, BLOCK_T), parts)](
                *inputs, grad_hidden, *sizes, **options
            )
        kernels.backward_rows[(triton.cdiv(competing, BLOCK_R), parts)](
            *inputs, grad_rows, grad_bias, *sizes, **options
        )
        grad_positive = None
        if ctx.positive_dtype is not None:
            grad_positive = (grad_T * torch.expm1(own_T - lse_T)).to(ctx.positive_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_rows, grad_bias, None, None, grad_positive


def fused_losses(
    hidden_TD: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    target_T: Tensor,
    negative: Tensor | None,
    positive_T: Tensor | None,
    smooth: float,
) -> Tensor:
    """See ``reference.reference_losses``."""
    loss_T: Tensor = _Losses.apply(hidden_TD, rows, bias, target_T, negative, positive_T)
    return loss_T if smooth == 0 else loss_T + smoothing(hidden_TD, rows, bias, target_T, smooth)

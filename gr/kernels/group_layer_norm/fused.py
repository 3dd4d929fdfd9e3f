"""Triton path: statistics are made again in the backward pass instead of being kept.

What stays for it is x and the groups. Sums are in float32, and nothing is added with atomics, so
gradients repeat exactly.

Legend: N tokens, D width, G groups, R runs of tokens whose sums are kept apart.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.group_layer_norm import fused_kernels as kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a tile; runs, and the floats that the sums of all runs may take for one table.
TILE, MAX_RUNS, SUMS_SIZE = 2048, 256, 2**24
MAX_WIDTH, MAX_GROUPS = 8192, 2**16 - 1


def why_not(x: Tensor, num_groups: int) -> str | None:
    """What this path lacks for these arguments, or None."""
    if x.dtype not in DTYPES:
        return f"x has dtype {x.dtype}; wanted one of {', '.join(map(str, DTYPES))}"
    if x.shape[-1] > MAX_WIDTH:
        return f"x has width {x.shape[-1]}; wanted at most {MAX_WIDTH}, a row is one tile"
    if num_groups > MAX_GROUPS:
        return f"there are {num_groups} groups; wanted at most {MAX_GROUPS}"
    if x.numel() // x.shape[-1] >= 2**31:
        return f"x has {x.numel() // x.shape[-1]} tokens; wanted fewer than 2^31"
    return None


def _allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _rows(x: Tensor) -> Tensor:
    """[N, D] with columns side by side; rows may lie apart, as those of a slice do."""
    x_ND = x.reshape(-1, x.shape[-1])
    return x_ND if x_ND.stride(-1) == 1 else x_ND.contiguous()


def _options(x_ND: Tensor, num_groups: int, eps: float) -> dict[str, Any]:
    block = triton.next_power_of_2(x_ND.shape[1])
    return {
        "x_row": x_ND.stride(0),
        "num_rows": x_ND.shape[0],
        "num_groups": num_groups,
        "eps": eps,
        "D": x_ND.shape[1],
        "BLOCK_N": max(1, TILE // block),
        "BLOCK_D": block,
    }


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Tensor, weight_GD: Tensor, bias_GD: Tensor, eps: float
    ) -> Tensor:
        x_ND, group_N = _rows(x), group.flatten().contiguous()
        weight_GD, bias_GD = weight_GD.contiguous(), bias_GD.contiguous()
        options = _options(x_ND, len(weight_GD), eps)
        out = _allocate(x, *x_ND.shape)
        if len(x_ND):
            kernels.forward[(triton.cdiv(len(x_ND), options["BLOCK_N"]),)](
                x_ND, group_N, weight_GD, bias_GD, out, **options
            )
        ctx.save_for_backward(x, group_N, weight_GD)
        ctx.eps, ctx.bias_dtype = eps, bias_GD.dtype
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, group_N, weight_GD = ctx.saved_tensors
        x_ND, grad_ND = _rows(x), grad.reshape(-1, x.shape[-1]).contiguous()
        num_groups, width = weight_GD.shape
        options = _options(x_ND, num_groups, ctx.eps)
        blocks = triton.cdiv(len(x_ND), options["BLOCK_N"])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _allocate(x, *x_ND.shape)
            if blocks:
                kernels.backward[(blocks,)](x_ND, group_N, weight_GD, grad_ND, grad_x, **options)
            grad_x = grad_x.view(x.shape)
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            runs = min(blocks, MAX_RUNS, max(1, SUMS_SIZE // weight_GD.numel()))
            sum_weight, sum_bias = (
                _allocate(x, runs, num_groups, width, dtype=torch.float32) for _ in range(2)
            )
            if blocks:
                kernels.backward_tables[(runs, num_groups)](
                    x_ND, group_N, grad_ND, sum_weight, sum_bias, **options
                )
            grad_weight = sum_weight.sum(0).to(weight_GD.dtype)
            grad_bias = sum_bias.sum(0).to(ctx.bias_dtype)
        return grad_x, None, grad_weight, grad_bias, None


def fused_group_layer_norm(
    x: Tensor, group: Tensor, weight_GD: Tensor, bias_GD: Tensor, eps: float
) -> Tensor:
    """See ``gr.kernels.group_layer_norm``."""
    out: Tensor = _GroupNorm.apply(x, group, weight_GD, bias_GD, eps)
    return out

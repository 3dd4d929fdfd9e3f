"""Triton path: one kernel forward, one backward; neither statistics nor a mask are kept.

What stays for the backward pass is a, u and the seed of the random bits, which comes from torch's
generator of the device. Sums are in float32, and nothing is added with atomics, so gradients repeat
exactly.

Legend: N rows, D width, P programs of the backward kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.dropout import dropped_steps, mask_scale
from gr.kernels.norm_mul import fused_kernels as kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a tile, and programs that share the sums of weight and bias.
TILE, MAX_PROGRAMS = 2048, 512
MAX_WIDTH = 8192


def why_not(a: Tensor) -> str | None:
    """What this path lacks for these arguments, or None."""
    if a.dtype not in DTYPES:
        return f"a has dtype {a.dtype}; wanted one of {', '.join(map(str, DTYPES))}"
    if a.shape[-1] > MAX_WIDTH:
        return f"a has width {a.shape[-1]}; wanted at most {MAX_WIDTH}, a row is one tile"
    if a.numel() // a.shape[-1] >= 2**31:
        return f"a has {a.numel() // a.shape[-1]} rows; wanted fewer than 2^31"
    return None


def _allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _rows(x: Tensor) -> Tensor:
    """[N, D] with columns side by side; rows may lie apart, as those of a slice do."""
    x_ND = x.reshape(-1, x.shape[-1])
    return x_ND if x_ND.stride(-1) == 1 else x_ND.contiguous()


def _options(
    a_ND: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    concat: bool,
    steps: int,
) -> dict[str, Any]:
    width = a_ND.shape[1]
    block = triton.next_power_of_2(width)
    return {
        "num_rows": a_ND.shape[0],
        "eps": eps,
        "drop": steps,
        "scale": mask_scale(steps),
        "D": width,
        "WEIGHT": weight is not None,
        "BIAS": bias is not None,
        "CONCAT": concat,
        "DROPOUT": steps > 0,
        "BLOCK_N": max(1, TILE // block),
        "BLOCK_D": block,
    }


class _NormMul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        u: Tensor,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        eps: float,
        concat: bool,
        steps: int,
    ) -> Tensor:
        a_ND, u_ND = _rows(a), _rows(u)
        weight_D, bias_D = (None if p is None else p.contiguous() for p in (weight_D, bias_D))
        seed = torch.randint(2**62, (1,), device=a.device) if steps else None
        options = _options(a_ND, weight_D, bias_D, eps, concat, steps)
        count, width = a_ND.shape
        out = _allocate(a, count, 3 * width if concat else width)
        if count:
            kernels.forward[(triton.cdiv(count, options["BLOCK_N"]),)](
                a_ND, u_ND, weight_D, bias_D, out, seed, a_ND.stride(0), u_ND.stride(0), **options
            )
        ctx.save_for_backward(a, u, weight_D, bias_D, seed)
        ctx.settings = (eps, concat, steps)
        return out.view(*a.shape[:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, u, weight_D, bias_D, seed = ctx.saved_tensors
        a_ND, u_ND = _rows(a), _rows(u)
        grad_NF = grad.reshape(-1, grad.shape[-1]).contiguous()
        options = _options(a_ND, weight_D, bias_D, *ctx.settings)
        count, width = a_ND.shape
        programs = min(triton.cdiv(count, options["BLOCK_N"]), MAX_PROGRAMS)
        grad_a, grad_u = _allocate(a, count, width), _allocate(u, count, width)
        sum_weight, sum_bias = (
            None if p is None else _allocate(p, programs, width, dtype=torch.float32)
            for p in (weight_D, bias_D)
        )
        if count:
            kernels.backward[(programs,)](
                a_ND,
                u_ND,
                weight_D,
                bias_D,
                grad_NF,
                grad_a,
                grad_u,
                sum_weight,
                sum_bias,
                seed,
                a_ND.stride(0),
                u_ND.stride(0),
                **options,
            )
        return (
            grad_a.view(a.shape),
            grad_u.view(u.shape),
            None if sum_weight is None else sum_weight.sum(0).to(weight_D.dtype),
            None if sum_bias is None else sum_bias.sum(0).to(bias_D.dtype),
            None,
            None,
            None,
        )


def fused_norm_mul(
    a: Tensor,
    u: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    eps: float,
    concat: bool,
    dropout: float,
) -> Tensor:
    """See ``gr.kernels.norm_mul``."""
    steps = dropped_steps(dropout)
    out: Tensor = _NormMul.apply(a, u, weight_D, bias_D, eps, concat, steps)
    return out

"""CPU path: rows of the tables are copied and their gradients summed without autograd's index_put.

What stays for the backward pass is n, one number per token and the groups.

Legend: N tokens, D width, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def wide(x: Tensor) -> Tensor:
    """x in the dtype of the sums: float64 stays, everything else becomes float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def standardize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """n = (x − mean) / √(variance + ε) [..., D], and 1/√(variance + ε) [..., 1].

    Torch's kernel is vectorised only with a scale and a shift, so it gets ones and zeros.
    """
    x = wide(x)
    one, zero = x.new_ones(x.shape[-1:]), x.new_zeros(x.shape[-1:])
    n, _, rstd = torch.native_layer_norm(x, x.shape[-1:], one, zero, eps)
    return n, rstd


def standardize_backward(grad: Tensor, n: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of x from that of n: (dn − mean(dn) − n · mean(dn ⊙ n)) / √(variance + ε)."""
    # As if n were the input: its mean is 0 and its scale 1.
    mean, scale = torch.zeros_like(rstd), torch.ones_like(rstd)
    grad_x: Tensor = torch.ops.aten.native_layer_norm_backward(
        grad, n, n.shape[-1:], mean, scale, None, None, [True, False, False]
    )[0]
    return grad_x.mul_(rstd)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Tensor, weight_GD: Tensor, bias_GD: Tensor, eps: float
    ) -> Tensor:
        n, rstd = standardize(x, eps)
        group_N = group.flatten()
        weight, bias = (
            table.to(n.dtype).index_select(0, group_N).view(n.shape)
            for table in (weight_GD, bias_GD)
        )
        ctx.save_for_backward(n.to(x.dtype), rstd, group_N, weight_GD)
        ctx.bias_dtype = bias_GD.dtype
        return torch.addcmul(bias, n, weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, rstd, group_N, weight_GD = ctx.saved_tensors
        n, grad = wide(kept), wide(grad)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight = weight_GD.to(n.dtype).index_select(0, group_N).view(n.shape)
            grad_x = standardize_backward(weight.mul_(grad), n, rstd)
            grad_x = grad_x.to(kept.dtype)
        if ctx.needs_input_grad[2]:
            grad_weight = _by_group(grad * n, group_N, weight_GD).to(weight_GD.dtype)
        if ctx.needs_input_grad[3]:
            grad_bias = _by_group(grad, group_N, weight_GD).to(ctx.bias_dtype)
        return grad_x, None, grad_weight, grad_bias, None


def _by_group(x: Tensor, group_N: Tensor, table_GD: Tensor) -> Tensor:
    """Sums [G, D] of the rows of each group."""
    return x.new_zeros(table_GD.shape).index_add_(0, group_N, x.reshape(-1, x.shape[-1]))


def group_layer_norm_in_passes(
    x: Tensor, group: Tensor, weight_GD: Tensor, bias_GD: Tensor, eps: float
) -> Tensor:
    """See ``gr.kernels.group_layer_norm``."""
    out: Tensor = _GroupNorm.apply(x, group, weight_GD, bias_GD, eps)
    return out

"""LayerNorm whose scale and shift belong to the group of the token.

    y = (x − mean) / √(variance + ε) ⊙ γ[g] + β[g]

Mean and variance are the token's own, over D. Source: MTFM's group layer norm (GLN), on the input
of a block and on its attention output; there a group is a kind of token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gr.kernels.group_layer_norm.passes import group_layer_norm_in_passes
from gr.kernels.group_layer_norm.reference import reference_group_layer_norm
from gr.kernels.triton_path import triton_lacks

__all__ = ["Impl", "group_layer_norm"]

Impl = Literal["auto", "reference", "cpu", "triton"]


def group_layer_norm(
    x: Tensor,
    group: Tensor,
    weight_GD: Tensor,
    bias_GD: Tensor,
    *,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> Tensor:
    """y, of the shape and dtype of x.

    Args:
        x: tokens [..., D], any floating dtype.
        group: int64 [...], the group of every token, 0 to G − 1.
        weight_GD, bias_GD: γ and β of every group.
        impl: "reference" is the specification; "cpu" keeps less for the backward pass and sums the
            gradients of the tables without ``index_put``; "triton" is one kernel forward and two
            backward. "auto" is "cpu" for CPU tensors, "triton" for CUDA tensors that it can run on,
            and "reference" for others and inside a compiled graph.

    Raises:
        ValueError: shapes or dtypes do not agree, or ``impl`` is unknown.
        IndexError: a group is no row of the tables (checked on the CPU; the Triton kernels give
            such a token NaN, and the tables nothing).
        RuntimeError: "cpu" or "triton" was asked for and cannot run; says what is missing.
    """
    _check(x, group, weight_GD, bias_GD, eps)
    if impl not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"impl: {impl!r}, wanted 'auto', 'reference', 'cpu' or 'triton'")
    run = reference_group_layer_norm
    if impl == "cpu" or (impl == "auto" and _wants(x, "cpu")):
        if x.device.type != "cpu":
            raise RuntimeError(f"impl: 'cpu' cannot run: x is on {x.device}; wanted the CPU")
        run = group_layer_norm_in_passes
    elif impl == "triton" or (impl == "auto" and _wants(x, "cuda")):
        missing = _triton_lacks(x, len(weight_GD))
        if missing is None:
            from gr.kernels.group_layer_norm.fused import fused_group_layer_norm as run
        elif impl == "triton":
            raise RuntimeError(f"impl: 'triton' cannot run: {missing}")
    return run(x, group, weight_GD, bias_GD, eps)


def _check(x: Tensor, group: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise ValueError(f"x: {x.dtype} {tuple(x.shape)}, wanted a floating [..., D], D > 0")
    if group.shape != x.shape[:-1] or group.dtype != torch.int64:
        raise ValueError(
            f"group: {group.dtype} {tuple(group.shape)}, wanted torch.int64 {tuple(x.shape[:-1])}"
        )
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or bias.shape != weight.shape:
        raise ValueError(
            f"weight_GD, bias_GD: shapes {tuple(weight.shape)} and {tuple(bias.shape)}, wanted "
            f"(G, {x.shape[-1]}) both"
        )
    if not eps > 0:
        raise ValueError(f"eps: {eps}, wanted a positive number")
    if group.device.type == "cpu" and group.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in group.aminmax())
        if low < 0 or high >= len(weight):
            raise IndexError(f"group: groups {low} to {high}, wanted 0 to {len(weight) - 1}")


def _wants(x: Tensor, device: str) -> bool:
    return x.device.type == device and not torch.compiler.is_compiling()


def _triton_lacks(x: Tensor, num_groups: int) -> str | None:
    lacks = triton_lacks("x", x)
    if lacks is not None:
        return lacks
    from gr.kernels.group_layer_norm import fused

    return fused.why_not(x, num_groups)

"""Softmax loss over a table of items that never holds the logits of all targets at once.

    loss_t = ln Σ_{r ∈ C(t)} exp(s(t, r)) − s(t, y_t)            s(t, r) = x_t · w_r / τ + b_r

where y_t is the target, and C(t) all rows of the table, or the target and R sampled negatives that
are not the target. With ``l2_normalize`` both vectors of the product have length 1. With smoothing
ε, s(t, y_t) becomes (1 − ε) s(t, y_t) + ε mean_r s(t, r) over all rows.

Source: HSTU appendix D and its public code (sampled softmax, cosines, temperature).

Legend: T targets, D width, V rows of the table, R negatives of a target.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gr.kernels.item_softmax.reference import reference_losses
from gr.kernels.item_softmax.tiled import tiled_losses
from gr.kernels.triton_path import triton_lacks, wants_triton

__all__ = ["L2_EPS", "Impl", "item_softmax"]

Impl = Literal["auto", "reference", "cpu", "triton"]

L2_EPS = 1e-6
"""Least length a vector is divided by; the head's logits use it too."""


def item_softmax(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    bias_V: Tensor | None = None,
    negative: Tensor | None = None,
    *,
    l2_normalize: bool = False,
    temperature: float = 1.0,
    smooth: float = 0.0,
    impl: Impl = "auto",
) -> Tensor:
    """Loss of every target, float32 [T] (float64 for float64 inputs).

    Args:
        hidden_TD: hidden states; any floating dtype. Cosines are taken in float32.
        weight_VD: the table.
        target_T: int64, rows of the table.
        bias_V: added to the scores.
        negative: int64 rows of the table to compete with, [R] for all targets or [T, R] for each
            its own; those equal to the target do not count. None: the whole table competes.
        temperature: τ.
        smooth: ε, label smoothing, for the whole table only.
        impl: "reference" builds all logits and is the specification; "cpu" works through tiles of
            targets, on any device, and keeps their probabilities only while they are small;
            "triton" keeps the sum of each row. "auto" is "triton" for CUDA tensors that it can run
            on, and "cpu" otherwise and inside a compiled graph.

    Raises:
        ValueError: shapes, dtypes or options do not agree, or ``impl`` is unknown.
        IndexError: a target or negative is no row of the table (checked on the CPU).
        RuntimeError: "triton" was asked for and cannot run; says what is missing.
    """
    _check(hidden_TD, weight_VD, target_T, bias_V, negative, temperature, smooth)
    if impl not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"impl: {impl!r}, wanted 'auto', 'reference', 'cpu' or 'triton'")
    dtype = _product_dtype(hidden_TD, l2_normalize)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        hidden_TD, weight_VD = hidden_TD.to(dtype), weight_VD.to(dtype)
        if l2_normalize:
            hidden_TD = F.normalize(hidden_TD, dim=-1, eps=L2_EPS)
        if temperature != 1.0:
            hidden_TD = hidden_TD / temperature
        if l2_normalize and negative is None:
            weight_VD = F.normalize(weight_VD, dim=-1, eps=L2_EPS)
        run = reference_losses if impl == "reference" else tiled_losses
        if impl == "triton" or (impl == "auto" and wants_triton(hidden_TD)):
            missing = _triton_lacks(hidden_TD, negative)
            if missing is None:
                from gr.kernels.item_softmax.fused import fused_losses as run
            elif impl == "triton":
                raise RuntimeError(f"impl: 'triton' cannot run: {missing}")
        if negative is None:
            return run(hidden_TD, weight_VD, bias_V, target_T, None, None, smooth)
        # Only the rows that take part are normalised.
        own_TD, others = weight_VD[target_T], weight_VD[negative]
        if l2_normalize:
            own_TD, others = (F.normalize(w, dim=-1, eps=L2_EPS) for w in (own_TD, others))
        positive_T = (hidden_TD * own_TD).sum(-1)
        bias = None
        if bias_V is not None:
            positive_T, bias = positive_T + bias_V[target_T], bias_V[negative]
        return run(hidden_TD, others, bias, target_T, negative, positive_T, 0.0)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    negative: Tensor | None,
    temperature: float,
    smooth: float,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden_TD, weight_VD: shapes {tuple(hidden.shape)} and {tuple(weight.shape)}, "
            "wanted [T, D] and [V, D]"
        )
    if target.shape != hidden.shape[:1]:
        raise ValueError(f"target_T: shape {tuple(target.shape)}, wanted ({len(hidden)},)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias_V: shape {tuple(bias.shape)}, wanted ({len(weight)},)")
    if negative is not None and (
        negative.dim() not in (1, 2)
        or negative.shape[-1] == 0
        or (negative.dim() == 2 and len(negative) != len(hidden))
    ):
        raise ValueError(
            f"negative: shape {tuple(negative.shape)}, wanted (R,) or ({len(hidden)}, R), R > 0"
        )
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature}, wanted a positive number")
    if not 0 <= smooth < 1 or (smooth and negative is not None):
        raise ValueError(f"smooth: {smooth}, wanted 0 <= smooth < 1, and 0 with negatives")
    for name, index in (("target_T", target), ("negative", negative)):
        if index is None or index.dtype == torch.int64:
            continue
        raise ValueError(f"{name}: dtype {index.dtype}, wanted torch.int64")
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for name, index in (("target_T", target), ("negative", negative)):
        if index is not None and index.numel():
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= len(weight):
                raise IndexError(f"{name}: rows {low} to {high}, wanted 0 to {len(weight) - 1}")


def _product_dtype(hidden: Tensor, l2_normalize: bool) -> torch.dtype:
    if hidden.dtype == torch.float64:
        return torch.float64
    if l2_normalize:
        # In half precision a temperature of .05 turns the rounding of a norm into units of logit.
        return torch.float32
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _triton_lacks(hidden: Tensor, negative: Tensor | None) -> str | None:
    lacks = triton_lacks("hidden_TD", hidden)
    if lacks is not None:
        return lacks
    from gr.kernels.item_softmax import fused

    return fused.why_not(hidden, negative)

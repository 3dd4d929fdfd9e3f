"""HSTU's gate: y = dropout(LayerNorm(a) ⊙ u), or dropout([u, a, LayerNorm(a) ⊙ u]).

    LayerNorm(a) = (a − mean) / √(variance + ε) · w + b

The result is what the output projection reads. Source: HSTU, formula 3 (§3.1), and its public code,
whose ranking form joins u and a to the product. Dropout is over all that the projection reads.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gr.kernels.dropout import STEPS, dropped_steps
from gr.kernels.norm_mul.passes import norm_mul_in_passes
from gr.kernels.norm_mul.reference import reference_norm_mul
from gr.kernels.triton_path import triton_lacks

__all__ = ["Impl", "norm_mul"]

Impl = Literal["auto", "reference", "cpu", "triton"]


def norm_mul(
    a: Tensor,
    u: Tensor,
    weight_D: Tensor | None = None,
    bias_D: Tensor | None = None,
    *,
    eps: float = 1e-6,
    concat: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """The gated and normalised attention output, [..., D], or [..., 3 D] with ``concat``.

    Args:
        a: attention output [..., D]; statistics are per row, over D.
        u: gate, of the shape and dtype of ``a``.
        weight_D, bias_D: scale and shift; without them the norm has none.
        concat: the result is [u, a, LayerNorm(a) ⊙ u].
        dropout: probability of an element of the result to become 0, rounded to a multiple of
            2⁻¹⁶; what stays is scaled up. Nothing is dropped unless ``training``.
        impl: "reference" is the specification; "cpu" takes the forms that torch
            has vectorised; "triton" makes one pass and keeps no mask, but draws it again. "auto" is
            "cpu" for CPU tensors, "triton" for CUDA tensors that it can run on, and "reference"
            for others and inside a compiled graph. On a CPU "cpu" and "reference" drop the same
            elements after the same ``torch.manual_seed``.

    Raises:
        ValueError: shapes, dtypes or options do not agree, or ``impl`` is unknown.
        RuntimeError: "cpu" or "triton" was asked for and cannot run; says what is missing.
    """
    _check(a, u, weight_D, bias_D, eps, dropout)
    if impl not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"impl: {impl!r}, wanted 'auto', 'reference', 'cpu' or 'triton'")
    run = reference_norm_mul
    if impl == "cpu" or (impl == "auto" and _wants(a, "cpu")):
        if a.device.type != "cpu":
            raise RuntimeError(f"impl: 'cpu' cannot run: a is on {a.device}; wanted the CPU")
        run = norm_mul_in_passes
    elif impl == "triton" or (impl == "auto" and _wants(a, "cuda")):
        missing = _triton_lacks(a)
        if missing is None:
            from gr.kernels.norm_mul.fused import fused_norm_mul as run
        elif impl == "triton":
            raise RuntimeError(f"impl: 'triton' cannot run: {missing}")
    return run(a, u, weight_D, bias_D, eps, concat, dropout if training else 0.0)


def _check(
    a: Tensor, u: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dropout: float
) -> None:
    if a.shape != u.shape or a.dim() == 0 or a.shape[-1] == 0:
        raise ValueError(
            f"a, u: shapes {tuple(a.shape)} and {tuple(u.shape)}, wanted the same, [..., D], D > 0"
        )
    if a.dtype != u.dtype or not a.is_floating_point():
        raise ValueError(f"a, u: dtypes {a.dtype} and {u.dtype}, wanted one floating dtype")
    for name, given in (("weight_D", weight), ("bias_D", bias)):
        if given is not None and given.shape != a.shape[-1:]:
            raise ValueError(f"{name}: shape {tuple(given.shape)}, wanted ({a.shape[-1]},)")
    if bias is not None and weight is None:
        raise ValueError("bias_D: given without weight_D, wanted both, weight_D alone or neither")
    if not eps > 0:
        raise ValueError(f"eps: {eps}, wanted a positive number")
    if not 0 <= dropout <= 1 or dropped_steps(dropout) == STEPS:
        raise ValueError(f"dropout: {dropout}, wanted a probability, 0 <= dropout < 1")


def _wants(a: Tensor, device: str) -> bool:
    return a.device.type == device and not torch.compiler.is_compiling()


def _triton_lacks(a: Tensor) -> str | None:
    lacks = triton_lacks("a", a)
    if lacks is not None:
        return lacks
    from gr.kernels.norm_mul import fused

    return fused.why_not(a)

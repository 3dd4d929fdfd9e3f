"""HSTU's pointwise aggregated attention with relative position and time bias.

A = SiLU(α q kᵀ + w_pos[pos_i − pos_j] + w_time[bucket(t_{i+1} − t_j)]) / n, masked to 0; the
result is A v. Source: HSTU §3.1 and its public code.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gr.kernels.hstu_attention.geometry import Geometry, build_geometry, time_bucket
from gr.kernels.hstu_attention.pointwise import pointwise_attention
from gr.kernels.hstu_attention.reference import reference_attention
from gr.kernels.hstu_attention.visibility import Visibility
from gr.kernels.triton_path import triton_lacks

__all__ = ["Geometry", "Impl", "Visibility", "build_geometry", "hstu_attention", "time_bucket"]

Impl = Literal["auto", "reference", "cpu", "triton"]


def hstu_attention(
    q_BHQd: Tensor,
    k_BHKd: Tensor,
    v_BHKe: Tensor,
    geometry: Geometry,
    position_table_P: Tensor | None = None,
    time_table_T: Tensor | None = None,
    *,
    scale: float = 1.0,
    norm_length: float,
    impl: Impl = "auto",
) -> Tensor:
    """Attention output [B, H, Q, e], before the output norm and gate.

    Args:
        geometry: visibility, distances and time buckets of the queries and keys.
        position_table_P: bias per distance, shared by the heads; distances past the end read the
            last entry.
        time_table_T: bias per time bucket, shared by the heads.
        scale: α; 1 in the retrieval form, 1/√d in the ranking form.
        norm_length: the constant n. Never the length of the batch, or the output of a row would
            depend on the rows beside it.
        impl: "reference" materialises every intermediate and is the specification; "cpu" keeps one
            score matrix, recomputes it in the backward pass and sums table gradients by histogram,
            on any device; "triton" keeps none and evaluates mask and bias tile by tile. "auto" is
            "triton" for CUDA tensors that it can run on, and "cpu" for all others, inside a
            compiled graph and under ``torch.use_deterministic_algorithms``.

    Raises:
        ValueError: shapes do not agree, ``norm_length`` is not positive, or ``impl`` is unknown.
        RuntimeError: "triton" was asked for and cannot run; says what is missing.
    """
    if norm_length <= 0:
        raise ValueError(f"norm_length: {norm_length}, wanted a positive number")
    if q_BHQd.shape[-1] != k_BHKd.shape[-1]:
        raise ValueError(
            f"q has head size {q_BHQd.shape[-1]}, k has {k_BHKd.shape[-1]}; wanted the same"
        )
    if time_table_T is not None and not geometry.has_clock:
        raise ValueError("time_table_T: given, but the layout has no timestamps; pass timestamps")
    if impl not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"impl: {impl!r}, wanted 'auto', 'reference', 'cpu' or 'triton'")
    run = reference_attention if impl == "reference" else pointwise_attention
    if impl == "triton" or (impl == "auto" and _wants_triton(q_BHQd)):
        missing = _triton_lacks(q_BHQd, k_BHKd, v_BHKe, geometry)
        if missing is None:
            from gr.kernels.hstu_attention.fused import fused_attention as run
        elif impl == "triton":
            raise RuntimeError(f"impl: 'triton' cannot run: {missing}")
    return run(q_BHQd, k_BHKd, v_BHKe, geometry, position_table_P, time_table_T, scale, norm_length)


def _wants_triton(q: Tensor) -> bool:
    return (
        q.is_cuda
        and not torch.compiler.is_compiling()
        and not torch.are_deterministic_algorithms_enabled()
    )


def _triton_lacks(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> str | None:
    lacks = triton_lacks("q", q)
    if lacks is not None:
        return lacks
    from gr.kernels.hstu_attention import fused

    return fused.why_not(q, k, v, geometry)

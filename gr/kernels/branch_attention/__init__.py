"""Attention of appended nodes over a shared prefix and their own ancestors.

    s_j = α q k_jᵀ for the valid keys j of the prefix and for the ancestors j of the node
    softmax: out = Σ_j exp(s_j) v_j / Σ_j exp(s_j)        silu: out = Σ_j SiLU(s_j) v_j / n

A node is one of its own ancestors. The cost is N (P + L) pairs, where a dense mask has N (P + A):
nodes never meet the other nodes, and prefix keys are stored once, not once per node.

Source: M-FALCON, HSTU §3.4 and appendix H (candidates that share a history); ancestors other than
the node itself are ours (a beam's earlier codes). Deviation: no relative bias in the silu form.

Legend: B batch, H query heads, G key heads (H a multiple of G), N nodes that ask, A all nodes, P
prefix keys, L most ancestors of a node, d, e head sizes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gr.kernels.branch_attention.reference import reference_attention
from gr.kernels.branch_attention.two_parts import two_part_attention
from gr.kernels.triton_path import triton_lacks

__all__ = ["Form", "Impl", "branch_attention"]

Form = Literal["softmax", "silu"]
Impl = Literal["auto", "reference", "cpu", "triton"]


def branch_attention(
    q_BHNd: Tensor,
    k_prefix_BGPd: Tensor,
    v_prefix_BGPe: Tensor,
    k_nodes_BGAd: Tensor,
    v_nodes_BGAe: Tensor,
    ancestors_BNL: Tensor,
    valid_BP: Tensor | None = None,
    *,
    form: Form = "softmax",
    scale: float | None = None,
    norm_length: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention output [B, H, N, e]; 0 for a node that sees nothing.

    Args:
        ancestors_BNL: int64, the nodes (0 … A − 1) that each asking node sees, itself included, in
            any order; −1 for none. A node named twice counts twice. [1, N, L] serves all rows.
        valid_BP: bool, False for padding of the prefix; None where there is none.
        scale: α; None is 1/√d.
        norm_length: the constant n of the silu form, and None for softmax.
        impl: "reference" builds all scores and is the specification; "cpu" works through tiles of
            nodes; "triton" keeps no scores and adds the gradients of nodes with atomics, so their
            last bits may change between runs. "auto" is "cpu" for CPU tensors, and for others
            "triton" if it can run; inside a compiled graph and under
            ``torch.use_deterministic_algorithms`` it is "reference" there.

    Raises:
        ValueError: shapes, dtypes or options do not agree, or ``impl`` is unknown.
        IndexError: an ancestor is no node (checked on the CPU).
        RuntimeError: ``impl`` was asked for and cannot run; says what is missing.
    """
    tensors = (q_BHNd, k_prefix_BGPd, v_prefix_BGPe, k_nodes_BGAd, v_nodes_BGAe)
    _check_shapes(*tensors, ancestors_BNL, valid_BP)
    _check_ancestors(ancestors_BNL, k_nodes_BGAd.shape[2])
    if form not in ("softmax", "silu"):
        raise ValueError(f"form: {form!r}, wanted 'softmax' or 'silu'")
    if form == "softmax" and norm_length is not None:
        raise ValueError(f"norm_length: {norm_length}, wanted None: a softmax has none")
    if form == "silu" and not (norm_length is not None and norm_length > 0):
        raise ValueError(f"norm_length: {norm_length}, wanted a positive number for 'silu'")
    if impl not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"impl: {impl!r}, wanted 'auto', 'reference', 'cpu' or 'triton'")
    if scale is None:
        scale = q_BHNd.shape[-1] ** -0.5
    if impl == "auto":
        impl = _choose(q_BHNd, k_prefix_BGPd, v_prefix_BGPe, k_nodes_BGAd, v_nodes_BGAe)
    run = reference_attention
    if impl == "cpu":
        if q_BHNd.device.type != "cpu":
            raise RuntimeError(f"impl: 'cpu' cannot run: q is on {q_BHNd.device}; wanted the CPU")
        run = two_part_attention
    elif impl == "triton":
        missing = _triton_lacks(*tensors)
        if missing is not None:
            raise RuntimeError(f"impl: 'triton' cannot run: {missing}")
        from gr.kernels.branch_attention.fused import fused_attention as run
    return run(*tensors, ancestors_BNL, valid_BP, scale, norm_length)


def _check_shapes(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_nodes: Tensor,
    v_nodes: Tensor,
    ancestors: Tensor,
    valid: Tensor | None,
) -> None:
    if q.dim() != 4 or k_prefix.dim() != 4 or v_prefix.dim() != 4:
        raise ValueError(
            f"q, k_prefix, v_prefix: {q.dim()}, {k_prefix.dim()} and {v_prefix.dim()} axes, "
            "wanted 4 each"
        )
    batch, heads, num_queries, size = q.shape
    groups, num_prefix = k_prefix.shape[1:3]
    value_size = v_prefix.shape[-1]
    num_nodes = k_nodes.shape[2] if k_nodes.dim() == 4 else 0
    if not groups or heads % groups:
        raise ValueError(f"q: {heads} heads, wanted a multiple of the {groups} heads of k_prefix")
    for name, tensor, wanted in (
        ("k_prefix", k_prefix, (batch, groups, num_prefix, size)),
        ("v_prefix", v_prefix, (batch, groups, num_prefix, value_size)),
        ("k_nodes", k_nodes, (batch, groups, num_nodes, size)),
        ("v_nodes", v_nodes, (batch, groups, num_nodes, value_size)),
    ):
        if tensor.shape != wanted:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, wanted {wanted}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype}, wanted {q.dtype} as q has")
    if ancestors.dim() != 3 or ancestors.shape[:2] not in ((batch, num_queries), (1, num_queries)):
        raise ValueError(
            f"ancestors_BNL: shape {tuple(ancestors.shape)}, wanted ({batch} or 1, {num_queries}, "
            "L)"
        )
    if valid is not None and (valid.shape != (batch, num_prefix) or valid.dtype != torch.bool):
        raise ValueError(
            f"valid_BP: {valid.dtype} of shape {tuple(valid.shape)}, wanted torch.bool of shape "
            f"({batch}, {num_prefix})"
        )


def _check_ancestors(ancestors: Tensor, num_nodes: int) -> None:
    if ancestors.dtype != torch.int64:
        raise ValueError(f"ancestors_BNL: dtype {ancestors.dtype}, wanted torch.int64")
    # Looking at values costs a synchronisation on a GPU and a graph break in a compiled model.
    if ancestors.device.type != "cpu" or torch.compiler.is_compiling() or not ancestors.numel():
        return
    low, high = (int(x) for x in ancestors.aminmax())
    if low < -1 or high >= num_nodes:
        raise IndexError(f"ancestors_BNL: nodes {low} to {high}, wanted -1 to {num_nodes - 1}")


def _choose(q: Tensor, *others: Tensor) -> Impl:
    if q.device.type == "cpu":
        return "cpu"
    calm = torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled()
    return "reference" if calm or _triton_lacks(q, *others) is not None else "triton"


def _triton_lacks(q: Tensor, *others: Tensor) -> str | None:
    lacks = triton_lacks("q", q)
    if lacks is not None:
        return lacks
    from gr.kernels.branch_attention import fused

    return fused.why_not(q)

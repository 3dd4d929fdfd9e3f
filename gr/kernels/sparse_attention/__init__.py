"""SORT's sparse attention: a window for the context, everything for candidates, pruned queries.

    out_i = Σ_j softmax_j(α q_i k_jᵀ) v_j over the keys j that ``SparseMask`` shows to query i

Source: SORT §3.2 (BOS as attention sink), §3.3.1 (candidates on a diagonal mask), §3.4 (local
window) and §3.5 (query pruning: old tokens stay as keys and values, and no longer ask).

The cost is Q (window + sinks) pairs for Q context queries, and all of the context for a candidate.
Candidates are nodes appended to the context, so ``branch_attention`` serves them.

Legend: B batch, H query heads, G key heads (H a multiple of G), K keys (context, then candidates),
Q queries (the newest context tokens, then the candidates), d, e head sizes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gr.kernels.branch_attention import branch_attention
from gr.kernels.sparse_attention.mask import SparseMask
from gr.kernels.sparse_attention.reference import reference_attention
from gr.kernels.sparse_attention.windowed import windowed_attention
from gr.kernels.triton_path import triton_lacks

__all__ = ["Impl", "SparseMask", "sparse_attention"]

Impl = Literal["auto", "reference", "cpu", "triton"]


def sparse_attention(
    q_BHQd: Tensor,
    k_BGKd: Tensor,
    v_BGKe: Tensor,
    mask: SparseMask,
    valid_BK: Tensor | None = None,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention output [B, H, Q, e]; 0 for padding queries.

    Args:
        valid_BK: bool, False for padding; None where there is none.
        scale: α; None is 1/√d.
        impl: "reference" builds the mask and all scores and is the specification; "cpu" reads per
            tile of queries the keys that it sees; "triton" does so in one kernel. "auto" is "cpu"
            for CPU tensors, and for others "triton" if it can run, or "reference"; inside a
            compiled graph and under ``torch.use_deterministic_algorithms`` it is "reference" there.

    Raises:
        ValueError: shapes, dtypes or the mask do not agree, or ``impl`` is unknown.
        RuntimeError: ``impl`` was asked for and cannot run; says what is missing.
    """
    _check(q_BHQd, k_BGKd, v_BGKe, mask, valid_BK)
    if impl not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"impl: {impl!r}, wanted 'auto', 'reference', 'cpu' or 'triton'")
    if scale is None:
        scale = q_BHQd.shape[-1] ** -0.5
    if impl == "auto":
        impl = _choose(q_BHQd)
    if impl == "reference":
        return reference_attention(q_BHQd, k_BGKd, v_BGKe, mask, valid_BK, scale)
    run = windowed_attention
    if impl == "cpu" and q_BHQd.device.type != "cpu":
        raise RuntimeError(f"impl: 'cpu' cannot run: q is on {q_BHQd.device}; wanted the CPU")
    if impl == "triton":
        missing = _triton_lacks(q_BHQd)
        if missing is not None:
            raise RuntimeError(f"impl: 'triton' cannot run: {missing}")
        from gr.kernels.sparse_attention.fused import fused_attention as run
    num_keys, candidates = k_BGKd.shape[2], mask.num_candidates
    context, asking = num_keys - candidates, mask.context_queries(num_keys)
    k, v = k_BGKd[:, :, :context], v_BGKe[:, :, :context]
    valid = None if valid_BK is None else valid_BK[:, :context]
    parts = []
    if asking or not candidates:
        parts.append(run(q_BHQd[:, :, :asking], k, v, mask, valid, scale))
    if candidates:
        q, itself = q_BHQd[:, :, asking:], torch.arange(candidates, device=k.device)[None]
        if valid_BK is not None:
            padding = ~valid_BK[:, context:]
            itself = itself.masked_fill(padding, -1)
            q = q.masked_fill(padding[:, None, :, None], 0.0)
        others = k_BGKd[:, :, context:], v_BGKe[:, :, context:], itself[..., None]
        out = branch_attention(q, k, v, *others, valid, scale=scale, impl=impl)
        if valid_BK is not None:
            out = out.masked_fill(padding[:, None, :, None], 0.0)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: SparseMask, valid: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v: {q.dim()}, {k.dim()} and {v.dim()} axes, wanted 4 each")
    batch, heads, num_queries, size = q.shape
    groups, num_keys = k.shape[1:3]
    if not groups or heads % groups:
        raise ValueError(f"q: {heads} heads, wanted a multiple of the {groups} heads of k")
    for name, tensor, wanted in (
        ("k", k, (batch, groups, num_keys, size)),
        ("v", v, (batch, groups, num_keys, v.shape[-1])),
    ):
        if tensor.shape != wanted:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, wanted {wanted}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype}, wanted {q.dtype} as q has")
    if mask.num_candidates > num_keys:
        raise ValueError(f"mask: {mask.num_candidates} candidates, wanted at most {num_keys} keys")
    wanted_queries = mask.context_queries(num_keys) + mask.num_candidates
    if num_queries != wanted_queries:
        raise ValueError(
            f"q: {num_queries} queries, wanted {wanted_queries}: the context's newest "
            f"{wanted_queries - mask.num_candidates} and {mask.num_candidates} candidates"
        )
    if valid is not None and (valid.shape != (batch, num_keys) or valid.dtype != torch.bool):
        raise ValueError(
            f"valid_BK: {valid.dtype} of shape {tuple(valid.shape)}, wanted torch.bool of shape "
            f"({batch}, {num_keys})"
        )


def _choose(q: Tensor) -> Impl:
    if q.device.type == "cpu":
        return "cpu"
    calm = torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled()
    return "reference" if calm or _triton_lacks(q) is not None else "triton"


def _triton_lacks(q: Tensor) -> str | None:
    lacks = triton_lacks("q", q)
    if lacks is not None:
        return lacks
    from gr.kernels.sparse_attention import fused

    return fused.why_not(q)

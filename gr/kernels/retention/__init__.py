"""Linear attention whose memory fades: a state per head that decays before each token is added.

    S_t = g_t S_{t−1} + k_t v_tᵀ        o_t = q_tᵀ S_t        g_t = exp(a_t), a_t <= 0

or, with S_0 the initial state and no recurrence,

    o_i = Σ_{j <= i} (q_i · k_j) exp(Σ_{t=j+1..i} a_t) v_j + exp(Σ_{t=1..i} a_t) q_iᵀ S_0

A token's own share has weight 1. FuXi-Linear writes exp(−γ (i − j + 1)) for a constant decay, which
is this with a = −γ and the output times exp(−γ): the caller scales. A half-life of H tokens is
a = −ln 2 / H. There is no 1/√d and no normaliser.

Source: FuXi-Linear, retention channel; MARS, tracks with half-lives; RetNet §2 for the three forms.

Legend: B batch, H heads, N tokens, d, e head sizes of keys and values.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gr.kernels.retention.chunked import chunked_retention
from gr.kernels.retention.recurrent import retention_step
from gr.kernels.retention.reference import reference_retention
from gr.kernels.triton_path import triton_lacks, wants_triton

__all__ = ["Impl", "retention", "retention_step"]

Impl = Literal["auto", "reference", "cpu", "triton"]


def retention(
    q_BHNd: Tensor,
    k_BHNd: Tensor,
    v_BHNe: Tensor,
    log_decay: Tensor,
    initial_state_BHde: Tensor | None = None,
    valid_BN: Tensor | None = None,
    *,
    chunk: int | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Outputs of a stream, and the state after it, with which the stream can go on.

    Args:
        q_BHNd, k_BHNd, v_BHNe: any one floating dtype.
        log_decay: a, finite and at most 0 (checked on the CPU): [H] for a constant decay per head,
            [B, H, N] for one per step. Sums of it are taken in float32 at least.
        initial_state_BHde: S_0, what an earlier call returned; None for zeros.
        valid_BN: bool, False for padding. Padding neither decays nor adds, wherever it stands; its
            own output is what its query reads. Its keys may be anything, its values finite.
        chunk: tokens that are worked on together; decides cost, not the result. None for the
            path's own choice: 128 on the CPU, 64 in Triton, which wants 16, 32 or 64.
        impl: "reference" builds the N×N weights and is the specification; "cpu" goes chunk by
            chunk, on any device, and keeps one state per chunk for the backward pass; "triton" does
            so without weights in memory. "auto" is "triton" for CUDA tensors that it can run on,
            and "cpu" otherwise and inside a compiled graph.

    Returns:
        The output [B, H, N, e] in the dtype of the values, and the state [B, H, d, e] in float32
        (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes, decays or ``chunk`` do not fit, or ``impl`` is unknown.
        RuntimeError: "triton" was asked for and cannot run; says what is missing.
    """
    _check(q_BHNd, k_BHNd, v_BHNe, log_decay, initial_state_BHde, valid_BN, chunk)
    if impl not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"impl: {impl!r}, wanted 'auto', 'reference', 'cpu' or 'triton'")
    wide = torch.float64 if q_BHNd.dtype == torch.float64 else torch.float32
    decay = log_decay.to(wide)
    decay = decay[None, :, None] if decay.dim() == 1 else decay
    if valid_BN is not None:
        padding = ~valid_BN[:, None, :]
        decay = decay.expand(-1, -1, valid_BN.shape[1]).masked_fill(padding, 0.0)
        k_BHNd = k_BHNd.masked_fill(padding[..., None], 0.0)
    run = reference_retention if impl == "reference" else chunked_retention
    if impl == "triton" or (impl == "auto" and wants_triton(q_BHNd)):
        missing = _triton_lacks(q_BHNd, v_BHNe, chunk)
        if missing is None:
            from gr.kernels.retention.fused import fused_retention as run
        elif impl == "triton":
            raise RuntimeError(f"impl: 'triton' cannot run: {missing}")
    with torch.autocast(q_BHNd.device.type, enabled=False):
        return run(q_BHNd, k_BHNd, v_BHNe, decay, initial_state_BHde, chunk)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    valid: Tensor | None,
    chunk: int | None,
) -> None:
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"q_BHNd, k_BHNd, v_BHNe: shapes {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}; wanted [B, H, N, d], the same, and [B, H, N, e]"
        )
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q_BHNd, k_BHNd, v_BHNe: dtypes {q.dtype}, {k.dtype}, {v.dtype}; "
            "wanted one floating dtype for all three"
        )
    batch, heads, tokens, size = q.shape
    if log_decay.shape not in ((heads,), (batch, heads, tokens)):
        raise ValueError(
            f"log_decay: shape {tuple(log_decay.shape)}, wanted ({heads},) or "
            f"({batch}, {heads}, {tokens})"
        )
    state = (batch, heads, size, v.shape[-1])
    if initial is not None and initial.shape != state:
        raise ValueError(f"initial_state_BHde: shape {tuple(initial.shape)}, wanted {state}")
    if valid is not None and (valid.shape != (batch, tokens) or valid.dtype != torch.bool):
        raise ValueError(
            f"valid_BN: {valid.dtype} of shape {tuple(valid.shape)}, wanted torch.bool of shape "
            f"({batch}, {tokens})"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: {chunk}, wanted at least 1 token, or None")
    # Looking at values costs a synchronisation on a GPU and a graph break in a compiled model.
    if log_decay.device.type != "cpu" or torch.compiler.is_compiling() or not log_decay.numel():
        return
    low, high = (float(x) for x in log_decay.detach().aminmax())
    if not -float("inf") < low <= high <= 0:
        raise ValueError(f"log_decay: values from {low} to {high}, wanted finite ones, at most 0")


def _triton_lacks(q: Tensor, v: Tensor, chunk: int | None) -> str | None:
    lacks = triton_lacks("q_BHNd", q)
    if lacks is not None:
        return lacks
    from gr.kernels.retention import fused

    return fused.why_not(q, v, chunk)

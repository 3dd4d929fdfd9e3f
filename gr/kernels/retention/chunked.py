"""CPU path: chunk by chunk, so that time and memory grow with N and not with N².

Within a chunk the sum is a small masked product; what came before it is one matrix per head:

    A_i = Σ a of the chunk up to i          D_ij = exp(A_i − A_j) for j <= i, else 0
    O = (Q Kᵀ ∘ D) V + exp(A) Q S           S' = exp(A_C) S + (exp(A_C − A) K)ᵀ V

No exponent is above 0, so nothing overflows, and a weight that underflows is 0. Decay gradients are
those of the A, which are Σ_d (q dq − k dk), summed from the end of each chunk; the sum starts again
in every chunk, so its rounding does not grow with N.

Legend: B batch, H heads, N tokens, C tokens of a chunk, d, e head sizes, T chunks; b is B, or 1 for
a decay that rows share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 128


@dataclass(frozen=True)
class _Decay:
    """Weights of a chunk: between its tokens, from its start, to its end, and across it."""

    pair_bHCC: Tensor
    since_start_bHC1: Tensor
    until_end_bHC1: Tensor
    across_bH11: Tensor

    @staticmethod
    def of(log_decay_bHC: Tensor) -> _Decay:
        sums = log_decay_bHC.cumsum(-1)[..., None]
        end = sums[..., -1:, :]
        pair = (sums - sums.transpose(-1, -2)).clamp_(max=0.0).exp_().tril_()
        return _Decay(pair, sums.exp(), (end - sums).clamp_(max=0.0).exp_(), end.exp())


class _Decays:
    """Weights by chunk; a constant decay has the same ones in all chunks of a length."""

    def __init__(self, log_decay: Tensor, tokens: int) -> None:
        self.constant = log_decay.shape[-1] == 1
        self.values = log_decay.expand(-1, -1, tokens)
        self.known: dict[int, _Decay] = {}

    def __call__(self, part: slice) -> _Decay:
        if not self.constant:
            return _Decay.of(self.values[..., part])
        size = part.stop - part.start
        if size not in self.known:
            self.known[size] = _Decay.of(self.values[..., part])
        return self.known[size]


def _parts(tokens: int, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, tokens)) for at in range(0, tokens, chunk)]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        initial: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, size = q.shape
        wide, keep = log_decay.dtype, any(ctx.needs_input_grad)
        if initial is None:
            state = q.new_zeros(batch, heads, size, v.shape[-1], dtype=wide)
        else:
            state = initial.to(wide, copy=True)
        out = v.new_empty(batch, heads, tokens, v.shape[-1])
        decays, states = _Decays(log_decay, tokens), [state]
        for part in _parts(tokens, chunk):
            q_c, k_c, v_c = (x[:, :, part].to(wide) for x in (q, k, v))
            decay = decays(part)
            score = (q_c @ k_c.transpose(-1, -2)).mul_(decay.pair_bHCC)
            out[:, :, part] = (score @ v_c).add_((q_c * decay.since_start_bHC1) @ state)
            added = (k_c * decay.until_end_bHC1).transpose(-1, -2) @ v_c
            state = added.addcmul_(state, decay.across_bH11)
            if keep:
                states.append(state)
        ctx.chunk = chunk
        ctx.initial_dtype = None if initial is None else initial.dtype
        ctx.save_for_backward(q, k, v, log_decay, *(states if keep else ()))
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, *states = ctx.saved_tensors
        wide, tokens = log_decay.dtype, q.shape[2]
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_decay = None
        if ctx.needs_input_grad[3]:
            grad_decay = log_decay.new_empty(*q.shape[:2], tokens)
        decays, parts = _Decays(log_decay, tokens), _parts(tokens, ctx.chunk)
        for number in reversed(range(len(parts))):
            part, before, after = parts[number], states[number], states[number + 1]
            q_c, k_c, v_c, grad = (x[:, :, part].to(wide) for x in (q, k, v, grad_out))
            decay = decays(part)
            score = (q_c @ k_c.transpose(-1, -2)).mul_(decay.pair_bHCC)
            pull = (grad @ v_c.transpose(-1, -2)).mul_(decay.pair_bHCC)
            reads = (grad @ before.transpose(-1, -2)).mul_(decay.since_start_bHC1)
            dq = reads.add_(pull @ k_c)
            writes = (v_c @ grad_state.transpose(-1, -2)).mul_(decay.until_end_bHC1)
            dk = writes.add_(pull.transpose(-1, -2) @ q_c)
            dv = (k_c * decay.until_end_bHC1) @ grad_state
            grad_q[:, :, part], grad_k[:, :, part] = dq, dk
            grad_v[:, :, part] = dv.add_(score.transpose(-1, -2) @ grad)
            if grad_decay is not None:
                of_sums = (q_c * dq).sum(-1) - (k_c * dk).sum(-1)
                crossing = (after * grad_state).sum((-1, -2))[..., None]
                grad_decay[:, :, part] = of_sums.flip(-1).cumsum(-1).flip(-1) + crossing
            read = (q_c * decay.since_start_bHC1).transpose(-1, -2) @ grad
            grad_state = read.addcmul_(grad_state, decay.across_bH11)
        if grad_decay is not None:
            grad_decay = grad_decay.sum_to_size(log_decay.shape)
        grad_initial = None
        if ctx.initial_dtype is not None:
            grad_initial = grad_state.to(ctx.initial_dtype)
        return grad_q, grad_k, grad_v, grad_decay, grad_initial, None


def chunked_retention(
    q_BHNd: Tensor,
    k_BHNd: Tensor,
    v_BHNe: Tensor,
    log_decay: Tensor,
    initial_state_BHde: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.reference_retention``."""
    out: tuple[Tensor, Tensor] = _Chunked.apply(
        q_BHNd, k_BHNd, v_BHNe, log_decay, initial_state_BHde, chunk or CHUNK
    )
    return out

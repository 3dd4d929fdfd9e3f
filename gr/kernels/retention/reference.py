"""The specification: every weight of the sum is written out, autograd does the rest."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_retention(
    q_BHNd: Tensor,
    k_BHNd: Tensor,
    v_BHNe: Tensor,
    log_decay: Tensor,
    initial_state_BHde: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """See ``gr.kernels.retention``; ``log_decay`` is [B or 1, H, N or 1], ``chunk`` is not used."""
    tokens = q_BHNd.shape[2]
    decayed = log_decay.expand(-1, -1, tokens).cumsum(-1)
    step = torch.arange(tokens, device=q_BHNd.device)
    later = step[:, None] < step[None, :]
    between = decayed[..., :, None] - decayed[..., None, :]
    weight = between.masked_fill(later, -torch.inf).exp().to(q_BHNd.dtype)
    out_BHNe = (q_BHNd @ k_BHNd.transpose(-1, -2) * weight) @ v_BHNe

    # What is left of a token's share when the stream ends.
    left = log_decay.expand(-1, -1, tokens).sum(-1)[..., None] - decayed
    k_BHNd = k_BHNd * left.exp()[..., None].to(k_BHNd.dtype)
    state = (k_BHNd.transpose(-1, -2) @ v_BHNe).to(decayed.dtype)
    if initial_state_BHde is not None:
        start = initial_state_BHde.to(decayed.dtype)
        reads = decayed.exp()[..., None].to(q_BHNd.dtype) * q_BHNd
        out_BHNe = out_BHNe + reads @ start.to(q_BHNd.dtype)
        state = state + log_decay.expand(-1, -1, tokens).sum(-1)[..., None, None].exp() * start
    return out_BHNe, state

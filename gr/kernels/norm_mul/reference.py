"""The specification: every intermediate is a tensor, autograd does the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gr.kernels.dropout import fast_dropout


def reference_norm_mul(
    a: Tensor,
    u: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    eps: float,
    concat: bool,
    dropout: float,
) -> Tensor:
    """See ``gr.kernels.norm_mul``."""
    normed = F.layer_norm(a, a.shape[-1:], eps=eps)
    if weight_D is not None:
        normed = normed * weight_D
    if bias_D is not None:
        normed = normed + bias_D
    gated = (normed * u).to(a.dtype)
    if concat:
        gated = torch.cat([u, a, gated], dim=-1)
    return fast_dropout(gated, dropout, training=True)

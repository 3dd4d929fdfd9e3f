"""CPU path: torch's own autograd, which nothing written in Python undercuts at the sizes of a small
model; but the norm gets a scale of ones, without which torch's kernel is not vectorised.

Legend: D width; every other axis counts rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gr.kernels.dropout import fast_dropout


def norm_mul_in_passes(
    a: Tensor,
    u: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    eps: float,
    concat: bool,
    dropout: float,
) -> Tensor:
    """See ``gr.kernels.norm_mul``."""
    x, size = a if a.dtype == torch.float64 else a.float(), a.shape[-1:]
    weight = x.new_ones(size) if weight_D is None else weight_D.to(x.dtype)
    bias = x.new_zeros(size) if bias_D is None else bias_D.to(x.dtype)
    gated = (F.layer_norm(x, size, weight, bias, eps) * u).to(a.dtype)
    joined = torch.cat([u, a, gated], dim=-1) if concat else gated
    return fast_dropout(joined, dropout, training=True)

"""The specification: the mask is a matrix, autograd does the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from gr.kernels.sparse_attention.mask import SparseMask


def reference_attention(
    q_BHQd: Tensor,
    k_BGKd: Tensor,
    v_BGKe: Tensor,
    mask: SparseMask,
    valid_BK: Tensor | None,
    scale: float,
) -> Tensor:
    """See ``gr.kernels.sparse_attention``."""
    q: Tensor = q_BHQd.unflatten(1, (k_BGKd.shape[1], q_BHQd.shape[1] // k_BGKd.shape[1]))
    score = scale * (q @ k_BGKd[:, :, None].transpose(-1, -2))
    seen = mask.matrix(k_BGKd.shape[2], valid_BK, q.device)[:, None, None]
    weight = score.masked_fill(~seen, torch.finfo(score.dtype).min).softmax(-1) * seen
    return (weight @ v_BGKe[:, :, None]).flatten(1, 2)

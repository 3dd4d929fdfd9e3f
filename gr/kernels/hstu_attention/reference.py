"""The specification: every intermediate is a tensor, autograd does the rest."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gr.kernels.hstu_attention.geometry import Geometry


def reference_attention(
    q_BHQd: Tensor,
    k_BHKd: Tensor,
    v_BHKe: Tensor,
    geometry: Geometry,
    position_table_P: Tensor | None,
    time_table_T: Tensor | None,
    scale: float,
    norm_length: float,
) -> Tensor:
    """See ``gr.kernels.hstu_attention``."""
    score_BHQK = scale * (q_BHQd @ k_BHKd.transpose(-1, -2))
    if position_table_P is not None:
        score_BHQK = score_BHQK + position_table_P[geometry.distance()][:, None]
    bucket_BQK = None if time_table_T is None else geometry.bucket()
    if time_table_T is not None and bucket_BQK is not None:
        score_BHQK = score_BHQK + time_table_T[bucket_BQK][:, None]
    weight_BHQK = F.silu(score_BHQK) / norm_length * geometry.mask_BQK[:, None]
    return weight_BHQK @ v_BHKe

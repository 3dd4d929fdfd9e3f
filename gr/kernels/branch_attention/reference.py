"""The specification: scores of prefix and ancestors side by side, autograd does the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_attention(
    q_BHNd: Tensor,
    k_prefix_BGPd: Tensor,
    v_prefix_BGPe: Tensor,
    k_nodes_BGAd: Tensor,
    v_nodes_BGAe: Tensor,
    ancestors_BNL: Tensor,
    valid_BP: Tensor | None,
    scale: float,
    norm_length: float | None,
) -> Tensor:
    """See ``gr.kernels.branch_attention``; ``norm_length`` is None for a softmax."""
    batch, heads, num_queries, _ = q_BHNd.shape
    groups, num_prefix = k_prefix_BGPd.shape[1:3]
    num_nodes, length = k_nodes_BGAd.shape[2], ancestors_BNL.shape[2]
    q = q_BHNd.unflatten(1, (groups, heads // groups))
    ancestors_BNL = ancestors_BNL.expand(batch, -1, -1)
    seen = (ancestors_BNL >= 0)[:, None, None]
    # A row of zeros behind the nodes stands for "no ancestor".
    flat_BS = torch.where(ancestors_BNL < 0, num_nodes, ancestors_BNL).flatten(1)
    at_BGS1 = flat_BS[:, None, :, None].expand(-1, groups, -1, -1)

    def gather(x_BGAd: Tensor) -> Tensor:
        padded = F.pad(x_BGAd, (0, 0, 0, 1))
        rows = padded.take_along_dim(at_BGS1, dim=2)
        split: Tensor = rows.unflatten(2, (num_queries, length))
        return split[:, :, None]

    score = q @ k_prefix_BGPd[:, :, None].transpose(-1, -2)
    own_score = (q[..., None, :] * gather(k_nodes_BGAd)).sum(-1)
    score = scale * torch.cat([score, own_score], dim=-1)
    valid = seen.new_ones(batch, num_prefix) if valid_BP is None else valid_BP
    mask = torch.cat(
        [valid[:, None, None, None].expand(-1, -1, -1, num_queries, -1), seen], dim=-1
    ).expand_as(score)
    if norm_length is None:
        score = score.masked_fill(~mask, torch.finfo(score.dtype).min)
        weight = score.softmax(-1) * mask
    else:
        weight = F.silu(score) / norm_length * mask
    out = weight[..., :num_prefix] @ v_prefix_BGPe[:, :, None]
    out = out + (weight[..., num_prefix:, None] * gather(v_nodes_BGAe)).sum(-2)
    return out.flatten(1, 2)

"""The specification: all logits are a tensor, autograd does the rest."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_losses(
    hidden_TD: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    target_T: Tensor,
    negative: Tensor | None,
    positive_T: Tensor | None,
    smooth: float,
) -> Tensor:
    """See ``gr.kernels.item_softmax``; scaled hidden states against rows that compete.

    Args:
        rows: [V, D] of the table, or [R, D] or [T, R, D] of the negatives.
        bias: of the rows, [V], [R] or [T, R].
        negative: which rows of the table they are; None: the table itself.
        positive_T: scores of the targets, where the rows are negatives.
    """
    score = hidden_TD @ rows.T if rows.dim() == 2 else (rows @ hidden_TD[:, :, None])[..., 0]
    if score.dtype != torch.float64:
        score = score.float()
    if bias is not None:
        score = score + bias
    if negative is None:
        own_T = score.gather(1, target_T[:, None])[:, 0]
        pulled_T = own_T if smooth == 0 else (1 - smooth) * own_T + smooth * score.mean(1)
        return score.logsumexp(1) - pulled_T
    assert positive_T is not None
    score = score.masked_fill(negative == target_T[:, None], -torch.inf)
    positive_T = positive_T.to(score.dtype)
    return torch.cat([positive_T[:, None], score], dim=1).logsumexp(1) - positive_T

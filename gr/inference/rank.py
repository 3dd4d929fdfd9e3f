"""Ranking: the probability of an action after each candidate (M-FALCON).

All candidates of a user are branches of one cached history: the history is read once, candidates
see it and their own tokens and never each other, and microbatches bound the memory. The time of a
candidate is the time of the request. Scores are the same for every microbatch size.

Legend: B users, C candidates of the longest row, M tokens of the longest candidate, A actions.

Source: HSTU §3.4 (M-FALCON).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gr.inference.branches import Prefix


def action_log_probs(
    prefix: Prefix,
    token_BCM: Tensor,
    action_tokens: Tensor,
    microbatch: int = 64,
) -> Tensor:
    """log p(action | history, candidate) for every candidate and action.

    Args:
        prefix: the histories.
        token_BCM: int64 item tokens of each row's candidates; rows of fewer tokens are padded with
            -1 on the right, and so are missing candidates (all -1), whose result has no meaning.
        action_tokens: int64 [A], the tokens among which the probability is normalised.
        microbatch: candidates of a row in one pass; bounds the memory.

    Returns:
        float32 [B, C, A].

    Raises:
        ValueError: no actions, a microbatch below 1, or NaN logits.
    """
    if not len(action_tokens):
        raise ValueError("action_tokens is empty: wanted the tokens of at least one action")
    if microbatch < 1:
        raise ValueError(f"microbatch is {microbatch}: wanted at least 1")
    num_rows, num_candidates, levels = token_BCM.shape
    action_tokens = action_tokens.to(prefix.device)
    token_BCM = _flush_right(token_BCM.to(prefix.device))
    parts = [torch.empty(num_rows, 0, len(action_tokens), device=prefix.device)]
    for start in range(0, num_candidates, microbatch):
        chunk = token_BCM[:, start : start + microbatch]
        token_BN = chunk.flatten(1)
        node = torch.arange(token_BN.shape[1], device=prefix.device)
        # A chain's first real token hangs on the prefix; padding in front of it is seen by nobody.
        starts = torch.cat([chunk.new_full((*chunk.shape[:2], 1), -1), chunk[..., :-1]], 2) < 0
        parent_BN = torch.where(starts.flatten(1), -1, node - 1)
        logits = prefix.branch().append(
            token_BN.clamp_min(0), parent_BN, levels=levels, keep=node[levels - 1 :: levels]
        )
        parts.append(logits[..., action_tokens].log_softmax(-1))
    scores = torch.cat(parts, dim=1)
    real = token_BCM[..., -1] >= 0
    if scores[real].isnan().any():
        raise ValueError(
            "p(action) is NaN: the model returned NaN logits, or rules every action out after an "
            "item (is it trained on a stream with actions?)"
        )
    return scores


def _flush_right(token_BCM: Tensor) -> Tensor:
    """The same chains with their padding in front, so that every last token is in one column."""
    levels = token_BCM.shape[2]
    shift = (token_BCM < 0).sum(-1, keepdim=True)
    at = torch.arange(levels, device=token_BCM.device) - shift
    return torch.where(at < 0, -1, token_BCM.gather(2, at.clamp_min(0)))

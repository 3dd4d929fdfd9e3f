"""Retrieval: the best items of the trie under a history, by beams on a shared prefix.

Legend: B users, w beams before a step and W beams at most, C children of the widest node of a
level, V vocabulary, k items wanted.

An item's score is the log-probability of its whole semantic ID: the sum over its tokens of
log-softmax over the *full* vocabulary, which is what stock ``generate`` with a prefix constraint
and no length penalty sums. Rules: what the trie or the filter forbids is -inf; a beam without a
permitted child dies and stays dead; beams kept are at most min(W, permitted children); an item
comes out once. Two sibling beams never meet again, so there is nothing to deduplicate.

As every live beam has a permitted item below it, W >= k beams lose no item for want of beams:
min(k, permitted items) always come out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gr.inference.branches import Branches, Prefix
from gr.inference.constraint import RowFilter
from gr.tokenizer.trie import ROOT, ItemTrie


@dataclass(frozen=True)
class Beams:
    """Finished beams, best first.

    ``node_BW`` is int64, the leaf of each beam, -1 for a dead one; ``score_BW`` is float32, its
    log-probability, -inf for a dead one.
    """

    node_BW: Tensor
    score_BW: Tensor


def default_num_beams(k: int) -> int:
    """Beams for k items when the caller names no number: twice k, at least 50.

    A beam search finds the best items only if their beginnings survive, so some slack over k is
    needed; more than that costs time and changes little.
    """
    return max(2 * k, 50)


def child_log_probs(logits_BwV: Tensor, token_BwC: Tensor) -> Tensor:
    """log-softmax over the full vocabulary at some tokens, float32 [B, w, C].

    A row of logits that is all -inf (a grammar that allows nothing) gives -inf, not NaN.
    """
    total = logits_BwV.logsumexp(-1, keepdim=True)
    chosen = logits_BwV.gather(-1, token_BwC)
    return torch.where(total == -torch.inf, -torch.inf, chosen - total)


def beam_search(prefix: Prefix, trie: ItemTrie, num_beams: int, keep: RowFilter) -> Beams:
    """The ``num_beams`` best permitted leaves that a beam search of that width finds.

    An item with fewer tokens than others keeps its place among the beams with its final score.

    Raises:
        ValueError: fewer than one beam, a filter for another number of rows, or NaN logits.
    """
    if num_beams < 1:
        raise ValueError(f"num_beams is {num_beams}: wanted at least 1")
    if keep.num_requests not in (1, prefix.num_rows):
        raise ValueError(f"the filter holds {keep.num_requests} requests: wanted {prefix.num_rows}")
    device, num_rows = prefix.device, prefix.num_rows
    branches: Branches | None = None
    node_Bw = torch.full((num_rows, 1), ROOT, dtype=torch.int64, device=device)
    score_Bw = torch.zeros(num_rows, 1, device=device)
    branch_Bw = torch.full_like(node_Bw, -1)
    logits_BwV = prefix.logits_BV[:, None]
    for depth in range(trie.levels):
        child_BwC, gain_BwC = _continuations(trie, node_Bw, logits_BwV, trie.level_degree[depth])
        dead = keep.count(trie, child_BwC) == 0
        total_BwC = (score_Bw[..., None] + gain_BwC).masked_fill(dead, -torch.inf)
        width = min(num_beams, total_BwC[0].numel(), trie.level_width[depth])
        score_Bw, best_Bw = total_BwC.flatten(1).topk(width)
        node_Bw = child_BwC.flatten(1).gather(1, best_Bw)
        node_Bw = torch.where(score_Bw == -torch.inf, -1, node_Bw)
        if depth + 1 == trie.levels:
            break
        if branches is None:
            branches = prefix.branch()
        parent_Bw = branch_Bw.gather(1, best_Bw // child_BwC.shape[2])
        token_Bw = trie.token[node_Bw.clamp_min(0)].long().clamp_min(0)
        first = branches.num_nodes
        logits_BwV = branches.append(token_Bw, parent_Bw)
        branch_Bw = torch.arange(first, first + width, device=device).expand(num_rows, -1)
    if score_Bw.isnan().any():
        raise ValueError("the model returned NaN logits: wanted finite ones (check its weights)")
    return Beams(node_Bw, score_Bw)


def _continuations(
    trie: ItemTrie, node_Bw: Tensor, logits_BwV: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Children of every beam and their log-probabilities, [B, w, C]; -1 and -inf past the last."""
    child_BwC, real_BwC = trie.children(node_Bw, width)
    token_BwC = trie.token[child_BwC].long().clamp_min(0)
    gain_BwC = child_log_probs(logits_BwV, token_BwC).masked_fill(~real_BwC, -torch.inf)
    child_BwC = child_BwC.masked_fill(~real_BwC, -1)
    if trie.mixed:
        done_Bw = trie.is_leaf(node_Bw)
        child_BwC[..., 0] = torch.where(done_Bw, node_Bw, child_BwC[..., 0])
        gain_BwC[..., 0] = gain_BwC[..., 0].masked_fill(done_Bw, 0.0)
    return child_BwC, gain_BwC


def expand_buckets(beams: Beams, trie: ItemTrie, keep: RowFilter, k: int) -> tuple[Tensor, Tensor]:
    """The first k permitted items behind the beams' leaves.

    Beams in order of score; within a leaf, items in order of popularity, all with its score.

    Returns:
        catalogue row int64 [B, k], -1 past the last, and score float32 [B, k].
    """
    low_BW, _ = trie.rows(beams.node_BW)
    count_BW = keep.count(trie, beams.node_BW)
    end_BW = count_BW.cumsum(1)
    slot_Bk = torch.arange(k, device=end_BW.device).expand(len(end_BW), -1).contiguous()
    leaf_Bk = torch.searchsorted(end_BW, slot_Bk, right=True)
    real_Bk = leaf_Bk < end_BW.shape[1]
    leaf_Bk = leaf_Bk.clamp_max(end_BW.shape[1] - 1)
    within_Bk = slot_Bk - (end_BW - count_BW).gather(1, leaf_Bk)
    rank_Bk = keep.rank(low_BW).gather(1, leaf_Bk) + within_Bk
    row_Bk = trie.order[keep.select(rank_Bk).clamp_max(trie.num_items - 1)]
    score_Bk = beams.score_BW.gather(1, leaf_Bk)
    return row_Bk.masked_fill(~real_Bk, -1), score_Bk.masked_fill(~real_Bk, -torch.inf)


def retrieve(
    prefix: Prefix,
    trie: ItemTrie,
    k: int,
    num_beams: int | None = None,
    keep: RowFilter | None = None,
) -> tuple[Tensor, Tensor]:
    """The best k permitted items of every row.

    Args:
        prefix: the histories.
        trie: the catalogue.
        k: items wanted per row; rows with fewer permitted items get those.
        num_beams: None takes ``default_num_beams(k)``. At least k.
        keep: which items may come out; None: all.

    Returns:
        catalogue row int64 [B, k], -1 past the last, and log-probability float32 [B, k], best
        first.

    Raises:
        ValueError: k < 1, fewer beams than k, or what ``beam_search`` raises.
    """
    if k < 1:
        raise ValueError(f"k is {k}: wanted at least 1")
    if num_beams is None:
        num_beams = default_num_beams(k)
    if num_beams < k:
        raise ValueError(f"num_beams is {num_beams}: wanted at least k, which is {k}")
    if keep is None:
        keep = RowFilter.everything(trie.num_items, trie.device)
    return expand_buckets(beam_search(prefix, trie, num_beams, keep), trie, keep, k)

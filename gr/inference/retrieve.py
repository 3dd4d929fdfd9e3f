"""Retrieval: the best items of the trie under a history, by beams on a shared prefix.

Legend: B users, w beams before a step and W beams at most, S candidates of a row (the continuations
of all its beams behind each other), V vocabulary, C tokens asked for, k items wanted.

An item's score is the log-probability of its whole semantic ID: the sum over its tokens of
log-softmax over the *full* vocabulary, which is what stock ``generate`` with a prefix constraint
and no length penalty sums. Rules: what the trie or the filter forbids is -inf; a beam without a
permitted child dies and stays dead; beams kept are at most min(W, permitted children); an item
comes out once. Two sibling beams never meet again, so there is nothing to deduplicate.

As every live beam has a permitted item below it, W >= k beams lose no item for want of beams:
min(k, permitted items) always come out, or as many of them as ``max_per_prefix`` leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gr.inference.beam_options import (
    BeamOptions,
    GumbelBeams,
    of_beam,
    spread_topk,
    sum_before_in_group,
)
from gr.inference.branches import Branches, Prefix
from gr.inference.constraint import RowFilter
from gr.tokenizer.trie import ROOT, ItemTrie, lookup


@dataclass(frozen=True)
class Beams:
    """Finished beams, best (or drawn) first.

    ``node_BW`` is int64, the leaf of each beam, -1 for a dead one; ``score_BW`` is float32, its
    log-probability, -inf for a dead one; ``group_BW`` is int64, the node of its first
    ``prefix_levels`` tokens, the leaf itself where it has fewer.
    """

    node_BW: Tensor
    score_BW: Tensor
    group_BW: Tensor


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


def _gains(logits_BwV: Tensor, token_BS: Tensor, beam_BS: Tensor, temperature: float) -> Tensor:
    """log-softmax of logits / temperature at each candidate's token after its beam.

    The same as `child_log_probs`, in the place of the logits: these are the largest tensor of a
    step, and fresh memory for it costs as much as the arithmetic.
    """
    top_Bw1 = logits_BwV.amax(-1, keepdim=True)
    # The largest becomes 0 before it is divided: no temperature, however small, can overflow.
    logits_BwV.sub_(top_Bw1.masked_fill(top_Bw1 == -torch.inf, 0.0))
    if temperature != 1:
        logits_BwV.div_(temperature)
    at_BS = token_BS if logits_BwV.shape[1] == 1 else beam_BS * logits_BwV.shape[2] + token_BS
    chosen_BS = logits_BwV.flatten(1).gather(1, at_BS)
    total_Bw = logits_BwV.exp_().sum(-1).log_()
    total_Bw.masked_fill_(total_Bw == -torch.inf, 0.0)
    return chosen_BS.sub_(of_beam(total_Bw, beam_BS))


def beam_search(
    prefix: Prefix,
    trie: ItemTrie,
    num_beams: int,
    keep: RowFilter,
    options: BeamOptions | None = None,
    request_B: Tensor | None = None,
) -> Beams:
    """The ``num_beams`` best permitted leaves that a beam search of that width finds.

    An item with fewer tokens than others keeps its place among the beams with its final score.

    Args:
        prefix: the histories.
        trie: the catalogue.
        num_beams: W.
        keep: which items may come out.
        options: None: the best leaves, whatever they have in common.
        request_B: int64, the number by which sampling knows each row: with one seed, a row's answer
            depends on its number and on no other row. None: its place in the batch.

    Raises:
        ValueError: fewer than one beam, a filter for another trie or number of rows, a token that
            the model does not have, ``prefix_levels`` beyond the trie's, other than one number per
            row, or NaN logits.
    """
    options = options or BeamOptions()
    _check(prefix, trie, num_beams, keep, options, request_B)
    device, num_rows = prefix.device, prefix.num_rows
    draws: GumbelBeams | None = None
    if options.seed is not None:
        numbers_B = torch.arange(num_rows) if request_B is None else request_B
        draws = GumbelBeams(options.seed, numbers_B.to(device))
    branches: Branches | None = None
    node_Bw = torch.full((num_rows, 1), ROOT, dtype=torch.int64, device=device)
    group_Bw, branch_Bw = node_Bw, torch.full_like(node_Bw, -1)
    score_Bw = torch.zeros(num_rows, 1, device=device)
    logits_BwV = prefix.logits_BV[:, None].clone()
    for depth in range(trie.levels):
        # All rows begin at one node, whose children may be the whole catalogue.
        child_BS, beam_BS = trie.fan_out(node_Bw if depth else node_Bw[:1], depth)
        token_BS = lookup(trie.token, child_BS.clamp_min(0)).clamp_min_(0).long()
        candidates = child_BS.shape[1]
        cap = options.max_per_prefix if depth >= options.prefix_levels else None
        # Where only the best are kept, exclusions need to be looked up for the best alone.
        late = draws is None and cap is None and 2 * (num_beams + keep.num_excluded) < candidates
        live_BS = _live(trie, child_BS, keep.before_exclusions if late else keep)
        child_BS, beam_BS, token_BS, live_BS = (
            tensor.expand(num_rows, -1) for tensor in (child_BS, beam_BS, token_BS, live_BS)
        )
        gain_BS = _gains(logits_BwV, token_BS, beam_BS, options.temperature)
        if trie.mixed:
            gain_BS.masked_fill_(child_BS == of_beam(node_Bw, beam_BS), 0.0)
        gain_BS = torch.where(live_BS, gain_BS, -torch.inf)
        key_BS = total_BS = of_beam(score_Bw, beam_BS) + gain_BS
        if draws is not None:
            key_BS = draws.grow(gain_BS, token_BS, beam_BS)
        width = min(num_beams, candidates, trie.level_width[depth])
        if cap is not None:
            group_BS = of_beam(group_Bw, beam_BS)
            key_Bw, best_Bw, beyond_Bw = spread_topk(key_BS, group_BS, cap, width)
            if depth + 1 == trie.levels:
                key_Bw = key_Bw.masked_fill(beyond_Bw, -torch.inf)
        elif late and keep.num_excluded:
            key_Bw, best_Bw = _topk_not_excluded(key_BS, child_BS, width, trie, keep)
        else:
            key_Bw, best_Bw = key_BS.topk(width)
        if draws is not None:
            draws.keep(best_Bw)
        dead_Bw = key_Bw == -torch.inf
        parent_Bw = beam_BS.gather(1, best_Bw)
        node_Bw = child_BS.gather(1, best_Bw).masked_fill_(dead_Bw, -1)
        score_Bw = total_BS.gather(1, best_Bw).masked_fill_(dead_Bw, -torch.inf)
        group_Bw = node_Bw if depth < options.prefix_levels else group_Bw.gather(1, parent_Bw)
        if depth + 1 == trie.levels:
            break
        if branches is None:
            branches = prefix.branch()
        first = branches.num_nodes
        logits_BwV = branches.append(token_BS.gather(1, best_Bw), branch_Bw.gather(1, parent_Bw))
        branch_Bw = torch.arange(first, first + width, device=device).expand(num_rows, -1)
    if score_Bw.isnan().any():
        raise ValueError("the model returned NaN logits: wanted finite ones (check its weights)")
    return Beams(node_Bw, score_Bw, group_Bw)


def _check(
    prefix: Prefix,
    trie: ItemTrie,
    num_beams: int,
    keep: RowFilter,
    options: BeamOptions,
    request_B: Tensor | None,
) -> None:
    num_rows, vocabulary = prefix.logits_BV.shape
    if num_beams < 1:
        raise ValueError(f"num_beams is {num_beams}: wanted at least 1")
    if trie.largest_token >= vocabulary:
        raise ValueError(
            f"the trie has token {trie.largest_token}: wanted less than {vocabulary}, which is how "
            "many logits the model has"
        )
    if keep.num_rows != trie.num_items:
        raise ValueError(f"keep is over {keep.num_rows} items: wanted the trie's {trie.num_items}")
    if keep.num_requests not in (1, num_rows):
        raise ValueError(f"the filter holds {keep.num_requests} requests: wanted {num_rows}")
    if options.max_per_prefix is not None and options.prefix_levels > trie.levels:
        raise ValueError(
            f"prefix_levels is {options.prefix_levels}: wanted at most {trie.levels}, the tokens "
            "of the longest semantic ID"
        )
    if request_B is not None and request_B.shape != (num_rows,):
        raise ValueError(f"request_B has shape {tuple(request_B.shape)}: wanted ({num_rows},)")


def _live(trie: ItemTrie, child_BS: Tensor, keep: RowFilter) -> Tensor:
    """Candidates with a permitted item below."""
    if keep.unconstrained:
        return child_BS >= 0
    requests = max(len(child_BS), keep.num_requests)
    return keep.count(trie, child_BS.expand(requests, -1)) > 0


def _topk_not_excluded(
    key_BS: Tensor, child_BS: Tensor, width: int, trie: ItemTrie, keep: RowFilter
) -> tuple[Tensor, Tensor]:
    """topk among the candidates that exclusions have left something below.

    No more than ``keep.num_excluded`` have nothing left, so so many more are looked at.
    """
    key_BW, at_BW = key_BS.topk(width + keep.num_excluded)
    empty_BW = keep.count(trie, child_BS.gather(1, at_BW)) == 0
    key_BW, best_BW = key_BW.masked_fill(empty_BW, -torch.inf).topk(width)
    return key_BW, at_BW.gather(1, best_BW)


def expand_buckets(
    beams: Beams, trie: ItemTrie, keep: RowFilter, k: int, max_per_prefix: int | None = None
) -> tuple[Tensor, Tensor]:
    """The first k permitted items behind the beams' leaves.

    In the order of the beams; within a leaf, items in order of popularity, all with its score; and
    not more than ``max_per_prefix`` of one group.

    Returns:
        catalogue row int64 [B, k], -1 past the last, and score float32 [B, k].
    """
    low_BW, _ = trie.rows(beams.node_BW)
    count_BW = keep.count(trie, beams.node_BW)
    if max_per_prefix is not None:
        before_BW = sum_before_in_group(beams.group_BW, count_BW)
        count_BW = torch.minimum(count_BW, (max_per_prefix - before_BW).clamp_min(0))
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
    options: BeamOptions | None = None,
    request_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best k permitted items of every row.

    Args:
        prefix: the histories.
        trie: the catalogue.
        k: items wanted per row; rows with fewer permitted items get those.
        num_beams: None takes ``default_num_beams(k)``. At least k.
        keep: which items may come out; None: all.
        options: how beams are chosen, see `BeamOptions`; None: the best ones.
        request_B: int64, the number of each row for sampling, see ``beam_search``.

    Returns:
        catalogue row int64 [B, k], -1 past the last, and log-probability float32 [B, k], best
        first; in the order of drawing where ``options`` has a seed.

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
    options = options or BeamOptions()
    beams = beam_search(prefix, trie, num_beams, keep, options, request_B)
    return expand_buckets(beams, trie, keep, k, options.max_per_prefix)

"""Exact scores of the whole catalogue through the trie.

The tokens of every branch are known beforehand, so all inner nodes of the trie are appended in one
pass (or in chunks of them), each shared beginning once. The result is what a beam search of
unlimited width would find, for every item: the ground truth of whole-catalogue metrics. A catalogue
of one-token items needs no pass at all, only the logits after the history.

Legend: B users, n items, N trie nodes, c nodes of a chunk, C children, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gr.inference.branches import Prefix
from gr.inference.retrieve import child_log_probs
from gr.tokenizer.trie import ROOT, ItemTrie


class CatalogPlan:
    """Which trie nodes are appended in which pass; made once per trie.

    Args:
        trie: the catalogue.
        chunk: inner nodes in one pass; bounds the memory at B x chunk x V logits.

    Raises:
        ValueError: a chunk below 1.
    """

    def __init__(self, trie: ItemTrie, chunk: int = 256) -> None:
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}: wanted at least 1")
        self.trie, self.chunk = trie, chunk
        self.parent = trie.parents()
        leaf = torch.nonzero(trie.is_leaf(torch.arange(trie.num_nodes, device=trie.device)))[:, 0]
        low, high = trie.rows(leaf)
        in_order = torch.argsort(low)
        self.leaf_of_row = torch.repeat_interleave(leaf[in_order], (high - low)[in_order])
        self.chunks = self._cut()

    def _cut(self) -> list[tuple[Tensor, Tensor, int]]:
        """Inner nodes in depth-first order, in chunks that carry their first node's ancestors.

        In that order a node's ancestors are in its chunk or above the chunk's first node. Each
        chunk is (trie nodes int64 [c], place of each one's parent in the chunk or -1, levels).
        """
        trie, parent = self.trie, self.parent.cpu()
        depth = torch.zeros(trie.num_nodes, dtype=torch.int64)
        for level, start in enumerate(trie.level_starts[1:-1], start=1):
            depth[start : trie.level_starts[level + 1]] = level
        inner = torch.nonzero(trie.child_ptr.cpu().diff() > 0)[1:, 0]  # all but the root
        key = trie.row_lo.cpu()[inner].long() * (trie.levels + 1) + depth[inner]
        inner = inner[torch.argsort(key)]
        place = torch.full((trie.num_nodes,), -1, dtype=torch.int64)
        chunks = []
        for begin in range(0, len(inner), self.chunk):
            nodes = inner[begin : begin + self.chunk]
            above: list[int] = []
            up = int(parent[nodes[0]])
            while up != ROOT:
                above.insert(0, up)
                up = int(parent[up])
            nodes = torch.cat([torch.tensor(above, dtype=torch.int64), nodes])
            place[nodes] = torch.arange(len(nodes))
            local = torch.where(parent[nodes] == ROOT, -1, place[parent[nodes]])
            levels = int(depth[nodes].max())
            chunks.append((nodes.to(trie.device), local.to(trie.device), levels))
        return chunks


def catalog_log_probs(prefix: Prefix, plan: CatalogPlan) -> Tensor:
    """log p(semantic ID | history) of every item.

    Returns:
        float32 [B, n] in the order of catalogue rows; items that share a semantic ID have equal
        scores.

    Raises:
        ValueError: NaN logits.
    """
    trie, num_rows = plan.trie, prefix.num_rows
    token_N = trie.token.long()
    first, last = trie.level_starts[1], trie.level_starts[2]
    score_BN = torch.zeros(num_rows, trie.num_nodes, device=prefix.device)
    top_B1C = token_N[first:last].expand(num_rows, 1, -1)
    score_BN[:, first:last] = child_log_probs(prefix.logits_BV[:, None], top_B1C)[:, 0]
    for nodes, local_parent, levels in plan.chunks:
        logits_BcV = prefix.branch().append(
            token_N[nodes].expand(num_rows, -1), local_parent[None], levels
        )
        child_cC, real_cC = trie.children(nodes, max(trie.level_degree[1:]))
        token_BcC = token_N[child_cC].clamp_min(0).expand(num_rows, -1, -1)
        gain_BcC = child_log_probs(logits_BcV, token_BcC)
        # Ancestors that a later chunk repeats give their children the same values again.
        score_BN[:, child_cC[real_cC]] = gain_BcC[:, real_cC]
    for start, end in zip(trie.level_starts[2:-1], trie.level_starts[3:], strict=True):
        score_BN[:, start:end] += score_BN[:, plan.parent[start:end]]
    score_Bn = torch.empty(num_rows, trie.num_items, device=prefix.device)
    score_Bn[:, trie.order] = score_BN[:, plan.leaf_of_row]
    if score_Bn.isnan().any():
        raise ValueError("the model returned NaN logits: wanted finite ones (check its weights)")
    return score_Bn

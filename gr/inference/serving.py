"""A catalogue as it is served: everything that depends on the items, replaced as one.

The three questions are answered here for prefixes that have been read already. `Recommender` asks
them about batches of histories that it reads first, `Session` about one that it holds.

Legend: B users of a batch, C candidates of the longest row, A actions, k items wanted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gr.inference.beam_options import BeamOptions
from gr.inference.branches import Backbone, Prefix
from gr.inference.constraint import ItemSubset, RowFilter, build_filter
from gr.inference.exhaustive import CatalogPlan, catalog_log_probs
from gr.inference.histories import HistoryEncoder, Report
from gr.inference.rank import action_log_probs
from gr.inference.retrieve import default_num_beams, retrieve
from gr.inference.scored import Scored
from gr.inference.subsets import CatalogSubset
from gr.tokenizer import SemanticIdTokenizer
from gr.tokenizer.trie import ItemTrie

IntArray = npt.NDArray[np.int64]
Items: TypeAlias = Collection["str | int"]
AllowedToOne: TypeAlias = "Items | CatalogSubset | None"
Allowed: TypeAlias = "AllowedToOne | Sequence[AllowedToOne]"
# What the filter knows: a subset, catalogue rows, or None for all items.
Permitted: TypeAlias = "list[ItemSubset | IntArray | None] | None"
# An action, or weights of several: the score is then the weighted sum of their probabilities.
Wanted: TypeAlias = "str | Mapping[str, float] | None"


class ServedCatalog:
    """One version of the catalogue, never changed once made.

    Args:
        tokenizer: with the catalogue.
        trie: of that catalogue, on the device of the model.
        backbone: the model.
        missing_action, max_events: see `HistoryEncoder`.
    """

    def __init__(
        self,
        tokenizer: SemanticIdTokenizer,
        trie: ItemTrie,
        backbone: Backbone,
        missing_action: str | None,
        max_events: int | None,
    ) -> None:
        assert tokenizer.catalog is not None
        self.tokenizer, self.trie, self.catalog = tokenizer, trie, tokenizer.catalog
        self.actions = tokenizer.vocabulary.actions
        self.encoder = HistoryEncoder(tokenizer, backbone, missing_action, max_events)
        self._item_tokens = torch.from_numpy(tokenizer.encoder.item_tokens).to(trie.device)
        self._action_tokens = torch.from_numpy(tokenizer.vocabulary.action_tokens)
        self._plan: CatalogPlan | None = None

    # ---- what callers name, as catalogue rows ------------------------------------------------

    def allowed(self, given: Allowed, count: int, report: Report) -> Permitted:
        """What may come out: one entry for all requests, or one for each of ``count``."""
        if given is None:
            return None
        if isinstance(given, CatalogSubset):
            return [given.of(self.catalog, self.trie)]
        groups, _ = _per_row("allowed", given, count)
        kept: list[ItemSubset | IntArray | None] = []
        for group in groups:
            if group is None:
                kept.append(None)
            elif isinstance(group, CatalogSubset):
                kept.append(group.of(self.catalog, self.trie))
            else:
                names = [str(item) for item in group]
                index = self.catalog.index(names)
                report.unknown_allowed += [names[i] for i in np.flatnonzero(index < 0)]
                kept.append(index[index >= 0])
        return kept

    def candidates(
        self, given: Any, count: int, report: Report, drop_unknown: bool = True
    ) -> list[IntArray]:
        """Catalogue rows of the candidates of every request; unknown ones are -1 or left out."""
        groups, shared = _per_row("candidates", given, count)
        wanted = []
        for number, group in enumerate(groups):
            if group is None:
                raise ValueError(f"candidates[{number}] is None: wanted a collection of item ids")
            names = [str(item) for item in group]
            index = self.catalog.index(names)
            if (index < 0).any():
                unknown = [names[i] for i in np.flatnonzero(index < 0)]
                report.unknown_candidates[number] = unknown
            wanted.append(index[index >= 0] if drop_unknown else index)
        return wanted * count if shared else wanted

    def weights(self, wanted: Wanted, default: str | None) -> Tensor:
        """float32 [A]: what the probability of each action counts.

        Raises:
            ValueError: fewer than two actions in the stream, or one that it does not have.
        """
        if len(self.actions) < 2:
            raise ValueError(
                f"the model's stream has actions {self.actions}: ranking needs two or more to tell "
                "apart; build the tokenizer with actions=..., or use retrieve"
            )
        chosen = wanted if wanted is not None else default
        named = chosen if isinstance(chosen, Mapping) else {chosen: 1.0}
        weights = torch.zeros(len(self.actions))
        for name, weight in named.items():
            if name not in self.actions:
                raise ValueError(f"action is {name!r}: wanted one of {self.actions}")
            weights[self.actions.index(name)] = weight
        if not named:
            raise ValueError(f"action is {chosen!r}: wanted weights of one or more actions")
        return weights

    def event_weights(self, wanted: Wanted, default: str | None) -> Tensor | None:
        """As ``weights``, positive; None for a stream that has nothing to rank by."""
        if len(self.actions) < 2:
            return None
        weights = self.weights(wanted, default)
        if (weights < 0).any():
            raise ValueError(f"action is {wanted!r}: wanted weights above 0")
        return weights

    # ---- the questions -----------------------------------------------------------------------

    def retrieve(
        self,
        prefix: Prefix,
        keep: RowFilter,
        k: int,
        num_beams: int | None,
        options: BeamOptions | None,
        numbers: IntArray,
    ) -> list[list[Scored]]:
        """See `Recommender.retrieve`; ``numbers`` are those of the requests in their call."""
        k = min(k, len(self.catalog))
        request_B = torch.from_numpy(numbers)
        return self._named(*retrieve(prefix, self.trie, k, num_beams, keep, options, request_B))

    def recommend(
        self, prefix: Prefix, keep: RowFilter, k: int, weights: Tensor | None, action_weight: float
    ) -> list[list[Scored]]:
        """See `Recommender.recommend`; ``weights`` None: retrieval alone."""
        row_BC, score_BC = retrieve(prefix, self.trie, self.pool(k), keep=keep)
        if weights is not None:
            # In logarithms all the way: a small probability must not become 0.
            log_probs_BCA = self.action_log_probs(prefix, row_BC)
            action_BC = (log_probs_BCA + weights.to(log_probs_BCA.device).log()).logsumexp(-1)
            score_BC = (score_BC + action_weight * action_BC).masked_fill(row_BC < 0, -torch.inf)
            row_BC, score_BC = _best_first(row_BC, score_BC)
        return self._named(row_BC[:, :k], score_BC[:, :k])

    def rank(
        self, prefix: Prefix, rows: Sequence[IntArray], weights: Tensor, microbatch: int
    ) -> list[list[Scored]]:
        """See `Recommender.rank`; ``rows`` are known candidates."""
        row_BC = padded_rows(rows).to(self.trie.device)
        log_probs_BCA = self.action_log_probs(prefix, row_BC, microbatch)
        score_BC = log_probs_BCA.exp() @ weights.to(log_probs_BCA.device)
        return self._named(*_best_first(row_BC, score_BC.masked_fill(row_BC < 0, -torch.inf)))

    def score_catalog(self, prefix: Prefix, chunk: int) -> Tensor:
        """See `Recommender.score_catalog`."""
        if self._plan is None or self._plan.chunk != chunk:
            self._plan = CatalogPlan(self.trie, chunk)
        return catalog_log_probs(prefix, self._plan)

    def action_log_probs(self, prefix: Prefix, row_BC: Tensor, microbatch: int = 64) -> Tensor:
        """log p(action | history, item), float32 [B, C, A]; no meaning where ``row_BC`` is -1."""
        tokens_BCM = self._item_tokens[row_BC.clamp_min(0)]
        tokens_BCM = tokens_BCM.masked_fill(row_BC[..., None] < 0, -1)
        return action_log_probs(prefix, tokens_BCM, self._action_tokens, microbatch)

    # ---- shared steps ------------------------------------------------------------------------

    def filter(
        self,
        seen: Sequence[IntArray],
        allowed: Permitted,
        exclude_seen: bool,
    ) -> RowFilter:
        """The constraint of a batch whose rows have seen the catalogue rows ``seen``."""
        return build_filter(self.trie, seen if exclude_seen else None, allowed)

    def pool(self, k: int) -> int:
        """How many items are retrieved to be ranked."""
        return min(max(5 * k, 50), len(self.catalog))

    def room(self, num_beams: int | None, k: int) -> int:
        """Nodes that branches append for such a question."""
        beams = num_beams or default_num_beams(k)
        return min(beams, len(self.catalog)) * (self.trie.levels - 1)

    def _named(self, row_Bk: Tensor, score_Bk: Tensor) -> list[list[Scored]]:
        names = self.catalog.item_ids
        return [
            [Scored(names[r], s) for r, s in zip(row, score, strict=True) if r >= 0]
            for row, score in zip(row_Bk.tolist(), score_Bk.tolist(), strict=True)
        ]


def _best_first(row_BC: Tensor, score_BC: Tensor) -> tuple[Tensor, Tensor]:
    order = score_BC.argsort(dim=1, descending=True, stable=True)
    return row_BC.gather(1, order), score_BC.gather(1, order)


def padded_rows(rows: Sequence[IntArray]) -> Tensor:
    """Catalogue rows int64 [B, C], -1 past a row's last."""
    width = max((len(row) for row in rows), default=0)
    table = np.full((len(rows), width), -1, dtype=np.int64)
    for at, row in enumerate(rows):
        table[at, : len(row)] = row
    return torch.from_numpy(table)


def _per_row(name: str, given: Any, count: int) -> tuple[list[Any], bool]:
    """Collections of ids per history, and whether a single one serves all.

    Raises:
        ValueError: a single string, single ids among collections, or as many collections as
            neither.
    """
    if isinstance(given, str):
        raise ValueError(f"{name} is the string {given!r}: wanted a collection of item ids")
    entries = list(given)
    if all(isinstance(entry, (str, int, np.integer)) for entry in entries) and not (
        count == 0 and not entries
    ):
        return [entries], True
    for number, entry in enumerate(entries):
        if isinstance(entry, (str, int, np.integer)):
            raise ValueError(f"{name}[{number}] is {entry!r}: wanted a collection of item ids")
    if len(entries) != count:
        raise ValueError(f"{name} has {len(entries)} entries: wanted one for each of {count}")
    return entries, False

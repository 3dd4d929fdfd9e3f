"""The validation that selects a checkpoint: retrieval metrics over the whole catalogue."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedModel

from gr.data import Event
from gr.tokenizer import ItemTrie, SemanticIdTokenizer


class CatalogValidation:
    """Exact scores of all items for every row, then HR, NDCG and MRR; a ``GRTrainer`` evaluation.

    Histories are encoded once, at the first call. A row is asked at the time of its target, as a
    served model is.

    Args:
        tokenizer: with its catalogue.
        rows: validation part of a split.
        max_events: events of a history that the model reads.
        has_clock: False where times are an order, and the model sees none.
        limit: use that many rows, drawn by ``seed``; None for all.
        exclude_seen: a history's own items are no candidates.
        batch_size: users scored at once.
    """

    def __init__(
        self,
        tokenizer: SemanticIdTokenizer,
        rows: Any,
        max_events: int,
        has_clock: bool = True,
        limit: int | None = None,
        seed: int = 0,
        exclude_seen: bool = True,
        batch_size: int = 64,
    ) -> None:
        from gr.eval import EvaluationSet

        if limit is not None and limit < len(rows):
            chosen = np.random.default_rng(seed).choice(len(rows), limit, replace=False)
            rows = rows.select(np.sort(chosen))
        assert tokenizer.catalog is not None
        self.tokenizer, self.max_events, self.has_clock = tokenizer, max_events, has_clock
        self.exclude_seen, self.batch_size = exclude_seen, batch_size
        self.rows = EvaluationSet.from_rows(rows, tokenizer.catalog)
        self.trie = ItemTrie.from_catalog(tokenizer.catalog, tokenizer.vocabulary)
        self._encoded: list[list[Any]] | None = None

    def __call__(self, model: PreTrainedModel) -> dict[str, float]:
        """HR@k, NDCG@k and MRR@k of ``model``, which is in evaluation mode."""
        from gr.eval import Bootstrap, RetrievalProtocol, evaluate_retrieval
        from gr.inference import Backbone, CatalogPlan, catalog_log_probs
        from gr.inference.histories import HistoryEncoder, Report

        # No default action: an event without one reads [UNK] here as it does in training.
        encoder = HistoryEncoder(self.tokenizer, Backbone(model), None, self.max_events)
        step = 8 * self.batch_size
        if self._encoded is None:
            self._encoded = [
                encoder.encode(self._histories(batch), self._times(batch), Report())
                for _, batch in self.rows.batches(step)
            ]
        plan = CatalogPlan(self.trie.to(model.device))
        encoded = iter(self._encoded)

        def score(batch: Any) -> Any:
            scores = np.empty((len(batch), self.rows.num_items), dtype=np.float32)
            for numbers, prefix in encoder.batches(next(encoded), self.batch_size):
                scores[numbers] = catalog_log_probs(prefix, plan).float().cpu().numpy()
            return scores

        result = evaluate_retrieval(
            score,
            self.rows,
            RetrievalProtocol(ks=(10, 50), exclude_seen=self.exclude_seen),
            batch_size=step,
            bootstrap=Bootstrap(replicates=0),
        )
        return {n: v for n, v in result.metrics.items() if not n.startswith("coverage")}

    def _histories(self, batch: Any) -> list[list[Event]]:
        known = set(self.tokenizer.vocabulary.actions)
        return [
            [
                Event(item, action if action in known else None, time if self.has_clock else None)
                for item, action, time in zip(items, acts, times, strict=True)
            ]
            for items, acts, times in zip(
                batch.item_ids, batch.actions, batch.timestamps, strict=True
            )
        ]

    def _times(self, batch: Any) -> list[int] | None:
        return list(batch.request_times) if self.has_clock else None

"""Three baselines that cost nothing: run them beside every model, which should beat them.

Legend: B histories, I items, X binary users x items of the training histories, n(i) users who met
item i.

    Popularity   score(j) = events of j in training
    ItemKNN      score(j) = sum over distinct i in the history of          sim(i, j)
    RecencyKNN   score(j) = sum over distinct i in the history of decay^age(i) sim(i, j)

    sim(i, j)    = |users with both| / (sqrt(n(i) n(j)) + shrinkage), kept for the `neighbours`
                   items i most similar to each candidate j, 0 elsewhere; sim(j, j) = 0.
    age(i)       = events since i was last met: 0 for the newest event of the history.

The similarity is the cosine of implicit co-occurrence (Deshpande and Karypis 2004, "Item-based
top-N recommendation algorithms", section 4), shrunk for pairs with little support. None of them
excludes seen items: that is the protocol's business (`gr.eval.protocol`), and the same for every
model.

Where the defaults come from: MovieLens 100K, a grid of shrinkage {0, 2, 5, 10, 20, 50} x
neighbours {20, 50, 100, 200, 400, all} x decay {none, .4 ... .9}, judged by NDCG@10 on the
validation item of leave-one-out, averaged with the item before it (each fitted only on what came
earlier in its user's history). The test item took no part in the choice. 400 neighbours, shrinkage
2 and decay .6 are the best cell with a bounded neighbourhood (NDCG@10 .120; keeping all neighbours
gives .121), and the same neighbourhood serves the undecayed model (.072; all neighbours .073). The
surface is flat around it: adjoining cells differ by less than the confidence interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gr.eval.protocol import RetrievalProtocol, RetrievalResult, evaluate_retrieval
from gr.eval.rows import EvaluationSet, ItemIndex, RowSource

ScoreArray = npt.NDArray[np.float32]
History = npt.NDArray[np.int64] | Sequence[int]

_DENSE_ITEMS = 4096
"""Catalogues up to this size are scored against a dense table (at most 64 MB), for speed."""

_BLOCK_ITEMS = 1024
"""Rows of the co-occurrence matrix held at once while fitting; bounds the memory it takes."""


def _flat(
    histories: Sequence[History], num_items: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row, item and age of every distinct item of every history, at its newest occurrence."""
    arrays = [np.asarray(history, dtype=np.int64).reshape(-1) for history in histories]
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    row = np.repeat(np.arange(len(arrays), dtype=np.int64), lengths)
    item = np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
    bad = (item < 0) | (item >= num_items)
    if bad.any():
        where = int(np.argmax(bad))
        raise ValueError(
            f"history {row[where]} holds item {item[where]}: wanted catalogue rows in "
            f"[0, {num_items})"
        )
    age = np.repeat(np.cumsum(lengths), lengths) - 1 - np.arange(len(item))
    newest_first = np.lexsort((age, row))
    row, item, age = row[newest_first], item[newest_first], age[newest_first]
    _, first = np.unique(row * num_items + item, return_index=True)
    return row[first], item[first], age[first]


def _history_matrix(histories: Sequence[History], num_items: int, decay: float) -> Any:
    """Sparse float32 [B, I] with decay^age at the items of each history."""
    row, item, age = _flat(histories, num_items)
    weight = np.power(np.float64(decay), age).astype(np.float32)
    return sp.csr_array((weight, (row, item)), shape=(len(histories), num_items))


@dataclass
class Popularity:
    """Every history gets the same scores: how often each item occurs in the training histories."""

    counts: ScoreArray = field(default_factory=lambda: np.zeros(0, dtype=np.float32), init=False)

    def fit(self, histories: Sequence[History], n_items: int) -> Popularity:
        """Counts events (repeats included) over `histories` of catalogue rows in [0, n_items)."""
        for row, history in enumerate(histories):
            items = np.asarray(history, dtype=np.int64)
            if items.size and (items.min() < 0 or items.max() >= n_items):
                raise ValueError(
                    f"history {row} holds items {items.min()} ... {items.max()}: wanted catalogue "
                    f"rows in [0, {n_items})"
                )
        events = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(np.asarray(h, dtype=np.int64) for h in histories)]
        )
        self.counts = np.bincount(events, minlength=n_items).astype(np.float32)
        return self

    def score(self, histories: Sequence[History]) -> ScoreArray:
        """Scores float32 [B, I]; a read-only view, one row of memory for any B."""
        _require_fitted(self.counts.size, "Popularity")
        return np.broadcast_to(self.counts, (len(histories), len(self.counts)))


@dataclass
class ItemKNN:
    """Item-to-item nearest neighbours by shrunk cosine; every item of the history counts alike.

    neighbours: items of the history space kept per candidate; shrinkage: in users, >= 0. Both see
    the module docstring for how the defaults were found.
    """

    neighbours: int = 400
    shrinkage: float = 2.0
    similarity: Any = field(default=None, init=False, repr=False)
    _table: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.neighbours < 1 or self.shrinkage < 0:
            raise ValueError(
                "neighbours must be >= 1 and shrinkage >= 0, got "
                f"{self.neighbours} and {self.shrinkage}"
            )

    @property
    def history_decay(self) -> float:
        """Weight of an event relative to the one after it."""
        return 1.0

    def fit(self, histories: Sequence[History], n_items: int) -> ItemKNN:
        """Similarities from training `histories` of catalogue rows; memory: I x neighbours."""
        if n_items < 1:
            raise ValueError(f"n_items must be >= 1, got {n_items}")
        users = _history_matrix(histories, n_items, decay=1.0)
        items = users.T.tocsr()
        root = np.sqrt(np.asarray(users.sum(axis=0), dtype=np.float64).reshape(-1))
        kept: list[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]] = []
        for start in range(0, n_items, _BLOCK_ITEMS):
            block = items[start : start + _BLOCK_ITEMS] @ users
            block.sort_indices()  # equal similarities then keep the order of the catalogue
            together = block.tocoo()
            candidate, item = together.row.astype(np.int64) + start, together.col.astype(np.int64)
            value = together.data / (root[candidate] * root[item] + self.shrinkage)
            other = candidate != item
            candidate, item, value = candidate[other], item[other], value[other]
            # One key for (candidate, most similar first): similarities lie in [0, 1].
            order = np.argsort(2.0 * (candidate - start) - value, kind="stable")
            candidate, item, value = candidate[order], item[order], value[order]
            size = np.bincount(candidate - start, minlength=1)
            place = np.arange(len(candidate)) - np.repeat(np.cumsum(size) - size, size)
            near = place < self.neighbours
            kept.append((item[near], candidate[near], value[near].astype(np.float32)))
        item, candidate, value = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        self.similarity = sp.csr_array((value, (item, candidate)), shape=(n_items, n_items))
        self._table = self.similarity.toarray() if n_items <= _DENSE_ITEMS else self.similarity
        return self

    def score(self, histories: Sequence[History]) -> ScoreArray:
        """Scores float32 [B, I]; an empty history scores 0 everywhere (one big tie)."""
        _require_fitted(self.similarity is not None, type(self).__name__)
        weights = _history_matrix(histories, self.similarity.shape[0], self.history_decay)
        scores = weights @ self._table
        return np.asarray(scores.toarray() if sp.issparse(scores) else scores, dtype=np.float32)


@dataclass
class RecencyKNN(ItemKNN):
    """`ItemKNN` whose history fades: an event weighs `decay` (0 < decay <= 1) of the next one."""

    decay: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")

    @property
    def history_decay(self) -> float:
        return self.decay


def evaluate_baselines(
    train: Any,
    rows: RowSource | Sequence[Mapping[str, Any]],
    catalog: ItemIndex,
    protocol: RetrievalProtocol | None = None,
) -> dict[str, RetrievalResult]:
    """The three baselines, fitted on `train` and evaluated on `rows` under one protocol.

    train: training sequences with a column `item_id` (lists of item ids); items that the catalogue
    lacks are left out of them. rows: see `EvaluationSet.from_rows`. Keys: `popularity`, `item-knn`,
    `recency-knn`.
    """
    histories = [
        found[found >= 0] for found in (catalog.index(items) for items in train["item_id"])
    ]
    evaluated = EvaluationSet.from_rows(rows, catalog)
    baselines: dict[str, Popularity | ItemKNN] = {
        "popularity": Popularity(),
        "item-knn": ItemKNN(),
        "recency-knn": RecencyKNN(),
    }
    return {
        name: evaluate_retrieval(baseline.fit(histories, len(catalog)), evaluated, protocol)
        for name, baseline in baselines.items()
    }


def _require_fitted(fitted: object, name: str) -> None:
    if not fitted:
        raise RuntimeError(f"{name} has no training data yet: call fit(histories, n_items) first")

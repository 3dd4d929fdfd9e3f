"""Baselines against their formulas written as loops."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gr.eval import EvaluationSet, ItemKNN, Popularity, RecencyKNN, evaluate_retrieval
from gr.eval import baselines as module
from gr.eval.baselines import evaluate_baselines

ITEMS = 15
RNG = np.random.default_rng(0)
TRAIN = [RNG.integers(0, ITEMS, RNG.integers(1, 9)) for _ in range(40)]
HISTORIES = [*TRAIN[:6], np.array([3, 3, 5, 3]), np.array([], dtype=np.int64)]


def literal_scores(neighbours: int, shrinkage: float, decay: float) -> npt.NDArray[np.float64]:
    users = [set(history.tolist()) for history in TRAIN]
    count = Counter(item for user in users for item in user)
    similarity = np.zeros((ITEMS, ITEMS))
    for i in range(ITEMS):
        for j in range(ITEMS):
            both = sum(i in user and j in user for user in users)
            if i != j and both:
                similarity[i, j] = both / (math.sqrt(count[i] * count[j]) + shrinkage)
    for j in range(ITEMS):
        for i in np.argsort(-similarity[:, j], kind="stable")[neighbours:]:
            similarity[i, j] = 0.0
    scores = np.zeros((len(HISTORIES), ITEMS))
    for row, history in enumerate(HISTORIES):
        met: set[int] = set()
        for age, item in enumerate(reversed(history.tolist())):
            if item not in met:
                scores[row] += decay**age * similarity[item]
            met.add(item)
    return scores


def test_popularity_counts_events() -> None:
    scores = Popularity().fit([[0, 0, 2], [2], []], 4).score([[1], []])
    assert scores.tolist() == [[2, 0, 2, 0]] * 2


@pytest.mark.parametrize("dense_items", [0, 4096])
@pytest.mark.parametrize("shrinkage", [0.0, 3.7])
def test_item_knn_with_all_neighbours_equals_the_formula(
    shrinkage: float, dense_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DENSE_ITEMS", dense_items)
    monkeypatch.setattr(module, "_BLOCK_ITEMS", 4)
    model = ItemKNN(neighbours=ITEMS, shrinkage=shrinkage).fit(TRAIN, ITEMS)
    expected = literal_scores(ITEMS, shrinkage, 1.0)
    assert model.score(HISTORIES) == pytest.approx(expected, abs=1e-5)


def test_recency_knn_equals_the_formula() -> None:
    model = RecencyKNN(neighbours=ITEMS, shrinkage=2.0, decay=0.6).fit(TRAIN, ITEMS)
    assert model.score(HISTORIES) == pytest.approx(literal_scores(ITEMS, 2.0, 0.6), abs=1e-5)


def test_a_candidate_keeps_its_most_similar_items() -> None:
    # The shrinkage is an irrational number, so that few similarities are equal at the border.
    model = ItemKNN(neighbours=3, shrinkage=math.pi).fit(TRAIN, ITEMS)
    full = ItemKNN(neighbours=ITEMS, shrinkage=math.pi).fit(TRAIN, ITEMS).similarity.toarray()
    kept = model.similarity.toarray()
    assert ((kept > 0).sum(axis=0) == np.minimum(3, (full > 0).sum(axis=0))).all()
    assert np.sort(kept, axis=0)[-3:] == pytest.approx(np.sort(full, axis=0)[-3:])


def test_items_outside_the_catalogue_and_unfitted_models_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"history 1 holds item 7: wanted catalogue rows in \[0, 5"
    ):
        ItemKNN().fit([[1], [2, 7]], 5)
    with pytest.raises(ValueError, match=r"history 0 holds items -1 \.\.\. 2"):
        Popularity().fit([[2, -1]], 5)
    with pytest.raises(RuntimeError, match=r"RecencyKNN has no training data yet"):
        RecencyKNN().score([[1]])
    with pytest.raises(ValueError, match="decay must lie in"):
        RecencyKNN(decay=0.0)
    with pytest.raises(ValueError, match="neighbours must be >= 1"):
        ItemKNN(neighbours=0)


def test_movielens_100k_rows() -> None:
    """The numbers that the documentation quotes for leave-one-out on MovieLens 100K."""
    root = os.environ.get("GR_DATA")
    path = Path(root or "") / "ml-100k" / "ml-100k.inter"
    if not root or not path.is_file():
        pytest.skip("needs MovieLens 100K: set GR_DATA to a folder that holds ml-100k/")
    table = np.loadtxt(path, dtype=np.int64, skiprows=1, usecols=(0, 1, 3), delimiter="\t")
    table = table[np.lexsort((np.arange(len(table)), table[:, 2], table[:, 0]))]
    _, items = np.unique(table[:, 1], return_inverse=True)
    borders = np.flatnonzero(np.diff(table[:, 0])) + 1
    histories = np.split(items, borders)
    train = [history[:-2] for history in histories]
    size = int(items.max()) + 1
    rows = EvaluationSet.from_indices(
        [history[:-1] for history in histories], [history[-1] for history in histories], size
    )
    hits = [
        evaluate_retrieval(model.fit(train, size), rows).metrics["HR@10"]
        for model in (Popularity(), ItemKNN(), RecencyKNN())
    ]
    assert hits == pytest.approx([0.0848, 0.1177, 0.1994], abs=5e-4)


def test_evaluate_baselines_runs_all_three_on_split_rows() -> None:
    class Numbers:
        def __len__(self) -> int:
            return 4

        def index(self, item_ids: Sequence[str]) -> npt.NDArray[np.int64]:
            return np.array([int(i) if int(i) < 4 else -1 for i in item_ids], dtype=np.int64)

    train = {"item_id": [["0", "1"], ["0", "1", "9"], ["0", "2"], ["3"]]}
    rows = [
        {"user_id": "u", "item_id": ["1"], "target_item_id": "0"},
        {"user_id": "v", "item_id": ["2"], "target_item_id": "9"},
    ]
    results = evaluate_baselines(train, rows, Numbers())
    assert list(results) == ["popularity", "item-knn", "recency-knn"]
    for result in results.values():
        assert result.per_row["HR@1"].tolist() == [1.0, 0.0]
        assert result.counts["unknown_targets"] == 1

"""The protocol: who is a candidate, what is a miss, and that scores and lists agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pytest
import torch

from gr.eval import (
    Bootstrap,
    EvaluationBatch,
    EvaluationSet,
    Popularity,
    RetrievalProtocol,
    evaluate_ranking,
    evaluate_retrieval,
    paired_difference,
)

ITEMS = ["a", "b", "c", "d", "e", "f"]
NO_INTERVALS = Bootstrap(0)


class Letters:
    """A catalogue of six items."""

    def __len__(self) -> int:
        return len(ITEMS)

    def index(self, item_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        return np.array([ITEMS.index(i) if i in ITEMS else -1 for i in item_ids], dtype=np.int64)


@dataclass(frozen=True)
class Hit:
    item_id: str
    score: float


ROWS: list[dict[str, Any]] = [
    {"user_id": "u", "item_id": ["a", "zz", "b"], "target_item_id": "c"},
    {"user_id": "v", "item_id": [], "target_item_id": "f"},
    {"user_id": "w", "item_id": ["d", "e"], "target_item_id": "d"},
    {"user_id": "w", "item_id": ["e"], "target_item_id": "nowhere"},
]
for position, row in enumerate(ROWS):
    row["action"] = ["like"] * len(row["item_id"])
    row["timestamp"] = list(range(len(row["item_id"])))
    row["target_action"], row["target_timestamp"] = "secret", 100 + position


def test_rows_become_catalogue_rows_and_unknown_items_are_counted() -> None:
    for source in (ROWS, datasets.Dataset.from_list(ROWS)):
        rows = EvaluationSet.from_rows(source, Letters())
        assert [rows.history(i).tolist() for i in range(4)] == [[0, 1], [], [3, 4], [4]]
        assert rows.targets.tolist() == [2, 5, 3, -1]
        assert rows.unknown_history == 1
        assert rows.target_seen().tolist() == [False, False, True, False]


def test_a_model_is_told_the_history_and_the_time_but_not_the_answer() -> None:
    rows = EvaluationSet.from_rows(datasets.Dataset.from_list(ROWS), Letters())
    batches = list(rows.batches(3))
    assert [start for start, _ in batches] == [0, 3]
    batch = batches[0][1]
    assert batch.item_ids == [["a", "zz", "b"], [], ["d", "e"]]
    assert batch.actions == [["like"] * 3, [], ["like"] * 2]
    assert batch.timestamps == [[0, 1, 2], [], [0, 1]]
    assert batch.request_times == [100, 101, 102]
    assert not any("target" in name for name in vars(batch))
    assert "secret" not in repr(batch)


def test_seen_items_are_no_candidates_whatever_the_model_says() -> None:
    # Seen items get the best scores: with them among the candidates "c" would be third.
    rows = EvaluationSet.from_rows(ROWS[:1], Letters())
    scores = np.array([[9.0, 8.0, 5.0, 1.0, 1.0, 1.0]])
    kept = scores.copy()
    result = evaluate_retrieval(lambda batch: scores, rows, bootstrap=NO_INTERVALS)
    assert result.metrics["MRR@10"] == 1.0
    assert (scores == kept).all(), "the caller's scores were written to"
    shown = evaluate_retrieval(
        lambda batch: scores, rows, RetrievalProtocol(exclude_seen=False), bootstrap=NO_INTERVALS
    )
    assert shown.metrics["MRR@10"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("choice", "hit"), [("miss", 0.0), ("keep", 1.0)])
def test_a_target_that_was_seen(choice: Any, hit: float) -> None:
    rows = EvaluationSet.from_rows(ROWS[2:3], Letters())
    protocol = RetrievalProtocol(ks=(2,), seen_target=choice)
    by_score = evaluate_retrieval(
        lambda batch: np.array([[0, 0, 0, 5.0, 9.0, 0]]), rows, protocol, bootstrap=NO_INTERVALS
    )
    by_list = evaluate_retrieval([["e", "d", "a"]], rows, protocol, bootstrap=NO_INTERVALS)
    for result in (by_score, by_list):
        assert result.metrics["MRR@2"] == hit
        assert result.counts["seen_targets"] == 1


def test_an_unknown_target_is_a_miss_and_reported_even_when_an_unknown_item_is_recommended() -> (
    None
):
    rows = EvaluationSet.from_rows(ROWS[3:], Letters())
    scored = evaluate_retrieval(lambda batch: np.ones((1, 6)), rows, bootstrap=NO_INTERVALS)
    listed = evaluate_retrieval([["nowhere", "a"]], rows, bootstrap=NO_INTERVALS)
    for result in (scored, listed):
        assert result.metrics["HR@50"] == 0.0
        assert result.counts["unknown_targets"] == 1
    assert listed.counts["unknown_recommended"] == 1


def test_scores_and_their_lists_give_the_same_numbers_in_any_batch_size() -> None:
    rng = np.random.default_rng(0)
    size = 30
    histories = [rng.integers(0, size, rng.integers(0, 8)) for _ in range(25)]
    rows = EvaluationSet.from_indices(
        histories, rng.integers(-1, size, 25), size, user_ids=rng.integers(0, 9, 25).tolist()
    )
    table = rng.random((25, size)).astype(np.float32)
    protocol = RetrievalProtocol(ks=(1, 5, 40), curve_k=20)

    results = []
    for batch_size in (4, 25):
        start = iter(range(0, 25, batch_size))

        def by_rows(batch: EvaluationBatch, start: Any = start) -> torch.Tensor:
            first = next(start)
            return torch.from_numpy(table[first : first + len(batch)])

        results.append(evaluate_retrieval(by_rows, rows, protocol, batch_size=batch_size))
    lists = [[int(item) for item in np.argsort(-line)] for line in table]
    results.append(evaluate_retrieval(lists, rows, protocol, batch_size=7))
    for other in results[1:]:
        assert other.metrics == pytest.approx(results[0].metrics)
        assert other.curve == pytest.approx(results[0].curve)
        for name, interval in results[0].intervals.items():
            assert other.intervals[name] == pytest.approx(interval), name
    assert results[0].curve[4] == results[0].metrics["HR@5"]
    assert results[2].counts["seen_removed"] == sum(len(set(h.tolist())) for h in histories)


def test_the_mean_is_over_rows_not_over_batches() -> None:
    rows = EvaluationSet.from_indices([[]] * 3, [0, 0, 1], 2)
    result = evaluate_retrieval(
        lambda batch: np.tile([1.0, 0.0], (len(batch), 1)),
        rows,
        batch_size=2,
        bootstrap=NO_INTERVALS,
    )
    assert result.metrics["HR@1"] == pytest.approx(2 / 3)


def test_bfloat16_scores_and_baselines_and_progress() -> None:
    rows = EvaluationSet.from_indices([[0], [1], [2]], [1, 1, 1], 3)
    steps: list[tuple[int, int]] = []
    by_torch = evaluate_retrieval(
        lambda batch: torch.tensor([[1.0, 3.0, 2.0]] * len(batch), dtype=torch.bfloat16),
        rows,
        batch_size=2,
        progress=lambda done, total: steps.append((done, total)),
    )
    baseline = evaluate_retrieval(Popularity().fit([[0, 1, 1, 1, 2, 2]], 3), rows)
    assert by_torch.metrics == baseline.metrics
    assert baseline.counts["seen_targets"] == 1
    assert steps == [(2, 3), (3, 3)]


def test_lists_of_scored_items_short_lists_and_duplicates() -> None:
    rows = EvaluationSet.from_rows(ROWS[:2], Letters())
    protocol = RetrievalProtocol(ks=(3,))
    answers = [[Hit("f", -0.1), Hit("c", -0.2)], [Hit("a", -0.1), Hit("b", -0.2), Hit("f", -0.3)]]
    result = evaluate_retrieval(lambda batch: answers, rows, protocol, bootstrap=NO_INTERVALS)
    assert result.per_row["MRR@3"] == pytest.approx([1 / 2, 1 / 3])
    assert result.counts["short_lists"] == 1
    assert len(result.curve) == 3
    with pytest.raises(ValueError, match="list of row 1 shows item 'a' 2 times"):
        evaluate_retrieval([["c"], ["a", "b", "a"]], rows)


def test_wrong_answers_are_refused() -> None:
    rows = EvaluationSet.from_rows(ROWS, Letters())
    with pytest.raises(ValueError, match=r"must be \[4, 6\] .*got \[4, 7\]"):
        evaluate_retrieval(lambda batch: np.zeros((4, 7)), rows)
    with pytest.raises(ValueError, match="got 2 lists for 4 rows"):
        evaluate_retrieval([["a"], ["b"]], rows)
    with pytest.raises(ValueError, match=r"row 0 holds catalogue rows 0 ... 6, wanted \[0, 6\)"):
        evaluate_retrieval([[0, 6], [], [], []], rows)
    bare = EvaluationSet.from_indices([[0]], [1], 6)
    with pytest.raises(ValueError, match="no catalogue to look them up"):
        evaluate_retrieval([["a"]], bare)
    with pytest.raises(ValueError, match="no rows"):
        EvaluationSet.from_rows([], Letters())
    with pytest.raises(ValueError, match="need the column 'target_item_id'"):
        EvaluationSet.from_rows([{"user_id": "u", "item_id": []}], Letters())
    with pytest.raises(ValueError, match='"miss" or "keep"'):
        RetrievalProtocol(seen_target="drop")  # type: ignore[arg-type]  # the error is the test
    with pytest.raises(ValueError, match="batch_size must be >= 1"):
        evaluate_retrieval(lambda batch: np.zeros((4, 6)), rows, batch_size=0)


def test_a_paired_difference_is_narrower_than_the_two_intervals() -> None:
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 50, 400)
    rows = EvaluationSet.from_indices([[]] * 400, targets, 50)
    noise = rng.random((400, 50))
    noise[np.arange(400), targets] += 0.5
    better = noise.copy()
    better[np.arange(400), targets] += 0.05
    first = evaluate_retrieval(lambda batch: better, rows, batch_size=400)
    second = evaluate_retrieval(lambda batch: noise, rows, batch_size=400)
    mean, low, high = paired_difference(first, second, "HR@10")
    assert mean == pytest.approx(first.metrics["HR@10"] - second.metrics["HR@10"])
    assert 0 <= low <= mean <= high
    widths = [result.intervals["HR@10"] for result in (first, second)]
    assert high - low < min(top - bottom for bottom, top in widths)
    with pytest.raises(ValueError, match="metric must be one of"):
        paired_difference(first, second, "HR@11")


def test_flat_numbers_for_the_file() -> None:
    rows = EvaluationSet.from_indices([[0], [1]], [1, 2], 3)
    flat = evaluate_retrieval(lambda batch: np.zeros((2, 3)), rows).to_dict()
    assert flat["HR@1"] == 0.5
    assert flat["HR@1_low"] <= flat["HR@1"] <= flat["HR@1_high"]
    assert flat["rows"] == 2
    assert all(isinstance(value, int | float) for value in flat.values())


def test_ranking_result_holds_the_three_metrics_and_what_was_left_out() -> None:
    users = ["u"] * 4 + ["v"] * 2 + ["w"] * 3
    labels = [1, 0, 1, 0, 1, 1, 0, 0, 1]
    result = evaluate_ranking(np.linspace(0.2, 0.8, 9), labels, users)
    assert set(result.metrics) == set(result.intervals) == {"AUC", "GAUC", "NE"}
    assert result.counts["gauc_users_left_out"] == 1
    assert result.counts["gauc_events_left_out"] == 2
    assert result.metrics["GAUC"] == pytest.approx((4 * 0.25 + 3 * 1.0) / 7)

"""Metrics against literal definitions, Monte Carlo over tie orders, and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from gr.eval.metrics import (
    Coverage,
    TiedRanks,
    auc,
    coverage,
    gauc,
    normalized_entropy,
    ranking_metrics,
    tied_ranks,
)


def literal(order: list[int], target: int, k: int) -> tuple[float, float, float]:
    """HR, NDCG and MRR at k of one full ranking, from their definitions."""
    for rank, item in enumerate(order[:k], start=1):
        if item == target:
            return 1.0, 1.0 / math.log2(rank + 1), 1.0 / rank
    return 0.0, 0.0, 0.0


def all_orders_mean(scores: npt.NDArray[np.float64], target: int, k: int) -> list[float]:
    """Mean of the literal metrics over every position of the target among its ties."""
    above = [i for i in range(len(scores)) if scores[i] > scores[target]]
    level = [i for i in range(len(scores)) if scores[i] == scores[target] and i != target]
    values = []
    for place in range(len(level) + 1):
        order = [*above, *level[:place], target, *level[place:]]
        values.append(literal(order, target, k))
    return [float(value) for value in np.mean(values, axis=0)]


def test_untied_ranks_equal_the_definitions() -> None:
    rng = np.random.default_rng(0)
    scores = rng.permuted(np.tile(np.arange(20.0), (30, 1)), axis=1)
    targets = rng.integers(0, 20, 30)
    got = ranking_metrics(tied_ranks(scores, targets), (1, 3, 10))
    for row in range(30):
        order = list(np.argsort(-scores[row]))
        for k in (1, 3, 10):
            values = [got[f"{name}@{k}"][row] for name in ("HR", "NDCG", "MRR")]
            assert values == pytest.approx(literal(order, int(targets[row]), k))


@given(
    scores=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    target=st.integers(0, 8),
    k=st.integers(1, 12),
)
def test_tied_ranks_are_the_mean_over_tie_orders(scores: list[int], target: int, k: int) -> None:
    target %= len(scores)
    array = np.array(scores, dtype=np.float64)
    got = ranking_metrics(tied_ranks(array[None], [target]), (k,))
    values = [got[f"{name}@{k}"][0] for name in ("HR", "NDCG", "MRR")]
    assert values == pytest.approx(all_orders_mean(array, target, k))


def test_expected_metrics_agree_with_random_tie_orders() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 4, (1, 30)).astype(np.float64)
    target = 7
    draws = 20_000
    jitter = rng.random((draws, 30)) * 0.5  # breaks every tie at random, and moves no untied pair
    sampled = ranking_metrics(
        tied_ranks(np.repeat(scores, draws, 0) + jitter, np.full(draws, target)), (5, 10)
    )
    expected = ranking_metrics(tied_ranks(scores, [target]), (5, 10))
    for name, values in sampled.items():
        error = values.std() / math.sqrt(draws)
        assert abs(values.mean() - expected[name][0]) <= 4 * error + 1e-12, name


def test_a_constant_scorer_gets_chance() -> None:
    got = ranking_metrics(tied_ranks(np.zeros((3, 40), dtype=np.float32), [0, 17, 39]), (10,))
    assert got["HR@10"] == pytest.approx([10 / 40] * 3)
    assert got["MRR@10"] == pytest.approx([sum(1 / r for r in range(1, 11)) / 40] * 3)


def test_more_places_than_items_is_a_certain_hit() -> None:
    got = ranking_metrics(tied_ranks(np.zeros((1, 4)), [2]), (50,))
    assert got["HR@50"] == pytest.approx([1.0])


def test_unknown_and_excluded_targets_are_misses_even_among_excluded_items() -> None:
    scores = np.array([[1.0, -np.inf, -np.inf], [1.0, 2.0, 3.0]])
    ranks = tied_ranks(scores, [1, -1])
    assert ranking_metrics(ranks, (3,))["HR@3"].tolist() == [0.0, 0.0]


def test_nan_scores_and_foreign_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 hold 2 NaN"):
        tied_ranks(np.array([[1.0, 2.0], [np.nan, np.nan]]), [0, 0])
    with pytest.raises(ValueError, match=r"targets must lie in \[-1, 2\), got 2"):
        tied_ranks(np.zeros((1, 2)), [2])
    with pytest.raises(ValueError, match="cut-off >= 1, got \\[0\\]"):
        ranking_metrics(tied_ranks(np.zeros((1, 2)), [1]), (0,))


def test_positions_count_from_one_and_zero_is_a_miss() -> None:
    got = ranking_metrics(TiedRanks.from_positions([1, 2, 0, 11]), (10,))
    assert got["HR@10"].tolist() == [1, 1, 0, 0]
    assert got["MRR@10"].tolist() == [1, 0.5, 0, 0]


def test_coverage_of_scores_equals_coverage_of_their_lists() -> None:
    rng = np.random.default_rng(2)
    scores = rng.random((6, 50))
    scores[:, :5] = -np.inf
    gathered = Coverage(50, (1, 4, 60))
    for half in (scores[:3], scores[3:]):
        gathered.add_scores(half)
    lists = [np.argsort(-row)[:45] for row in scores]
    for k in (1, 4, 60):
        literal_share = len({int(item) for row in lists for item in row[:k]}) / 50
        assert gathered.result()[f"coverage@{k}"] == pytest.approx(literal_share)
        assert coverage(lists, 50, k) == pytest.approx(literal_share)


def test_coverage_where_nothing_is_listed_is_zero() -> None:
    gathered = Coverage(2, (1,))
    gathered.add_scores(np.full((1, 2), -np.inf))
    assert str(gathered.result()["coverage@1"]) == "0.0"  # not -0.0


def test_coverage_of_ties_is_the_mean_over_random_draws() -> None:
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 3, (5, 12)).astype(np.float64)
    gathered = Coverage(12, (4,))
    gathered.add_scores(scores)
    draws = [
        coverage(list(np.argsort(-(scores + 0.5 * rng.random(scores.shape)), axis=1)), 12, 4)
        for _ in range(4000)
    ]
    error = float(np.std(draws)) / math.sqrt(len(draws))
    assert abs(float(np.mean(draws)) - gathered.result()["coverage@4"]) <= 4 * error


def test_auc_equals_scikit_learn_with_ties() -> None:
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 2, 500)
    scores = np.round(rng.random(500) + 0.3 * labels, 1)
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert auc(np.full(500, 0.3), labels) == 0.5


def test_gauc_is_the_impression_weighted_mean_and_counts_who_is_left_out() -> None:
    rng = np.random.default_rng(5)
    users = rng.integers(0, 40, 400).astype(str)
    labels = rng.integers(0, 2, 400)
    labels[np.isin(users, ["3", "8"])] = 1
    scores = np.round(rng.random(400), 1)
    total = weight = left = 0.0
    for user in set(users.tolist()):
        mine = users == user
        if len(set(labels[mine].tolist())) == 2:
            total += mine.sum() * roc_auc_score(labels[mine], scores[mine])
            weight += mine.sum()
        else:
            left += mine.sum()
    got = gauc(scores, labels, users)
    assert got.value == pytest.approx(total / weight, abs=1e-12)
    assert got.events_left_out == left
    assert got.users + got.users_left_out == len(set(users.tolist()))
    assert got.users_left_out >= 2


def test_gauc_of_a_score_that_only_knows_the_user_is_half() -> None:
    users = np.repeat(np.arange(20), 10)
    labels = np.tile([0, 1], 100)
    assert gauc(users / 20, labels, users).value == 0.5


def test_normalized_entropy_is_one_for_the_base_rate_and_log_loss_over_entropy_else() -> None:
    rng = np.random.default_rng(6)
    labels = (rng.random(1000) < 0.2).astype(int)
    rate = labels.mean()
    assert normalized_entropy(np.full(1000, rate), labels) == pytest.approx(1.0, abs=1e-12)
    probabilities = np.clip(0.2 + 0.3 * (labels - 0.2) + 0.1 * rng.random(1000), 0.01, 0.99)
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert normalized_entropy(probabilities, labels) == pytest.approx(
        log_loss(labels, probabilities) / entropy
    )
    assert math.isfinite(normalized_entropy(1.0 - labels, labels))


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.1, 0.2], [1, 1], "both labels, all 2 events are labelled 1"),
        ([0.1, 0.2], [0, 2], "event 1 has 2"),
        ([0.1, float("nan")], [0, 1], "score of event 1 is NaN"),
        ([0.1], [0, 1], "vectors of one length"),
        ([], [], "no events"),
    ],
)
def test_wrong_events_are_refused(scores: list[float], labels: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auc(scores, labels)


def test_one_label_and_scores_that_are_no_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match="NE needs both labels, all 2 events are labelled 0"):
        normalized_entropy([0.5, 0.5], [0, 0])
    with pytest.raises(ValueError, match=r"\[0, 1\], got -3 ... 2"):
        normalized_entropy([-3.0, 2.0], [0, 1])
    with pytest.raises(ValueError, match="none of 2 has them"):
        gauc([0.1, 0.2], [0, 1], ["a", "b"])

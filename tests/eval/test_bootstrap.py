"""Intervals against a literal loop over replicates and against the normal approximation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from gr.eval import bootstrap as module
from gr.eval.bootstrap import Bootstrap, mean_intervals, ranking_intervals
from gr.eval.metrics import gauc


def test_interval_of_a_mean_has_the_width_of_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(0.3, 1.0, 2000)
    low, high = mean_intervals({"x": values}, np.arange(2000), Bootstrap(2000))["x"]
    half = 1.96 * values.std() / math.sqrt(2000)
    assert low == pytest.approx(values.mean() - half, abs=0.12 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.12 * half)


def test_users_are_resampled_not_rows() -> None:
    # Ten identical rows a user: by rows the interval would be sqrt(10) times too narrow.
    per_user = np.random.default_rng(1).random(50)
    once = mean_intervals({"x": per_user}, np.arange(50), Bootstrap(500))
    many = mean_intervals(
        {"x": np.repeat(per_user, 10)}, np.repeat(np.arange(50), 10), Bootstrap(500)
    )
    assert many["x"] == pytest.approx(once["x"])


def test_a_replicate_is_the_pooled_mean_over_the_drawn_users() -> None:
    users = np.array(["a", "a", "a", "b", "c", "c"])
    values = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    settings = Bootstrap(200, seed=3)
    (draws,) = settings.draws(3, 3)
    literal = []
    for drawn in draws:
        weight = dict(zip("abc", drawn, strict=True))
        rows = [weight[user] for user in users]
        literal.append(np.average(values, weights=rows))
    expected = np.quantile(literal, [0.025, 0.975])
    assert mean_intervals({"x": values}, users, settings)["x"] == pytest.approx(expected)


def test_the_same_seed_gives_the_same_interval_whatever_the_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"x": np.random.default_rng(2).random(30)}
    whole = mean_intervals(values, np.arange(30), Bootstrap(100, seed=5))
    assert whole != mean_intervals(values, np.arange(30), Bootstrap(100, seed=6))
    monkeypatch.setattr(module, "_CHUNK_CELLS", 7 * 30)
    chunked = mean_intervals(values, np.arange(30), Bootstrap(100, seed=5))
    assert chunked["x"] == pytest.approx(whole["x"], rel=1e-12)


def test_ranking_intervals_equal_a_loop_that_repeats_the_drawn_users() -> None:
    rng = np.random.default_rng(7)
    users = np.repeat(np.arange(12), rng.integers(3, 9, 12))
    labels = rng.integers(0, 2, len(users))
    scores = np.clip(np.round(0.4 * labels + 0.6 * rng.random(len(users)), 1), 0.05, 0.95)
    settings = Bootstrap(60, seed=1)
    (draws,) = settings.draws(12, len(users))
    replicates: dict[str, list[float]] = {"AUC": [], "GAUC": [], "NE": []}
    for drawn in draws:
        rows, owners = [], []
        for user, times in enumerate(drawn):
            for copy in range(int(times)):
                mine = np.flatnonzero(users == user)
                rows.append(mine)
                owners += [f"{user}/{copy}"] * len(mine)
        index = np.concatenate(rows)
        rate = labels[index].mean()
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        replicates["AUC"].append(roc_auc_score(labels[index], scores[index]))
        replicates["GAUC"].append(gauc(scores[index], labels[index], owners).value)
        replicates["NE"].append(log_loss(labels[index], scores[index]) / entropy)
    got = ranking_intervals(scores, labels, users, settings)
    for name, values in replicates.items():
        expected = tuple(np.quantile(values, [0.025, 0.975]))
        assert got[name] == pytest.approx(expected, abs=1e-10), name


def test_no_replicates_no_intervals_and_nonsense_is_refused() -> None:
    assert mean_intervals({"x": np.ones(3)}, [1, 2, 3], Bootstrap(0)) == {}
    with pytest.raises(ValueError, match="confidence in"):
        Bootstrap(confidence=95)
    with pytest.raises(ValueError, match=r"values\['x'\] has shape \(2,\), users has \(3,\)"):
        mean_intervals({"x": np.ones(2)}, [1, 2, 3])

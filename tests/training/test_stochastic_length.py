"""Stochastic length against a loop over windows, closed forms, and counts of many draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gr.training.stochastic_length import (
    Rule,
    StochasticLength,
    kept_events,
    kept_lengths,
    sparsity,
)

RULES: tuple[Rule, ...] = ("greedy", "random", "feature_weighted")
N = 64
# 64^{1.5/2} = 22.6
HALF = StochasticLength(1.5, "random")


def draws(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2**64, size=count, dtype=np.uint64)


def test_thresholds_are_the_papers() -> None:
    # HSTU §4.2: with α = 1.6, 4,096 events mostly become 776.
    assert StochasticLength(1.6).threshold(4096) == 776
    # Powers that are whole.
    assert StochasticLength(1.6).threshold(1024) == 256
    assert StochasticLength(2.0).threshold(1000) == 1000
    assert StochasticLength(1.5).threshold(1) == 1


@pytest.mark.parametrize("rule", RULES)
def test_windows_hold_what_they_may(rule: Rule) -> None:
    options = StochasticLength(1.5, rule)
    limit = options.threshold(N)
    assert limit == 22
    rng = np.random.default_rng(1)
    count = np.concatenate([[0, 1, limit, limit + 1, N], rng.integers(0, N + 1, size=200)])
    stop = count.cumsum()
    timestamp = rng.integers(0, 1000, size=int(stop[-1])).cumsum()
    draw = draws(len(count))
    position, offsets = kept_events(stop - count, stop, draw, N, options, timestamp)
    lengths = kept_lengths(count, draw, N, options)
    assert np.diff(offsets).tolist() == lengths.tolist()
    for w, (begin, end) in enumerate(itertools.pairwise(offsets)):
        mine = position[begin:end].tolist()
        assert mine == sorted(set(mine))
        assert not mine or (mine[0] >= stop[w] - count[w] and mine[-1] < stop[w])
        assert len(mine) in ({int(count[w])} if count[w] <= limit else {limit, int(count[w])})
        if rule == "greedy":
            assert mine == list(range(int(stop[w]) - len(mine), int(stop[w])))
    assert (lengths < count).any() and (lengths[count > limit] == count[count > limit]).any()


@pytest.mark.parametrize("rule", RULES)
def test_a_window_depends_on_its_draw_and_nothing_beside_it(rule: Rule) -> None:
    options = StochasticLength(1.2, rule)
    start, stop, draw = np.array([0, 50, 10]), np.array([50, 110, 60]), draws(3)
    timestamp = np.arange(110) ** 2
    position, offsets = kept_events(start, stop, draw, N, options, timestamp)
    for w in range(3):
        one = slice(w, w + 1)
        alone, _ = kept_events(start[one], stop[one], draw[one], N, options, timestamp)
        assert position[offsets[w] : offsets[w + 1]].tolist() == alone.tolist()
    again = kept_events(start, stop, draw, N, options, timestamp)[0]
    assert again.tolist() == position.tolist()
    other = kept_events(start, stop, draws(3, 1), N, options, timestamp)[0]
    assert rule == "greedy" or other.tolist() != position.tolist()


def test_alpha_2_keeps_everything() -> None:
    count = np.arange(N + 1)
    for rule in RULES:
        options = StochasticLength(2.0, rule)
        assert (kept_lengths(count, draws(N + 1), N, options) == count).all()


def test_long_sequences_stay_whole_as_often_as_they_should() -> None:
    for count in (30, 64, 200):
        kept = kept_lengths(np.full(40_000, count), draws(40_000, count), N, HALF)
        wanted = min(1.0, N**1.5 / count**2)
        assert abs((kept == count).mean() - wanted) < 5 * math.sqrt(0.25 / 40_000)


def first_draws(weight: list[float], size: int) -> list[float]:
    """P(event is kept), by going through all orders of drawing without replacement."""
    found = [0.0] * len(weight)
    for order in itertools.permutations(range(len(weight)), size):
        probability, left = 1.0, sum(weight)
        for event in order:
            probability *= weight[event] / left if left > 0 else 0.0
            left -= weight[event]
        for event in order:
            found[event] += probability
    return found


@pytest.mark.parametrize("rule", ["random", "feature_weighted"])
def test_events_are_kept_as_often_as_their_weights_say(rule: Rule) -> None:
    # 6^{1.2/2} = 2.9; times back: 100, 60, 30, 10, 0, 0 of 200 seconds.
    times, copies = [0, 40, 70, 90, 100, 100], 30_000
    options = StochasticLength(1.2, rule)
    assert options.threshold(6) == 2
    start = np.arange(copies) * 6
    position, offsets = kept_events(
        start, start + 6, draws(copies), 6, options, np.array(times * copies)
    )
    cut = np.diff(offsets) == 2
    mine = np.repeat(cut, np.diff(offsets))
    seen = np.bincount(position[mine] % 6, minlength=6) / cut.sum()
    weight = [1.0] * 6 if rule == "random" else [1 - (100 - t) / 200 for t in times]
    wanted = first_draws(weight, 2)
    limit = 5 * math.sqrt(0.25 / cut.sum())
    assert np.abs(seen - wanted).max() < limit
    # The other rule would not pass.
    if rule == "feature_weighted":
        assert np.abs(np.array(first_draws([1.0] * 6, 2)) - wanted).max() > 2 * limit


def test_without_a_clock_events_are_counted() -> None:
    options = StochasticLength(1.3)
    start, stop, draw = np.array([3, 40]), np.array([40, 100]), draws(2)
    counted, _ = kept_events(start, stop, draw, N, options)
    ticking, _ = kept_events(start, stop, draw, N, options, np.arange(100) * 7 + 5)
    assert counted.tolist() == ticking.tolist()
    # No time between the events: all alike.
    still, _ = kept_events(start, stop, draw, N, options, np.full(100, 9))
    alike, _ = kept_events(start, stop, draw, N, StochasticLength(1.3, "random"))
    assert still.tolist() == alike.tolist()


@pytest.mark.parametrize("alpha", [1.6, 1.8, 2.0])
def test_sparsity_is_its_expectation(alpha: float) -> None:
    lengths = np.random.default_rng(2).integers(1, 3000, size=50_000)
    limit, tokens, pairs = int(1024 ** (alpha / 2) + 1e-9), 0.0, 0.0
    for length in np.minimum(lengths, 1024).tolist():
        whole = 1.0 if length <= limit else min(1.0, 1024**alpha / length**2)
        tokens += whole * length + (1 - whole) * limit
        pairs += whole * length**2 + (1 - whole) * limit**2
    found = sparsity(lengths, 1024, StochasticLength(alpha))
    assert abs(found.tokens - (1 - tokens / 50_000 / 1024)) < 5 * 0.5 / math.sqrt(50_000)
    assert abs(found.pairs - (1 - pairs / 50_000 / 1024**2)) < 5 * 0.5 / math.sqrt(50_000)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"alpha: 1.0, wanted 1 < alpha <= 2"):
        StochasticLength(1.0)
    with pytest.raises(ValueError, match=r"alpha: 2.5"):
        StochasticLength(2.5)
    with pytest.raises(ValueError, match=r"rule: 'newest', wanted one of"):
        StochasticLength(1.5, "newest")  # type: ignore[arg-type]  # what a file could hold

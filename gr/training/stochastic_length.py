"""Stochastic length: long histories are mostly seen in part, so that an epoch costs less.

With N the most events of a sequence and α in (1, 2], a sequence of n events is kept whole

    where n <= N^{α/2}, and else with probability N^α / n²;

otherwise N^{α/2} of its events are kept, in order. The expected cost of attention of a long
sequence is then at most 2 N^α instead of N². α = 2 keeps everything.

Source: HSTU §3.2 (equation 4) and appendix F.1 for the choice of events, where f_i = t_n − t_i is
the time from event i to the sequence's last: "greedy" the smallest f; "random" any, all subsets
alike; "feature_weighted" by weights 1 − f_i / Σ_j f_j. The paper says no more than that about the
weights (its sum ends at L); here the sum is over all n events, and events are drawn one by one
without replacement. So the weights sum to n − 1, and in a long sequence most are near 1. Training
sees such subsequences; evaluation and serving see histories as they are.

Legend: n windows, e events kept, E events of the windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gr.training.events import IntArray, ranges
from gr.training.typed_json import require

Draws = npt.NDArray[np.uint64]
Rule = Literal["greedy", "random", "feature_weighted"]


@dataclass(frozen=True)
class StochasticLength:
    """How sequences are shortened.

    Attributes:
        alpha: α, above 1 and at most 2; sequences are cut to N^{α/2} events.
        rule: which events a shortened sequence keeps.
    """

    alpha: float = 1.8
    rule: Rule = "feature_weighted"

    def __post_init__(self) -> None:
        require(1 < self.alpha <= 2, "alpha", self.alpha, "1 < alpha <= 2")
        rules = ("greedy", "random", "feature_weighted")
        require(self.rule in rules, "rule", self.rule, f"one of {list(rules)}")

    def threshold(self, max_events: int) -> int:
        """N^{α/2}, rounded down, at least 1."""
        # A power that is whole, such as 1024^{1.6/2} = 256, may come out just below.
        return max(1, int(max_events ** (self.alpha / 2) + 1e-9))


def kept_lengths(
    count: IntArray, draw: Draws, max_events: int, options: StochasticLength
) -> IntArray:
    """Events that each sequence keeps.

    Args:
        count: int64 [n], events of each; more than ``max_events`` is allowed.
        draw: uint64 [n], the number that decides for a sequence; the same one decides the same.
        max_events: N, the same for all sequences and batches.

    Returns:
        int64 [n].
    """
    limit = options.threshold(max_events)
    whole = float(max_events) ** options.alpha / np.maximum(count, 1).astype(np.float64) ** 2
    cut = (count > limit) & (_uniform(draw, np.zeros_like(count)) >= whole)
    kept: IntArray = np.where(cut, limit, count)
    return kept


def kept_events(
    start: IntArray,
    stop: IntArray,
    draw: Draws,
    max_events: int,
    options: StochasticLength,
    timestamp: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Which events of each window are kept; what a window keeps depends on nothing beside it.

    Args:
        start, stop: int64 [n], windows as positions in ``EventArrays``.
        draw: uint64 [n], see ``kept_lengths``.
        max_events: N.
        timestamp: int64 seconds of all events, for "feature_weighted". None where the data has no
            clock: f then counts events instead of seconds.

    Returns:
        Positions in ``EventArrays``, int64 [e], window after window and ascending within one, and
        int64 [n + 1] where each window begins in them.
    """
    count = stop - start
    kept = kept_lengths(count, draw, max_events, options)
    offsets = np.zeros(len(count) + 1, dtype=np.int64)
    np.cumsum(kept, out=offsets[1:])
    if options.rule == "greedy":
        return ranges(stop - kept, kept), offsets
    position = ranges(start, count)
    cut = kept < count
    chosen = np.repeat(~cut, count)
    among = np.flatnonzero(~chosen)
    long = count[cut]
    window = np.repeat(np.arange(len(long)), long)
    place = position[among]
    waiting = -np.log(_uniform(draw[cut][window], 1 + place - start[cut][window]))
    if options.rule == "feature_weighted":
        waiting = _divided(waiting, _weights(place, stop[cut], window, timestamp))
    # Exponential clocks: the first L to ring are a draw by weight without replacement.
    order = np.lexsort((waiting, window))
    rank = np.arange(len(order)) - np.repeat(np.cumsum(long) - long, long)
    chosen[among[order[rank < options.threshold(max_events)]]] = True
    return position[chosen], offsets


@dataclass(frozen=True)
class Sparsity:
    """What stochastic length leaves undone (HSTU appendix F.2).

    Attributes:
        tokens: 1 − mean length / N.
        pairs: 1 − mean squared length / N², for attention.
    """

    tokens: float
    pairs: float


def sparsity(
    lengths: IntArray, max_events: int, options: StochasticLength, seed: int = 0
) -> Sparsity:
    """Simulate one epoch over sequences of ``lengths`` events, int64 [n], cut to the newest N."""
    draw = np.random.default_rng(seed).integers(2**64, size=len(lengths), dtype=np.uint64)
    kept = kept_lengths(np.minimum(lengths, max_events), draw, max_events, options)
    share = kept / max_events
    return Sparsity(1 - float(share.mean()), 1 - float((share**2).mean()))


def _uniform(draw: Draws, number: IntArray) -> npt.NDArray[np.float64]:
    """The ``number``-th uniform of each draw, strictly between 0 and 1."""
    # SplitMix64: what one window gets depends on nothing else of the batch.
    bits = draw + (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    uniform: npt.NDArray[np.float64] = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return uniform


def _weights(
    position: IntArray, stop: IntArray, window: IntArray, timestamp: IntArray | None
) -> npt.NDArray[np.float64]:
    """1 − f / Σ f; 1 for all events of a window without any time between them."""
    clock = position if timestamp is None else timestamp[position]
    last = stop - 1 if timestamp is None else timestamp[stop - 1]
    age = (last[window] - clock).astype(np.float64)
    total = np.bincount(window, weights=age, minlength=len(stop))[window]
    return 1 - age / np.where(total > 0, total, 1.0)


def _divided(
    waiting: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    # An event with all of Σ f has weight 0: it never rings.
    out = np.full_like(waiting, np.inf)
    return np.divide(waiting, weight, out=out, where=weight > 0)

"""Metrics on ranks and on probabilities. Numpy only; nothing here knows a model or a data set.

Legend: B rows (one target each), I items of the catalogue, N labelled events, K cut-offs.

Ties. A scorer that gives two items the same score has not ranked them, so every ranking metric
here is the *expected value over a uniformly random order of the tied items*, in closed form. A
constant scorer therefore gets exactly what guessing gets, whatever order the catalogue happens to
be stored in. With `better` items above the target and `tied` other items level with it, the
target's rank is uniform on `better + 1 ... better + tied + 1`, and

    E[HR@k]   = |{r <= k}| / (tied + 1)
    E[NDCG@k] = sum over r <= k of 1 / log2(1 + r) / (tied + 1)
    E[MRR@k]  = sum over r <= k of 1 / r           / (tied + 1)

There is one relevant item a row, so HR@k and Recall@k are the same number and the ideal DCG is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MISS = np.int64(2**62)
"""`TiedRanks.better` of a target that cannot be reached (unknown, excluded, not returned)."""


@dataclass(frozen=True)
class TiedRanks:
    """Where each row's target stands.

    `better` int64 [B] items are strictly above it, `tied` int64 [B] others are level with it.
    """

    better: IntArray
    tied: IntArray

    def __post_init__(self) -> None:
        if self.better.shape != self.tied.shape or self.better.ndim != 1:
            raise ValueError(
                "better and tied must be two vectors of one length, got shapes "
                f"{self.better.shape} and {self.tied.shape}"
            )
        if self.better.size and (self.better.min() < 0 or self.tied.min() < 0):
            raise ValueError("better and tied count items and cannot be negative")

    def __len__(self) -> int:
        return len(self.better)

    @classmethod
    def from_positions(cls, positions: npt.ArrayLike) -> TiedRanks:
        """Untied ranks from 1-based positions [B]; 0 means that the target was not returned."""
        array = np.asarray(positions, dtype=np.int64)
        if array.size and array.min() < 0:
            raise ValueError(f"positions are 1-based, 0 for a miss; got {array.min()}")
        return cls(np.where(array > 0, array - 1, MISS), np.zeros_like(array))


def tied_ranks(scores_BI: npt.NDArray[np.floating], targets_B: npt.ArrayLike) -> TiedRanks:
    """Ranks of the targets among all items; a higher score is better.

    Items at -inf are not candidates. A target of -1 (unknown to the catalogue), or one whose own
    score is -inf, is a miss, not a member of a tie at the bottom.

    Raises ValueError for a score that is NaN, and for a target outside the catalogue.
    """
    targets = np.asarray(targets_B, dtype=np.int64)
    if scores_BI.ndim != 2 or targets.shape != scores_BI.shape[:1]:
        raise ValueError(
            f"scores must be [B, items] with one target a row, got scores {scores_BI.shape} "
            f"and targets {targets.shape}"
        )
    broken = np.isnan(scores_BI).any(axis=1)
    if broken.any():
        row = int(np.argmax(broken))
        raise ValueError(f"scores of row {row} hold {int(np.isnan(scores_BI[row]).sum())} NaN")
    if targets.size and (targets.min() < -1 or targets.max() >= scores_BI.shape[1]):
        raise ValueError(
            f"targets must lie in [-1, {scores_BI.shape[1]}), got "
            f"{targets.min()} ... {targets.max()}"
        )
    own = scores_BI[np.arange(len(targets)), np.maximum(targets, 0)]
    reachable = (targets >= 0) & (own > -np.inf)
    better = (scores_BI > own[:, None]).sum(axis=1)
    level = (scores_BI == own[:, None]).sum(axis=1)
    return TiedRanks(
        np.where(reachable, better, MISS).astype(np.int64),
        np.where(reachable, level - 1, 0).astype(np.int64),
    )


def _expected_gain(
    ranks: TiedRanks, k: int, gain: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Mean of `gain(rank)` over the ranks a target may take, with no gain below rank k."""
    table = np.concatenate([[0.0], np.cumsum(gain(np.arange(1, k + 1, dtype=np.float64)))])
    first = np.minimum(ranks.better, k)
    last = np.minimum(ranks.better + ranks.tied + 1, k)
    return np.asarray((table[last] - table[first]) / (ranks.tied + 1), dtype=np.float64)


def _checked_cutoffs(ks: Sequence[int]) -> list[int]:
    cutoffs = [int(k) for k in ks]
    if not cutoffs or min(cutoffs) < 1:
        raise ValueError(f"ks must be at least one cut-off >= 1, got {list(ks)}")
    return cutoffs


def hit_rate(ranks: TiedRanks, k: int) -> FloatArray:
    """Expected HR@k of each row, float64 [B]. Equals Recall@k: there is one target a row."""
    return _expected_gain(ranks, k, np.ones_like)


def ranking_metrics(ranks: TiedRanks, ks: Sequence[int] = (1, 5, 10, 50)) -> dict[str, FloatArray]:
    """`{"HR@k", "NDCG@k", "MRR@k"}` of every row, float64 [B]; publish the mean over rows."""
    values: dict[str, FloatArray] = {}
    for k in _checked_cutoffs(ks):
        values[f"HR@{k}"] = hit_rate(ranks, k)
        values[f"NDCG@{k}"] = _expected_gain(ranks, k, lambda rank: 1.0 / np.log2(1.0 + rank))
        values[f"MRR@{k}"] = _expected_gain(ranks, k, lambda rank: 1.0 / rank)
    return values


class Coverage:
    """Share of the catalogue that appears in at least one row's top k, gathered batch by batch.

    Ties at the border of a top k are an even draw: an item that is in a row's list with
    probability p stays out with probability 1 - p, and rows draw independently. The value is the
    expected share of items drawn at least once.
    """

    def __init__(self, num_items: int, ks: Sequence[int] = (10,)) -> None:
        self.num_items = num_items
        self._log_absent = {k: np.zeros(num_items) for k in _checked_cutoffs(ks)}

    def add_scores(self, scores_BI: npt.NDArray[np.floating]) -> None:
        """Adds a batch of scores [B, I]; items at -inf are never listed."""
        cutoffs = sorted({min(k, self.num_items) for k in self._log_absent})
        places = [self.num_items - k for k in cutoffs]
        ordered = np.partition(scores_BI, places, axis=1)
        for k, absent in self._log_absent.items():
            border = ordered[:, self.num_items - min(k, self.num_items)][:, None]
            above = scores_BI > border
            level = (scores_BI == border) & (border > -np.inf)
            room = np.minimum(k, self.num_items) - above.sum(axis=1, keepdims=True)
            share = np.where(level, room / np.maximum(level.sum(axis=1, keepdims=True), 1), 0.0)
            with np.errstate(divide="ignore"):
                absent += np.log1p(-np.where(above, 1.0, share)).sum(axis=0)

    def add_lists(self, lists: Sequence[npt.NDArray[np.int64]]) -> None:
        """Adds ranked lists of catalogue rows, best first; -1 entries are ignored."""
        for k, absent in self._log_absent.items():
            shown = np.concatenate([np.zeros(0, dtype=np.int64), *(row[:k] for row in lists)])
            absent[shown[shown >= 0]] = -np.inf

    def result(self) -> dict[str, float]:
        """`{"coverage@k": share in [0, 1]}`."""
        return {
            f"coverage@{k}": float((1.0 - np.exp(absent)).mean())
            for k, absent in self._log_absent.items()
        }


def coverage(lists: Sequence[npt.ArrayLike], num_items: int, k: int) -> float:
    """Share of `num_items` catalogue rows that appear among the first k of any list."""
    gathered = Coverage(num_items, (k,))
    gathered.add_lists([np.asarray(row, dtype=np.int64) for row in lists])
    return gathered.result()[f"coverage@{k}"]


def checked_events(
    scores: npt.ArrayLike, labels: npt.ArrayLike, *more: npt.ArrayLike
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Scores [N] as float64 and labels [N] as bool, or a ValueError that says what is wrong."""
    score = np.asarray(scores, dtype=np.float64)
    label = np.asarray(labels)
    if (
        score.ndim != 1
        or label.shape != score.shape
        or any(len(np.asarray(m)) != len(score) for m in more)
    ):
        raise ValueError(
            "scores, labels and users must be vectors of one length, got "
            f"{[np.asarray(value).shape for value in (scores, labels, *more)]}"
        )
    if not len(score):
        raise ValueError("there are no events to evaluate")
    if np.isnan(score).any():
        raise ValueError(f"the score of event {int(np.argmax(np.isnan(score)))} is NaN")
    strange = ~np.isin(label, (0, 1))
    if strange.any():
        row = int(np.argmax(strange))
        raise ValueError(f"labels must be 0 or 1, event {row} has {label[row]}")
    return score, label.astype(bool)


@dataclass(frozen=True)
class GroupedAUC:
    """GAUC and what it rests on.

    `value` is the mean of the users' AUCs weighted by their number of events (impressions). Users
    whose events all carry one label have no AUC; they are left out, and counted: `users_left_out`,
    `events_left_out`. `user_auc` [U] (NaN where left out) and `user_events` [U] follow `user_ids`
    [U].
    """

    value: float
    users: int
    users_left_out: int
    events_left_out: int
    user_ids: npt.NDArray[np.generic]
    user_auc: FloatArray
    user_events: IntArray


def auc(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """P(score of a positive > score of a negative) + half of P(equal); .5 for a constant scorer.

    Raises ValueError where only one label occurs: the number does not exist then.
    """
    score, label = checked_events(scores, labels)
    value = _grouped(score, label, np.zeros(len(score), dtype=np.int64), 1)[0][0]
    if np.isnan(value):
        raise ValueError(
            f"AUC needs both labels, all {len(label)} events are labelled {int(label[0])}"
        )
    return float(value)


def gauc(scores: npt.ArrayLike, labels: npt.ArrayLike, users: npt.ArrayLike) -> GroupedAUC:
    """Impression-weighted mean of the AUC within each user (MARM, section 3.1.2).

    Ties count half. Raises ValueError where no user has both labels.
    """
    score, label = checked_events(scores, labels, users)
    user_ids, user = np.unique(np.asarray(users), return_inverse=True)
    value, events = _grouped(score, label, user.astype(np.int64), len(user_ids))
    counted = ~np.isnan(value)
    if not counted.any():
        raise ValueError(f"GAUC needs a user with both labels, none of {len(user_ids)} has them")
    return GroupedAUC(
        value=float((value[counted] * events[counted]).sum() / events[counted].sum()),
        users=int(counted.sum()),
        users_left_out=int((~counted).sum()),
        events_left_out=int(events[~counted].sum()),
        user_ids=user_ids,
        user_auc=value,
        user_events=events,
    )


def _grouped(
    score: FloatArray, label: npt.NDArray[np.bool_], group: IntArray, num_groups: int
) -> tuple[FloatArray, IntArray]:
    """AUC within each group (rank sum on mid-ranks; NaN for one label), and group sizes."""
    order = np.lexsort((score, group))
    score, label, group = score[order], label[order], group[order]
    size = np.bincount(group, minlength=num_groups)
    start = np.cumsum(size) - size
    fresh = np.ones(len(score), dtype=bool)
    fresh[1:] = (group[1:] != group[:-1]) | (score[1:] != score[:-1])
    tie = np.cumsum(fresh) - 1
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(score)) - 1
    rank = (0.5 * (first + last) + 1.0)[tie] - start[group]
    positive = np.bincount(group, weights=label, minlength=num_groups)
    rank_sum = np.bincount(group, weights=rank * label, minlength=num_groups)
    pairs = positive * (size - positive)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.where(pairs > 0, (rank_sum - positive * (positive + 1) / 2) / pairs, np.nan)
    return value.astype(np.float64), size.astype(np.int64)


def log_losses(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, eps: float = 1e-7
) -> FloatArray:
    """-(y ln p + (1 - y) ln(1 - p)) of each event in nats, float64 [N]; eps <= p <= 1 - eps."""
    probability, label = checked_events(probabilities, labels)
    if probability.min() < 0 or probability.max() > 1:
        raise ValueError(
            "probabilities must lie in [0, 1], got "
            f"{probability.min():.4g} ... {probability.max():.4g}"
        )
    clipped = np.clip(probability, eps, 1.0 - eps)
    return -np.log(np.where(label, clipped, 1.0 - clipped))


def normalized_entropy(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, eps: float = 1e-7
) -> float:
    """Normalised entropy: mean log-loss over the entropy of the base rate; lower is better.

        NE = -(1/N) sum(y ln p + (1 - y) ln(1 - p)) / -(q ln q + (1 - q) ln(1 - q)),  q = mean(y)

    with q taken over the very events evaluated, so that predicting q for all gives 1 (He et al.
    2014, "Practical lessons from predicting clicks on ads at Facebook", section 3). Raises
    ValueError where only one label occurs: the denominator is 0.
    """
    losses = log_losses(probabilities, labels, eps)
    rate = float(np.mean(np.asarray(labels, dtype=np.float64)))
    if rate in (0.0, 1.0):
        raise ValueError(f"NE needs both labels, all {len(losses)} events are labelled {int(rate)}")
    return float(losses.mean() / binary_entropy(np.array(rate)))


def binary_entropy(rate: FloatArray) -> FloatArray:
    """Entropy of a coin with P(1) = rate, in nats; 0 at 0 and at 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = -(rate * np.log(rate) + (1.0 - rate) * np.log1p(-rate))
    return np.nan_to_num(np.asarray(value, dtype=np.float64), nan=0.0)

"""Whole-catalogue evaluation: every item is a candidate, and one protocol for all models.

What counts as what:

- **Candidates** are all items of the catalogue. With `exclude_seen` the items of the row's own
  history are not (whatever the model says about them), for every model alike: models and baselines
  need not exclude anything.
- **A target that was seen before** (repeat consumption). `seen_target="miss"`: it is excluded as
  any seen item and cannot be hit. This is the default, because it is what a served list without
  seen items does, and so a model gives the same number as scores and as lists.
  `seen_target="keep"`: the target alone stays a candidate although its history holds it; that
  answers "how well is this event predicted", and is the choice for data in which people return to
  items. Either way such rows are counted: `seen_targets`.
- **A target the catalogue does not know** is a miss, never dropped: `unknown_targets`.
- **Ties** never favour the model: see `gr.eval.metrics`.
- **The mean is over rows**, never over batches; intervals resample users.
- **Ranked lists** are taken in the order given. Seen items are taken out of them (`seen_removed`)
  and the rest moves up. A list shorter than the largest cut-off is counted (`short_lists`): what
  it does not show is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from gr.eval.bootstrap import Bootstrap, mean_intervals, ranking_intervals
from gr.eval.metrics import (
    MISS,
    Coverage,
    FloatArray,
    IntArray,
    TiedRanks,
    auc,
    gauc,
    hit_rate,
    normalized_entropy,
    ranking_metrics,
    tied_ranks,
)
from gr.eval.rows import EvaluationBatch, EvaluationSet

RankedLists: TypeAlias = Sequence[Sequence[Any]]
"""Per row, best first: item ids, catalogue rows (int), or objects with an `item_id`."""

Answers: TypeAlias = "npt.NDArray[np.floating] | torch.Tensor | RankedLists"
"""Scores [B, items], higher is better, or ranked lists."""


@runtime_checkable
class HistoryScorer(Protocol):
    """A baseline: scores [B, items] from histories of catalogue rows."""

    def score(self, histories: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class RetrievalProtocol:
    """What is asked of every model; see the module docstring for the choices.

    `curve_k`: HR@k is kept for every k up to it, for the figure.
    """

    ks: tuple[int, ...] = (1, 5, 10, 50)
    exclude_seen: bool = True
    seen_target: Literal["miss", "keep"] = "miss"
    curve_k: int = 50

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1 or self.curve_k < 1:
            raise ValueError(f"ks and curve_k must be >= 1, got {self.ks} and {self.curve_k}")
        if self.seen_target not in ("miss", "keep"):
            raise ValueError(f'seen_target must be "miss" or "keep", got {self.seen_target!r}')


@dataclass(frozen=True, eq=False)
class RetrievalResult:
    """Retrieval quality of one model.

    metrics: HR@k, NDCG@k, MRR@k, coverage@k. intervals: metric -> (low, high) (coverage has none:
    it is no mean over users). per_row: metric -> float64 [N]. curve: HR@1 ... HR@curve_k. counts:
    rows, users and whatever the protocol had to count.
    """

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    per_row: dict[str, FloatArray] = field(repr=False)
    curve: FloatArray = field(repr=False)
    counts: dict[str, int]
    user_ids: npt.NDArray[np.str_] = field(repr=False)

    def to_dict(self) -> dict[str, float]:
        """Flat numbers for `metrics.json`: each metric, its `_low` and `_high`, and the counts."""
        return _flat(self.metrics, self.intervals, self.counts)


def evaluate_retrieval(
    model: HistoryScorer | Callable[[EvaluationBatch], Answers] | RankedLists,
    rows: EvaluationSet,
    protocol: RetrievalProtocol | None = None,
    *,
    batch_size: int = 256,
    bootstrap: Bootstrap | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RetrievalResult:
    """Evaluates a model on the whole catalogue.

    model: a function from `EvaluationBatch` to scores [B, items] (NumPy or torch, -inf: not a
    candidate) or to ranked lists; an object with `score(histories)`; or all ranked lists at once,
    one a row. progress: called with (rows done, rows) after each batch.

    Raises ValueError for scores of a wrong shape or with NaN, for a list that shows an item twice,
    and for a number of answers that is not the number of rows.
    """
    protocol = protocol or RetrievalProtocol()
    ask = _asker(model, rows)
    better = np.full(len(rows), MISS, dtype=np.int64)
    tied = np.zeros(len(rows), dtype=np.int64)
    shown = Coverage(rows.num_items, protocol.ks)
    lists = _ListReader(rows, protocol)
    for start, batch in rows.batches(batch_size):
        stop = start + len(batch)
        answers = ask(start, batch)
        if isinstance(answers, torch.Tensor | np.ndarray):
            scores = _candidate_scores(answers, rows, protocol, start, stop)
            shown.add_scores(scores)
            ranks = tied_ranks(scores, rows.targets[start:stop])
        else:
            ranked = lists.read(answers, start, stop)
            shown.add_lists(ranked)
            ranks = _list_ranks(ranked, rows.targets[start:stop])
        better[start:stop], tied[start:stop] = ranks.better, ranks.tied
        if progress is not None:
            progress(stop, len(rows))
    ranks = TiedRanks(better, tied)
    per_row = ranking_metrics(ranks, protocol.ks)
    depth = (
        protocol.curve_k if lists.longest is None else min(protocol.curve_k, max(lists.longest, 1))
    )
    return RetrievalResult(
        metrics={
            **{name: float(value.mean()) for name, value in per_row.items()},
            **shown.result(),
        },
        intervals=mean_intervals(per_row, rows.user_ids, bootstrap),
        per_row=per_row,
        curve=np.array([hit_rate(ranks, k).mean() for k in range(1, depth + 1)]),
        counts={
            "rows": len(rows),
            "users": len(np.unique(rows.user_ids)),
            "unknown_targets": int((rows.targets < 0).sum()),
            "seen_targets": int(rows.target_seen().sum()),
            "unknown_history": rows.unknown_history,
            **lists.counts(),
        },
        user_ids=rows.user_ids,
    )


def paired_difference(
    a: RetrievalResult, b: RetrievalResult, metric: str, bootstrap: Bootstrap | None = None
) -> tuple[float, float, float]:
    """(mean, low, high) of `metric` of a minus b over the same rows and the same drawn users."""
    for result in (a, b):
        if metric not in result.per_row:
            raise ValueError(f"metric must be one of {sorted(result.per_row)}, got {metric!r}")
    if not np.array_equal(a.user_ids, b.user_ids):
        raise ValueError("the two results are not about the same rows: their user ids differ")
    difference = a.per_row[metric] - b.per_row[metric]
    bootstrap = bootstrap or Bootstrap()
    mean = float(difference.mean())
    low, high = mean_intervals({metric: difference}, a.user_ids, bootstrap).get(
        metric, (mean, mean)
    )
    return mean, low, high


@dataclass(frozen=True)
class RankingResult:
    """Quality of predicted probabilities: `metrics` AUC, GAUC, NE, their `intervals`, `counts`."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    counts: dict[str, int]

    def to_dict(self) -> dict[str, float]:
        """Flat numbers for `metrics.json`, as `RetrievalResult.to_dict`."""
        return _flat(self.metrics, self.intervals, self.counts)


def evaluate_ranking(
    probabilities: npt.ArrayLike,
    labels: npt.ArrayLike,
    user_ids: Sequence[object],
    bootstrap: Bootstrap | None = None,
) -> RankingResult:
    """AUC, GAUC and NE of predicted probabilities against what happened, one number per event.

    probabilities: [N] in [0, 1]; labels: 0/1 [N]; user_ids: [N]. Raises ValueError where a metric
    does not exist (one label only) or an input is not what it should be.
    """
    users = np.array([str(user) for user in user_ids])
    grouped = gauc(probabilities, labels, users)
    label = np.asarray(labels)
    return RankingResult(
        metrics={
            "AUC": auc(probabilities, labels),
            "GAUC": grouped.value,
            "NE": normalized_entropy(probabilities, labels),
        },
        intervals=ranking_intervals(probabilities, labels, users, bootstrap),
        counts={
            "events": len(label),
            "positives": int(label.sum()),
            "users": len(grouped.user_ids),
            "gauc_users": grouped.users,
            "gauc_users_left_out": grouped.users_left_out,
            "gauc_events_left_out": grouped.events_left_out,
        },
    )


def _flat(
    metrics: dict[str, float], intervals: dict[str, tuple[float, float]], counts: dict[str, int]
) -> dict[str, float]:
    bounds = {
        f"{name}_{side}": value
        for name, interval in intervals.items()
        for side, value in zip(("low", "high"), interval, strict=True)
    }
    return {**metrics, **bounds, **counts}


def _asker(
    model: HistoryScorer | Callable[[EvaluationBatch], Answers] | RankedLists, rows: EvaluationSet
) -> Callable[[int, EvaluationBatch], Answers]:
    """One way to ask all three kinds of model: (first row, batch) -> answers."""
    if isinstance(model, HistoryScorer):
        return lambda start, batch: model.score(batch.histories)
    if isinstance(model, Sequence):
        if len(model) != len(rows):
            raise ValueError(
                f"wanted one ranked list a row, got {len(model)} lists for {len(rows)} rows"
            )
        return lambda start, batch: model[start : start + len(batch)]
    return lambda start, batch: model(batch)


def _candidate_scores(
    answers: npt.NDArray[np.floating] | torch.Tensor,
    rows: EvaluationSet,
    protocol: RetrievalProtocol,
    start: int,
    stop: int,
) -> npt.NDArray[np.floating]:
    """A copy of the scores with -inf where an item is not a candidate."""
    if isinstance(answers, torch.Tensor):
        wide = answers.detach().to("cpu")
        # NumPy has no bfloat16; float32 holds all of it, so no tie is made or broken.
        answers = (wide if wide.dtype == torch.float64 else wide.float()).numpy()
    if answers.shape != (stop - start, rows.num_items):
        raise ValueError(
            f"scores of rows {start} ... {stop - 1} must be [{stop - start}, {rows.num_items}] "
            f"(rows, items of the catalogue), got {list(answers.shape)}"
        )
    narrow = answers.dtype.kind == "f" and answers.dtype.itemsize <= 4
    scores: npt.NDArray[np.floating] = np.array(answers, np.float32 if narrow else np.float64)
    if protocol.exclude_seen:
        row, item = rows.seen(start, stop)
        if protocol.seen_target == "keep":
            excluded = item != rows.targets[start:stop][row]
            row, item = row[excluded], item[excluded]
        scores[row, item] = -np.inf
    return scores


class _ListReader:
    """Turns ranked lists into arrays of catalogue rows, and counts what it met."""

    def __init__(self, rows: EvaluationSet, protocol: RetrievalProtocol) -> None:
        self.rows, self.protocol = rows, protocol
        self.longest: int | None = None
        self.seen_removed = self.short = self.unknown = 0

    def read(self, answers: RankedLists, start: int, stop: int) -> list[IntArray]:
        if len(answers) != stop - start:
            raise ValueError(
                f"wanted one ranked list for each of the rows {start} ... {stop - 1}, "
                f"got {len(answers)}"
            )
        return [self._one(answer, start + offset) for offset, answer in enumerate(answers)]

    def _one(self, answer: Sequence[Any], row: int) -> IntArray:
        entries = [getattr(entry, "item_id", entry) for entry in answer]
        items = self._catalogue_rows(entries, row)
        known = items[items >= 0]
        unique, times = np.unique(known, return_counts=True)
        if times.size and times.max() > 1:
            twice = entries[int(np.flatnonzero(items == unique[np.argmax(times)])[0])]
            raise ValueError(
                f"the list of row {row} shows item {twice!r} {times.max()} times, wanted once"
            )
        self.unknown += int((items < 0).sum())
        if self.protocol.exclude_seen:
            kept = ~np.isin(items, self.rows.history(row))
            if self.protocol.seen_target == "keep":
                kept |= items == self.rows.targets[row]
            self.seen_removed += int((~kept).sum())
            items = items[kept]
        self.short += len(items) < max(self.protocol.ks)
        self.longest = max(self.longest or 0, len(items))
        return items

    def _catalogue_rows(self, entries: list[Any], row: int) -> IntArray:
        if not entries:
            return np.zeros(0, dtype=np.int64)
        if isinstance(entries[0], str):
            if self.rows.catalog is None:
                raise ValueError(
                    f"the list of row {row} holds item ids ({entries[0]!r}), but the rows have no "
                    "catalogue to look them up in: build them with EvaluationSet.from_rows"
                )
            return np.asarray(self.rows.catalog.index([str(e) for e in entries]), dtype=np.int64)
        items = np.asarray(entries, dtype=np.int64)
        if items.min() < 0 or items.max() >= self.rows.num_items:
            raise ValueError(
                f"the list of row {row} holds catalogue rows {items.min()} ... {items.max()}, "
                f"wanted [0, {self.rows.num_items})"
            )
        return items

    def counts(self) -> dict[str, int]:
        if self.longest is None:
            return {}
        return {
            "seen_removed": self.seen_removed,
            "short_lists": self.short,
            "unknown_recommended": self.unknown,
        }


def _list_ranks(ranked: list[IntArray], targets: IntArray) -> TiedRanks:
    positions = np.zeros(len(ranked), dtype=np.int64)
    for row, (items, target) in enumerate(zip(ranked, targets, strict=True)):
        # An item the catalogue lacks is -1, as target and as recommendation: no match.
        found = np.flatnonzero(items == target) if target >= 0 else np.zeros(0, dtype=np.int64)
        positions[row] = found[0] + 1 if found.size else 0
    return TiedRanks.from_positions(positions)

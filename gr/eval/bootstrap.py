"""Confidence intervals by resampling users (percentile bootstrap).

Users, not rows, are drawn: the rows of one user are not independent. A replicate draws as many
users as there are, with replacement, and recomputes the metric as it is published (sum over rows /
number of rows), so a user with more rows weighs more in it, as in the number itself.

For a difference between two models, pass the difference of their per-row values: both are then
resampled with the same users, and an interval that does not hold 0 means what one hopes it means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gr.eval.metrics import FloatArray, binary_entropy, checked_events, gauc, log_losses

_CHUNK_CELLS = 4_000_000
"""Replicates are drawn in chunks of about this many (replicate, event) cells: 32 MB each."""


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn. `replicates=0` switches them off."""

    replicates: int = 1000
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicates < 0 or not 0.0 < self.confidence < 1.0:
            raise ValueError(
                "replicates must be >= 0 and confidence in (0, 1), got "
                f"{self.replicates} and {self.confidence}"
            )

    def interval(self, replicates: FloatArray) -> tuple[float, float]:
        """The central `confidence` of the replicates; undefined ones (NaN) are left out."""
        tail = (1.0 - self.confidence) / 2.0
        low, high = np.nanquantile(replicates, [tail, 1.0 - tail])
        return float(low), float(high)

    def draws(self, num_users: int, cells_per_replicate: int) -> Iterator[FloatArray]:
        """Chunks [C, U]: how often each user was drawn in each replicate; a seed fixes them."""
        rng = np.random.default_rng(self.seed)
        step = max(1, _CHUNK_CELLS // max(cells_per_replicate, num_users, 1))
        for start in range(0, self.replicates, step):
            count = min(step, self.replicates - start)
            drawn = rng.integers(0, num_users, (count, num_users))
            drawn += np.arange(count)[:, None] * num_users
            flat = np.bincount(drawn.ravel(), minlength=count * num_users)
            yield flat.reshape(count, num_users).astype(np.float64)


def mean_intervals(
    values: dict[str, FloatArray], users: npt.ArrayLike, bootstrap: Bootstrap | None = None
) -> dict[str, tuple[float, float]]:
    """Intervals of the means of per-row values.

    values: name -> float64 [B]; users: the user of each row [B]. Returns name -> (low, high);
    every name is computed on the same draws. Empty when `replicates` is 0.
    """
    bootstrap = bootstrap or Bootstrap()
    unique, user = np.unique(np.asarray(users), return_inverse=True)
    for name, column in values.items():
        if column.shape != user.shape:
            raise ValueError(f"values[{name!r}] has shape {column.shape}, users has {user.shape}")
    if not bootstrap.replicates or not values or not len(unique):
        return {}
    sums_UM = np.stack(
        [np.bincount(user, weights=column, minlength=len(unique)) for column in values.values()], 1
    )
    rows_U = np.bincount(user, minlength=len(unique)).astype(np.float64)
    means = [
        (draw @ sums_UM) / (draw @ rows_U)[:, None]
        for draw in bootstrap.draws(len(unique), len(unique))
    ]
    table = np.concatenate(means)
    return {name: bootstrap.interval(table[:, column]) for column, name in enumerate(values)}


def ranking_intervals(
    probabilities: npt.ArrayLike,
    labels: npt.ArrayLike,
    users: npt.ArrayLike,
    bootstrap: Bootstrap | None = None,
) -> dict[str, tuple[float, float]]:
    """Intervals of AUC, GAUC and NE over events [N] of users [N]; empty when `replicates` is 0.

    Every replicate recomputes the whole metric, the base rate inside NE included.
    """
    bootstrap = bootstrap or Bootstrap()
    score, label = checked_events(probabilities, labels, users)
    if not bootstrap.replicates:
        return {}
    grouped = gauc(score, label, users)
    num_users = len(grouped.user_ids)
    user = np.searchsorted(grouped.user_ids, np.asarray(users))
    losses_U = np.bincount(user, weights=log_losses(score, label), minlength=num_users)
    clicks_U = np.bincount(user, weights=label, minlength=num_users)
    events_U = grouped.user_events.astype(np.float64)
    counted_U = np.where(np.isnan(grouped.user_auc), 0.0, events_U)
    weighted_auc_U = np.nan_to_num(grouped.user_auc) * counted_U

    order = np.argsort(score, kind="stable")
    tie_starts = np.flatnonzero(np.append(True, np.diff(score[order]) > 0))
    user_sorted, label_sorted = user[order], label[order]
    replicates: dict[str, list[FloatArray]] = {"AUC": [], "GAUC": [], "NE": []}
    for draw in bootstrap.draws(num_users, len(score)):
        weight = draw[:, user_sorted]
        positive = np.add.reduceat(weight * label_sorted, tie_starts, axis=1)
        negative = np.add.reduceat(weight * ~label_sorted, tie_starts, axis=1)
        below = np.cumsum(negative, axis=1) - negative
        with np.errstate(invalid="ignore", divide="ignore"):
            pairs = positive.sum(axis=1) * negative.sum(axis=1)
            replicates["AUC"].append((positive * (below + 0.5 * negative)).sum(axis=1) / pairs)
            replicates["GAUC"].append((draw @ weighted_auc_U) / (draw @ counted_U))
            total = draw @ events_U
            entropy = binary_entropy((draw @ clicks_U) / total)
            replicates["NE"].append(
                np.where(entropy > 0, draw @ losses_U / total / entropy, np.nan)
            )
    return {name: bootstrap.interval(np.concatenate(parts)) for name, parts in replicates.items()}

"""What a process that trains is given, and what it gives back: files in one folder.

Given: ``settings.json``; ``train.parquet`` with the training events and ``history.parquet`` with
the histories of the test requests, both ``user, item, time`` (int64), oldest event first;
``requests.parquet`` with ``user, time``, one row a request. Users and items are numbers from 0;
time is unix seconds, or an order where ``has_clock`` is false.

Given back: ``<run>.npy``, int64 [requests, k], the best items of every request that are not in its
history, -1 where a list ends early; and ``<run>.json``.

Standard library, NumPy and pandas alone: the peers' environment has nothing of ours.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

LISTED = 50  # items of a list


@dataclass(frozen=True)
class Settings:
    """What is equal for all.

    Attributes:
        data: name of the data set. split_hash: of its split.
        users, items: how many.
        has_clock: whether times are seconds.
        epochs: how many, or at most how many.
        minutes: no epoch begins after so many; None sets no limit. For peers alone.
        length: events that a model reads; it trains on the last ``length + 1`` of every user.
        batch: users of an optimiser step.
    """

    data: str
    split_hash: str
    users: int
    items: int
    has_clock: bool
    epochs: int
    threads: int
    minutes: float | None = None
    length: int = 200
    width: int = 50
    layers: int = 2
    heads: int = 1
    negatives: int = 128
    batch: int = 128
    dropout: float = 0.2
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    temperature: float = 0.05
    seed: int = 0


def save_settings(folder: Path, settings: Settings) -> None:
    (folder / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")


def load_settings(folder: Path) -> Settings:
    values = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    return Settings(**{**values, "betas": tuple(values["betas"])})


def load_events(folder: Path, name: str) -> pd.DataFrame:
    """``train``, ``history`` or ``requests``."""
    return pd.read_parquet(folder / f"{name}.parquet")


def targets_of_last(train: pd.DataFrame, length: int) -> int:
    """Targets in the last ``length + 1`` events of every user, the first of which is none."""
    return int((train.groupby("user").size().clip(upper=length + 1) - 1).sum())


def best_unseen(
    scores: npt.NDArray[np.float32], history: pd.DataFrame, k: int = LISTED
) -> npt.NDArray[np.int64]:
    """The ``k`` best items of each row of scores [U, I] that are not in the user's history."""
    scores = scores.copy()
    scores[history["user"].to_numpy(), history["item"].to_numpy()] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int64)
    return np.where(np.isfinite(np.take_along_axis(scores, order, axis=1)), order, -1)


def give_back(folder: Path, run: str, lists: npt.NDArray[np.int64], report: dict[str, Any]) -> None:
    np.save(folder / f"{run}.npy", lists)
    # The report comes last and at once: where it is, the run is whole.
    half = folder / f"{run}.json.half"
    half.write_text(json.dumps(report), encoding="utf-8")
    half.replace(folder / f"{run}.json")

"""Running a study: train, evaluate, compare; go on where a cut run stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gr.data import load
from gr.data.whole_file import whole_file
from gr.eval import RetrievalProtocol, RetrievalResult, evaluate_recommender, paired_difference
from gr.eval.baselines import evaluate_baselines
from gr.inference import Recommender
from gr.reproduce.study import Study
from gr.training.checkpoints import quiet_files
from gr.training.prepare import PreparedData, prepare
from gr.training.recipe import Recipe
from gr.training.train import train

Say = Callable[[str], None]
PROTOCOLS = {True: "seen items excluded", False: "all items"}
COMPARED = ("HR@10", "NDCG@10")


def reproduce(
    study: Study,
    folder: str | os.PathLike[str],
    say: Say = print,
    progress: bool = False,
) -> dict[str, Any]:
    """Run a study, or the rest of one, and return what belongs into ``docs/results``.

    ``folder`` then holds one training run per run of the study. A run that is there and whole is
    not run again.

    Args:
        say: called with one line per step.
        progress: show a progress bar per training.

    Raises:
        DataError: the data set is not to be had.
        ValueError: ``folder`` holds runs of another recipe or of other data.
    """
    folder = Path(folder)
    interactions = load(study.data)
    outcomes: dict[str, _Outcome] = {}
    for name in study.runs:
        recipe = study.recipe_of(name)
        place = folder / name
        if not (place / "result.json").is_file():
            say(f"{study.name}: training {name}")
            train(
                interactions,
                recipe,
                place,
                resume=(place / "recipe.json").is_file(),
                progress=progress,
            )
        elif Recipe.load(place / "recipe.json") != recipe:
            raise ValueError(f"{place} holds a run of another recipe: wanted a new folder")
        outcomes[name] = _Outcome(place, study, prepare(interactions, recipe.data), say)
    first = next(iter(outcomes.values()))
    return {
        "study": study.name,
        "title": study.title,
        "command": f"gr reproduce {study.name}",
        "data": study.data,
        "split_hash": first.data.split.split_hash,
        "runs": {name: outcome.result for name, outcome in outcomes.items()},
        "baselines": _baselines(study, first),
        "differences": [
            _difference(a, b, outcomes[a], outcomes[b], study.exclude_seen[0])
            for a, b in study.compare
        ],
        "published": [
            {"system": p.system, "metrics": p.metrics, "source": p.source, "note": p.note}
            for p in study.published
        ],
        "note": study.note,
        "threads": sorted({str(study.recipe_of(n).training.threads or "all") for n in study.runs}),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


class _Outcome:
    """What a trained run is worth; measured once, then read from its folder."""

    def __init__(self, place: Path, study: Study, data: PreparedData, say: Say) -> None:
        self.place, self.study, self.data = place, study, data
        file = place / "result.json"
        if not file.is_file():
            say(f"{study.name}: evaluating {place.name}")
            result = self._measure()
            with whole_file(file) as temporary:
                temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        self.result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))

    def _measure(self) -> dict[str, Any]:
        with quiet_files():
            recommender = Recommender.from_pretrained(self.place / "model")
        test = {}
        for exclude_seen in self.study.exclude_seen:
            found = evaluate_recommender(
                recommender,
                self.data.split.test,
                self.data.has_clock,
                protocol_of(self.study, exclude_seen),
            )
            test[PROTOCOLS[exclude_seen]] = found.to_dict()
            rows = {f"row.{name}": values for name, values in found.per_row.items()}
            save_file({**rows, "curve": found.curve}, self._rows(exclude_seen))
        log = json.loads((self.place / "train_log.json").read_text(encoding="utf-8"))
        best: dict[str, float] = next(
            (v for v in log["validation"] if v["step"] == log["best_step"]), {}
        )
        return {
            "recipe": log["recipe"],
            "split_hash": log["split_hash"],
            "seed": log["recipe"]["training"]["seed"],
            "epochs": best.get("epoch", log["recipe"]["training"]["epochs"]),
            "seconds": log["seconds"],
            "validation": best,
            "test": test,
            "commit": log["commit"],
        }

    def _rows(self, exclude_seen: bool) -> Path:
        return self.place / f"rows-{'unseen' if exclude_seen else 'all'}.safetensors"

    def retrieval(self, exclude_seen: bool) -> RetrievalResult:
        """The rows behind the numbers, for paired differences."""
        tensors = load_file(self._rows(exclude_seen))
        rows = {n.removeprefix("row."): t for n, t in tensors.items() if n.startswith("row.")}
        return RetrievalResult(
            metrics={name: float(values.mean()) for name, values in rows.items()},
            intervals={},
            per_row=rows,
            curve=tensors["curve"],
            counts={},
            user_ids=np.array(self.data.split.test["user_id"][:], dtype=np.str_),
        )


def protocol_of(study: Study, exclude_seen: bool) -> RetrievalProtocol:
    """How the runs of a study are evaluated."""
    ks = tuple(sorted({*study.ks, 10}))
    return RetrievalProtocol(ks=ks, exclude_seen=exclude_seen)


def _baselines(study: Study, outcome: _Outcome) -> dict[str, dict[str, dict[str, float]]]:
    """Three models that cost nothing, under every protocol of the study."""
    split = outcome.data.split
    with quiet_files():
        catalog = Recommender.from_pretrained(outcome.place / "model").catalog
    return {
        PROTOCOLS[exclude_seen]: {
            name: result.to_dict()
            for name, result in evaluate_baselines(
                split.train, split.test, catalog, protocol_of(study, exclude_seen)
            ).items()
        }
        for exclude_seen in study.exclude_seen
    }


def _difference(
    a: str, b: str, first: _Outcome, second: _Outcome, exclude_seen: bool
) -> dict[str, Any]:
    ours, other = first.retrieval(exclude_seen), second.retrieval(exclude_seen)
    return {
        "a": a,
        "b": b,
        **{metric: paired_difference(ours, other, metric) for metric in COMPARED},
    }

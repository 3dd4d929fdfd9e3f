"""The main job: MovieLens 100K to a trained, evaluated and saved recommender.

    data -> embeddings -> semantic IDs -> training -> evaluation beside baselines -> report

Writes ``model/``, ``metrics.json`` and ``report.html`` (and what they were made from) into one
folder, whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gr.data import load
from gr.eval import (
    ExampleUser,
    RankingResult,
    Recommendation,
    ReportContent,
    RetrievalResult,
    build_metrics,
    evaluate_actions,
    evaluate_recommender,
    histories_of,
    one_request,
    write_report,
)
from gr.eval.baselines import evaluate_baselines
from gr.eval.rows import EvaluationSet
from gr.inference import Recommender
from gr.tokenizer import catalog_report
from gr.training.checkpoints import quiet_files
from gr.training.presets import PRESETS
from gr.training.train import TrainedRun, train

SHOWN_USERS = 3
SHOWN_EVENTS = 8
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class DemoResult:
    """What the demo measured, and where it is."""

    folder: Path
    metrics: dict[str, Any]
    retrieval: dict[str, RetrievalResult]
    ranking: RankingResult
    examples: list[ExampleUser]
    split_summary: str
    facts: dict[str, str]


def run_demo(
    folder: str | os.PathLike[str] = "runs/demo",
    dataset: str = "ml-100k",
    say: Say = print,
    progress: bool = False,
) -> DemoResult:
    """Run it.

    Args:
        folder: replaced if it holds an earlier demo.
        say: called with one line per step.
        progress: show a progress bar per training.

    Raises:
        DataError: the data set is not to be had; the message names every source tried.
        FileExistsError: ``folder`` holds something that is no demo.
    """
    began = time.perf_counter()
    target = Path(folder).resolve()  # so that it has a name, and is no link
    _refuse_foreign(target)
    work = target.with_name(f".{target.name}.partial")
    shutil.rmtree(work, ignore_errors=True)

    say(f"data: {dataset}")
    interactions = load(dataset)
    runs: dict[str, TrainedRun] = {}
    took: dict[str, float] = {}
    for name in ("hstu-sid", "hstu-atomic"):
        say(f"training {name}")
        start = time.perf_counter()
        place = work if name == "hstu-sid" else work / name
        runs[name] = train(interactions, PRESETS[name], place, progress=progress)
        took[name] = time.perf_counter() - start
    main = runs["hstu-sid"]
    data = main.data

    say("evaluating on the whole catalogue, seen items excluded")
    with quiet_files():
        served = {
            name: Recommender.from_pretrained(run.folder / "model") for name, run in runs.items()
        }
    recommender = served["hstu-sid"]
    retrieval = evaluate_baselines(data.split.train, data.split.test, recommender.catalog)
    for name in ("hstu-atomic", "hstu-sid"):
        retrieval[name] = evaluate_recommender(served[name], data.split.test)
    held_out = one_request(data.split.validation, data.split.test)
    ranking = evaluate_actions(recommender, held_out, "like")

    facts = {
        "training time": ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items()),
        "split": data.split.summary(),
    }
    report = catalog_report(recommender.catalog, embeddings=None)
    examples = _examples(recommender, data.split.test)
    metrics = build_metrics(
        dataset,
        data.split.split_hash,
        time.perf_counter() - began,
        retrieval,
        ranking,
        report.to_dict(),
    )
    content = ReportContent(
        title="Movies people will watch next: MovieLens 100K",
        main_model="hstu-sid",
        curves={name: result.curve for name, result in retrieval.items()},
        codebook_usage=[np.array(counts) for counts in report.code_counts],
        losses={name: _losses(run) for name, run in runs.items()},
        examples=examples,
        facts=facts,
        notes=_notes(retrieval["hstu-sid"], ranking),
    )
    write_report(work, metrics, content)
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    work.replace(target)
    return DemoResult(
        Path(folder), metrics, retrieval, ranking, examples, data.split.summary(), facts
    )


def _refuse_foreign(folder: Path) -> None:
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file: wanted an empty or a new folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / "metrics.json").is_file():
        raise FileExistsError(
            f"{folder} holds files but no metrics.json, so it is no earlier demo: wanted an empty "
            "or a new folder"
        )


def _losses(run: TrainedRun) -> list[tuple[float, float]]:
    """Training loss over steps, averaged so that a curve has at most 100 points."""
    losses: npt.NDArray[np.float64] = np.asarray(run.trainer.step_losses, dtype=np.float64)
    parts = np.array_split(losses, min(100, len(losses)))
    ends = np.cumsum([len(part) for part in parts])
    return [(float(end), float(part.mean())) for end, part in zip(ends, parts, strict=True)]


def _examples(recommender: Recommender, rows: Any) -> list[ExampleUser]:
    """Users with histories of ordinary length, evenly spaced over the split."""
    lengths = np.array([len(items) for items in rows["item_id"]])
    ordinary = np.flatnonzero((lengths >= 20) & (lengths <= 120))
    chosen = ordinary[np.linspace(0, len(ordinary) - 1, SHOWN_USERS + 2).astype(int)[1:-1]]
    picked = rows.select(chosen)
    evaluated = EvaluationSet.from_rows(picked, recommender.catalog)
    _, batch = next(evaluated.batches(SHOWN_USERS))
    histories = histories_of(batch, recommender.vocabulary.actions, has_clock=True)
    answers = recommender.recommend(histories, k=5, request_times=batch.request_times)
    title = recommender.catalog.title
    return [
        ExampleUser(
            user_id=user,
            history=[
                Recommendation(title(event.item_id), note=event.action or "")
                for event in history[-SHOWN_EVENTS:]
            ],
            recommendations=[
                Recommendation(
                    title(scored.item_id), f"{scored.score:.2f}", scored.item_id == target
                )
                for scored in answer
            ],
            target=title(target),
            history_length=len(history),
        )
        for user, history, answer, target in zip(
            batch.user_ids, histories, answers, picked["target_item_id"], strict=True
        )
    ]


def _notes(retrieval: RetrievalResult, ranking: RankingResult) -> Sequence[str]:
    counts, events = retrieval.counts, ranking.counts
    return [
        f"{counts['rows']:,} test events, one per user; every item of the catalogue is a "
        f"candidate except those of the user's history. Targets seen before (counted as misses): "
        f"{counts['seen_targets']}; unknown to the catalogue: {counts['unknown_targets']}.",
        "Each model was selected on the validation event; the test event was read once. A request "
        "is made at the time of its target, which HSTU's time bias reads.",
        f"Ranking: p(like) for {events['events']:,} held-out events, the two of a user as "
        "candidates of one request; GAUC over the "
        f"{events['gauc_users']:,} users who liked one of them.",
        "Intervals are 95 % bootstrap intervals over users.",
    ]

"""Training: ours beside other libraries, on the same events, with the quality of what comes out.

    python benchmarks/train.py [--data ml-1m] [--epochs 20] [--threads 2]
    python benchmarks/train.py --data ml-1m --only rectools-hstu-softmax --minutes 60 --threads 1 \
        --trained runs/reproduce/ml-1m-hstu/hstu

The first call makes an environment for the peers and installs ``peers/requirements.txt`` into it:
RecTools (``HSTUModel``, ``SASRecModel``) and RePlay (``SasRec``). Every run then has a process of
its own, with the same events, width, depth, heads, length, negatives, batch, dropout, learning rate
and number of epochs, and returns its best 50 items for every test user, which this process judges:
leave-one-out, whole catalogue, seen items excluded, last weights. docs/benchmarks.md explains the
numbers and names the differences that remain.

With ``--minutes`` peers train for that long, and stand beside recommenders that ``gr train`` or
``gr reproduce`` left (``--trained``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset

from gr.data.whole_file import whole_file
from gr.eval import (
    Bootstrap,
    EvaluationSet,
    RetrievalProtocol,
    RetrievalResult,
    evaluate_recommender,
    evaluate_retrieval,
    paired_difference,
)
from gr.inference import Recommender
from gr.training.ids import build_ids
from gr.training.prepare import PreparedData, prepare, read_data
from gr.training.recipe import DataRecipe, IdsRecipe
from measuring import RESULTS, commit, machine, print_table, progress
from peers.exchange import Settings, load_settings, save_settings

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "peers" / "requirements.txt"
METRICS = ("HR@10", "NDCG@10")
EPOCHS = {"ml-100k": 20, "ml-1m": 10}
UNLIMITED = 100_000


@dataclass(frozen=True)
class Run:
    """One training: the module that does it, and which of ours it is compared with."""

    name: str
    module: str
    beside: str | None = None

    @property
    def ours(self) -> bool:
        return self.beside is None


def _runs() -> dict[str, Run]:
    ours = [
        Run(f"gr-{model}-{training}", "train_ours")
        for model in ("hstu", "sasrec")
        for training in ("sampled", "softmax", "recipe")
    ]
    peers = [
        Run(f"{library}-{model}-{loss}", f"peers.{library}_peer", f"gr-{model}-{loss}")
        for library, model in (("rectools", "hstu"), ("rectools", "sasrec"), ("replay", "sasrec"))
        for loss in ("sampled", "softmax")
    ]
    return {run.name: run for run in (*ours, *peers)}


RUNS = _runs()

DIFFERENCES = (
    "Negatives of the sampled softmax: ours are drawn once a batch, a peer's once a position; "
    "RePlay corrects their logits for the sampling, ours and RecTools do not.",
    "Blocks: RecTools' and RePlay's SASRec have LayerNorms, learnt positions and a ReLU layer; our "
    "transformer block has RMSNorms, rotary positions and a gated SiLU layer of that width. "
    "RecTools' HSTU adds learnt positions to the embeddings and has affine norms; ours does not.",
    "Initial weights: each library's own.",
    "Batches: ours hold users with histories of like lengths, padded to the longest of them; a "
    "peer's hold any users, padded to the whole length.",
    "Targets: ours predicts the first event of a window too.",
    "gr-*-recipe: all events of a user instead of the last ones, batches of 1024 tokens, another "
    "learning rate with a cosine schedule, clipped gradients, averaged weights, other dropout.",
)


# ---- what all are given --------------------------------------------------------------------------


def events_table(rows: Dataset, catalog: Any, users: Mapping[str, int]) -> pd.DataFrame:
    """Lists of events as one table ``user, item, time`` of numbers, oldest event first."""
    items = rows["item_id"][:]
    lengths = [len(row) for row in items]
    known = catalog.index([item for row in items for item in row])
    return pd.DataFrame(
        {
            "user": np.repeat([users[user] for user in rows["user_id"]], lengths),
            "item": np.asarray(known, dtype=np.int64),
            "time": np.array([t for row in rows["timestamp"] for t in row], dtype=np.int64),
        }
    )


def export(folder: Path, data: PreparedData, catalog: Any) -> None:
    """The files that every run reads; see ``peers.exchange``."""
    test = data.split.test
    users = {user: number for number, user in enumerate(test["user_id"])}
    events_table(data.split.train, catalog, users).to_parquet(folder / "train.parquet")
    events_table(test, catalog, users).to_parquet(folder / "history.parquet")
    requests = {"user": range(len(users)), "time": test["target_timestamp"][:]}
    pd.DataFrame(requests).astype("int64").to_parquet(folder / "requests.parquet")


# ---- the peers' environment ----------------------------------------------------------------------


def peer_python(folder: Path) -> Path:
    """The interpreter of the peers' environment, which is made where it is missing or outdated."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    mark = folder / "installed.txt"  # written last: half an environment is made anew
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return python
    progress(f"installing the peers into {folder}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)]
    subprocess.run(install, check=True)
    mark.write_text(wanted, encoding="utf-8")
    return python


# ---- runs ----------------------------------------------------------------------------------------


@contextmanager
def work_folder(given: Path | None, settings: Settings) -> Iterator[Path]:
    """The folder that runs read and write: ``given``, which stays, or a temporary one.

    Raises:
        ValueError: ``given`` holds runs of other settings.
    """
    if given is None:
        with tempfile.TemporaryDirectory(prefix="gr-train-") as name:
            save_settings(Path(name), settings)
            yield Path(name)
        return
    given.mkdir(parents=True, exist_ok=True)
    if (given / "settings.json").is_file() and load_settings(given) != settings:
        raise ValueError(f"--work: {given} holds runs of {load_settings(given)}, wanted {settings}")
    save_settings(given, settings)
    yield given


def train(run: Run, folder: Path, python: str, threads: int) -> None:
    """One run in its process, which leaves its report and its lists in ``folder``.

    Raises:
        RuntimeError: the process failed; the message ends with the last lines that it wrote.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    log = folder / f"{run.name}.log"
    with log.open("w", encoding="utf-8") as written:
        ended = subprocess.run(
            [python, "-m", run.module, str(folder), run.name],
            cwd=HERE,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    if ended.returncode:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{run.name} ended with {ended.returncode}:\n{last}")


def judge(folder: Path, run: Run, rows: EvaluationSet) -> RetrievalResult:
    """The quality of the lists of a run."""
    listed = np.load(folder / f"{run.name}.npy")
    lists = [row[row >= 0].tolist() for row in listed]
    return evaluate_retrieval(lists, rows, RetrievalProtocol(ks=(10,)), bootstrap=Bootstrap())


def summary(report: Mapping[str, Any], quality: RetrievalResult) -> dict[str, Any]:
    """What is kept of a run. The first epoch also builds and loads, so it does not count."""
    seconds, cpu_seconds = (report[f"{kind}_seconds_all"] for kind in ("epoch", "cpu"))
    typical = median(seconds[1:] or seconds)
    return {
        "epoch_seconds": typical,
        "epoch_cpu_seconds": median(cpu_seconds[1:] or cpu_seconds),
        "targets_per_epoch": report["targets"],
        "targets_per_second": report["targets"] / typical,
        **metrics_of(quality),
        "seconds": sum(seconds),
        **{name: value for name, value in report.items() if name != "targets"},
    }


def compare(
    peer: Mapping[str, Any],
    ours: Mapping[str, Any],
    qualities: tuple[RetrievalResult, RetrievalResult],
) -> dict[str, Any]:
    """A peer beside one of ours: ratios of peer to ours, and both qualities.

    Args:
        qualities: of the peer and of ours.
    """
    theirs, mine = qualities
    return {
        "epoch_speedup": peer["epoch_seconds"] / ours["epoch_seconds"],
        "epoch_cpu_ratio": peer["epoch_cpu_seconds"] / ours["epoch_cpu_seconds"],
        "target_speedup": ours["targets_per_second"] / peer["targets_per_second"],
        "memory_ratio": peer["peak_mb"] / ours["peak_mb"],
        "growth_ratio": peer["growth_mb"] / max(ours["growth_mb"], 1.0),
        "quality": {metric: peer[metric] for metric in METRICS},
        "quality_ours": {metric: ours[metric] for metric in METRICS},
        "difference": difference(mine, theirs),
    }


def load_trained(folder: Path, data: PreparedData) -> tuple[RetrievalResult, dict[str, Any]]:
    """A recommender that was trained before: its quality, and what is kept of it.

    Raises:
        ValueError: it was trained on another split.
    """
    log = json.loads((folder / "train_log.json").read_text(encoding="utf-8"))
    if log["split_hash"] != data.split.split_hash:
        raise ValueError(
            f"--trained: {folder} has split_hash {log['split_hash']}, wanted "
            f"{data.split.split_hash}"
        )
    quality = evaluate_recommender(
        Recommender.from_pretrained(folder / "model"),
        data.split.test,
        data.has_clock,
        RetrievalProtocol(ks=(10,)),
    )
    kept = {"seconds": log["seconds"], "commit": log["commit"]}
    return quality, {**kept, **metrics_of(quality)}


def metrics_of(quality: RetrievalResult) -> dict[str, Any]:
    """The metrics that are shown, with their intervals."""
    return {
        **{metric: quality.metrics[metric] for metric in METRICS},
        **{f"{metric}_interval": list(quality.intervals[metric]) for metric in METRICS},
    }


def difference(ours: RetrievalResult, peer: RetrievalResult) -> dict[str, dict[str, Any]]:
    """Ours minus a peer's, user by user, with 95 % intervals."""
    found = {}
    for metric in METRICS:
        mean, low, high = paired_difference(ours, peer, metric)
        found[metric] = {"ours_minus_peer": mean, "interval": [low, high]}
    return found


def comparisons(
    runs: Mapping[str, Mapping[str, Any]], qualities: Mapping[str, RetrievalResult]
) -> dict[str, dict[str, Any]]:
    """Every peer that ran beside ours of equal settings and beside our recipe, where those ran."""
    found: dict[str, dict[str, Any]] = {}
    for name in runs:
        beside = RUNS[name].beside
        if beside is None:
            continue
        recipe = beside.rsplit("-", 1)[0] + "-recipe"
        for ours, suffix in ((beside, ""), (recipe, ", our recipe")):
            if ours in runs:
                pair = (qualities[name], qualities[ours])
                compared = compare(runs[name], runs[ours], pair)
                found[name + suffix] = {"ours": ours, **compared}
    return found


# ---- the whole -----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=[*EPOCHS], default="ml-100k")
    parser.add_argument(
        "--epochs", type=int, help="of every run (default: 20 on ml-100k, 10 on ml-1m)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of every run (default: 2)")
    parser.add_argument(
        "--length", type=int, default=200, help="events a model reads (default: 200)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(default: 0.001)")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        default=Path.home() / ".cache" / "gr" / "peers",
        help="environment of the peers, made where it is missing (default: ~/.cache/gr/peers)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*RUNS], metavar="RUN", help=f"some of: {', '.join(RUNS)}"
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="FOLDER",
        help="keep what runs leave there, and skip those that it has (default: a temporary one)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=RESULTS,
        help="folder of train.json, or train-ml-1m.json (default: benchmarks/results)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="train peers until so long has passed, instead of a number of epochs",
    )
    parser.add_argument(
        "--trained",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="folders of training runs of ours to set beside the peers",
    )
    given = parser.parse_args(arguments)
    if given.minutes is not None and any(RUNS[name].ours for name in given.only or RUNS):
        parser.error("--minutes is for peers: wanted --only with peers, and ours by --trained")
    return given


def main() -> None:
    given = parse()
    runs = [RUNS[name] for name in given.only or RUNS]
    python = {True: sys.executable, False: ""}
    if not all(run.ours for run in runs):
        python[False] = str(peer_python(given.peers))
    about = {"machine": {**machine(), "threads": given.threads}, "commit": commit()}
    data = prepare(read_data(given.data), DataRecipe())
    catalog = build_ids(data, IdsRecipe(kind="atomic", embeddings=())).catalog
    rows = EvaluationSet.from_rows(data.split.test, catalog)
    settings = Settings(
        data=given.data,
        split_hash=data.split.split_hash,
        users=len(rows),
        items=len(catalog),
        has_clock=data.has_clock,
        epochs=given.epochs or (EPOCHS[given.data] if given.minutes is None else UNLIMITED),
        minutes=given.minutes,
        threads=given.threads,
        length=given.length,
        learning_rate=given.learning_rate,
    )
    measured: dict[str, dict[str, Any]] = {}
    qualities: dict[str, RetrievalResult] = {}
    with work_folder(given.work, settings) as folder:
        export(folder, data, catalog)
        for run in runs:
            done = folder / f"{run.name}.json"
            if not done.is_file():
                progress(run.name)
                train(run, folder, python[run.ours], settings.threads)
            report = json.loads(done.read_text(encoding="utf-8"))
            qualities[run.name] = judge(folder, run, rows)
            measured[run.name] = summary(report, qualities[run.name])
    beside: dict[str, dict[str, Any]] = {}
    for place in given.trained:
        quality, kept = load_trained(place, data)
        beside[place.name] = {
            **kept,
            "difference": {name: difference(quality, peer) for name, peer in qualities.items()},
        }
    result = {
        "peers": comparisons(measured, qualities),
        "trained": beside,
        "runs": measured,
        "config": {**asdict(settings), "differences": DIFFERENCES},
        **about,
    }
    show(result)
    given.output.mkdir(parents=True, exist_ok=True)
    suffix = "" if given.data == "ml-100k" else f"-{given.data}"
    file = given.output / f"train{suffix}.json"
    with whole_file(file) as temporary:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    print(file)


def show(result: Mapping[str, Any]) -> None:
    runs, config = result["runs"], result["config"]
    columns = ("run", "s/epoch", "CPU s", "targets/s", "peak MB", "grown MB")
    keys = ("epoch_seconds", "epoch_cpu_seconds")
    counts = ("targets_per_second", "peak_mb", "growth_mb")
    rows = [
        [name, *(f"{run[key]:.2f}" for key in keys), *(f"{run[key]:,.0f}" for key in counts)]
        for name, run in runs.items()
    ]
    title = f"{config['data']}, {config['threads']} threads: an epoch"
    print_table(title, columns, rows)
    rows = [
        [name, *(_with_interval(run[metric], run[f"{metric}_interval"]) for metric in METRICS)]
        for name, run in [*runs.items(), *result["trained"].items()]
    ]
    after = f"{config['epochs']} epochs"
    if config["minutes"] is not None:
        after = f"{config['minutes']:g} minutes"
    print_table(f"After {after}: test, 95 %", ("run", *METRICS), rows)
    rows = [
        [
            f"{name} − {peer}",
            *(
                f"{found[metric]['ours_minus_peer']:+.4f} "
                f"[{found[metric]['interval'][0]:+.3f}, {found[metric]['interval'][1]:+.3f}]"
                for metric in METRICS
            ),
            f"{runs[peer]['seconds'] / kept['seconds']:.2f}x",
        ]
        for name, kept in result["trained"].items()
        for peer, found in kept["difference"].items()
    ]
    if rows:
        print_table("Trained before, minus a peer", ("", *METRICS, "peer's time"), rows)
    rows = [
        [
            name,
            f"{found['epoch_speedup']:.1f}x",
            f"{found['memory_ratio']:.2f}x",
            f"{found['growth_ratio']:.1f}x",
            f"{found['difference']['NDCG@10']['ours_minus_peer']:+.4f}",
        ]
        for name, found in result["peers"].items()
    ]
    ratios = ("peer", "epoch", "peak", "grown", "NDCG@10")
    if rows:
        print_table("Peer over ours (NDCG@10: ours minus peer)", ratios, rows)


def _with_interval(value: float, interval: Sequence[float]) -> str:
    return f"{value:.4f} [{interval[0]:.3f}, {interval[1]:.3f}]"


if __name__ == "__main__":
    main()

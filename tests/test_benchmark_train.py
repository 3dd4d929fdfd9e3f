"""The parts of benchmarks/train.py that need no peer: what is given, what is judged, what is told.

Times are not tested, only how they are put together.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gr.data import Interactions
from gr.eval import EvaluationSet
from gr.training.ids import build_ids
from gr.training.prepare import PreparedData, prepare
from gr.training.recipe import DataRecipe, IdsRecipe
from gr.training.train import model_config, train

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
ITEMS = 40


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def data() -> PreparedData:
    rng = np.random.default_rng(0)
    counts = rng.integers(4, 15, 12)
    events = pa.table(
        {
            "user_id": [f"u{user}" for user, n in enumerate(counts) for _ in range(n)],
            "item_id": [f"i{n}" for count in counts for n in rng.permutation(ITEMS)[:count]],
            "timestamp": pa.array(10**9 + np.arange(counts.sum()), pa.int64()),
            "action": ["interact"] * int(counts.sum()),
        }
    )
    return prepare(Interactions("tiny", events), DataRecipe())


@pytest.fixture(scope="module")
def ids(data: PreparedData) -> Any:
    return build_ids(data, IdsRecipe(kind="atomic", embeddings=()))


@pytest.fixture
def settings(data: PreparedData, ids: Any) -> Any:
    return module("peers.exchange").Settings(
        data="tiny",
        split_hash=data.split.split_hash,
        users=len(data.split.test),
        items=len(ids.catalog),
        has_clock=True,
        epochs=2,
        threads=1,
        length=6,
        width=4,
        batch=5,
    )


def test_runs_are_given_the_events_of_the_split(
    data: PreparedData, ids: Any, settings: Any, tmp_path: Path
) -> None:
    exchange = module("peers.exchange")
    module("train").export(tmp_path, data, ids.catalog)
    exchange.save_settings(tmp_path, settings)
    assert exchange.load_settings(tmp_path) == settings
    users = data.split.test["user_id"][:]
    for name, rows in (("train", data.split.train), ("history", data.split.test)):
        given = exchange.load_events(tmp_path, name)
        assert set(map(str, given.dtypes)) == {"int64"}
        for row in rows:
            mine = given[given["user"] == users.index(row["user_id"])]
            assert [ids.catalog.item_ids[n] for n in mine["item"]] == row["item_id"]
            assert mine["time"].tolist() == row["timestamp"]
        assert len(given) == sum(map(len, rows["item_id"]))
    requests = exchange.load_events(tmp_path, "requests")
    assert requests["user"].tolist() == list(range(len(users)))
    assert requests["time"].tolist() == data.split.test["target_timestamp"][:]


def test_targets_of_the_last_events() -> None:
    train = pd.DataFrame({"user": [0] * 2 + [1] * 7 + [2] * 30})
    # Of 2, 7 and the last 11 events the first is no target.
    assert module("peers.exchange").targets_of_last(train, 10) == 1 + 6 + 10


def test_best_items_are_those_of_a_sort_without_the_seen() -> None:
    rng = np.random.default_rng(1)
    scores = rng.permutation(5 * 9).reshape(5, 9).astype(np.float32)
    seen = [(user, int(item)) for user in range(5) for item in rng.integers(0, 9, 4)]
    history = pd.DataFrame(seen, columns=["user", "item"])
    lists = module("peers.exchange").best_unseen(scores, history, 7)
    assert lists.shape == (5, 7) and lists.dtype == np.int64
    for user, row in enumerate(lists.tolist()):
        left = sorted(set(range(9)) - {item for owner, item in seen if owner == user})
        wanted = sorted(left, key=lambda item: -scores[user, item])[:7]
        assert row == wanted + [-1] * (7 - len(wanted))


def test_the_watch_counts_epochs_and_what_training_adds() -> None:
    watch = module("peers.watch").Watch()
    watch.begin()
    held = np.ones(12_500_000)  # 100 MB
    watch.epoch()
    watch.epoch()
    del held
    watch.end()
    report = watch.report()
    assert len(report["epoch_seconds_all"]) == len(report["cpu_seconds_all"]) == 2
    assert min(report["epoch_seconds_all"]) >= 0
    assert 95 < report["growth_mb"] < 200
    assert report["peak_mb"] >= report["held_mb"] + report["growth_mb"] - 1e-6


@pytest.mark.parametrize(
    ("name", "training"), [("hstu", "sampled"), ("hstu", "recipe"), ("sasrec", "softmax")]
)
def test_our_runs_train_on_what_they_say(
    name: str, training: str, data: PreparedData, ids: Any, settings: Any, tmp_path: Path
) -> None:
    ours, watch = module("train_ours"), module("peers.watch").Watch()
    recipe = ours.make_recipe(f"gr-{name}-{training}", settings)
    config = model_config(recipe, ids.tokenizer)
    assert (config.hidden_size, config.num_attention_heads) == (4, 1)
    assert config.layer_types == [{"hstu": "hstu", "sasrec": "transformer"}[name]] * 2
    assert config.item_loss == ("sampled" if training == "sampled" else "level")
    watch.begin()
    model, targets = ours.fit(recipe, data, ids.tokenizer, tmp_path, watch)
    assert len(watch.seconds) == 2
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    most = 10**9 if training == "recipe" else settings.length + 1
    assert targets == sum(min(len(row), most) for row in data.split.train["item_id"])


def test_equal_runs_differ_from_the_peers_settings_in_nothing(settings: Any) -> None:
    recipe = module("train_ours").make_recipe("gr-hstu-sampled", settings)
    training = recipe.training
    assert training.batches.sequences == 5 and training.batches.tokens is None
    assert training.optimizer.learning_rate == 1e-3 and training.optimizer.weight_decay == 0
    assert training.optimizer.schedule == "constant" and training.optimizer.warmup_steps == 0
    assert training.optimizer.max_grad_norm == 0 and training.selection.ema_decay == 0
    assert recipe.model["num_negatives"] == 128 and recipe.model["dropout"] == 0.2
    assert (training.epochs, training.threads) == (2, 1)


def judged(
    data: PreparedData, ids: Any, folder: Path, name: str, place: int | None
) -> tuple[Any, dict[str, Any]]:
    """Quality and summary of a run that shows every target at ``place``, or never."""
    train = module("train")
    rows = EvaluationSet.from_rows(data.split.test, ids.catalog)
    lists = np.full((len(rows), 12), -1)
    for row, target in enumerate(rows.targets):
        unseen = np.setdiff1d(np.arange(rows.num_items), [*rows.history(row), target])
        lists[row] = unseen[:12]
        if place is not None:
            lists[row] = np.insert(unseen[:11], place - 1, target)
    np.save(folder / f"{name}.npy", lists)
    quality = train.judge(folder, train.RUNS[name], rows)
    report = {
        "epoch_seconds_all": [90.0, 4.0, 2.0, 3.0],
        "cpu_seconds_all": [95.0, 5.0, 5.0, 6.0],
        "targets": 600,
        "peak_mb": 300.0,
        "held_mb": 200.0,
        "growth_mb": 50.0,
    }
    return quality, train.summary(report, quality)


def test_lists_are_judged_and_compared(data: PreparedData, ids: Any, tmp_path: Path) -> None:
    train = module("train")
    good, ours = judged(data, ids, tmp_path, "gr-hstu-sampled", 3)
    bad, peer = judged(data, ids, tmp_path, "rectools-hstu-sampled", None)
    assert ours["HR@10"] == 1 and ours["NDCG@10"] == pytest.approx(1 / np.log2(4))
    assert peer["HR@10"] == peer["NDCG@10"] == 0
    assert ours["epoch_seconds"] == 3 and ours["epoch_cpu_seconds"] == 5  # without the first
    assert ours["targets_per_second"] == 200
    peer |= {"epoch_seconds": 30.0, "targets_per_second": 15.0, "peak_mb": 600.0}
    runs = {"gr-hstu-sampled": ours, "rectools-hstu-sampled": peer}
    qualities = {"gr-hstu-sampled": good, "rectools-hstu-sampled": bad}
    compared = train.comparisons(runs, qualities)
    assert list(compared) == ["rectools-hstu-sampled"]
    found = compared["rectools-hstu-sampled"]
    assert found["ours"] == "gr-hstu-sampled"
    assert found["epoch_speedup"] == 10 and found["memory_ratio"] == 2
    assert found["target_speedup"] == pytest.approx(200 / 15)
    assert found["difference"]["HR@10"] == {"ours_minus_peer": 1.0, "interval": [1.0, 1.0]}
    with_recipe = {**runs, "gr-hstu-recipe": ours}
    compared = train.comparisons(with_recipe, {**qualities, "gr-hstu-recipe": good})
    assert list(compared) == ["rectools-hstu-sampled", "rectools-hstu-sampled, our recipe"]


def test_a_recommender_trained_before_stands_beside_a_peer(
    data: PreparedData, ids: Any, settings: Any, tmp_path: Path
) -> None:
    bench = module("train")
    recipe = module("train_ours").make_recipe("gr-hstu-sampled", settings)
    ran = train(data.interactions, recipe, tmp_path / "ours")
    quality, kept = bench.load_trained(ran.folder, data)
    assert kept["seconds"] > 0 and kept["HR@10"] == quality.metrics["HR@10"]
    peer, _ = judged(data, ids, tmp_path, "rectools-hstu-sampled", None)
    found = bench.difference(quality, peer)["HR@10"]
    assert found["ours_minus_peer"] == pytest.approx(kept["HR@10"])
    other = replace(data, split=replace(data.split, split_hash="0" * 16))
    with pytest.raises(ValueError, match=f"ours has split_hash .*, wanted {'0' * 16}"):
        bench.load_trained(ran.folder, other)


def test_a_peer_stops_after_its_minutes() -> None:
    watch = module("peers.watch").Watch()
    watch.begin()
    assert not watch.is_over(None) and not watch.is_over(5.0)
    assert watch.is_over(0.0)


def test_minutes_are_for_peers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module("train").parse(["--minutes", "5", "--only", "gr-hstu-recipe"])
    assert "--minutes is for peers" in capsys.readouterr().err


def test_every_peer_has_ours_beside_it() -> None:
    runs = module("train").RUNS
    for run in runs.values():
        assert run.ours == run.name.startswith("gr-")
        assert run.ours or runs[run.beside].ours
        assert (BENCHMARKS / f"{run.module.replace('.', '/')}.py").is_file()


def test_peers_are_pinned() -> None:
    lines = module("train").REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    assert all("==" in line for line in lines if line and not line.startswith("#"))


def test_peers_are_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, called = module("train"), []

    def run(command: list[str], check: bool) -> None:
        called.append(command[1:3])
        (tmp_path / "peers").mkdir(exist_ok=True)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        assert train.peer_python(tmp_path / "peers").is_relative_to(tmp_path)
    assert called == [["-m", "venv"], ["-m", "pip"]]
    (tmp_path / "peers" / "installed.txt").write_text("others", encoding="utf-8")
    train.peer_python(tmp_path / "peers")
    assert len(called) == 4


def test_a_run_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    train = module("train")
    broken = replace(train.RUNS["gr-hstu-sampled"], module="no_such_module")
    with pytest.raises(RuntimeError, match=r"gr-hstu-sampled ended with 1:\n.*no_such_module"):
        train.train(broken, tmp_path, sys.executable, 1)


def test_a_kept_folder_is_for_one_set_of_settings(settings: Any, tmp_path: Path) -> None:
    train = module("train")
    for _ in range(2):
        with train.work_folder(tmp_path, settings) as folder:
            assert folder == tmp_path and (folder / "settings.json").is_file()
    with (
        pytest.raises(ValueError, match="holds runs of"),
        train.work_folder(tmp_path, replace(settings, epochs=9)),
    ):
        pass
    with train.work_folder(None, settings) as folder:
        assert (folder / "settings.json").is_file()
    assert not folder.exists()


def test_help_names_the_options_and_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        module("train").parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--peers FOLDER" in text and "--epochs" in text and "docs/benchmarks.md" in text

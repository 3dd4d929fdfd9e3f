"""The benchmarks run, agree with the stock library, and write what they promise. No times here."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ABOUT = {"config", "machine", "commit"}
KEYS = {
    "retrieve": {
        "speedup",
        "speedup_processor",
        "memory_ratio",
        "max_score_diff",
        "trie_share",
        "step_over_matmul",
        "seconds",
        "memory_mb",
        "breakdown",
        "sweeps",
    },
    "rank": {"speedup_one_by_one", "speedup_repeated", "max_score_diff", "backbones"},
}
TOLERANCE = {"retrieve": 1e-4, "rank": 1e-5}


def run(script: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def numbers(value: Any) -> list[float]:
    """All numbers inside a JSON value."""
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of both benchmarks."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for name in KEYS:
        run(f"{name}.py", "--quick", "--output", str(folder))
    return folder


@pytest.mark.parametrize("name", KEYS)
def test_results_are_complete_and_the_same_as_stock(name: str, results: Path) -> None:
    result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    assert result.keys() >= KEYS[name] | ABOUT
    assert result["max_score_diff"] <= TOLERANCE[name]
    assert result["config"]["quick"] is True
    assert all(math.isfinite(number) and number >= 0 for number in numbers(result))
    picture = (results / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert {path.name for path in results.iterdir() if path.stem == name} == {
        f"{name}.json",
        f"{name}.png",
    }


def test_ratios_and_parts_follow_from_what_they_are_made_of(results: Path) -> None:
    result = json.loads((results / "retrieve.json").read_text(encoding="utf-8"))
    seconds, memory, breakdown = result["seconds"], result["memory_mb"], result["breakdown"]
    assert result["speedup"] == pytest.approx(seconds["stock"] / seconds["ours"], rel=1e-4)
    assert result["memory_ratio"] == pytest.approx(memory["ours"] / memory["stock"], rel=1e-4)
    phases = ("prefill", "model steps", "trie", "choosing")
    parts = [part for phase in phases for part in breakdown[phase].values()]
    assert sum(parts) == pytest.approx(breakdown["seconds_watched"], rel=1e-3)
    share = sum(breakdown["trie"].values()) / breakdown["seconds_watched"]
    assert result["trie_share"] == pytest.approx(share, rel=1e-3)
    ratio = breakdown["step_seconds"] / breakdown["step_matmul_seconds"]
    assert result["step_over_matmul"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("name", KEYS)
def test_help_names_the_options_and_the_page(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--quick" in text and "--output DIR" in text and "docs/benchmarks.md" in text


def test_table_for_the_page(results: Path) -> None:
    text = run("table.py", str(results))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5, 6}
    assert "Llama, ours" in text and "`generate`, dict callback" in text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({(1, 2): -1.0, (1, 3): -2.001}, "scores differ by 0.001"),
        ({(1, 2): -1.0, (1, 4): -1.5}, "is in one answer only"),
        ({(1, 2): -1.0}, "is in one answer only"),
        ({}, "user 0 has 0 items"),
    ],
)
def test_answers_that_differ_end_the_run(
    other: dict[tuple[int, ...], float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    retrieve = importlib.import_module("retrieve")
    ours = {(1, 2): -1.0, (1, 3): -2.0}
    with pytest.raises(RuntimeError, match=message):
        retrieve.largest_difference("stock", [other], [ours])
    tied = {(1, 2): -1.00001, (1, 4): -2.00001}
    assert retrieve.largest_difference("stock", [tied], [ours]) == pytest.approx(1e-5)


def test_scores_that_differ_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rank = importlib.import_module("rank")
    assert rank.largest_difference("x", [[0.0, 1.0]], [[1e-6, 1.0]]) == pytest.approx(1e-6)
    for wrong in (1e-4, math.nan):
        with pytest.raises(RuntimeError, match="scores differ"):
            rank.largest_difference("x", [[0.0, wrong]], [[0.0, 0.0]])

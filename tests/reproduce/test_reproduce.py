"""Studies: what they refuse, what a run writes, how a cut run goes on, and the page of results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gr.reproduce import Study, find_study, load_results, reproduce, results_page, study_names
from gr.reproduce.results import save_result
from gr.reproduce.study import merged

ROOT = Path(__file__).parents[2]
STUDY: dict[str, Any] = {
    "name": "tiny",
    "title": "A tiny study",
    "data": "ml-latest-small",
    "ks": [5, 10],
    "exclude_seen": [True, False],
    "recipe": {
        "ids": {"kind": "atomic", "embeddings": []},
        "model": {"hidden_size": 8, "num_attention_heads": 1, "layer_types": ["hstu"]},
        "training": {"epochs": 1, "tensorboard": False, "windows": {"max_events": 8}},
    },
    "runs": {"hstu": {}, "transformer": {"model": {"layer_types": ["transformer"]}}},
    "compare": [["hstu", "transformer"]],
    "published": [{"system": "Theirs", "metrics": {"HR@10": 0.3}, "source": "paper, table 4"}],
}


def write(folder: Path, **change: Any) -> Path:
    file = folder / "tiny.json"
    file.write_text(json.dumps({**STUDY, **change}))
    return file


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    folder = tmp_path / "data" / "ml-latest-small"
    folder.mkdir(parents=True)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(1, 13):
        movies = rng.permutation(20)[:9] + 1
        lines += [f"{user},{movie},4.0,{10**9 + 100 * step}" for step, movie in enumerate(movies)]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    films = [f"{n},Film {n} (1999),Drama" for n in range(1, 21)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *films]) + "\n")
    monkeypatch.setenv("GR_DATA", str(tmp_path / "data"))
    return folder


def test_a_run_is_trained_measured_and_written_once(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    study = Study.load(write(tmp_path))
    result = reproduce(study, tmp_path / "out", say=said.append)
    assert [line.split(": ")[1] for line in said] == [
        "training hstu",
        "evaluating hstu",
        "training transformer",
        "evaluating transformer",
    ]
    test = result["runs"]["hstu"]["test"]
    assert set(test) == {"seen items excluded", "all items"} == set(result["baselines"])
    for values in test.values():
        assert values["HR@5_low"] <= values["HR@5"] <= values["HR@5_high"]
        assert values["rows"] == 12
    assert result["runs"]["transformer"]["recipe"]["model"]["layer_types"] == ["transformer"]
    mean, low, high = result["differences"][0]["HR@10"]
    both = [result["runs"][n]["test"]["seen items excluded"]["HR@10"] for n in study.runs]
    assert mean == pytest.approx(both[0] - both[1]) and low <= mean <= high

    # What is there is not run again; what is cut off in the middle goes on.
    shutil.rmtree(tmp_path / "out" / "transformer")
    said.clear()
    again = reproduce(study, tmp_path / "out", say=said.append)
    assert said == ["tiny: training transformer", "tiny: evaluating transformer"]
    assert again["runs"]["hstu"] == result["runs"]["hstu"]
    assert again["runs"]["transformer"]["test"] == result["runs"]["transformer"]["test"]

    (tmp_path / "out" / "hstu" / "result.json").unlink()
    resumed = reproduce(study, tmp_path / "out", say=said.append)
    assert resumed["runs"]["hstu"]["test"] == test


def test_a_folder_of_another_recipe_is_refused(data: Path, tmp_path: Path) -> None:
    study = Study.load(write(tmp_path, runs={"hstu": {}}, compare=[]))
    reproduce(study, tmp_path / "out", say=lambda line: None)
    other = Study.load(write(tmp_path, runs={"hstu": {"training": {"epochs": 2}}}, compare=[]))
    with pytest.raises(ValueError, match="hstu holds a run of another recipe"):
        reproduce(other, tmp_path / "out", say=lambda line: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": {}}, "runs: {}, wanted at least one"),
        ({"ks": [0]}, r"ks: \(0,\), wanted positive"),
        ({"compare": [["hstu", "gru"]]}, r"compare: \('hstu', 'gru'\), wanted two of"),
        ({"epochs": 3}, "study: unknown key 'epochs'"),
        ({"name": "other"}, "study.name: 'other', wanted 'tiny'"),
        ({"runs": {"hstu": {"seed": 3}}, "compare": []}, "runs.hstu: recipe: unknown key"),
        ({"exclude_seen": []}, "exclude_seen"),
    ],
)
def test_no_study_is_half_read(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path, **change)
    with pytest.raises(ValueError, match=message) as caught:
        Study.load(file)
    assert str(file) in str(caught.value)


def test_a_missing_key_and_a_missing_study_are_named(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.write_text(json.dumps({k: v for k, v in STUDY.items() if k != "data"}))
    with pytest.raises(ValueError, match="'data'"):
        Study.load(file)
    with pytest.raises(FileNotFoundError, match="nothing: no such study, wanted one of"):
        find_study("nothing")


def test_changes_reach_into_objects_and_replace_the_rest() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 4}
    assert merged(base, {"a": {"c": [3]}, "e": 5}) == {"a": {"b": 1, "c": [3]}, "d": 4, "e": 5}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 4}


def test_every_study_of_the_project_can_be_read() -> None:
    for name in study_names():
        assert find_study(name).name == name


def test_the_page_is_what_the_results_say() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == results_page(load_results(ROOT / "docs" / "results")), "run: gr results -o"


def test_the_page_shows_numbers_with_intervals(tmp_path: Path) -> None:
    metrics = {"HR@10": 0.25, "HR@10_low": 0.2, "HR@10_high": 0.3, "NDCG@10": 0.125}
    run = {"test": {"all items": metrics}, "seed": 3, "epochs": 7.0, "seconds": 90, "commit": "abc"}
    result: dict[str, Any] = {
        "study": "tiny",
        "title": "A tiny study",
        "command": "gr reproduce tiny",
        "data": "ml-1m",
        "split_hash": "0123",
        "runs": {"hstu": run, "other": run},
        "baselines": {"all items": {"popularity": metrics}},
        "differences": [{"a": "hstu", "b": "other", "HR@10": [0.01, -0.02, 0.03]}],
        "published": [{"system": "T", "metrics": {"HR@10": 0.3}, "source": "s", "note": "n"}],
        "note": "",
    }
    result["differences"][0]["NDCG@10"] = [0.0, 0.0, 0.0]
    save_result(result, tmp_path / "tiny.json")
    page = results_page(load_results(tmp_path))
    assert "| **hstu** | .2500 [.2000, .3000] | .1250 | 3 | 7 | 2 min | abc |" in page
    assert "| T (s; n) | .3000 |  |  |  |  |  |" in page
    assert "hstu − other: HR@10 +0.0100 [-0.0200, +0.0300]" in page
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="no result of a study, lacks"):
        load_results(tmp_path)

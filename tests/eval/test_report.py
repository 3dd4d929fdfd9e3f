"""The files of a run: the shape of metrics.json, and a page that is whole and escaped."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gr.eval import (
    EvaluationSet,
    ExampleUser,
    Popularity,
    Recommendation,
    ReportContent,
    build_metrics,
    evaluate_ranking,
    evaluate_retrieval,
    write_report,
)

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Collects text, images and anything that would load or run; checks that tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.images: list[str] = []
        self.foreign: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "src" and tag == "img":
                self.images.append(value or "")
            elif name in ("src", "href") or name.startswith("on"):
                self.foreign.append(f"{tag} {name}={value}")
        if tag in ("script", "iframe", "object", "link"):
            self.foreign.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def results() -> dict[str, Any]:
    rows = EvaluationSet.from_indices([[0], [1], [2]], [1, 2, 3], 4)
    return build_metrics(
        "toy",
        "abc123",
        75.5,
        {
            "popularity": evaluate_retrieval(Popularity().fit([[0, 1, 2]], 4), rows),
            "<b>model</b>": evaluate_retrieval(lambda batch: np.eye(4)[[1, 2, 0]], rows),
        },
        evaluate_ranking([0.1, 0.7, 0.4, 0.9], [0, 1, 1, 0], ["u", "u", "v", "v"]),
        {"collision_rate": np.float32(0.25), "level_sizes": (4, 4), "perplexity": float("nan")},
    )


FULL = ReportContent(
    title="Toy & <i>run</i>",
    main_model="<b>model</b>",
    curves={"popularity": [0.1, 0.2], "<b>model</b>": [0.3, 0.5]},
    codebook_usage=[[3, 1, 0, 2], [1, 1, 1, 1]],
    losses={"training": [(1, 2.0), (2, 1.0)], "validation": [(2, 1.5)]},
    examples=[
        ExampleUser(
            "17",
            [Recommendation("Alien <script>alert(1)</script>", "like")],
            [Recommendation("Brazil", "-1.20"), Recommendation("Casablanca", is_target=True)],
            target="Casablanca",
            history_length=40,
        )
    ],
    facts={"command": "gr demo --out <folder>"},
    notes=["1 target was unknown."],
)


def test_metrics_file_has_the_promised_shape(tmp_path: Path) -> None:
    path, _ = write_report(tmp_path / "new" / "folder", results())
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert list(stored) == ["dataset", "split_hash", "seconds", "retrieval", "ranking", "tokenizer"]
    assert set(stored["retrieval"]) == {"popularity", "<b>model</b>"}
    assert {"HR@10", "NDCG@10", "HR@10_low"} <= set(stored["retrieval"]["popularity"])
    assert {"AUC", "GAUC", "NE"} <= set(stored["ranking"])
    assert stored["tokenizer"] == {
        "collision_rate": 0.25,
        "level_sizes": [4, 4],
        "perplexity": None,
    }
    assert sorted(file.name for file in path.parent.iterdir()) == ["metrics.json", "report.html"]


def test_the_page_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    _, path = write_report(tmp_path, results(), FULL)
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == []
    assert page.foreign == []
    assert len(page.images) == 4
    for image in page.images:
        head, _, body = image.partition(",")
        assert head == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(body)).tag.endswith("svg")
    for wanted in (
        "Toy & <i>run</i>",
        "<b>model</b>",
        "Alien <script>alert(1)</script>",
        "Casablanca",
        "(the last 1 of 40)",
        "gr demo --out <folder>",
        "1 target was unknown.",
        "1 min 16 s",
        "collision rate 0.2500",
        "split abc123",
    ):
        assert wanted in page.words, wanted


def test_every_value_of_the_table_is_on_the_page(tmp_path: Path) -> None:
    metrics = results()
    _, path = write_report(tmp_path, metrics, FULL)
    words = Page(path.read_text(encoding="utf-8")).words
    for values in metrics["retrieval"].values():
        for name in ("HR@10", "NDCG@5", "coverage@10"):
            assert f"{values[name]:.4f}" in words
        assert f"{values['HR@5_low']:.3f} – {values['HR@5_high']:.3f}" in words


def test_a_name_with_dollar_signs_is_no_formula(tmp_path: Path) -> None:
    name = "$x^$"
    metrics = {**results(), "retrieval": {name: {"HR@10": 0.5}}}
    content = ReportContent(curves={name: [0.1, 0.5]}, losses={name: [(1, 2.0)]})
    _, path = write_report(tmp_path, metrics, content)
    page = Page(path.read_text(encoding="utf-8"))
    assert name in page.words and len(page.images) == 3


def test_parts_that_are_not_there_leave_no_trace_and_equal_runs_give_equal_files(
    tmp_path: Path,
) -> None:
    metrics = {**results(), "ranking": {}, "tokenizer": {}}
    _, path = write_report(tmp_path, metrics)
    html = path.read_text(encoding="utf-8")
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    assert headings == ["Retrieval"]
    _, again = write_report(tmp_path / "again", metrics)
    assert again.read_text(encoding="utf-8") == html


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "must have the keys"),
        ({"retrieval": {}}, "at least one model"),
        ({"tokenizer": {"codes": {1, 2}}}, r"metrics\['tokenizer'\]\['codes'\] must be .* got set"),
    ],
)
def test_a_wrong_shape_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path / "run", {**results(), **change})
    assert not (tmp_path / "run").exists()

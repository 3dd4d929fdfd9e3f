"""What people see in a terminal: text of theirs comes out as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gr.cli import app
from gr.console import example_table, fields_table, retrieval_table
from gr.demo import run_demo
from gr.eval import ExampleUser, Recommendation


def test_brackets_are_no_markup() -> None:
    shown = Console(width=200, record=True)
    film = Recommendation("[rec] 2", "[/]", is_target=True)
    shown.print(fields_table("[a]", {"[b]": "[c]"}))
    shown.print(retrieval_table({"[d]": {"HR@10": 0.5}}))
    shown.print(example_table(ExampleUser("[u]", [film], [film], "[t]", 1)))
    text = shown.export_text()
    for written in ("[a]", "[b]", "[c]", "[d]", "[rec] 2", "[/]", "[u]", "[t]"):
        assert written in text


def test_a_refusal_with_brackets_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["recommend", str(tmp_path / "[red]" / "[/x]")])
    assert result.exit_code == 2
    assert "[red]/[/x] is not a folder" in re.sub(r"\s+", " ", result.output)


def test_a_file_in_the_place_of_the_demo_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file: wanted an empty or a new folder"):
        run_demo(tmp_path / "file")

"""The documentation is true: its examples run, its links lead somewhere, its commands parse.

Every ```python block of a page runs, in order, in one namespace, in a folder as `make demo` leaves
it (with a data set and a model that are tiny); "```python no-run" is shown only. A "```text output"
block holds what the Python block before it prints.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import typer.main

import gr.data
from gr.cli import app
from gr.data import DATASETS, load
from gr.model import GRForCausalLM
from gr.model.blocks import BLOCKS
from gr.model.blocks.hstu import HSTUOptions
from gr.tokenizer import Quantizer, QuantizerWarning
from gr.tokenizer.collisions import POLICIES
from gr.training.ids import build_ids
from gr.training.prepare import prepare
from gr.training.presets import PRESETS
from gr.training.recipe import Recipe
from gr.training.train import model_config, save_recommender

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("README.md")]
ITEMS, USERS = 60, 40

page_case = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


class Block(NamedTuple):
    """A fenced block: the words after the fence, its text, and the line its text starts on."""

    info: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
        else:
            text = "".join(f"{inner}\n" for inner in lines[start + 1 : number])
            found.append(Block(lines[start][3:].strip(), text, start + 2))
            start = None
    assert start is None, f"{page.name}: line {(start or 0) + 1}: the fence is never closed"
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks and without code between backticks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def write_ml_100k(folder: Path) -> None:
    """A made-up data set in the files of MovieLens 100K: items "1" .. "60", sorted by nothing."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    things = ("River", "Garden", "Letter", "Harbour", "Winter", "Café")
    ways = ("Long", "Silent", "Last", "Red", "Lost", "Second", "Hidden", "Golden", "Broken", "Wild")
    movies = []
    for number in range(ITEMS):
        title = f"{ways[number % 10]} {things[number // 10]}, The ({1960 + number % 38})"
        genres = ["0"] * 19
        genres[1 + number // 10] = genres[1 + number % 7] = "1"
        movies.append("|".join([str(number + 1), title, "01-Jan-1995", "", "", *genres]))
    events = []
    for user in range(USERS):
        count = int(rng.integers(12, 25))
        taste = np.where(np.arange(ITEMS) // 10 == user % 6, 5.0, 1.0)
        items = rng.choice(ITEMS, count, replace=False, p=taste / taste.sum())
        times = 880_000_000 + 10_000 * user + rng.integers(10, 90_000, count).cumsum()
        for item, time in zip(items.tolist(), times.tolist(), strict=True):
            rating = rng.integers(4, 6) if item // 10 == user % 6 else rng.integers(1, 6)
            events.append(f"{user + 1}\t{item + 1}\t{rating}\t{time}")
    people = [f"{user + 1}|{20 + user}|F|writer|00000" for user in range(USERS)]
    for name, rows in (("u.item", movies), ("u.data", events), ("u.user", people)):
        (folder / name).write_text("\n".join(rows) + "\n", encoding="latin-1")


@pytest.fixture(scope="module")
def after_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``data/ml-100k`` and ``runs/demo``, as `make demo` writes it."""
    root = tmp_path_factory.mktemp("docs")
    write_ml_100k(root / "data" / "ml-100k")
    preset = PRESETS["hstu-sid"]
    recipe = replace(
        preset,
        ids=replace(preset.ids, levels=(8, 16), embeddings=preset.ids.embeddings[:1]),
        # Wide enough weights that random scores differ.
        model={**preset.model, "hidden_size": 16, "initializer_range": 0.3},
    )
    data = prepare(load("ml-100k", root / "data"), recipe.data)
    ids = build_ids(data, recipe.ids)
    demo = root / "runs" / "demo"
    ids.save(demo / "ids")
    recipe.save(demo / "recipe.json")
    torch.manual_seed(0)
    save_recommender(
        GRForCausalLM(model_config(recipe, ids.tokenizer)), ids.tokenizer, demo / "model"
    )
    return root


@pytest.fixture
def workplace(after_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the folder to work in; nothing outside it is written to."""
    folder = tmp_path / "work"
    shutil.copytree(after_demo, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GR_DATA", str(folder / "data"))
    monkeypatch.setenv("GR_CACHE", str(tmp_path / "cache"))
    state = torch.random.get_rng_state()
    yield folder
    torch.random.set_rng_state(state)


# Sizes that suit a real catalogue are too large for 60 items, and the library says so.
@pytest.mark.filterwarnings(f"ignore::{QuantizerWarning.__module__}.{QuantizerWarning.__name__}")
@page_case
def test_examples_run(page: Path, workplace: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "docs_page"}
    printed = ""
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.info == "text output":
            assert printed.rstrip() == block.text.rstrip(), f"{where}: the output differs"
        elif block.info == "python":
            # Line numbers of a traceback are those of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
            printed = out.getvalue()
        else:
            # Any other kind is shown only, but a misspelt one would be skipped unseen.
            known = block.info in ("python no-run", "text") or block.info[:4] not in (
                "pyth",
                "text",
            )
            assert known, f"{where}: kind {block.info!r}, wanted 'python no-run' or 'text output'"


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page's ```bash blocks, split into words, up to a pipe or redirection."""
    for block in blocks(page):
        if block.info != "bash":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            ends = [i for i, word in enumerate(words) if word in ("|", ">", "&&", ";", "2>")]
            if words:
                yield words[: min(ends, default=len(words))]


def parse(words: list[str]) -> None:
    """Parse a `gr` command as the command line would, without running it."""
    command: Any = typer.main.get_command(app)
    name, rest = "gr", words
    while hasattr(command, "commands"):
        if rest == ["--help"]:
            return
        assert rest, f"gr {' '.join(words)}: wanted a command after {name!r}"
        name, rest = rest[0], rest[1:]
        assert name in command.commands, f"gr {' '.join(words)}: no command {name!r}"
        command = command.commands[name]
    if "--help" not in rest:
        command.make_context(name, list(rest))


def modules(words: list[str]) -> list[str]:
    """The modules of ours that a command starts with ``-m``."""
    after = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"]
    return [name for name in after if name.startswith("gr.")]


@page_case
def test_gr_commands_parse(page: Path) -> None:
    for words in commands(page):
        if Path(words[0]).name == "gr":
            try:
                parse(words[1:])
            except Exception as error:
                pytest.fail(f"{page.name}: {shlex.join(words)}: {error or type(error).__name__}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tarin", "no command 'tarin'"),
        ("ids", "wanted a command"),
        ("train --data x", "output"),
        ("train --data x --output y --recipes z", "--recipes"),
        ("rank model", "candidates"),
        ("recommend model -k ten", "integer"),
    ],
)
def test_wrong_commands_are_noticed(line: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        parse(line.split())


@page_case
def test_stage_options_exist(page: Path) -> None:
    """``-m gr.…`` behind any launcher: the module exists and has the options shown."""
    for words in commands(page):
        for module in modules(words):
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
                importlib.import_module(module).main(["--help"])
            after = words[words.index(module) + 1 :]
            for option in (word for word in after if word.startswith("--")):
                assert option in shown.getvalue(), f"{page.name}: {module} has no {option}"


@pytest.mark.parametrize(
    ("name", "things"),
    [
        ("data.md", [*DATASETS, *(n for n in gr.data.__all__ if n.startswith("read_"))]),
        ("semantic-ids.md", [*POLICIES, *(kind.__name__ for kind in Quantizer.__subclasses__())]),
        ("model.md", [*BLOCKS, *(option.name for option in fields(HSTUOptions))]),
        ("training.md", [*PRESETS, *(f"`{part.name}`" for part in fields(Recipe)[1:])]),
        ("evaluation.md", ["Popularity", "ItemKNN", "RecencyKNN", "AUC", "GAUC", "NE", "coverage"]),
    ],
)
def test_pages_name_all_there_is(name: str, things: list[str]) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert [thing for thing in things if thing not in text] == []


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@page_case
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: link to {target}: no such file"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in map(slug, headings), f"{page.name}: link to {target}: no such heading"


def test_every_page_is_reachable() -> None:
    """From architecture.md, the page the others hang on."""
    start = ROOT / "docs" / "architecture.md"
    linked = set(re.findall(r"\]\(([\w-]+\.md)", prose(start)))
    assert linked >= {page.name for page in start.parent.glob("*.md")} - {start.name}

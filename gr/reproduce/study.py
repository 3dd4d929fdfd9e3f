"""A study: what is run to meet a published number. One JSON file each, in ``recipes/``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gr.training.recipe import Recipe
from gr.training.typed_json import read_dataclass, require

STUDIES = Path(__file__).parents[2] / "recipes"
# Where an installed package keeps them.
PACKAGED = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Published:
    """A row of someone's table.

    Attributes:
        system: the model, as its authors call it.
        metrics: name -> number, named as ours are.
        source: paper and table, or project.
        note: how its protocol differs from ours.
    """

    system: str
    metrics: dict[str, float]
    source: str
    note: str = ""


@dataclass(frozen=True)
class Study:
    """Training runs on one data set, evaluated alike, beside published rows.

    Attributes:
        name: also the name of its file and of its result.
        title: one line for the table.
        data: name of a data set.
        recipe: what all runs share, as ``Recipe.to_dict`` writes it; what is left out has its
            default.
        runs: run -> what it changes in ``recipe``, key by key.
        published: rows to stand beside.
        compare: pairs of runs whose difference gets an interval.
        ks: cut-offs.
        exclude_seen: evaluate without the items of the history, with them, or both ways.
        minutes: what all runs took, about, on two cores.
        note: what a reader should know.
    """

    name: str
    title: str
    data: str
    recipe: dict[str, Any]
    runs: dict[str, Any]
    published: tuple[Published, ...] = ()
    compare: tuple[tuple[str, str], ...] = ()
    ks: tuple[int, ...] = (10, 50)
    exclude_seen: tuple[bool, ...] = (True,)
    minutes: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        require(bool(self.runs), "runs", self.runs, "at least one")
        require(bool(self.ks) and min(self.ks) > 0, "ks", self.ks, "positive cut-offs")
        require(bool(self.exclude_seen), "exclude_seen", self.exclude_seen, "true, false or both")
        for pair in self.compare:
            require(set(pair) <= set(self.runs), "compare", pair, f"two of {sorted(self.runs)}")
        for name in self.runs:
            self.recipe_of(name)

    def recipe_of(self, run: str) -> Recipe:
        """The whole recipe of a run.

        Raises:
            ValueError: it is no recipe; the message names the run.
        """
        change = self.runs[run]
        require(isinstance(change, dict), f"runs.{run}", change, "an object with keys")
        try:
            return Recipe.from_dict({"name": run, **merged(self.recipe, change)})
        except ValueError as error:
            raise ValueError(f"runs.{run}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a study.

        Raises:
            ValueError: no JSON, or no study; the message names the file.
        """
        file = Path(path)
        try:
            study = read_dataclass(cls, json.loads(file.read_text(encoding="utf-8")), "study")
            require(study.name == file.stem, "study.name", study.name, repr(file.stem))
        except (ValueError, TypeError) as error:  # a key that is missing is a TypeError
            raise ValueError(f"{file}: {error}") from error
        return study


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the keys of ``change``; objects in both are merged, all else replaced."""
    out = dict(base)
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merged(out[key], value)
        else:
            out[key] = value
    return out


def study_names() -> list[str]:
    """The studies there are."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def find_study(name_or_path: str) -> Study:
    """A study by name, or a JSON file.

    Raises:
        FileNotFoundError: neither.
        ValueError: a file that is no study; the message names it.
    """
    for path in (_folder() / f"{name_or_path}.json", Path(name_or_path)):
        if path.is_file():
            return Study.load(path)
    raise FileNotFoundError(
        f"{name_or_path}: no such study, wanted one of {study_names()} or a JSON file"
    )


def _folder() -> Path:
    return STUDIES if STUDIES.is_dir() else PACKAGED

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gr.training import (
    BatchRecipe,
    DataRecipe,
    IdsRecipe,
    Recipe,
    SelectionRecipe,
    TrainingRecipe,
    WindowRecipe,
)


def test_json_round_trip(tmp_path: Path) -> None:
    recipe = Recipe(
        name="x",
        data=DataRecipe(actions_from_value=(("like", 4.0, None), ("dislike", None, 4.0))),
        ids=IdsRecipe(levels=(8, 4), actions=("like", "dislike")),
        model={"hidden_size": 8, "block_options": {"hstu": {"norm_length": 50.0}}},
        training=TrainingRecipe(
            epochs=3,
            windows=WindowRecipe(max_events=9, positive_actions=("like",)),
            batches=BatchRecipe(tokens=None, sequences=4),
            selection=SelectionRecipe(patience=2, ema_decay=0.99),
        ),
    )
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert list(tmp_path.iterdir()) == [tmp_path / "recipe.json"]


def test_left_out_keys_keep_their_defaults() -> None:
    assert Recipe.from_dict({}) == Recipe()
    assert Recipe.from_dict({"training": {"epochs": 3}}).training == TrainingRecipe(epochs=3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"trainig": {}}, r"recipe: unknown key 'trainig' \(did you mean 'training'\?\)"),
        ({"training": {"epoch": 1}}, r"recipe.training: unknown key 'epoch' .*'epochs'"),
        (
            {"training": {"windows": {"max_event": 1}}},
            r"recipe.training.windows: unknown key 'max_event'",
        ),
        ({"model": {"hiden_size": 3}}, r"recipe.model: unknown key 'hiden_size' .*'hidden_size'"),
        ({"model": {"hidden_size": "x"}}, r"recipe.model.hidden_size: 'x', wanted .* type int"),
        ({"model": {"vocab_size": 3}}, r"recipe.model.vocab_size: 3, wanted nothing"),
        ({"training": {"epochs": "ten"}}, r"recipe.training.epochs: 'ten', wanted .* type int"),
        ({"training": {"epochs": True}}, r"recipe.training.epochs: True, wanted .* type int"),
        ({"training": {"epochs": 0}}, r"recipe.training.epochs: 0, wanted a positive"),
        ({"training": []}, r"recipe.training: \[\], wanted an object"),
        ({"ids": {"kind": "rq"}}, r"recipe.ids.kind: 'rq', wanted one of"),
        ({"ids": {"levels": [8, "4"]}}, r"recipe.ids.levels\[1\]: '4', wanted .* type int"),
        ({"ids": {"levels": 8}}, r"recipe.ids.levels: 8, wanted a list"),
        (
            {"ids": {"embeddings": [{"source": "image"}]}},
            r"recipe.ids.embeddings\[0\].source: 'image', wanted one of",
        ),
        (
            {"training": {"batches": {"sequences": 8}}},
            r"recipe.training.batches.tokens, sequences: \(4096, 8\), wanted exactly one",
        ),
        ({"training": {"optimizer": {"betas": [0.9]}}}, r"betas: \[0.9\], wanted a list of 2"),
        (
            {"training": {"windows": {"max_events": 5, "context": 5}}},
            r"recipe.training.windows.context: 5, wanted 0 <= context < max_events",
        ),
        (
            {"training": {"windows": {"bare_windows": 1.5}}},
            r"recipe.training.windows.bare_windows: 1.5, wanted a probability",
        ),
    ],
)
def test_mistakes_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(data)


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    with pytest.raises(FileNotFoundError, match=r"r\.json: no such recipe"):
        Recipe.load(file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"r\.json: Expecting"):
        Recipe.load(file)
    file.write_text(json.dumps({"nam": "x"}))
    with pytest.raises(ValueError, match=r"r\.json: recipe: unknown key 'nam'"):
        Recipe.load(file)

"""The command line on tiny data: every command answers, in tables and in JSON, or refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from gr.cli import app
from gr.data import DATASETS, GENERATED, DataError
from gr.tokenizer import Catalog
from gr.training import BatchRecipe, DataRecipe, IdsRecipe, Recipe, TrainingRecipe, WindowRecipe
from gr.training.ids import main as ids_main
from gr.training.prepare import parse_columns, read_data
from gr.training.presets import PRESETS
from gr.training.recipe import EmbeddingRecipe
from gr.training.train import main as train_main

COLUMNS = "user_id=uid,item_id=movie,timestamp=when,value=stars,title=name"
RECIPE = Recipe(
    name="tiny",
    data=DataRecipe(actions_from_value=(("like", 4.0, None), ("dislike", None, 4.0))),
    ids=IdsRecipe(
        levels=(4, 5),
        embeddings=(EmbeddingRecipe(dimension=4, window=3), EmbeddingRecipe("text", 0.5, 4)),
        actions=("like", "dislike"),
    ),
    model={"hidden_size": 8, "num_attention_heads": 1, "layer_types": ["hstu"]},
    training=TrainingRecipe(
        epochs=1,
        tensorboard=False,
        windows=WindowRecipe(max_events=6),
        batches=BatchRecipe(tokens=500),
    ),
)


class World(NamedTuple):
    """Paths of a table of events with names of its own, its items, a recipe, and a trained run."""

    events: Path
    items: Path
    recipe: Path
    run: Path
    trained: dict[str, Any]

    @property
    def data(self) -> list[str]:
        return ["--data", str(self.events), "--columns", COLUMNS, "--items", str(self.items)]


def gr(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def answer(*arguments: str | Path) -> Any:
    """What a command prints with ``--json``."""
    result = gr(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str | Path) -> str:
    """The message of a command that refuses its input."""
    result = gr(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert not result.stdout
    return str(result.stderr)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(0)
    lines = ["uid,movie,when,stars"]
    for user in range(12):
        for step in range(8):
            item, stars = (user + step + rng.integers(0, 3)) % 15, rng.integers(1, 6)
            lines.append(f"u{user},i{item},{10**9 + 1000 * user + step},{stars}")
    events, items, recipe = folder / "log.csv", folder / "films.tsv", folder / "tiny.json"
    events.write_text("\n".join(lines) + "\n")
    kinds = ("red", "blue")
    films = [f"i{n}\t{kinds[n % 2]}\tFilm {n}: {kinds[n % 2]}" for n in range(15)]
    items.write_text("\n".join(["movie\tkind\tname", *films]) + "\n")
    RECIPE.save(recipe)
    world = World(events, items, recipe, folder / "run", {})
    trained = answer("train", *world.data, "--recipe", recipe, "--output", world.run)
    return world._replace(trained=trained)


def test_data(world: World) -> None:
    found = answer("data", world.events, *world.data[2:])
    assert (found["users"], found["events"], found["time"]) == (12, 96, "timestamp")
    assert len(found["leave-one-out split_hash"]) == 16
    shown = gr("data", world.events, "--columns", COLUMNS, "--items", world.items)
    assert shown.exit_code == 0 and found["leave-one-out split_hash"] in shown.stdout
    assert answer("data").keys() == {*DATASETS, *GENERATED}
    assert "ml-100k" in gr("data").stdout


def test_data_refusals(world: World, tmp_path: Path) -> None:
    assert "log.csv: no column for user_id" in refusal("data", world.events)
    told = refusal("data", world.events, "--columns", "user_id=who,item_id=movie,timestamp=when")
    assert "user_id (asked for as 'who'); the file has ['uid', 'movie', 'when', 'stars']" in told
    told = refusal("data", world.events, "--columns", "uid")
    assert "--columns: 'uid', wanted entries such as user_id=uid" in told
    assert "unknown schema names ['film']" in refusal("data", world.events, "--columns", "film=x")
    told = refusal("data", world.events, "--columns", COLUMNS)
    assert "unknown schema names ['title']" in told  # a column of items, and there are none
    told = refusal("data", tmp_path / "nothing.csv")
    assert "nothing.csv: no such file, and no data set of that name" in told
    told = refusal("data", "ml-100k", "--items", world.items)
    assert "data set 'ml-100k' brings its own columns and items" in told


def test_recipe() -> None:
    for name, preset in PRESETS.items():
        assert name in gr("recipe").stdout
        assert Recipe.from_dict(json.loads(gr("recipe", name).stdout)) == preset
    assert "nope: no such recipe" in refusal("recipe", "nope")


def test_ids(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "ids"
    built = answer("ids", "build", *world.data, "--recipe", world.recipe, "--output", folder)
    assert built["items"] == 15 and len(built["levels"]) == 2
    catalog = Catalog.load(folder)
    assert catalog.title("i3") == "Film 3: blue"
    assert catalog.metadata is not None and "kind" in catalog.metadata.column_names
    report = answer("ids", "report", folder, "--plots", tmp_path / "plots")
    assert report["collision_rate"] == built["collision_rate"]
    assert (tmp_path / "plots" / "code_usage.png").stat().st_size
    assert "collision_rate" in gr("ids", "report", folder).stdout
    shown = gr("ids", "build", *world.data, "--recipe", world.recipe, "--output", folder)
    assert shown.exit_code == 0 and "15 items" in shown.stdout
    assert "catalog.parquet is missing" in refusal("ids", "report", tmp_path)
    (folder / "catalog.json").write_text("{")
    assert "catalog.json is not JSON" in refusal("ids", "report", folder)
    bare = ["--data", str(world.events), "--columns", COLUMNS.removesuffix(",title=name")]
    told = refusal("ids", "build", *bare, "--recipe", world.recipe, "--output", folder)
    assert "'text' needs item metadata, and the data has none" in told


def test_train(world: World) -> None:
    assert world.trained["model"] == str(world.run / "model")
    assert 0 <= world.trained["NDCG@10"] <= 1
    log = json.loads((world.run / "train_log.json").read_text())
    assert log["split_hash"] in world.trained["split"]
    told = refusal("train", *world.data, "--recipe", world.recipe, "--output", world.run)
    assert "holds a run already: wanted a new folder, or --resume" in told


def test_evaluate(world: World) -> None:
    found = answer("evaluate", world.run, *world.data)
    assert found["split_hash"] in world.trained["split"]
    assert set(found["retrieval"]) == {"popularity", "item-knn", "recency-knn", "run"}
    assert found["retrieval"]["run"]["rows"] == 12
    validation = ("evaluate", str(world.run), *world.data, "--part", "validation")
    exact, served = answer(*validation), answer(*validation, "--beams", "50")
    assert served["retrieval"]["run"]["MRR@50"] == exact["retrieval"]["run"]["MRR@50"]
    assert exact["retrieval"]["run"] != found["retrieval"]["run"]
    models = found["retrieval"]
    mean, low, high = found["minus_recency_knn"]["HR@10"]
    assert mean == pytest.approx(models["run"]["HR@10"] - models["recency-knn"]["HR@10"])
    assert low <= mean <= high
    bare = answer("evaluate", world.run, *world.data, "--bare")["retrieval"]
    assert bare["run"] != models["run"] and bare["recency-knn"] == models["recency-knn"]
    shown = gr("evaluate", world.run, *world.data)
    assert shown.exit_code == 0 and found["split_hash"] in shown.stdout
    told = refusal("evaluate", world.run, *world.data, "--part", "train")
    assert "--part: 'train', wanted 'test' or 'validation'" in told
    assert "recipe.json" in refusal("evaluate", world.run / "model", *world.data)


def test_recommend(world: World) -> None:
    model = world.run / "model"
    found = answer("recommend", model, "--history", "i1:like, i2:dislike,i3", "-k", "4")
    assert len(found) == 4 and not {"i1", "i2", "i3"} & {entry["item_id"] for entry in found}
    assert all(e["title"].startswith(f"Film {e['item_id'][1:]}:") for e in found)
    scores = [entry["score"] for entry in found]
    assert scores == sorted(scores, reverse=True)
    retrieved = answer("recommend", model, "--retrieve-only")
    assert len(retrieved) == 10
    shown = gr("recommend", model, "--history", "i1,ghost")
    assert shown.exit_code == 0 and "Film" in shown.stdout and "ghost" in shown.stderr
    assert "action 'love'" in refusal("recommend", model, "--history", "i1:love")
    assert "is not a folder" in refusal("recommend", world.run / "nothing")
    refusal("recommend", world.run)  # a folder, and no model in it


def test_rank(world: World) -> None:
    model = world.run / "model"
    found = answer("rank", model, "--candidates", "i4, i5,i6", "--history", "i1:like")
    assert {entry["item_id"] for entry in found} == {"i4", "i5", "i6"}
    disliked = answer("rank", model, "--candidates", "i4,i5,i6", "--action", "dislike")
    liked = answer("rank", model, "--candidates", "i4,i5,i6")
    both = {e["item_id"]: e["score"] for e in liked}
    for entry in disliked:
        assert both[entry["item_id"]] + entry["score"] == pytest.approx(1, abs=1e-5)
    shown = gr("rank", model, "--candidates", "i4")
    assert shown.exit_code == 0 and "Film 4" in shown.stdout
    told = refusal("rank", model, "--candidates", "i4", "--action", "love")
    assert "action is 'love': wanted one of ('like', 'dislike')" in told


def test_the_stages_take_the_same_options(world: World, tmp_path: Path) -> None:
    """``python -m gr.training.ids`` and ``….train``."""
    folder = tmp_path / "ids"
    ids_main([*world.data, "--recipe", str(world.recipe), "--output", str(folder)])
    assert Catalog.load(folder).title("i3") == "Film 3: blue"
    replace(RECIPE, name="other").save(tmp_path / "other.json")
    with pytest.raises(ValueError, match="holds a run already"):  # after the data was read
        train_main(
            [*world.data, "--recipe", str(tmp_path / "other.json"), "--output", str(world.run)]
        )


def test_columns_of_items(world: World, tmp_path: Path) -> None:
    columns = parse_columns(COLUMNS)
    table = read_data(str(world.events), columns, world.items).items
    assert table is not None and table.column_names == ["item_id", "title", "kind"]
    own = tmp_path / "own.csv"  # item_id under its own name, though the events call it otherwise
    own.write_text("\n".join(["item_id,name", *(f"i{n},Film {n}" for n in range(15))]) + "\n")
    assert read_data(str(world.events), columns, own).num_items == 15
    with pytest.raises(DataError, match=r"own\.csv: no column for title; the file has"):
        read_data(str(world.events), {k: v for k, v in columns.items() if k != "title"}, own)
    with pytest.raises(DataError, match="item_id is given twice"):
        parse_columns("item_id=a,item_id=b")
    assert parse_columns(None) == {} and parse_columns(" a = b c , ") == {"a": "b c"}


def test_help_names_every_command() -> None:
    shown = gr("--help")
    assert shown.exit_code == 0
    for name in ("demo", "data", "ids", "train", "evaluate", "recommend", "rank", "recipe"):
        assert name in shown.stdout
    assert gr("train").exit_code == 2

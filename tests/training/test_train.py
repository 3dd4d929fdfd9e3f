"""The stages from a file of events to a saved recommender."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from gr.data import Event, read_table
from gr.eval import EvaluationSet
from gr.inference import Recommender
from gr.model import GRConfig, GRForCausalLM
from gr.tokenizer import ResidualKMeans
from gr.training import (
    BatchRecipe,
    DataRecipe,
    IdsRecipe,
    Recipe,
    SelectionRecipe,
    TrainingRecipe,
    WindowRecipe,
)
from gr.training.ids import build_ids
from gr.training.ids import main as ids_main
from gr.training.prepare import prepare
from gr.training.recipe import EmbeddingRecipe
from gr.training.train import main as train_main
from gr.training.train import train
from gr.training.validation import CatalogValidation

RECIPE = Recipe(
    name="tiny",
    data=DataRecipe(actions_from_value=(("like", 4.0, None), ("dislike", None, 4.0))),
    ids=IdsRecipe(
        levels=(4, 4, 4),
        embeddings=(EmbeddingRecipe(dimension=4, window=3), EmbeddingRecipe("text", 0.5, 4)),
        actions=("like", "dislike"),
    ),
    model={"hidden_size": 8, "num_attention_heads": 1, "layer_types": ["hstu"]},
    training=TrainingRecipe(
        epochs=2,
        tensorboard=False,
        windows=WindowRecipe(max_events=6, random_cuts=True, bare_windows=0.2, shuffle_ties=True),
        batches=BatchRecipe(tokens=500),
        selection=SelectionRecipe(ema_decay=0.5),
    ),
)


def write_events(folder: Path) -> Path:
    """Twelve users walk along twenty items; a table of events and one of items."""
    rng = np.random.default_rng(0)
    lines = ["user_id,item_id,timestamp,value"]
    for user in range(12):
        start, count = rng.integers(0, 20), rng.integers(5, 15)
        for step in range(count):
            item = (start + step + rng.integers(0, 3)) % 20
            time = 10**9 + 86_400 * user + 60 * step
            lines.append(f"u{user},i{item},{time},{rng.integers(1, 6)}")
    file = folder / "events.csv"
    file.write_text("\n".join(lines) + "\n")
    items = ["item_id,title"] + [
        f"i{n},{'red' if n < 10 else 'blue'} number {n}" for n in range(20)
    ]
    (folder / "items.csv").write_text("\n".join(items) + "\n")
    return file


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return write_events(tmp_path)


def test_a_run_leaves_a_loadable_recommender(events: Path, tmp_path: Path) -> None:
    interactions = read_table(events, items=events.with_name("items.csv"))
    run = train(interactions, RECIPE, tmp_path / "run")
    loaded = Recommender.from_pretrained(tmp_path / "run" / "model")
    row = run.data.split.test[0]
    columns = zip(row["item_id"], row["action"], row["timestamp"], strict=True)
    history = [Event(*column) for column in columns]
    direct = Recommender(run.model.eval(), run.tokenizer)
    assert loaded.retrieve([history], k=5) == direct.retrieve([history], k=5)
    assert len(loaded.retrieve([history], k=5)[0]) == 5
    assert loaded.catalog.title("i3") == "red number 3"
    # It was trained on bare windows; what it ranks by is another matter.
    assert (loaded.missing_action, loaded.default_action) == ("[UNK]", "like")
    log = json.loads((tmp_path / "run" / "train_log.json").read_text())
    assert log["split_hash"] == run.data.split.split_hash
    assert Recipe.from_dict(log["recipe"]) == RECIPE
    assert len(log["loss"]) == run.trainer.sampler.num_steps
    assert len(log["validation"]) == 2
    # The model that was saved is the one whose validation was best.
    validation = CatalogValidation(
        run.tokenizer, run.data.split.validation, RECIPE.training.windows.max_events
    )
    with torch.no_grad():
        again = validation(loaded.model)["NDCG@10"]
    assert again == pytest.approx(max(v["NDCG@10"] for v in log["validation"]), abs=1e-6)


@pytest.mark.parametrize("exclude_seen", [True, False])
def test_the_validation_counts_what_the_recommender_retrieves(
    events: Path, tmp_path: Path, exclude_seen: bool
) -> None:
    """HR@10 against beams wide enough to be exact, ranked by hand."""
    interactions = read_table(events, items=events.with_name("items.csv"))
    # Unique IDs: items that share one are tied, and a list breaks ties that a metric must not.
    selection = replace(RECIPE.training.selection, exclude_seen=exclude_seen)
    recipe = replace(
        RECIPE,
        ids=replace(RECIPE.ids, collisions="extra_level"),
        training=replace(RECIPE.training, selection=selection),
    )
    run = train(interactions, recipe, tmp_path / "run")
    rows = run.data.split.validation
    recommender = Recommender(run.model.eval(), run.tokenizer, max_events=6)
    hits = 0
    for row in rows:
        columns = zip(row["item_id"], row["action"], row["timestamp"], strict=True)
        history = [Event(*column) for column in columns]
        found = recommender.retrieve(
            [history],
            10,
            num_beams=40,
            request_times=[row["target_timestamp"]],
            exclude_seen=exclude_seen,
        )
        hits += row["target_item_id"] in [scored.item_id for scored in found[0]]
    validation = CatalogValidation(run.tokenizer, rows, max_events=6, exclude_seen=exclude_seen)
    with torch.no_grad():
        measured = validation(run.model)
    assert measured["HR@10"] == pytest.approx(hits / len(rows))
    selected = max(run.trainer.validations, key=lambda v: v["NDCG@10"])
    assert selected["HR@10"] == pytest.approx(measured["HR@10"])
    few = CatalogValidation(run.tokenizer, rows, max_events=6, limit=5)
    assert len(few.rows) == 5 and isinstance(few.rows, EvaluationSet)


def test_the_command_line_and_its_refusals(
    events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(RECIPE, ids=replace(RECIPE.ids, kind="atomic", embeddings=()))
    recipe.save(tmp_path / "recipe.json")
    arguments = ["--recipe", str(tmp_path / "recipe.json"), "--data", str(events)]
    arguments += ["--output", str(tmp_path / "run")]
    train_main(arguments)
    assert "split_hash" in capsys.readouterr().out
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="holds a run already: wanted a new folder, or --resume"):
        train_main(arguments)
    train_main([*arguments, "--resume"])
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == weights
    replace(recipe, name="other").save(tmp_path / "recipe.json")
    (tmp_path / "other.csv").write_text(events.read_text().replace(",i3,", ",i4,"))
    arguments[arguments.index(str(events))] = str(tmp_path / "other.csv")
    recipe.save(tmp_path / "recipe.json")
    with pytest.raises(ValueError, match="wanted the data that the run began with"):
        train_main([*arguments, "--resume"])
    replace(recipe, name="other").save(tmp_path / "recipe.json")
    with pytest.raises(ValueError, match="is another recipe than the one to resume with"):
        train_main([*arguments, "--resume"])
    assert len(Recommender.from_pretrained(tmp_path / "run" / "model").catalog) == 20


def test_ids_know_training_events_only(events: Path) -> None:
    interactions = read_table(events, items=events.with_name("items.csv"))
    data = prepare(interactions, RECIPE.data)
    ids = build_ids(data, RECIPE.ids)
    trained = [item for row in data.split.train for item in row["item_id"]]
    for item, count in zip(ids.catalog.item_ids, ids.catalog.popularity, strict=True):
        assert count == trained.count(item)
    assert set(ids.catalog.item_ids) == set(interactions.events["item_id"].to_pylist())
    assert ids.tokenizer.vocabulary.actions == ("like", "dislike")


def test_the_ids_stage_saves_what_it_builds(events: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, ids=replace(RECIPE.ids, embeddings=(EmbeddingRecipe(dimension=4),)))
    recipe.save(tmp_path / "recipe.json")
    arguments = ["--recipe", str(tmp_path / "recipe.json"), "--data", str(events)]
    ids_main([*arguments, "--output", str(tmp_path / "ids")])
    ids = build_ids(prepare(read_table(events), recipe.data), recipe.ids)
    quantizer = ResidualKMeans.from_pretrained(tmp_path / "ids" / "quantizer")
    assert (quantizer.encode(ids.embeddings) == ids.quantizer.encode(ids.embeddings)).all()


@pytest.mark.parametrize("kind", ["semantic", "shuffled", "lsh", "atomic"])
def test_every_kind_of_ids(events: Path, kind: str) -> None:
    interactions = read_table(events, items=events.with_name("items.csv"))
    data = prepare(interactions, RECIPE.data)
    made = {"kind": kind, "levels": [4, 4], "embeddings": [{"dimension": 4}]}
    recipe = Recipe.from_dict({"ids": {**made, "collisions": "popularity"}}).ids
    ids = build_ids(data, recipe)
    wanted = (20,) if kind == "atomic" else (4, 4)
    assert ids.catalog.level_sizes == {"item": wanted}
    again = build_ids(data, recipe)
    assert (again.catalog.codes == ids.catalog.codes).all()


def test_text_without_metadata_is_refused(events: Path) -> None:
    with pytest.raises(ValueError, match="'text' needs item metadata, and the data has none"):
        build_ids(prepare(read_table(events), RECIPE.data), RECIPE.ids)


def test_half_written_ids_are_not_taken_over(
    events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interactions = read_table(events, items=events.with_name("items.csv"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ResidualKMeans, "save_pretrained", killed)
        train(interactions, RECIPE, tmp_path / "run")
    train(interactions, RECIPE, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "ids" / "quantizer").is_dir()


def test_too_few_positions_for_the_windows_are_refused(events: Path, tmp_path: Path) -> None:
    interactions = read_table(events, items=events.with_name("items.csv"))
    recipe = replace(RECIPE, model={**RECIPE.model, "max_position_embeddings": 10})
    with pytest.raises(ValueError, match="max_position_embeddings: 10, wanted at least 29 for"):
        train(interactions, recipe, tmp_path / "run")


def test_an_unknown_action_is_validated_as_it_is_trained(events: Path) -> None:
    """[UNK] stands in its place, and no other action does."""
    interactions = read_table(events, items=events.with_name("items.csv"))
    data = prepare(interactions, RECIPE.data)
    tokenizer = build_ids(data, replace(RECIPE.ids, actions=("like",))).tokenizer
    validation = CatalogValidation(tokenizer, data.split.validation, max_events=6)
    model = GRForCausalLM(
        GRConfig(vocab_size=tokenizer.vocabulary.end, hidden_size=8, layer_types=["hstu"])
    ).eval()
    validation(model)
    assert validation._encoded is not None
    unknown = tokenizer.vocabulary.special_token("[UNK]")
    actions = [row["action"][-6:] for row in data.split.validation]
    encoded = [row for part in validation._encoded for row in part]
    for names, row in zip(actions, encoded, strict=True):
        assert (row.tokens == unknown).sum() == names.count("dislike")


def test_data_without_a_clock_makes_a_model_without_time_tables(
    events: Path, tmp_path: Path
) -> None:
    ordered = tmp_path / "ordered.csv"
    ordered.write_text(events.read_text().replace("timestamp", "order"))
    recipe = replace(
        RECIPE,
        ids=replace(RECIPE.ids, embeddings=(EmbeddingRecipe(dimension=4),)),
        training=replace(RECIPE.training, epochs=1, windows=WindowRecipe(max_events=6)),
    )
    run = train(read_table(ordered), recipe, tmp_path / "run")
    assert not any("time_bias" in name for name, _ in run.model.named_parameters())
    assert any("position_bias" in name for name, _ in run.model.named_parameters())
    # No window was bare, so [UNK] means nothing to this model.
    assert Recommender.from_pretrained(tmp_path / "run" / "model").missing_action == "like"


def test_unit_rows_forget_how_often_an_item_occurs(events: Path) -> None:
    data = prepare(read_table(events), RECIPE.data)
    plain = replace(RECIPE.ids, embeddings=(EmbeddingRecipe(dimension=4, unit_rows=False),))
    unit = replace(RECIPE.ids, embeddings=(EmbeddingRecipe(dimension=4),))
    long, short = build_ids(data, plain).embeddings, build_ids(data, unit).embeddings
    length = np.linalg.norm(long, axis=1)
    assert length.max() > 1.1 * length.min()
    np.testing.assert_allclose(
        short / np.linalg.norm(short, axis=1, keepdims=True), long / length[:, None], atol=1e-5
    )
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-5)


def test_threads_are_those_of_the_recipe_while_it_trains(events: Path, tmp_path: Path) -> None:
    class Watch(TrainerCallback):
        seen: ClassVar[set[int]] = set()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seen.add(torch.get_num_threads())

    before = torch.get_num_threads()
    recipe = replace(RECIPE, training=replace(RECIPE.training, epochs=1, threads=before + 1))
    train(
        read_table(events),
        replace(recipe, ids=replace(RECIPE.ids, embeddings=RECIPE.ids.embeddings[:1])),
        tmp_path / "run",
        callbacks=[Watch()],
    )
    assert Watch.seen == {before + 1} and torch.get_num_threads() == before
    with pytest.raises(ValueError, match="threads: 0, wanted a positive number or null"):
        replace(RECIPE.training, threads=0)

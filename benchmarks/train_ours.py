"""Our side of ``benchmarks/train.py``: one run in a process of its own.

    python -m train_ours FOLDER gr-hstu-sampled

A run is named after its block and how it is trained:

- ``sampled``, ``softmax``: a peer's settings. The last ``length + 1`` events of every user, batches
  of that many users, Adam at a constant rate, sampled or whole softmax.
- ``recipe``: how we would train a model of that size: the preset ``hstu-atomic``, with all events,
  cut anew in every epoch, small batches of like lengths, and averaged weights.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from gr.eval import EvaluationSet
from gr.eval.recommender import histories_of
from gr.inference import Recommender
from gr.model import GRForCausalLM
from gr.tokenizer import SemanticIdTokenizer
from gr.training import EventArrays, GRTrainer, StreamCollator
from gr.training.ids import build_ids
from gr.training.prepare import PreparedData, prepare, read_data
from gr.training.presets import HSTU_ATOMIC
from gr.training.recipe import (
    BatchRecipe,
    DataRecipe,
    IdsRecipe,
    OptimizerRecipe,
    Recipe,
    SelectionRecipe,
    TrainingRecipe,
    WindowRecipe,
)
from gr.training.train import model_config
from peers.exchange import Settings, best_unseen, give_back, load_events, load_settings
from peers.watch import Watch

BLOCKS = {"hstu": "hstu", "sasrec": "transformer"}


def make_recipe(run: str, settings: Settings) -> Recipe:
    """The recipe of a run ``gr-<hstu|sasrec>-<sampled|softmax|recipe>``."""
    _, name, training = run.split("-")
    size = {
        "layer_types": [BLOCKS[name]] * settings.layers,
        "hidden_size": settings.width,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.width,
    }
    if training == "recipe":
        preset = HSTU_ATOMIC
        scale = {"embedding_scale": settings.width**0.5}
        options = {"block_options": {"hstu": {"norm_length": float(settings.length)}}}
        plan = replace(
            preset.training,
            epochs=settings.epochs,
            threads=settings.threads,
            tensorboard=False,
            windows=replace(preset.training.windows, max_events=settings.length),
            selection=replace(preset.training.selection, first=settings.epochs),
        )
        return replace(
            preset,
            data=DataRecipe(),
            model={**preset.model, **size, **scale, **options},
            training=plan,
        )
    model: dict[str, Any] = {
        **size,
        "dropout": settings.dropout,
        "item_loss": "sampled" if training == "sampled" else "level",
        "num_negatives": settings.negatives,
    }
    if name == "hstu":
        # Cosines over a temperature and embeddings times √D, as in the published recipe and in the
        # peer; the peer divides attention by the length.
        model |= {
            "final_norm": "none",
            "l2_normalize": True,
            "logit_temperature": settings.temperature,
            "embedding_scale": settings.width**0.5,
            "block_options": {"hstu": {"norm_length": float(settings.length)}},
        }
    return Recipe(
        name=run,
        ids=IdsRecipe(kind="atomic", embeddings=()),
        model=model,
        training=TrainingRecipe(
            epochs=settings.epochs,
            seed=settings.seed,
            threads=settings.threads,
            tensorboard=False,
            # One window a user: the first event is read as the peers read it, and is a target too.
            windows=WindowRecipe(max_events=settings.length + 1),
            batches=BatchRecipe(tokens=None, sequences=settings.batch),
            optimizer=OptimizerRecipe(
                learning_rate=settings.learning_rate,
                schedule="constant",
                warmup_steps=0,
                betas=settings.betas,
                max_grad_norm=0.0,
            ),
            selection=SelectionRecipe(first=settings.epochs),
        ),
    )


class EpochCallback(TrainerCallback):
    """Tells the watch when an epoch of the trainer's sampler is over."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.ends: set[int] = set()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step in self.ends:
            self.watch.epoch()


def last_events(train: datasets.Dataset, count: int) -> datasets.Dataset:
    """The rows with the last ``count`` events of each."""
    lists = [name for name in train.column_names if name != "user_id"]
    columns = {name: [row[-count:] for row in train[name]] for name in lists}
    return datasets.Dataset.from_dict({"user_id": train["user_id"][:], **columns})


def fit(
    recipe: Recipe,
    data: PreparedData,
    tokenizer: SemanticIdTokenizer,
    folder: Path,
    watch: Watch,
) -> tuple[GRForCausalLM, int]:
    """The trained model, and the number of its targets in an epoch."""
    training = recipe.training
    train = data.split.train
    if training.batches.sequences is not None:
        train = last_events(train, training.windows.max_events)
    assert tokenizer.catalog is not None
    events = EventArrays.from_sequences(train, tokenizer.catalog, (), (), data.has_clock)
    set_seed(training.seed)
    model = GRForCausalLM(model_config(recipe, tokenizer, data.has_clock))
    callback = EpochCallback(watch)
    trainer = GRTrainer(
        model, StreamCollator(events, tokenizer), training, folder, callbacks=[callback]
    )
    callback.ends = {int(step) for step in trainer.sampler.steps_before[1:]}
    trainer.train()
    return model, len(events)


def main() -> None:
    folder, run = Path(sys.argv[1]), sys.argv[2]
    settings = load_settings(folder)
    torch.set_num_threads(settings.threads)
    recipe = make_recipe(run, settings)
    data = prepare(read_data(settings.data), recipe.data)
    if data.split.split_hash != settings.split_hash:
        raise ValueError(
            f"split hash: {data.split.split_hash}, wanted {settings.split_hash}, the peers' data"
        )
    tokenizer = build_ids(data, recipe.ids).tokenizer
    watch = Watch()
    watch.begin()
    with tempfile.TemporaryDirectory(dir=folder) as checkpoints:
        model, targets = fit(recipe, data, tokenizer, Path(checkpoints), watch)
    watch.end()
    recommender = Recommender(model.eval(), tokenizer, max_events=settings.length)
    rows = EvaluationSet.from_rows(data.split.test, recommender.catalog)
    _, batch = next(rows.batches(len(rows)))
    scores = recommender.score_catalog(
        histories_of(batch, (), data.has_clock), batch.request_times if data.has_clock else None
    )
    report = {
        **watch.report(),
        "targets": targets,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "recipe": recipe.to_dict(),
    }
    history = load_events(folder, "history")
    give_back(folder, run, best_unseen(scores.float().numpy(), history), report)


if __name__ == "__main__":
    main()

"""Stage ``train``: a recipe and a data set to a folder with a trained recommender.

    python -m gr.training.train --recipe recipe.json --data ml-100k --output runs/mine
    accelerate launch -m gr.training.train …
    torchrun --nproc_per_node 2 -m gr.training.train …

The folder then holds ``recipe.json``, ``split.json``, ``ids/``, ``checkpoints/``,
``train_log.json``, and ``model/`` for ``gr.Recommender.from_pretrained``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, set_seed

from gr.data import Interactions, Split
from gr.data.whole_file import whole_file
from gr.model import GRConfig, GRForCausalLM
from gr.tokenizer import SemanticIdTokenizer
from gr.training.arguments import training_arguments
from gr.training.checkpoints import quiet_files
from gr.training.code_version import commit
from gr.training.collator import StreamCollator
from gr.training.events import EventArrays
from gr.training.ids import Ids, build_ids
from gr.training.prepare import PreparedData, add_data_options, prepare, read_data_options
from gr.training.presets import find_recipe
from gr.training.recipe import Recipe
from gr.training.trainer import GRTrainer
from gr.training.validation import CatalogValidation


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """What a run leaves in memory; ``folder`` has the same on disk."""

    folder: Path
    data: PreparedData
    model: GRForCausalLM
    tokenizer: SemanticIdTokenizer
    trainer: GRTrainer


def train(
    interactions: Interactions,
    recipe: Recipe,
    output_dir: str | os.PathLike[str],
    resume: bool = False,
    callbacks: Iterable[TrainerCallback] = (),
    progress: bool = False,
) -> TrainedRun:
    """Prepare data and IDs, train, and write the folder described above.

    On several processes all of them call this; the main one writes.

    Args:
        resume: go on from the latest checkpoint in ``output_dir``, with the IDs there.

    Raises:
        ValueError: ``output_dir`` holds another run and ``resume`` is False, or a run of another
            recipe or other data and ``resume`` is True; or anything the stages refuse.
    """
    folder = Path(output_dir)
    # Before anything else: it sets up the processes.
    arguments = training_arguments(recipe.training, folder / "checkpoints")
    main = arguments.process_index == 0
    with arguments.main_process_first(local=False, desc="checking the output folder"):
        if main:
            _claim(folder, recipe, resume)
    with arguments.main_process_first(local=False, desc="preparing data"):
        data = prepare(interactions, recipe.data)
    with arguments.main_process_first(local=False, desc="building semantic IDs"):
        if main:
            _claim_data(folder, data.split)
            if not (resume and (folder / "ids").is_dir()):
                _save_ids(build_ids(data, recipe.ids), folder / "ids")
        tokenizer = SemanticIdTokenizer.from_pretrained(folder / "ids")
    training = recipe.training
    events = EventArrays.from_sequences(
        data.split.train,
        tokenizer.catalog,
        tokenizer.vocabulary.actions,
        training.windows.positive_actions,
        data.has_clock,
    )
    set_seed(training.seed)
    model = GRForCausalLM(model_config(recipe, tokenizer, data.has_clock))
    validation = CatalogValidation(
        tokenizer,
        data.split.validation,
        training.windows.max_events,
        data.has_clock,
        training.selection.rows,
        training.seed,
        training.selection.exclude_seen,
    )
    trainer = GRTrainer(
        model,
        StreamCollator(events, tokenizer),
        training,
        folder / "checkpoints",
        validation,
        callbacks,
        progress,
    )
    with _threads(training.threads):
        trainer.train(resume_from_checkpoint=resume)
    if main:
        bare = training.windows.bare_windows > 0
        save_recommender(model, tokenizer, folder / "model", knows_bare=bare)
        trainer.save_log(
            folder / "train_log.json",
            recipe=recipe.to_dict(),
            dataset=interactions.name,
            split=data.split.name,
            split_hash=data.split.split_hash,
            commit=commit(),
        )
    if arguments.world_size > 1:
        dist.barrier()
    return TrainedRun(folder, data, model, tokenizer, trainer)


def model_config(
    recipe: Recipe, tokenizer: SemanticIdTokenizer, has_clock: bool = True
) -> GRConfig:
    """The model's configuration: the recipe's arguments and what the vocabulary decides.

    Unless the recipe says otherwise, positions are as many as a window of ``max_events`` needs,
    and a candidate with its action after it. Data without a clock makes a model without tables for
    time, which would otherwise keep the noise they start with.

    Raises:
        ValueError: fewer positions than that, or anything ``GRConfig`` refuses.
    """
    vocabulary = tokenizer.vocabulary
    per_event = vocabulary.max_levels + bool(vocabulary.actions)
    positions = 1 + (recipe.training.windows.max_events + 1) * per_event
    options: dict[str, Any] = {"max_position_embeddings": positions, **recipe.model}
    if options["max_position_embeddings"] < positions:
        raise ValueError(
            f"recipe.model.max_position_embeddings: {options['max_position_embeddings']}, wanted "
            f"at least {positions} for windows of {recipe.training.windows.max_events} events"
        )
    if not has_clock and "hstu" in (options.get("layer_types") or ["hstu"]):
        blocks = dict(options.get("block_options") or {})
        if blocks.get("hstu", {}).get("bias", "position_time") == "position_time":
            options["block_options"] = blocks | {
                "hstu": {**blocks.get("hstu", {}), "bias": "position"}
            }
    return GRConfig(vocab_size=vocabulary.end, vocabulary=vocabulary.to_dict(), **options)


def save_recommender(
    model: GRForCausalLM,
    tokenizer: SemanticIdTokenizer,
    folder: str | os.PathLike[str],
    knows_bare: bool = False,
) -> None:
    """Model, tokenizer, catalogue and trie in one folder.

    Args:
        knows_bare: the model was trained on bare windows, so [UNK] stands for missing actions.
    """
    from gr.inference import Recommender
    from gr.inference.histories import UNKNOWN_ACTION

    missing = UNKNOWN_ACTION if knows_bare else None
    with quiet_files():
        Recommender(model.eval(), tokenizer, missing_action=missing).save_pretrained(folder)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _claim(folder: Path, recipe: Recipe, resume: bool) -> None:
    file = folder / "recipe.json"
    if not file.is_file():
        recipe.save(file)
    elif not resume:
        raise ValueError(f"{folder} holds a run already: wanted a new folder, or --resume")
    elif Recipe.load(file) != recipe:
        raise ValueError(f"{file} is another recipe than the one to resume with")


def _claim_data(folder: Path, split: Split) -> None:
    file = folder / "split.json"
    if not file.is_file():
        text = json.dumps({"split_hash": split.split_hash}) + "\n"
        with whole_file(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return
    held = json.loads(file.read_text(encoding="utf-8"))["split_hash"]
    if held != split.split_hash:
        raise ValueError(
            f"{file} has split_hash {held} and this data {split.split_hash}: wanted the data that "
            "the run began with"
        )


def _save_ids(ids: Ids, folder: Path) -> None:
    # Whole or not at all: a resumed run takes over what it finds.
    work = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    ids.save(work)
    shutil.rmtree(folder, ignore_errors=True)
    work.replace(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a recommender from a recipe."""
    parser = argparse.ArgumentParser(prog="python -m gr.training.train", description=main.__doc__)
    add_data_options(parser)
    parser.add_argument("--recipe", required=True, help="name of a recipe, or a JSON file")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    options = parser.parse_args(arguments)
    recipe = find_recipe(options.recipe)
    run = train(
        read_data_options(options),
        recipe,
        options.output,
        resume=options.resume,
        progress=options.progress,
    )
    if run.trainer.is_world_process_zero():
        print(run.data.split.summary())
        best = max(run.trainer.validations, key=lambda v: v[recipe.training.selection.metric])
        print(f"{run.folder / 'model'}: validation {best}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

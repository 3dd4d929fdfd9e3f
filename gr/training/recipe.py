"""Recipes: everything that decides a training run, as dataclasses that read and write JSON.

A recipe names no file and no data set, so one recipe serves many. Unknown keys and values of a
wrong type are refused where they are read.
"""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gr.data.whole_file import whole_file
from gr.training.stochastic_length import StochasticLength
from gr.training.typed_json import convert, read_dataclass, require, unknown_key


@dataclass(frozen=True)
class DataRecipe:
    """From a table of events to sequences and a split.

    Attributes:
        actions_from_value: rules ``(action, low, high)``, see ``gr.data.actions_from_value``.
        k_core: keep users and items with at least that many events; 0 keeps all.
        min_events: keep users with at least that many events.
        split: the protocol of evaluation.
    """

    actions_from_value: tuple[tuple[str, float | None, float | None], ...] = ()
    k_core: int = 0
    min_events: int = 3
    split: Literal["leave_one_out", "global_temporal", "held_out_users"] = "leave_one_out"


@dataclass(frozen=True)
class EmbeddingRecipe:
    """One source of item embeddings.

    Attributes:
        source: "cooccurrence" in training histories, or "text": titles and other metadata.
        weight: share of squared distances beside the other sources.
        dimension: columns.
        window: events that co-occurring items may lie apart; None: the whole history.
        model: name or folder of a sentence-transformers model; None for TF-IDF.
        unit_rows: give every item's row length 1 first, so that how often an item occurs does not
            decide how far it lies from the others.
    """

    source: Literal["cooccurrence", "text"] = "cooccurrence"
    weight: float = 1.0
    dimension: int = 64
    window: int | None = 10
    model: str | None = None
    unit_rows: bool = True


@dataclass(frozen=True)
class IdsRecipe:
    """From items to semantic IDs.

    Attributes:
        kind: "semantic": residual k-means; "shuffled": the same IDs dealt out at random; "lsh":
            random hyperplanes; "atomic": one token per item.
        levels: codes per level, e.g. (64, 64, 32); "atomic" has as many codes as items.
        embeddings: what the IDs are made from; "atomic" needs none.
        collisions: "popularity", "extra_level" or "reassign".
        actions: actions that become tokens, in this order; empty for streams of items only.
        seed: of embeddings and clustering.
    """

    kind: Literal["semantic", "shuffled", "lsh", "atomic"] = "semantic"
    levels: tuple[int, ...] = (64, 64, 64)
    embeddings: tuple[EmbeddingRecipe, ...] = (EmbeddingRecipe(),)
    collisions: Literal["popularity", "extra_level", "reassign"] = "reassign"
    actions: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            bool(self.levels) and min(self.levels, default=0) > 0,
            "levels",
            self.levels,
            "one or more positive sizes",
        )
        require(
            bool(self.embeddings) or self.kind == "atomic",
            "embeddings",
            self.embeddings,
            "at least one source",
        )


@dataclass(frozen=True)
class WindowRecipe:
    """How histories are cut for training.

    Attributes:
        max_events: most events of one training sequence.
        context: events that a later window of the same user repeats from the one before.
        random_cuts: draw where long histories are cut, anew in every epoch.
        bare_windows: probability that a sequence shows [UNK] for all its actions and one time for
            all its events, so that the model also serves histories of bare item ids.
        shuffle_ties: draw the order of a user's simultaneous events anew in every epoch: the data
            has one for them, which means nothing.
        positive_actions: only items with these actions are retrieval targets; empty for all.
        stochastic_length: show long windows mostly in part, drawn anew in every epoch; what is left
            out is no target in that epoch.
    """

    max_events: int = 200
    context: int = 0
    random_cuts: bool = False
    bare_windows: float = 0.0
    shuffle_ties: bool = False
    positive_actions: tuple[str, ...] = ()
    stochastic_length: StochasticLength | None = None

    def __post_init__(self) -> None:
        require(self.max_events > 0, "max_events", self.max_events, "a positive number")
        require(
            0 <= self.context < self.max_events,
            "context",
            self.context,
            f"0 <= context < max_events ({self.max_events})",
        )
        require(0 <= self.bare_windows <= 1, "bare_windows", self.bare_windows, "a probability")


@dataclass(frozen=True)
class BatchRecipe:
    """The batch of one optimiser step, over all processes together.

    Attributes:
        tokens: most padded tokens, or None to count sequences.
        sequences: number of sequences, or None to count tokens.
        accumulation: parts in which each process works through its share.
        length_noise: how far lengths are perturbed before windows of like length are batched.
    """

    tokens: int | None = 4096
    sequences: int | None = None
    accumulation: int = 1
    length_noise: float = 0.1

    def __post_init__(self) -> None:
        sizes = (self.tokens, self.sequences)
        require(
            (self.tokens is None) != (self.sequences is None),
            "tokens, sequences",
            sizes,
            "exactly one of them (set the other to null)",
        )
        require(
            min(n for n in sizes if n is not None) > 0,
            "tokens, sequences",
            sizes,
            "a positive size",
        )
        require(self.accumulation > 0, "accumulation", self.accumulation, "a positive number")
        require(self.length_noise >= 0, "length_noise", self.length_noise, "a number >= 0")


@dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW and its learning rate.

    Attributes:
        schedule: how the rate falls from its peak, after ``warmup_steps`` of linear rise, to
            ``final_ratio`` times the peak at the last step.
        weight_decay: applies to the kinds of parameters in ``decay``: "matrices", "embeddings"
            and "vectors" (norms and biases).
        max_grad_norm: gradients are clipped to it; 0 for no clipping.
    """

    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 100
    final_ratio: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    decay: tuple[Literal["matrices", "embeddings", "vectors"], ...] = ("matrices",)
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a positive number")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "a number >= 0")
        require(0 <= self.final_ratio <= 1, "final_ratio", self.final_ratio, "a ratio in [0, 1]")
        require(all(0 <= b < 1 for b in self.betas), "betas", self.betas, "numbers in [0, 1)")


@dataclass(frozen=True)
class SelectionRecipe:
    """Which weights of the run become the model.

    Attributes:
        metric: name of the validation metric that selects; higher is better.
        rows: validate on that many validation rows, drawn once by the run's seed; None for all.
        exclude_seen: a history's own items are no candidates. False where people come back to them,
            and where the evaluation lets them.
        every: epochs between validations.
        first: epoch of the first validation.
        patience: stop after that many validations in a row without a new best; None never stops.
        ema_decay: validate and keep an exponential moving average of the weights; 0 for none.
    """

    metric: str = "NDCG@10"
    rows: int | None = None
    exclude_seen: bool = True
    every: int = 1
    first: int = 1
    patience: int | None = None
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        require(self.every > 0, "every", self.every, "a positive number of epochs")
        require(self.first > 0, "first", self.first, "an epoch >= 1")
        require(
            self.patience is None or self.patience > 0,
            "patience",
            self.patience,
            "a positive number or null",
        )
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "a number in [0, 1)")


@dataclass(frozen=True)
class TrainingRecipe:
    """One training run.

    Attributes:
        epochs: passes over all targets.
        seed: of weights, dropout, cuts and batches.
        precision: "fp32", or "bf16" mixed precision.
        deterministic: refuse operations without a deterministic implementation. Runs on CPU
            repeat exactly without it.
        save_steps: write a checkpoint every that many optimiser steps, beside those that each
            validation writes; None for those alone.
        log_steps: optimiser steps between log entries.
        tensorboard: write TensorBoard events.
        threads: CPU threads of each process while it trains; None leaves them as they are. The many
            small operations of a small model take longer on several threads than on one.
    """

    epochs: int = 20
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    deterministic: bool = False
    save_steps: int | None = None
    log_steps: int = 50
    tensorboard: bool = True
    threads: int | None = None
    windows: WindowRecipe = field(default_factory=WindowRecipe)
    batches: BatchRecipe = field(default_factory=BatchRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    selection: SelectionRecipe = field(default_factory=SelectionRecipe)

    def __post_init__(self) -> None:
        require(self.epochs > 0, "epochs", self.epochs, "a positive number")
        require(self.log_steps > 0, "log_steps", self.log_steps, "a positive number")
        require(
            self.threads is None or self.threads > 0,
            "threads",
            self.threads,
            "a positive number or null",
        )
        require(
            self.save_steps is None or self.save_steps > 0,
            "save_steps",
            self.save_steps,
            "a positive number or null",
        )


@dataclass(frozen=True)
class Recipe:
    """A whole run. ``model`` holds arguments of ``GRConfig``, without those the IDs decide."""

    name: str = "recipe"
    data: DataRecipe = field(default_factory=DataRecipe)
    ids: IdsRecipe = field(default_factory=IdsRecipe)
    model: dict[str, Any] = field(default_factory=dict)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)

    def __post_init__(self) -> None:
        from gr.model import GRConfig

        known = [f.name for f in fields(GRConfig) if not f.name.startswith("_")]
        for name in ("vocab_size", "vocabulary"):
            require(
                name not in self.model,
                f"recipe.model.{name}",
                self.model.get(name),
                "nothing: it follows from the semantic IDs",
            )
        for name in self.model:
            if name not in known:
                raise unknown_key("recipe.model", name, known)
        hints = inspect.get_annotations(GRConfig, eval_str=True)
        for name in self.model.keys() & hints.keys():
            convert(self.model[name], hints[name], f"recipe.model.{name}")

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """Read ``to_dict``'s form; keys that are left out keep their defaults.

        Raises:
            ValueError: an unknown key, or a value of a wrong type or out of range.
        """
        return read_dataclass(cls, data, "recipe")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; the file appears whole or not at all."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a JSON file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no JSON, or anything ``from_dict`` refuses; the message names the file.
        """
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such recipe, wanted a JSON file")
        try:
            return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:  # JSONDecodeError is one
            raise ValueError(f"{file}: {error}") from error

"""Stage 0: a data set by name or file, filtered, as sequences, split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gr.data import (
    DATASETS,
    Interactions,
    Split,
    actions_from_value,
    build_sequences,
    global_temporal,
    k_core,
    leave_one_out,
    load,
    min_events,
    read_table,
    time_unit,
)
from gr.training.recipe import DataRecipe

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, eq=False)
class PreparedData:
    """What later stages read."""

    interactions: Interactions
    sequences: Dataset
    split: Split

    @property
    def has_clock(self) -> bool:
        """Whether times are seconds, and not only an order."""
        return time_unit(self.sequences) == "seconds"


def read_data(name_or_path: str) -> Interactions:
    """A named data set, or a file of events with the schema's own column names.

    Raises:
        DataError: neither, or anything a reader refuses.
    """
    if name_or_path in DATASETS or not Path(name_or_path).exists():
        return load(name_or_path)
    return read_table(name_or_path)


def prepare(interactions: Interactions, recipe: DataRecipe) -> PreparedData:
    """Name actions, filter, build sequences, split.

    Raises:
        DataError: nothing is left, or the data lacks what the recipe asks for.
    """
    if recipe.actions_from_value:
        interactions = actions_from_value(interactions, recipe.actions_from_value)
    if recipe.k_core:
        interactions = k_core(interactions, recipe.k_core)
    if recipe.min_events:
        interactions = min_events(interactions, recipe.min_events)
    sequences = build_sequences(interactions)
    split = leave_one_out if recipe.split == "leave_one_out" else global_temporal
    return PreparedData(interactions, sequences, split(sequences))

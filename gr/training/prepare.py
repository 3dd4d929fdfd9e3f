"""Stage 0: a data set by name or file, filtered, as sequences, split."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gr.data import (
    DATASETS,
    GENERATED,
    DataError,
    Interactions,
    Split,
    actions_from_value,
    build_sequences,
    global_temporal,
    held_out_users,
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


SPLITS: dict[str, Callable[[Dataset], Split]] = {
    "leave_one_out": leave_one_out,
    "global_temporal": global_temporal,
    "held_out_users": held_out_users,
}


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


def read_data(
    name_or_path: str,
    columns: Mapping[str, str] | None = None,
    items: str | Path | None = None,
) -> Interactions:
    """A named data set, or a file of events.

    Args:
        columns: schema name -> name in the file, as `gr.data.read_table` takes them.
        items: file of item metadata.

    Raises:
        DataError: neither, columns or items for a named data set, or anything a reader refuses.
    """
    if name_or_path in {*DATASETS, *GENERATED}:
        if columns or items is not None:
            raise DataError(
                f"data set {name_or_path!r} brings its own columns and items: wanted a file of "
                "events to go with --columns or --items"
            )
        return load(name_or_path)
    if not Path(name_or_path).exists():
        raise DataError(
            f"{name_or_path}: no such file, and no data set of that name; wanted a file of events "
            f"or one of {sorted([*DATASETS, *GENERATED])}"
        )
    return read_table(name_or_path, columns, items=items)


def parse_columns(text: str | None) -> dict[str, str]:
    """``user_id=uid,item_id=movie`` as a mapping.

    Raises:
        DataError: an entry without a name on both sides of ``=``, or a name given twice.
    """
    columns: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in (text or "").split(","))):
        name, _, source = (part.strip() for part in entry.partition("="))
        if not name or not source:
            raise DataError(f"--columns: {entry!r}, wanted entries such as user_id=uid")
        if name in columns:
            raise DataError(f"--columns: {name} is given twice, wanted once")
        columns[name] = source
    return columns


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """``--data``, ``--columns`` and ``--items`` of the stages' command lines."""
    parser.add_argument("--data", required=True, help="name of a data set, or a file of events")
    parser.add_argument("--columns", help="columns of the file, e.g. user_id=uid,item_id=movie")
    parser.add_argument("--items", help="file of item metadata: item_id, title, ...")


def read_data_options(options: argparse.Namespace) -> Interactions:
    """The data that the options of :func:`add_data_options` name."""
    return read_data(options.data, parse_columns(options.columns), options.items)


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
    return PreparedData(interactions, sequences, SPLITS[recipe.split](sequences))

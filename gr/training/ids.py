"""Stage ``ids``: items to embeddings, semantic IDs, catalogue and tokenizer.

    python -m gr.training.ids --data ml-100k --recipe recipe.json --output runs/ids

Legend: n items.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.preprocessing import normalize

from gr.data import Interactions
from gr.tokenizer import (
    AtomicQuantizer,
    Catalog,
    ItemTable,
    LSHQuantizer,
    Quantizer,
    ResidualKMeans,
    SemanticIdTokenizer,
    ShuffledQuantizer,
    build_catalog,
    cooccurrence_embeddings,
    join_embeddings,
    text_embeddings,
)
from gr.training.prepare import PreparedData, add_data_options, prepare, read_data_options
from gr.training.presets import find_recipe
from gr.training.recipe import EmbeddingRecipe, IdsRecipe

QUANTIZER_FOLDER = "quantizer"


@dataclass(frozen=True, eq=False)
class Ids:
    """Semantic IDs of a data set: the catalogue, its tokenizer, the fitted quantizer, and the
    embeddings float32 [n, d] in the order of the catalogue."""

    catalog: Catalog
    tokenizer: SemanticIdTokenizer
    quantizer: Quantizer
    embeddings: npt.NDArray[np.float32]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Tokenizer and catalogue into ``folder``, the quantizer into a folder in it."""
        self.tokenizer.save_pretrained(folder)
        self.quantizer.save_pretrained(Path(folder) / QUANTIZER_FOLDER)


def build_ids(data: PreparedData, recipe: IdsRecipe) -> Ids:
    """Semantic IDs of every item that has an event.

    Items of held-out events are in the catalogue too, but popularity and co-occurrence count
    training events only.

    Raises:
        ValueError: embeddings or quantizer refuse what they are given.
    """
    item_ids = [str(item) for item in pc.unique(data.interactions.events["item_id"]).to_pylist()]
    histories = _training_histories(data.split.train, item_ids)
    counted = np.concatenate(histories) if histories else np.zeros(0, dtype=np.int64)
    metadata = _metadata(data.interactions, item_ids)
    titles = [] if metadata is None else metadata["title"].to_pylist()
    embeddings = item_embeddings(recipe, metadata, histories, len(item_ids))
    table = ItemTable(
        item_ids,
        embeddings,
        titles=[title or item for title, item in zip(titles, item_ids, strict=False)],
        popularity=np.bincount(counted, minlength=len(item_ids)),
        metadata=metadata,
    )
    quantizer = make_quantizer(recipe)
    # One token per item leaves nothing to settle.
    policy = "popularity" if recipe.kind == "atomic" else recipe.collisions
    catalog = build_catalog(table, quantizer, policy)
    tokenizer = SemanticIdTokenizer.from_catalog(catalog, recipe.actions)
    return Ids(catalog, tokenizer, quantizer, embeddings)


def make_quantizer(recipe: IdsRecipe) -> Quantizer:
    """The quantizer of a recipe, not fitted."""
    if recipe.kind == "atomic":
        return AtomicQuantizer()
    if recipe.kind == "lsh":
        return LSHQuantizer(codebook_size=recipe.levels, seed=recipe.seed)
    base = ResidualKMeans(codebook_size=recipe.levels, seed=recipe.seed)
    return ShuffledQuantizer(base, recipe.seed) if recipe.kind == "shuffled" else base


def item_embeddings(
    recipe: IdsRecipe,
    metadata: pa.Table | None,
    histories: Sequence[npt.NDArray[np.int64]],
    n_items: int,
) -> npt.NDArray[np.float32]:
    """Join the sources of a recipe: float32 [n, d].

    Args:
        metadata: n rows in item order, with ``title`` and any other text columns.
        histories: catalogue rows of training events per user, oldest first.

    Raises:
        ValueError: text is asked for and there is none.
    """
    if recipe.kind == "atomic":
        return np.arange(n_items, dtype=np.float32)[:, None]
    parts = []
    for source in recipe.embeddings:
        part = _source(source, recipe.seed, metadata, histories, n_items)
        parts.append(normalize(part) if source.unit_rows else part)
    joined: npt.NDArray[np.float32] = join_embeddings(parts, [e.weight for e in recipe.embeddings])
    return joined


def _source(
    recipe: EmbeddingRecipe,
    seed: int,
    metadata: pa.Table | None,
    histories: Sequence[npt.NDArray[np.int64]],
    n_items: int,
) -> npt.NDArray[np.float32]:
    if recipe.source == "cooccurrence":
        return cooccurrence_embeddings(histories, n_items, recipe.dimension, recipe.window, seed)
    if metadata is None:
        raise ValueError("ids.embeddings: 'text' needs item metadata, and the data has none")
    columns = [metadata[name].to_pylist() for name in metadata.column_names if name != "item_id"]
    texts = [" ".join(value for value in row if value) for row in zip(*columns, strict=True)]
    return text_embeddings(texts, recipe.model, recipe.dimension, seed)


def _training_histories(train: Any, item_ids: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    known = pa.array(item_ids, pa.string())
    histories: list[npt.NDArray[np.int64]] = []
    for chunk in train.with_format("arrow")[:]["item_id"].chunks:
        rows = pc.index_in(chunk.flatten(), value_set=known).to_numpy(zero_copy_only=False)
        lengths = pc.list_value_length(chunk).to_numpy(zero_copy_only=False)
        histories += np.split(rows.astype(np.int64), np.cumsum(lengths)[:-1])
    return histories


def _metadata(interactions: Interactions, item_ids: Sequence[str]) -> pa.Table | None:
    """Rows of the metadata in the order of ``item_ids``; nulls where it lacks an item."""
    if interactions.items is None:
        return None
    table = interactions.items
    rows = pc.index_in(pa.array(item_ids, pa.string()), value_set=table["item_id"].combine_chunks())
    return table.take(rows).set_column(
        table.column_names.index("item_id"), "item_id", pa.array(item_ids, pa.string())
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the IDs of a data set and save them."""
    parser = argparse.ArgumentParser(prog="python -m gr.training.ids", description=main.__doc__)
    add_data_options(parser)
    parser.add_argument("--recipe", required=True, help="name of a recipe, or a JSON file")
    parser.add_argument("--output", required=True, help="folder to write")
    options = parser.parse_args(arguments)
    recipe = find_recipe(options.recipe)
    ids = build_ids(prepare(read_data_options(options), recipe.data), recipe.ids)
    ids.save(options.output)
    print(f"{options.output}: {len(ids.catalog):,} items, levels {ids.catalog.level_sizes}")


if __name__ == "__main__":
    main()

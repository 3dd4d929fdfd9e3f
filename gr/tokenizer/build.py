"""From embeddings to a catalogue, and new items into one that is published.

Legend: n items, k new items, d dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gr.tokenizer.catalog import Catalog
from gr.tokenizer.collisions import append, resolve
from gr.tokenizer.quantizers.base import Quantizer, checked_points


@dataclass(eq=False)
class ItemTable:
    """Items to be given semantic IDs: ids, float [n, d] embeddings, and what is known about them.

    Left empty, titles are the ids and popularity is 0.
    """

    item_ids: Sequence[str | int]
    embeddings: npt.ArrayLike
    titles: Sequence[str] = field(default_factory=list)
    popularity: npt.ArrayLike = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    metadata: pa.Table | None = None

    def __post_init__(self) -> None:
        n = len(self.item_ids)
        self.embeddings = checked_points(self.embeddings)
        counts = np.asarray(self.popularity, dtype=np.int64)
        self.popularity = counts if counts.size else np.zeros(n, dtype=np.int64)
        self.titles = list(self.titles) or [str(i) for i in self.item_ids]
        for name, length in (
            ("embeddings", len(self.embeddings)),
            ("titles", len(self.titles)),
            ("popularity", len(self.popularity)),
        ):
            if length != n:
                raise ValueError(f"{name} has {length} rows: wanted one for each of {n} items")


def build_catalog(
    tables: ItemTable | Mapping[str, ItemTable],
    quantizers: Quantizer | Mapping[str, Quantizer],
    policy: str = "popularity",
) -> Catalog:
    """Fit quantizers, encode all items, settle collisions.

    Args:
        tables: the items, or one table per entity type.
        quantizers: fitted here, in place; one, or one per entity type (types may differ in levels
            and sizes).
        policy: a collision policy, for every type.

    Raises:
        ValueError: types of the two mappings differ, or anything quantizers, policies or the
            catalogue refuse.
    """
    table_of = {"item": tables} if isinstance(tables, ItemTable) else dict(tables)
    quantizer_of = {"item": quantizers} if isinstance(quantizers, Quantizer) else dict(quantizers)
    if list(table_of) != list(quantizer_of):
        raise ValueError(
            f"tables are of types {list(table_of)}, quantizers of {list(quantizer_of)}: they must "
            "agree, in the same order"
        )
    codes_of: dict[str, npt.NDArray[np.int32]] = {}
    sizes_of: dict[str, tuple[int, ...]] = {}
    for name, table in table_of.items():
        quantizer = quantizer_of[name].fit(table.embeddings)
        codes_of[name], sizes_of[name] = resolve(
            quantizer.encode(table.embeddings),
            quantizer.level_sizes,
            policy,
            popularity=table.popularity,
            quantizer=quantizer,
            embeddings=table.embeddings,
        )
    width = max(len(sizes) for sizes in sizes_of.values())
    padded = [_padded(codes_of[name], width) for name in table_of]
    frames = list(table_of.values())
    return Catalog(
        item_ids=[str(i) for table in frames for i in table.item_ids],
        codes=np.concatenate(padded),
        level_sizes=sizes_of,
        item_types=[name for name, table in table_of.items() for _ in table.item_ids],
        titles=[title for table in frames for title in table.titles],
        popularity=np.concatenate([np.asarray(table.popularity) for table in frames]),
        metadata=_joined(frames),
        policy=policy,
    )


def append_items(
    catalog: Catalog, table: ItemTable, quantizer: Quantizer, item_type: str | None = None
) -> Catalog:
    """The catalogue with k new items; published items keep row and semantic ID.

    ``quantizer`` is the fitted one the type was built with, ``item_type`` the first type if None.
    An ``AtomicQuantizer`` gives new items the next free codes of its capacity.

    Raises:
        KeyError: the catalogue has no such type.
        ValueError: an item is already there, or there is no free atomic code left.
    """
    name = catalog.types[0] if item_type is None else item_type
    if name not in catalog.level_sizes:
        raise KeyError(f"item type {name!r} is not one of {catalog.types}")
    sizes = catalog.level_sizes[name]
    rows = catalog.type_index == catalog.types.index(name)
    published = catalog.codes[rows][:, : len(sizes)]
    if quantizer.kind == "atomic":
        first = int(published.max(initial=-1)) + 1
        if first + len(table.item_ids) > sizes[0]:
            raise ValueError(
                f"{len(table.item_ids)} new items for {sizes[0] - first} free atomic codes of "
                f"{sizes[0]}: build with AtomicQuantizer(capacity=...) to leave room"
            )
        new = np.arange(first, first + len(table.item_ids), dtype=np.int32)[:, None]
    else:
        new = quantizer.encode(table.embeddings)
    if quantizer.kind != "atomic" or catalog.policy == "extra_level":
        new = append(
            published,
            sizes,
            new,
            catalog.policy,
            popularity=table.popularity,
            quantizer=quantizer,
            embeddings=table.embeddings,
        )
    return catalog.with_items(
        table.item_ids,
        new,
        item_types=[name] * len(table.item_ids),
        titles=table.titles,
        popularity=table.popularity,
        metadata=table.metadata,
    )


def _padded(codes: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    out = np.full((len(codes), width), -1, dtype=np.int32)
    out[:, : codes.shape[1]] = codes
    return out


def _joined(tables: Sequence[ItemTable]) -> pa.Table | None:
    if all(table.metadata is None for table in tables):
        return None
    parts = [
        pa.table({"item_id": [str(i) for i in table.item_ids]})
        if table.metadata is None
        else table.metadata
        for table in tables
    ]
    return pa.concat_tables(parts, promote_options="permissive")

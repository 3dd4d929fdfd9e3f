"""The catalogue: which item is which row, and which semantic ID it has.

Legend: n items, M_max levels of the type that has most. Rows never move: the row of an item is its
identity for tries, samplers and metrics, and new items are appended behind the old ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gr.data.whole_file import whole_file

IntArray = npt.NDArray[np.int64]

PARQUET_NAME = "catalog.parquet"
JSON_NAME = "catalog.json"
_META = "metadata."
_FORMAT = 1


@dataclass(eq=False)  # arrays have no single truth value to compare by
class Catalog:
    """Items with their semantic IDs.

    ``codes`` is int32 [n, M_max]; a row of a type with fewer levels is padded with -1 on the right.
    ``level_sizes`` maps an entity type to its codes per level. ``popularity`` counts training
    events. ``metadata`` is a table of n rows in item order, or None. ``policy`` names the collision
    policy the codes were made with. Item ids are strings; other values are converted with ``str``.
    Left empty, ``item_types`` is the first type for all, ``titles`` the item ids, ``popularity`` 0.
    A title that is None is the item's id, too.

    Raises:
        ValueError: lengths differ, an item id is missing or repeats, a type is unknown, a code lies
            outside its level, or a popularity is negative.
    """

    item_ids: list[str]
    codes: npt.NDArray[np.int32]
    level_sizes: dict[str, tuple[int, ...]]
    item_types: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    popularity: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    metadata: pa.Table | None = None
    policy: str = "popularity"

    def __post_init__(self) -> None:
        for row, item in enumerate(self.item_ids):
            if item is None or item != item:
                raise ValueError(f"item_ids[{row}] is {item}: wanted an id")
        self.item_ids = [str(i) for i in self.item_ids]
        n = len(self.item_ids)
        self.level_sizes = {str(t): tuple(int(k) for k in s) for t, s in self.level_sizes.items()}
        if not self.level_sizes:
            raise ValueError("level_sizes is empty: wanted at least one entity type")
        if not self.item_types:
            self.item_types = [next(iter(self.level_sizes))] * n
        if not self.titles:
            self.titles = list(self.item_ids)
        elif None in self.titles and len(self.titles) == n:
            pairs = zip(self.titles, self.item_ids, strict=True)
            self.titles = [item if title is None else title for title, item in pairs]
        self.popularity = np.asarray(self.popularity, dtype=np.int64)
        if not self.popularity.size:
            self.popularity = np.zeros(n, dtype=np.int64)
        self.codes = np.ascontiguousarray(self.codes, dtype=np.int32)
        self._validate()

    def _validate(self) -> None:
        n = len(self.item_ids)
        width = max(len(ks) for ks in self.level_sizes.values())
        if self.codes.shape != (n, width):
            raise ValueError(f"codes have shape {self.codes.shape}: wanted {(n, width)}")
        lengths = {
            "item_types": len(self.item_types),
            "titles": len(self.titles),
            "popularity": len(self.popularity),
        }
        if self.metadata is not None:
            lengths["metadata"] = self.metadata.num_rows
        for name, length in lengths.items():
            if length != n:
                raise ValueError(f"{name} has {length} rows: wanted one for each of {n} items")
        if len(self._row_of) != n:
            seen: set[str] = set()
            for row, item in enumerate(self.item_ids):
                if item in seen:
                    raise ValueError(f"item_ids[{row}] {item!r} is already in the catalogue")
                seen.add(item)
        if n and self.popularity.min() < 0:
            row = int(self.popularity.argmin())
            raise ValueError(f"popularity[{row}] is {self.popularity[row]}: wanted a count >= 0")
        types = list(self.level_sizes)
        for row, name in enumerate(self.item_types):
            if name not in self.level_sizes:
                raise ValueError(f"item_types[{row}] is {name!r}: wanted one of {types}")
        sizes = np.zeros((len(types), width), dtype=np.int64)
        for t, name in enumerate(types):
            sizes[t, : len(self.level_sizes[name])] = self.level_sizes[name]
        limit = sizes[self.type_index]
        bad = np.where(limit > 0, (self.codes < 0) | (self.codes >= limit), self.codes != -1)
        if bad.any():
            row, level = (int(v) for v in np.argwhere(bad)[0])
            raise ValueError(
                f"codes[{row}, {level}] of item {self.item_ids[row]!r} is "
                f"{self.codes[row, level]}: type {self.item_types[row]!r} has {limit[row, level]} "
                "codes at that level (-1 is the padding past a type's last level)"
            )

    # ---- looking things up -------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.item_ids)

    @property
    def types(self) -> tuple[str, ...]:
        """Entity types, in the order of ``level_sizes``."""
        return tuple(self.level_sizes)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {item: row for row, item in enumerate(self.item_ids)}

    @cached_property
    def type_index(self) -> IntArray:
        """int64 [n]: each item's position in ``types``."""
        at = {name: t for t, name in enumerate(self.level_sizes)}
        return np.array([at[name] for name in self.item_types], dtype=np.int64)

    def of_types(self, *types: str) -> npt.NDArray[np.bool_]:
        """bool [n]: the items of some entity types.

        Raises:
            ValueError: a type that the catalogue does not have.
        """
        for name in types:
            if name not in self.types:
                raise ValueError(f"type is {name!r}: wanted one of {self.types}")
        mask: npt.NDArray[np.bool_] = np.isin(
            self.type_index, [self.types.index(name) for name in types]
        )
        return mask

    @cached_property
    def levels(self) -> IntArray:
        """int64 [n]: the number of semantic-ID levels of each item."""
        per_type = np.array([len(ks) for ks in self.level_sizes.values()], dtype=np.int64)
        return per_type[self.type_index]

    def index(self, item_ids: Iterable[str | int]) -> IntArray:
        """Rows of items: int64 [k], -1 for an unknown item."""
        get = self._row_of.get
        return np.array([get(str(item), -1) for item in item_ids], dtype=np.int64)

    def __contains__(self, item_id: object) -> bool:
        return str(item_id) in self._row_of

    def title(self, item_id: str | int) -> str:
        """Title of an item.

        Raises:
            KeyError: unknown item.
        """
        row = self._row_of.get(str(item_id))
        if row is None:
            raise KeyError(f"item {item_id!r} is not among the {len(self)} items of the catalogue")
        return self.titles[row]

    @cached_property
    def _buckets(self) -> tuple[npt.NDArray[np.void], IntArray]:
        """Distinct semantic IDs as sorted byte keys, and the row that speaks for each."""
        keys = self._keys(self.codes, self.type_index)
        # Most popular first, then the older row: np.unique returns the first occurrence.
        order = np.lexsort((np.arange(len(self)), -self.popularity))
        unique, first = np.unique(keys[order], return_index=True)
        return unique, order[first].astype(np.int64)

    @staticmethod
    def _keys(codes: npt.NDArray[Any], type_index: npt.NDArray[Any]) -> npt.NDArray[np.void]:
        # Big-endian, so that the byte order of keys is the numeric order of (type, codes).
        rows = np.concatenate([type_index[:, None], codes + 1], axis=1).astype(">u4")
        return np.ascontiguousarray(rows).view(np.dtype((np.void, 4 * rows.shape[1]))).ravel()

    def lookup(self, codes: npt.ArrayLike, type_index: npt.ArrayLike) -> IntArray:
        """Row of the most popular item behind each semantic ID, -1 where no item has it.

        Args:
            codes: int [k, M_max], padded with -1.
            type_index: int [k], positions in ``types`` (-1: no item).
        """
        wide = np.asarray(codes, dtype=np.int64)
        index = np.asarray(type_index, dtype=np.int64)
        if wide.ndim != 2 or wide.shape[1] != self.codes.shape[1]:
            raise ValueError(f"codes have shape {wide.shape}: wanted [k, {self.codes.shape[1]}]")
        out = np.full(len(wide), -1, dtype=np.int64)
        if not len(self) or not len(wide):
            return out
        unique, rows = self._buckets
        keys = self._keys(wide, np.maximum(index, 0))
        at = np.minimum(np.searchsorted(unique, keys), len(unique) - 1)
        found = (unique[at] == keys) & (index >= 0)
        out[found] = rows[at[found]]
        return out

    # ---- growing -----------------------------------------------------------------------------

    def with_items(
        self,
        item_ids: Sequence[str | int],
        codes: npt.ArrayLike,
        *,
        item_types: Sequence[str] | None = None,
        titles: Sequence[str] | None = None,
        popularity: npt.ArrayLike | None = None,
        metadata: pa.Table | None = None,
    ) -> Catalog:
        """A catalogue with k new items behind the old ones; published rows and codes stay.

        ``codes`` is int [k, M] with M <= M_max; missing levels are padded with -1. ``metadata``
        columns missing on either side become null.

        Raises:
            ValueError: an item is already there, or anything the constructor refuses.
        """
        new = [str(i) for i in item_ids]
        for row, item in enumerate(new):
            if item in self._row_of:
                raise ValueError(
                    f"item_ids[{row}] {item!r} is already in the catalogue (row "
                    f"{self._row_of[item]}): published semantic IDs do not move"
                )
        width = self.codes.shape[1]
        given = np.asarray(codes, dtype=np.int32)
        given = given.reshape(len(new), -1) if len(new) else given.reshape(0, width)
        if given.shape[1] > width:
            raise ValueError(f"codes have {given.shape[1]} levels: the catalogue has {width}")
        padded = np.full((len(new), width), -1, dtype=np.int32)
        padded[:, : given.shape[1]] = given
        counts = np.zeros(len(new), dtype=np.int64) if popularity is None else popularity
        return Catalog(
            item_ids=self.item_ids + new,
            codes=np.concatenate([self.codes, padded]),
            level_sizes=dict(self.level_sizes),
            item_types=self.item_types + list(item_types or [self.types[0]] * len(new)),
            titles=self.titles + list(titles if titles is not None else new),
            popularity=np.concatenate([self.popularity, np.asarray(counts, dtype=np.int64)]),
            metadata=self._joined_metadata(metadata, len(new)),
            policy=self.policy,
        )

    def _joined_metadata(self, new: pa.Table | None, count: int) -> pa.Table | None:
        if self.metadata is None and new is None:
            return None

        def blank(rows: int) -> pa.Table:
            return pa.table({"item_id": pa.nulls(rows, pa.string())})

        old_table = blank(len(self)) if self.metadata is None else self.metadata
        new_table = blank(count) if new is None else new
        return pa.concat_tables([old_table, new_table], promote_options="permissive")

    # ---- files -------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``catalog.parquet`` and ``catalog.json``; each appears whole or not at all."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        columns: dict[str, Any] = {
            "item_id": pa.array(self.item_ids, pa.string()),
            "item_type": pa.array(self.item_types, pa.string()),
            "title": pa.array(self.titles, pa.string()),
            "popularity": pa.array(self.popularity, pa.int64()),
        }
        for level in range(self.codes.shape[1]):
            columns[f"code_{level}"] = pa.array(self.codes[:, level], pa.int32())
        if self.metadata is not None:
            for name in self.metadata.column_names:
                columns[_META + name] = self.metadata.column(name)
        with whole_file(path / PARQUET_NAME) as temporary:
            pq.write_table(pa.table(columns), temporary)
        about = {
            "format": _FORMAT,
            "items": len(self),
            "level_sizes": [[t, list(ks)] for t, ks in self.level_sizes.items()],
            "policy": self.policy,
        }
        with whole_file(path / JSON_NAME) as temporary:
            temporary.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Catalog:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: a file of the pair is missing.
            ValueError: the two files do not belong together, or hold an invalid catalogue.
        """
        path = Path(folder)
        for name in (PARQUET_NAME, JSON_NAME):
            if not (path / name).is_file():
                raise FileNotFoundError(f"{path / name} is missing: wanted a saved catalogue")
        try:
            about: Mapping[str, Any] = json.loads((path / JSON_NAME).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path / JSON_NAME} is not JSON: {error}") from error
        if about.get("format") != _FORMAT:
            raise ValueError(
                f"{path / JSON_NAME}: format is {about.get('format')!r}, wanted {_FORMAT}"
            )
        try:
            table = pq.read_table(path / PARQUET_NAME)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path / PARQUET_NAME} is not a Parquet file: {error}") from error
        if table.num_rows != about["items"]:
            raise ValueError(
                f"{path / PARQUET_NAME} has {table.num_rows} rows: {JSON_NAME} beside it says "
                f"{about['items']}"
            )
        level_sizes = {str(t): tuple(ks) for t, ks in about["level_sizes"]}
        width = max(len(ks) for ks in level_sizes.values())
        wanted = ["item_id", "item_type", "title", "popularity"]
        wanted += [f"code_{level}" for level in range(width)]
        missing = [name for name in wanted if name not in table.column_names]
        if missing:
            raise ValueError(f"{path / PARQUET_NAME} has no column {missing[0]!r}")
        codes = np.stack(
            [table.column(f"code_{level}").to_numpy() for level in range(width)], axis=1
        )
        extra = [name for name in table.column_names if name.startswith(_META)]
        metadata = (
            pa.table({name[len(_META) :]: table.column(name) for name in extra}) if extra else None
        )
        return cls(
            item_ids=table.column("item_id").to_pylist(),
            codes=codes,
            level_sizes=level_sizes,
            item_types=table.column("item_type").to_pylist(),
            titles=table.column("title").to_pylist(),
            popularity=table.column("popularity").to_numpy(),
            metadata=metadata,
            policy=str(about["policy"]),
        )

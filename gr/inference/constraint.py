"""Which items a request may return, counted below any trie node without visiting the items.

Legend: B requests (or 1: the same for all), n items, E listed items of the longest request.

A `RowFilter` is a subset of the trie's sorted rows, per request: a *base* without a short list of
*excluded* rows. The base is everything, an `ItemSubset` (a type, what is in stock, what is new:
counted once per trie and shared by any number of requests), or a short list of rows. All of them
answer two questions that are inverse to each other: ``rank(row)`` is how many permitted rows come
before a row, and ``select(rank)`` is the permitted row with that rank. The number of permitted
items below a trie node is then ``rank(row_hi) - rank(row_lo)``. A request costs what its own lists
are long: nothing of the catalogue's size is touched, whatever is combined.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gr.tokenizer.catalog import Catalog
from gr.tokenizer.trie import ItemTrie, lookup

IntArray = npt.NDArray[np.int64]
Allowed: TypeAlias = "ItemSubset | Tensor | Sequence[ItemSubset | IntArray | None] | None"


class _Base(Protocol):
    """Permitted rows before exclusions."""

    @property
    def num_requests(self) -> int: ...
    def rank(self, row: Tensor) -> Tensor: ...
    def select(self, rank: Tensor) -> Tensor: ...


class _Every:
    num_requests = 1

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def rank(self, row: Tensor) -> Tensor:
        return row

    def select(self, rank: Tensor) -> Tensor:
        return rank.clamp_max(self._num_rows)


class _Counted:
    """``before_Bn`` int32 [B, n + 1]: how many rows are permitted before each row."""

    def __init__(self, before_Bn: Tensor) -> None:
        self._before_Bn = before_Bn
        self.num_requests = len(before_Bn)

    @classmethod
    def of(cls, mask_Bn: Tensor) -> _Counted:
        before_Bn = torch.zeros(
            len(mask_Bn), mask_Bn.shape[1] + 1, dtype=torch.int32, device=mask_Bn.device
        )
        torch.cumsum(mask_Bn, dim=1, dtype=torch.int32, out=before_Bn[:, 1:])
        return cls(before_Bn)

    def rank(self, row: Tensor) -> Tensor:
        return _take(self._before_Bn, row).long()

    def select(self, rank: Tensor) -> Tensor:
        return _search(self._before_Bn, (rank + 1).int(), right=False) - 1


class _Listed:
    """``row_BE`` int64: the permitted rows, ascending, padded with n."""

    def __init__(self, row_BE: Tensor, num_rows: int) -> None:
        self._row_BE, self._num_rows = row_BE, num_rows
        self.num_requests = len(row_BE)

    def rank(self, row: Tensor) -> Tensor:
        return _search(self._row_BE, row, right=False)

    def select(self, rank: Tensor) -> Tensor:
        width = self._row_BE.shape[1]
        if not width:
            return torch.full_like(rank, self._num_rows)
        row = _take(self._row_BE, rank.clamp_max(width - 1))
        return torch.where(rank >= width, self._num_rows, row)


class _Mixed:
    """Another base for each group of requests; the groups are int64 numbers of requests."""

    def __init__(self, parts: Sequence[tuple[Tensor, _Base]]) -> None:
        self._parts = parts
        self.num_requests = sum(len(at) for at, _ in parts)

    def rank(self, row: Tensor) -> Tensor:
        out = torch.empty_like(row)
        for at, base in self._parts:
            out[at] = base.rank(row[at])
        return out

    def select(self, rank: Tensor) -> Tensor:
        out = torch.empty_like(rank)
        for at, base in self._parts:
            out[at] = base.select(rank[at])
        return out


class ItemSubset:
    """Some items of one trie, counted once: a type, the new ones, what is in stock.

    Making one visits the catalogue; using it in any number of requests does not. Subsets of one
    trie combine with ``&``, ``|`` and ``~``.

    Args:
        trie: whose items they are, on the device where it stays.
        items: bool [n] over catalogue rows, or integers: catalogue rows, in any order.

    Raises:
        ValueError: a mask of another length, or a row that the catalogue does not have.
    """

    def __init__(self, trie: ItemTrie, items: Tensor | npt.ArrayLike) -> None:
        given = items.cpu().numpy() if isinstance(items, Tensor) else np.asarray(items)
        if given.dtype != np.bool_:
            mask = np.zeros(trie.num_items, dtype=bool)
            mask[_sorted_rows(trie, "items", given)] = True
        elif given.shape != (trie.num_items,):
            raise ValueError(
                f"items is a mask of shape {given.shape}: wanted ({trie.num_items},), one entry "
                "for each row of the catalogue"
            )
        else:
            mask = given[trie.order.cpu().numpy()]
        self._adopt(trie, torch.from_numpy(mask).to(trie.device))

    def _adopt(self, trie: ItemTrie, mask_n: Tensor) -> ItemSubset:
        # A subset that someone keeps must not keep the trie of a catalogue that was replaced.
        self._trie, self._mask_n = weakref.ref(trie), mask_n
        self._counted = _Counted.of(mask_n[None])
        self._size = int(mask_n.sum())
        return self

    @classmethod
    def of_type(cls, trie: ItemTrie, catalog: Catalog, name: str) -> ItemSubset:
        """The items of one entity type of the trie's catalogue.

        Raises:
            ValueError: a type that the catalogue does not have, or a catalogue of another size.
        """
        return cls(trie, catalog.of_types(name))

    def __len__(self) -> int:
        return self._size

    def __and__(self, other: ItemSubset) -> ItemSubset:
        trie = self._its_trie()
        return self._derived(trie, self._mask_n & other.of(trie)._mask_n)

    def __or__(self, other: ItemSubset) -> ItemSubset:
        trie = self._its_trie()
        return self._derived(trie, self._mask_n | other.of(trie)._mask_n)

    def __invert__(self) -> ItemSubset:
        return self._derived(self._its_trie(), ~self._mask_n)

    @classmethod
    def _derived(cls, trie: ItemTrie, mask_n: Tensor) -> ItemSubset:
        return cls.__new__(cls)._adopt(trie, mask_n)

    def _its_trie(self) -> ItemTrie:
        trie = self._trie()
        if trie is None:
            raise ValueError("the subset's trie is gone: wanted one that is still in use")
        return trie

    def of(self, trie: ItemTrie) -> ItemSubset:
        """This subset, if it is one of the trie's.

        Raises:
            ValueError: it belongs to another trie, or the trie has moved since.
        """
        if self._trie() is not trie:
            raise ValueError("the subset was made for another trie: wanted one made for this trie")
        if self._mask_n.device != trie.device:
            raise ValueError(
                f"the subset is on {self._mask_n.device}, its trie on {trie.device}: wanted a "
                "subset made after the trie has moved"
            )
        return self


class RowFilter:
    """A subset of sorted rows per request; use one of the constructors below or ``build_filter``.

    Attributes:
        num_rows: n.
        num_requests: B, or 1 when every request has the same constraint.
        num_excluded: E of the exclusions. Of nodes that share no item, at most so many lose all
            their permitted items to them.
        before_exclusions: the base alone.
        unconstrained: nothing is forbidden to any request.
    """

    def __init__(self, base: _Base, num_rows: int, excluded_BE: Tensor | None = None) -> None:
        """``excluded_BE`` int64: sorted rows, each once, padded with n; [1, E] is for all."""
        self._base, self.num_rows, self.num_requests = base, num_rows, base.num_requests
        self._excluded_BE: Tensor | None = None
        self.num_excluded = 0 if excluded_BE is None else excluded_BE.shape[1]
        self.before_exclusions = self
        if excluded_BE is not None and self.num_excluded:
            self.before_exclusions = RowFilter(base, num_rows)
            self.num_requests = max(self.num_requests, len(excluded_BE))
            self._exclude(excluded_BE.expand(self.num_requests, -1))
        self.unconstrained = isinstance(base, _Every) and not self.num_excluded

    def _exclude(self, listed_BE: Tensor) -> None:
        n = self.num_rows
        # A row that the base lacks is not taken out of it.
        safe_BE = listed_BE.clamp_max(n - 1)
        held_BE = (self._base.rank(safe_BE + 1) > self._base.rank(safe_BE)) & (listed_BE < n)
        row_BE = torch.where(held_BE, listed_BE, n).sort(1).values
        column_E = torch.arange(row_BE.shape[1], device=row_BE.device)
        # How many permitted rows come before each excluded one; none is past the padding.
        before_BE = self._base.rank(row_BE) - column_E
        self._excluded_BE = row_BE
        self._before_BE = torch.where(row_BE < n, before_BE, n)

    @classmethod
    def everything(cls, num_rows: int, device: torch.device) -> RowFilter:
        """No constraint."""
        return cls(_Every(num_rows), num_rows, _padded([], num_rows, device))

    @classmethod
    def without(cls, rows: Sequence[IntArray], num_rows: int, device: torch.device) -> RowFilter:
        """All rows but the listed ones; one array per request, or a single one for all."""
        return cls(_Every(num_rows), num_rows, _padded(rows, num_rows, device))

    @classmethod
    def only(cls, rows: Sequence[IntArray], num_rows: int, device: torch.device) -> RowFilter:
        """The listed rows and no others; one array per request, or a single one for all."""
        return cls(_Listed(_padded(rows, num_rows, device), num_rows), num_rows)

    @classmethod
    def from_mask(cls, mask_Bn: Tensor) -> RowFilter:
        """The rows where a boolean mask [B or 1, n] over sorted rows is true."""
        return cls(_Counted.of(mask_Bn), mask_Bn.shape[1])

    def rank(self, row: Tensor) -> Tensor:
        """Permitted rows before each row: int64, same shape [B, ...] as ``row``."""
        rank = self._base.rank(row)
        if self._excluded_BE is not None:
            rank = rank - _search(self._excluded_BE, row, right=False)
        return rank

    def select(self, rank: Tensor) -> Tensor:
        """The permitted row with each rank [B, ...]; ranks past the end give ``num_rows``."""
        if self._excluded_BE is not None:
            rank = rank + _search(self._before_BE, rank, right=True)
        return self._base.select(rank)

    def count(self, trie: ItemTrie, node: Tensor) -> Tensor:
        """Permitted items below each node [B, ...]; 0 for dead nodes (-1)."""
        low, high = trie.rows(node)
        return self.rank(high) - self.rank(low)


def _search(table_BE: Tensor, values: Tensor, right: bool) -> Tensor:
    """searchsorted of values [B, ...] in each request's own ascending list."""
    if not table_BE.shape[1]:
        return torch.zeros_like(values)
    if len(table_BE) == 1:
        return torch.searchsorted(table_BE[0], values.contiguous(), right=right)
    flat = values.reshape(len(table_BE), -1).contiguous()
    return torch.searchsorted(table_BE, flat, right=right).view(values.shape)


def _take(table_BE: Tensor, at: Tensor) -> Tensor:
    if len(table_BE) == 1:
        return lookup(table_BE[0], at)
    return table_BE.gather(1, at.reshape(len(table_BE), -1)).view(at.shape)


def _padded(rows: Sequence[IntArray], fill: int, device: torch.device) -> Tensor:
    """int64 [B or 1, E]: ascending distinct rows of each request, padded to one width."""
    distinct = [np.unique(listed) for listed in rows]
    width = max((len(listed) for listed in distinct), default=0)
    table = np.full((max(len(distinct), 1), width), fill, dtype=np.int64)
    for at, listed in enumerate(distinct):
        table[at, : len(listed)] = listed
    return torch.from_numpy(table).to(device)


def build_filter(
    trie: ItemTrie,
    excluded: Sequence[IntArray] | None = None,
    allowed: Allowed = None,
) -> RowFilter:
    """The constraint of a batch of requests, from catalogue rows.

    Args:
        trie: whose sorted rows the filter speaks of.
        excluded: catalogue rows that may not come out, one array per request.
        allowed: what may. For all requests: None (everything), an `ItemSubset`, or a bool mask
            [1, n] over catalogue rows. For each of them: a sequence of subsets, arrays of catalogue
            rows and None, or a bool mask [B, n]. A sequence of one entry is for all requests.

    Raises:
        ValueError: a mask that is not bool over all n items, a row that the catalogue does not
            have, a subset of another trie, or lengths that do not agree.
    """
    n = trie.num_items
    if allowed is None:
        base: _Base = _Every(n)
    elif isinstance(allowed, ItemSubset):
        base = allowed.of(trie)._counted
    elif isinstance(allowed, Tensor):
        if allowed.dtype != torch.bool or allowed.ndim != 2 or allowed.shape[1] != n:
            raise ValueError(
                f"allowed mask is {allowed.dtype} of shape {tuple(allowed.shape)}: wanted "
                f"torch.bool [B or 1, {n}] over catalogue rows"
            )
        base = _Counted.of(allowed.to(trie.device)[:, trie.order])
    else:
        base = _base_of_each(trie, allowed)
    if excluded is None:
        return RowFilter(base, n)
    given = 1 if allowed is None or isinstance(allowed, ItemSubset) else len(allowed)
    if given not in (1, len(excluded)):
        raise ValueError(f"allowed has {given} rows: wanted 1 or {len(excluded)}")
    rows = [_sorted_rows(trie, f"excluded[{at}]", listed) for at, listed in enumerate(excluded)]
    return RowFilter(base, n, _padded(rows, n, trie.device))


def _base_of_each(trie: ItemTrie, allowed: Sequence[ItemSubset | IntArray | None]) -> _Base:
    """One base for the requests that share a subset, and one for all that have their own lists."""
    shared: dict[ItemSubset | None, list[int]] = {}
    own: dict[int, IntArray] = {}
    for at, entry in enumerate(allowed):
        if entry is None or isinstance(entry, ItemSubset):
            shared.setdefault(entry, []).append(at)
        else:
            own[at] = _sorted_rows(trie, f"allowed[{at}]", entry)
    n = trie.num_items
    parts: list[tuple[list[int], _Base]] = [
        (numbers, _Every(n) if entry is None else entry.of(trie)._counted)
        for entry, numbers in shared.items()
    ]
    if own or not parts:
        parts.append((list(own), _Listed(_padded(list(own.values()), n, trie.device), n)))
    if len(parts) == 1:
        return parts[0][1]
    return _Mixed([(torch.tensor(at, device=trie.device), base) for at, base in parts])


def _sorted_rows(trie: ItemTrie, name: str, rows: npt.ArrayLike) -> IntArray:
    listed = np.asarray(rows)
    if listed.size and listed.dtype.kind not in "iu":
        raise ValueError(f"{name} is of {listed.dtype}: wanted integers, rows of the catalogue")
    outside = (listed < 0) | (listed >= trie.num_items)
    if outside.any():
        raise ValueError(
            f"{name} has row {listed[outside][0]}: wanted 0 to {trie.num_items - 1}, the rows of "
            "the catalogue"
        )
    return trie.sorted_row[listed.astype(np.int64)]

"""Which items a request may return, counted below any trie node without visiting the items.

Legend: B requests (or 1: the same for all), n items, E listed items of the longest request.

A `RowFilter` is a subset of the trie's sorted rows, per request. It answers two questions that are
inverse to each other: ``rank(row)`` is how many permitted rows come before a row, and
``select(rank)`` is the permitted row with that rank. The number of permitted items below a trie
node is then ``rank(row_hi) - rank(row_lo)``. Three forms hold the same thing at different costs:
everything but a short list (seen items), only a short list, or a boolean mask over the catalogue.
The first two never touch anything of the catalogue's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gr.tokenizer.trie import ItemTrie

IntArray = npt.NDArray[np.int64]


class RowFilter:
    """A subset of sorted rows per request; use one of the constructors below.

    ``table_BE`` is, by form: "only", the permitted rows; "mask", how many rows are permitted before
    each row; "without", how many rows are permitted before each listed row, whose own numbers are
    then ``listed_BE``. All are ascending.
    """

    def __init__(self, form: str, num_rows: int, table_BE: Tensor, listed_BE: Tensor) -> None:
        self._form, self.num_rows = form, num_rows
        self._table_BE, self._listed_BE = table_BE.contiguous(), listed_BE.contiguous()

    @classmethod
    def everything(cls, num_rows: int, device: torch.device) -> RowFilter:
        """No constraint."""
        nothing = torch.empty(1, 0, dtype=torch.int64, device=device)
        return cls("without", num_rows, nothing, nothing)

    @classmethod
    def without(cls, rows: Sequence[IntArray], num_rows: int, device: torch.device) -> RowFilter:
        """All rows but the listed ones; one array per request, or a single one for all."""
        listed, column = _padded(rows, num_rows)
        # Padding must stay ascending after its column is subtracted.
        listed = np.where(listed == num_rows, num_rows + column, listed)
        return cls(
            "without",
            num_rows,
            torch.from_numpy(listed - column).to(device),
            torch.from_numpy(listed).to(device),
        )

    @classmethod
    def only(cls, rows: Sequence[IntArray], num_rows: int, device: torch.device) -> RowFilter:
        """The listed rows and no others; one array per request, or a single one for all."""
        listed = torch.from_numpy(_padded(rows, num_rows)[0]).to(device)
        return cls("only", num_rows, listed, listed)

    @classmethod
    def from_mask(cls, mask_Bn: Tensor) -> RowFilter:
        """The rows where a boolean mask [B or 1, n] over sorted rows is true."""
        counts = mask_Bn.long().cumsum(1)
        table = torch.cat([counts.new_zeros(len(counts), 1), counts], dim=1)
        return cls("mask", mask_Bn.shape[1], table, table)

    @property
    def num_requests(self) -> int:
        """B, or 1 when every request has the same constraint."""
        return len(self._table_BE)

    def rank(self, row: Tensor) -> Tensor:
        """Permitted rows before each row: int64, same shape [B, ...] as ``row``."""
        if self._form == "mask":
            return _take(self._table_BE, row)
        before = _search(self._listed_BE, row, right=False)
        return before if self._form == "only" else row - before

    def select(self, rank: Tensor) -> Tensor:
        """The permitted row with each rank [B, ...]; ranks past the end give ``num_rows``."""
        if self._form == "mask":
            row = _search(self._table_BE, rank + 1, right=False) - 1
        elif self._form == "without":
            row = rank + _search(self._table_BE, rank, right=True)
        else:
            width = self._table_BE.shape[1]
            if not width:
                return torch.full_like(rank, self.num_rows)
            row = _take(self._table_BE, rank.clamp_max(width - 1))
            row = torch.where(rank >= width, self.num_rows, row)
        return row.clamp_max(self.num_rows)

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
        return table_BE[0][at]
    return table_BE.gather(1, at.reshape(len(table_BE), -1)).view(at.shape)


def _padded(rows: Sequence[IntArray], fill: int) -> tuple[IntArray, IntArray]:
    """Ascending distinct rows per request, padded to one width, and the column numbers."""
    distinct = [np.unique(listed) for listed in rows]
    width = max((len(listed) for listed in distinct), default=0)
    table = np.full((max(len(distinct), 1), width), fill, dtype=np.int64)
    for at, listed in enumerate(distinct):
        table[at, : len(listed)] = listed
    return table, np.arange(width, dtype=np.int64)


def build_filter(
    trie: ItemTrie,
    excluded: Sequence[IntArray] | None = None,
    allowed: Sequence[IntArray] | Tensor | None = None,
) -> RowFilter:
    """The constraint of a batch of requests, from catalogue rows.

    Args:
        trie: whose sorted rows the filter speaks of.
        excluded: catalogue rows that may not come out, one array per request.
        allowed: the only catalogue rows that may: one array per request, an outer length of 1 for
            all requests alike, or a bool mask [B or 1, n] over catalogue rows. None: all.

    Raises:
        ValueError: a mask that is not bool over all n items, or lengths that do not agree.
    """
    n, device, to_sorted = trie.num_items, trie.device, trie.sorted_row
    dropped = [to_sorted[r] for r in excluded] if excluded is not None else None
    if dropped is not None and not any(len(r) for r in dropped):
        dropped = None
    if allowed is None:
        if dropped is None:
            return RowFilter.everything(n, device)
        return RowFilter.without(dropped, n, device)
    if isinstance(allowed, Tensor):
        return RowFilter.from_mask(_sorted_mask(trie, allowed, dropped))
    kept = [to_sorted[r] for r in allowed]
    if dropped is not None:
        if len(kept) == 1:
            kept = kept * len(dropped)
        if len(kept) != len(dropped):
            raise ValueError(f"allowed has {len(kept)} rows: wanted 1 or {len(dropped)}")
        kept = [np.setdiff1d(k, d) for k, d in zip(kept, dropped, strict=True)]
    return RowFilter.only(kept, n, device)


def _sorted_mask(trie: ItemTrie, allowed: Tensor, dropped: Sequence[IntArray] | None) -> Tensor:
    if allowed.dtype != torch.bool or allowed.ndim != 2 or allowed.shape[1] != trie.num_items:
        raise ValueError(
            f"allowed mask is {allowed.dtype} of shape {tuple(allowed.shape)}: wanted torch.bool "
            f"[B or 1, {trie.num_items}] over catalogue rows"
        )
    mask = allowed.to(trie.device)[:, trie.order]
    if dropped is not None:
        if len(mask) not in (1, len(dropped)):
            raise ValueError(f"allowed mask has {len(mask)} rows: wanted 1 or {len(dropped)}")
        mask = mask.expand(len(dropped), -1).clone()
        request = np.repeat(np.arange(len(dropped)), [len(r) for r in dropped])
        mask[torch.from_numpy(request), torch.from_numpy(np.concatenate(dropped))] = False
    return mask

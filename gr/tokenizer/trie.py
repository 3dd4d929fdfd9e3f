"""Every semantic ID of a catalogue as one prefix tree in flat arrays on a device.

Legend: n items, M tokens of the longest semantic ID, N nodes, C children of the widest node asked
for; `...` any leading shape.

Rows are sorted by their tokens, so a node covers a contiguous range of *sorted rows*, and the
number of permitted items below a node is a difference of two ranks (`gr.inference.constraint`).
Nodes are numbered level by level in that order: the root is 0, and the children of node i are the
numbers ``child_ptr[i] .. child_ptr[i + 1] - 1``, which is the whole of the CSR structure. Items
that share one semantic ID share a leaf and lie in its range in order of popularity. Besides, the
first levels have a table from (node, token) to child, as many of them as stay small.
"""

from __future__ import annotations

import math
import os
import zlib
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gr.data.whole_file import whole_file
from gr.tokenizer.catalog import Catalog
from gr.tokenizer.vocabulary import SidVocabulary

IntArray = npt.NDArray[np.int64]

ROOT = 0
# The tables of the first levels hold at most as many entries as there are nodes, which adds a
# quarter to the memory, or this many (1 MiB) if that is more.
DENSE_ENTRIES = 2**18
_TENSORS = ("order", "token", "child_ptr", "row_lo", "row_hi", "level_start")
_CHUNK = 2**18


class _Dense(NamedTuple):
    """Children of all nodes of one level by token: int32 [nodes, span], flat, -1 for none."""

    first: int
    nodes: int
    low: int
    span: int
    child: Tensor


class ItemTrie:
    """Prefix tree over item tokens.

    Args:
        tokens: int64 [n, M]; rows of items with fewer tokens are padded with -1 on the right.
        popularity: int64 [n], orders the items behind one semantic ID (most popular first, then the
            lower row); None keeps the order of rows.

    Attributes:
        order: int64 [n], sorted row -> row of ``tokens`` (the catalogue row).
        token: int32 [N], the token that leads to a node; -1 for the root.
        child_ptr: int32 [N + 1], first child of a node; equal to its successor's for a leaf.
        row_lo, row_hi: int32 [N], the sorted rows below a node, ``row_lo <= row < row_hi``.
        levels: M.
        dense_levels: how many of the first levels ``step`` answers from a table.
        level_degree: the largest number of children of a node at each depth, M entries.
        level_width: how many beams can be told apart after 1, 2, .. M tokens: the nodes at that
            depth and the leaves above it.
        mixed: some semantic IDs are shorter than M.
        largest_token: the largest of all.

    Raises:
        ValueError: no items, a row without tokens, padding in front of a token, a token of 2^31 or
            more, or a semantic ID that is the beginning of another one (nothing could tell where it
            ends).
    """

    order: Tensor
    token: Tensor
    child_ptr: Tensor
    row_lo: Tensor
    row_hi: Tensor
    level_start: Tensor

    def __init__(self, tokens: Tensor, popularity: Tensor | None = None) -> None:
        wide = np.ascontiguousarray(tokens.detach().cpu().numpy(), dtype=np.int64)
        _check_rows(wide)
        counts = None if popularity is None else popularity.detach().cpu().numpy()
        if counts is not None and counts.shape != (len(wide),):
            raise ValueError(f"popularity has shape {counts.shape}: wanted ({len(wide)},)")
        order = sorted_order(wide, counts)
        self._adopt({**_build(wide, order), "order": order}, _checksum(wide, counts))
        self.to(tokens.device)

    def _adopt(self, arrays: dict[str, IntArray], checksum: int) -> None:
        for name in _TENSORS:
            wanted = np.int64 if name in ("order", "level_start") else np.int32
            setattr(self, name, torch.from_numpy(np.ascontiguousarray(arrays[name], wanted)))
        self.checksum = checksum
        starts: list[int] = arrays["level_start"].tolist()
        self.level_starts = tuple(starts)
        self.levels = len(starts) - 2
        degree = np.diff(arrays["child_ptr"])
        self.level_degree = tuple(int(degree[a:b].max()) for a, b in pairwise(starts[:-1]))
        is_leaf = degree == 0
        self.mixed = bool(is_leaf[: starts[-2]].any())  # a leaf anywhere above the last level
        self.level_width = tuple(b - a + int(is_leaf[:a].sum()) for a, b in pairwise(starts[1:]))
        self._dense = _dense_tables(arrays["token"], degree, starts)
        self.dense_levels = len(self._dense)
        self.largest_token = int(arrays["token"].max())
        self._most: dict[tuple[int, int], int] = {}

    @classmethod
    def from_catalog(cls, catalog: Catalog, vocabulary: SidVocabulary) -> ItemTrie:
        """The trie of a catalogue: sorted rows map to catalogue rows, leaves to its buckets.

        Raises:
            ValueError: an empty catalogue, or codes that the vocabulary does not have.
        """
        return cls(*_catalog_tensors(catalog, vocabulary))

    # ---- shape -------------------------------------------------------------------------------

    @property
    def num_items(self) -> int:
        return len(self.order)

    @property
    def num_nodes(self) -> int:
        return len(self.token)

    @property
    def device(self) -> torch.device:
        return self.order.device

    def to(self, device: torch.device | str) -> ItemTrie:
        """Move every array to a device, in place."""
        for name in _TENSORS:
            setattr(self, name, getattr(self, name).to(device))
        self._dense = [table._replace(child=table.child.to(device)) for table in self._dense]
        return self

    # ---- stepping ----------------------------------------------------------------------------

    def children(self, node: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Children of nodes, padded to a common number.

        Args:
            node: int64 [...]; -1 is a dead branch and has none.
            width: C, at least the largest number of children among the nodes.

        Returns:
            child int64 [..., C] (0 where there is none) and real bool [..., C].
        """
        safe = node.clamp_min(0)
        begin = self.child_ptr[safe]
        degree = (self.child_ptr[safe + 1] - begin).masked_fill(node < 0, 0)
        slot = torch.arange(width, device=node.device)
        real = slot < degree[..., None]
        return torch.where(real, begin[..., None] + slot, ROOT), real

    def fan_out(self, node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The continuations of each row's nodes, behind each other.

        A node continues with its children; one at which a semantic ID ends, with itself. Nodes
        differ widely in children, so this is a fraction of what padding to the widest would take.

        Args:
            node: int64 [B, w]; distinct nodes of one depth or leaves above it, -1 for dead ones.
            depth: the tokens that lead to them.

        Returns:
            child int64 [B, S], -1 past a row's last, and beam int64 [B, S], the place in the row of
            the node that is continued. S is at least 1.
        """
        width = node.shape[1]
        safe = node.clamp_min(0)
        begin = self.child_ptr[safe].long()
        degree = self.child_ptr[safe + 1] - begin
        begin = torch.where(degree == 0, node, begin)
        degree = degree.clamp_min(1).masked_fill(node < 0, 0)
        end = degree.cumsum(1)
        # Reading the number from another device would wait for it; there, S is what it may be.
        at_most = int(end[:, -1].max()) if self.device.type == "cpu" else self.most(depth, width)
        slots = max(at_most, 1)
        # Every end passed moves on to the next node.
        beam = end.new_zeros(len(node), slots + 1)
        beam = beam.scatter_add_(1, end, torch.ones_like(end)).cumsum(1)[:, :-1]
        real = beam < width
        beam = beam.clamp_max(width - 1)
        child = (begin - end + degree).gather(1, beam) + torch.arange(slots, device=node.device)
        return torch.where(real, child, -1), beam

    def most(self, depth: int, width: int) -> int:
        """The most continuations that so many nodes of one depth, and leaves above it, can have."""
        if (depth, width) not in self._most:
            first, last = self.level_starts[depth : depth + 2]
            degree = self.child_ptr[first : last + 1].diff()
            widest = degree.topk(min(width, last - first)).values
            ended = width if self.mixed else 0
            most = min(int(widest.sum()) + ended, self.level_width[depth])
            self._most[depth, width] = most
        return self._most[depth, width]

    def step(self, node: Tensor, token: Tensor) -> Tensor:
        """The child of each node along a token: int64 [...], -1 where there is none.

        Tables answer for the first levels; below them, a binary search in the node's children.
        """
        found = torch.full_like(node, -1)
        for first, nodes, low, span, child in self._dense:
            row, column = node - first, token - low
            inside = (row >= 0) & (row < nodes) & (column >= 0) & (column < span)
            at = torch.where(inside, row * span + column, 0)
            found = torch.where(inside, child[at].long(), found)
        if self.dense_levels == self.levels:
            return found
        searched = node >= self.level_starts[self.dense_levels]
        return torch.where(searched, self._search(node, token), found)

    def _search(self, node: Tensor, token: Tensor) -> Tensor:
        safe = node.clamp_min(0)
        end = self.child_ptr[safe + 1].long()
        low, high = self.child_ptr[safe].long(), end
        for _ in range(max(self.level_degree[self.dense_levels :]).bit_length()):
            middle = (low + high) // 2
            right = (low < high) & (self.token[middle.clamp_max(self.num_nodes - 1)] < token)
            low, high = torch.where(right, middle + 1, low), torch.where(right, high, middle)
        found = low.clamp_max(self.num_nodes - 1)
        return torch.where((low < end) & (self.token[found] == token), found, -1)

    def walk(self, tokens: Tensor) -> Tensor:
        """The node that a token sequence [..., L] leads to from the root; -1 if it leaves the trie.

        Tokens of -1 stand still, so rows padded on the right end at their own depth.
        """
        node = tokens.new_zeros(tokens.shape[:-1])
        for token in tokens.unbind(-1):
            node = torch.where(token < 0, node, self.step(node, token))
        return node

    def is_leaf(self, node: Tensor) -> Tensor:
        """bool [...]: a whole semantic ID ends here. Dead nodes (-1) are no leaves."""
        safe = node.clamp_min(0)
        return (node >= 0) & (self.child_ptr[safe] == self.child_ptr[safe + 1])

    def rows(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """The sorted rows below nodes: int64 lo and hi; equal (nothing) for dead nodes."""
        safe = node.clamp_min(0)
        low = lookup(self.row_lo, safe)
        return low.long(), torch.where(node >= 0, lookup(self.row_hi, safe), low).long()

    def parents(self) -> Tensor:
        """int64 [N]: the parent of every node; -1 for the root."""
        degree = self.child_ptr.long().diff()
        parent = torch.repeat_interleave(torch.arange(self.num_nodes, device=self.device), degree)
        return torch.cat([parent.new_full((1,), -1), parent])

    @cached_property
    def sorted_row(self) -> IntArray:
        """int64 [n] on the host: catalogue row -> sorted row, the inverse of ``order``."""
        order = self.order.cpu().numpy()
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return inverse

    # ---- files -------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the arrays as safetensors; the file appears whole or not at all."""
        target = Path(path)
        arrays = {name: getattr(self, name).cpu().contiguous() for name in _TENSORS}
        arrays["about"] = torch.tensor([self.checksum])
        with whole_file(target) as temporary:
            save_file(arrays, temporary)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ItemTrie:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not a saved trie.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is missing: wanted a saved trie")
        try:
            arrays = {name: tensor.numpy() for name, tensor in load_file(path).items()}
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        missing = sorted({*_TENSORS, "about"} - set(arrays))
        if missing:
            raise ValueError(f"{path} has no array {missing[0]!r}: wanted a saved trie")
        sizes = {len(arrays[name]) for name in ("token", "row_lo", "row_hi")}
        sizes |= {len(arrays["child_ptr"]) - 1, int(arrays["level_start"][-1])}
        if len(sizes) > 1:
            raise ValueError(f"{path} has arrays for {sorted(sizes)} nodes: wanted one number")
        trie = cls.__new__(cls)
        # Files of older versions have another number in front of the checksum.
        trie._adopt(arrays, int(arrays["about"][-1]))
        return trie

    def belongs_to(self, catalog: Catalog, vocabulary: SidVocabulary) -> bool:
        """Whether building from this catalogue again would give this trie."""
        tokens, popularity = _catalog_tensors(catalog, vocabulary)
        return self.checksum == _checksum(tokens.numpy(), popularity.numpy())


def _catalog_tensors(catalog: Catalog, vocabulary: SidVocabulary) -> tuple[Tensor, Tensor]:
    at = np.array([vocabulary.types.index(name) for name in catalog.types], dtype=np.int64)
    codes = catalog.codes[:, : vocabulary.max_levels]
    tokens = vocabulary.mixed_item_tokens(codes, at[catalog.type_index])
    return torch.from_numpy(tokens), torch.from_numpy(np.array(catalog.popularity, np.int64))


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` of a vector; on a CPU several times as fast as writing it that way."""
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def _checksum(tokens: IntArray, popularity: IntArray | None) -> int:
    check = zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int64).data)
    if popularity is None:
        return check
    return zlib.crc32(np.ascontiguousarray(popularity, dtype=np.int64).data, check)


def _check_rows(tokens: IntArray) -> None:
    if tokens.ndim != 2 or not tokens.shape[0] or not tokens.shape[1]:
        raise ValueError(
            f"tokens have shape {tokens.shape}: wanted [n, M] with at least one item and one token"
        )
    pad = tokens < 0
    if pad[:, 0].any():
        row = int(pad[:, 0].argmax())
        raise ValueError(f"tokens[{row}] has no tokens: wanted at least one per item")
    inner = pad[:, :-1] & ~pad[:, 1:]
    if inner.any():
        row, level = (int(v) for v in np.argwhere(inner)[0])
        raise ValueError(
            f"tokens[{row}, {level}] is padding before a token: wanted -1 only on the right"
        )
    if tokens.max() >= 2**31:
        row, level = (int(v) for v in np.argwhere(tokens >= 2**31)[0])
        raise ValueError(f"tokens[{row}, {level}] is {tokens[row, level]}: wanted less than 2^31")


def sorted_order(tokens: IntArray, popularity: npt.NDArray[np.int64] | None) -> IntArray:
    """Rows sorted by tokens, then most popular first, then row."""
    ranked = None if popularity is None else np.argsort(-popularity, kind="stable")
    lows = tokens.min(axis=0).tolist()
    spans = [high - low + 1 for low, high in zip(lows, tokens.max(axis=0).tolist(), strict=True)]
    room, bits = math.prod(spans), (len(tokens) - 1).bit_length()
    if room < 2**63:
        key = np.zeros(len(tokens), dtype=np.int64)
        for column, low, span in zip(tokens.T, lows, spans, strict=True):
            key *= span
            key += column
            key -= low
        if ranked is not None:
            key = key[ranked]
        if room << bits < 2**63:
            # One integer holds a row's tokens and its number: sorting it in place is by far the
            # fastest, and takes no more memory.
            key <<= bits
            key |= np.arange(len(key))
            key.sort()
            key &= (1 << bits) - 1
            order = key
        else:
            order = np.argsort(key, kind="stable")
    else:
        order = np.lexsort((tokens if ranked is None else tokens[ranked]).T[::-1])
    return order if ranked is None else ranked[order]


def _build(tokens: IntArray, order: IntArray) -> dict[str, IntArray]:
    """Node arrays, level by level; in int32, since this is what a large catalogue's memory is."""
    n, levels = tokens.shape
    columns = np.empty((levels, n), dtype=np.int32)
    for begin in range(0, n, _CHUNK):
        columns[:, begin : begin + _CHUNK] = tokens[order[begin : begin + _CHUNK]].T
    token, lows, highs = ([np.array([value], dtype=np.int32)] for value in (-1, 0, n))
    degrees = []
    level_start = [0, 1]
    starts = lows[0]
    differs = np.zeros(n, dtype=bool)
    differs[0] = True
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
        boundary = np.flatnonzero(differs).astype(np.int32)
        real = column[boundary] >= 0
        above = np.searchsorted(starts, boundary, side="right").astype(np.int32) - 1
        # Padding sorts first: a padded run whose successor has the same parent ends inside it.
        clash = ~real[:-1] & real[1:] & (above[:-1] == above[1:])
        if clash.any():
            at = int(np.flatnonzero(clash)[0])
            short, long = (int(order[boundary[i]]) for i in (at, at + 1))
            raise ValueError(
                f"tokens[{short}] is the beginning of tokens[{long}]: wanted no semantic ID that "
                "continues another"
            )
        if not real.any():
            break
        degrees.append(np.bincount(above[real], minlength=len(starts)).astype(np.int32))
        highs.append(np.append(boundary[1:], np.int32(n))[real])
        starts = boundary[real]
        lows.append(starts)
        token.append(column[starts])
        level_start.append(level_start[-1] + len(starts))
    degrees.append(np.zeros(len(starts), dtype=np.int32))
    child_ptr = np.ones(level_start[-1] + 1, dtype=np.int32)
    np.cumsum(np.concatenate(degrees), out=child_ptr[1:])
    child_ptr[1:] += 1
    del columns, column, degrees
    return {
        "token": _joined(token),
        "row_lo": _joined(lows),
        "row_hi": _joined(highs),
        "child_ptr": child_ptr,
        "level_start": np.array(level_start),
    }


def _joined(parts: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """The parts behind each other; the list is emptied, so that only one array is held twice."""
    whole = np.concatenate(parts)
    parts.clear()
    return whole


def _dense_tables(token: IntArray, degree: IntArray, starts: list[int]) -> list[_Dense]:
    left = max(DENSE_ENTRIES, len(token))
    tables: list[_Dense] = []
    for first, begin, end in zip(starts, starts[1:], starts[2:], strict=False):
        tokens = token[begin:end]
        nodes, low = begin - first, int(tokens.min())
        span = int(tokens.max()) - low + 1
        left -= nodes * span
        if left < 0:
            break
        child = np.full(nodes * span, -1, dtype=np.int32)
        row = np.repeat(np.arange(nodes) * span, degree[first:begin])
        child[row + tokens - low] = np.arange(begin, end)
        tables.append(_Dense(first, nodes, low, span, torch.from_numpy(child)))
    return tables

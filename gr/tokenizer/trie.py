"""Every semantic ID of a catalogue as one prefix tree in flat arrays on a device.

Legend: n items, M tokens of the longest semantic ID, N nodes, C children of the widest node asked
for; `...` any leading shape.

Rows are sorted by their tokens, so a node covers a contiguous range of *sorted rows*, and the
number of permitted items below a node is a difference of two ranks (`gr.inference.constraint`).
Nodes are numbered level by level in that order: the root is 0, and the children of node i are the
numbers ``child_ptr[i] .. child_ptr[i + 1] - 1``, which is the whole of the CSR structure. Items
that share one semantic ID share a leaf and lie in its range in order of popularity.
"""

from __future__ import annotations

import os
import zlib
from functools import cached_property
from itertools import pairwise
from pathlib import Path

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
_TENSORS = ("order", "token", "child_ptr", "row_lo", "row_hi", "first_child", "level_start")


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
        level_degree: the largest number of children of a node at each depth, M entries.
        level_width: how many beams can be told apart after 1, 2, .. M tokens: the nodes at that
            depth and the leaves above it.
        mixed: some semantic IDs are shorter than M.

    Raises:
        ValueError: no items, a row without tokens, padding in front of a token, or a semantic ID
            that is the beginning of another one (nothing could tell where it ends).
    """

    order: Tensor
    token: Tensor
    child_ptr: Tensor
    row_lo: Tensor
    row_hi: Tensor
    first_child: Tensor
    level_start: Tensor

    def __init__(self, tokens: Tensor, popularity: Tensor | None = None) -> None:
        wide = np.ascontiguousarray(tokens.detach().cpu().numpy(), dtype=np.int64)
        _check_rows(wide)
        counts = None if popularity is None else popularity.detach().cpu().numpy()
        if counts is not None and counts.shape != (len(wide),):
            raise ValueError(f"popularity has shape {counts.shape}: wanted ({len(wide)},)")
        order = sorted_order(wide, counts)
        built = _build(wide[order], order)
        first_level = built["token"][built["level_start"][1] : built["level_start"][2]]
        low = int(first_level[0])
        dense = np.full(int(first_level[-1]) - low + 1, -1, dtype=np.int64)
        dense[first_level - low] = 1 + np.arange(len(first_level))
        self._adopt({**built, "order": order, "first_child": dense}, low, _checksum(wide, counts))
        self.to(tokens.device)

    def _adopt(self, arrays: dict[str, IntArray], first_token: int, checksum: int) -> None:
        for name in _TENSORS:
            wanted = np.int64 if name in ("order", "level_start") else np.int32
            setattr(self, name, torch.from_numpy(np.ascontiguousarray(arrays[name], wanted)))
        self.first_token = first_token
        self.checksum = checksum
        starts: list[int] = arrays["level_start"].tolist()
        self.level_starts = tuple(starts)
        self.levels = len(starts) - 2
        degree = np.diff(arrays["child_ptr"])
        self.level_degree = tuple(int(degree[a:b].max()) for a, b in pairwise(starts[:-1]))
        is_leaf = degree == 0
        self.mixed = bool(is_leaf[: starts[-2]].any())  # a leaf anywhere above the last level
        self.level_width = tuple(b - a + int(is_leaf[:a].sum()) for a, b in pairwise(starts[1:]))

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
        alive = node >= 0
        safe = node.clamp_min(0)
        begin = self.child_ptr[safe].long()
        end = torch.where(alive, self.child_ptr[safe + 1].long(), begin)
        child = begin[..., None] + torch.arange(width, device=node.device)
        real = child < end[..., None]
        return torch.where(real, child, ROOT), real

    def step(self, node: Tensor, token: Tensor) -> Tensor:
        """The child of each node along a token: int64 [...], -1 where there is none.

        A dense table answers for the root; below it, a binary search in the node's children.
        """
        local = token - self.first_token
        inside = (local >= 0) & (local < len(self.first_child))
        dense = self.first_child[local.clamp(0, len(self.first_child) - 1)].long()
        from_root = torch.where(inside, dense, -1)
        if self.levels == 1:
            return torch.where(node == ROOT, from_root, -1)
        safe = node.clamp_min(0)
        end = self.child_ptr[safe + 1].long()
        low, high = self.child_ptr[safe].long(), end
        for _ in range(max(self.level_degree[1:]).bit_length()):
            middle = (low + high) // 2
            right = (low < high) & (self.token[middle.clamp_max(self.num_nodes - 1)] < token)
            low, high = torch.where(right, middle + 1, low), torch.where(right, high, middle)
        found = low.clamp_max(self.num_nodes - 1)
        hit = (node > ROOT) & (low < end) & (self.token[found] == token)
        return torch.where(node == ROOT, from_root, torch.where(hit, found, -1))

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
        low = self.row_lo[safe].long()
        return low, torch.where(node >= 0, self.row_hi[safe].long(), low)

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
        arrays["about"] = torch.tensor([self.first_token, self.checksum])
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
        trie = cls.__new__(cls)
        first_token, checksum = (int(v) for v in arrays.pop("about"))
        trie._adopt(arrays, first_token, checksum)
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


def _checksum(tokens: IntArray, popularity: IntArray | None) -> int:
    check = zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int64).tobytes())
    if popularity is None:
        return check
    return zlib.crc32(np.ascontiguousarray(popularity, dtype=np.int64).tobytes(), check)


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


def sorted_order(tokens: IntArray, popularity: npt.NDArray[np.int64] | None) -> IntArray:
    """Rows sorted by tokens, then most popular first, then row."""
    span = int(tokens.max()) + 2  # one more for the padding
    keys: list[IntArray] = []
    if span ** tokens.shape[1] < 2**63:
        # One integer per row: a single sort, a few times faster than one per level.
        packed = np.zeros(len(tokens), dtype=np.int64)
        for level in tokens.T:
            packed = packed * span + level + 1
        keys = [packed]
    else:
        keys = list(tokens.T[::-1])
    if popularity is not None:
        keys.insert(0, -popularity.astype(np.int64))
    if len(keys) == 1:
        return np.argsort(keys[0], kind="stable").astype(np.int64)
    return np.lexsort(keys).astype(np.int64)


def _build(tokens: IntArray, order: IntArray) -> dict[str, IntArray]:
    """Node arrays of sorted token rows, level by level."""
    n, levels = tokens.shape
    token, lows, highs, parents = [np.array([-1])], [np.array([0])], [np.array([n])], []
    level_start = [0, 1]
    starts = np.array([0])
    differs = np.zeros(n, dtype=bool)
    differs[0] = True
    for level in range(levels):
        column = tokens[:, level]
        differs[1:] |= column[1:] != column[:-1]
        boundary = np.flatnonzero(differs)
        ends = np.append(boundary[1:], n)
        real = column[boundary] >= 0
        above = np.searchsorted(starts, boundary, side="right") - 1
        # Padding sorts first: a padded run whose successor has the same parent ends inside it.
        clash = ~real[:-1] & real[1:] & (above[:-1] == above[1:])
        if level and clash.any():
            at = int(np.flatnonzero(clash)[0])
            short, long = (int(order[boundary[i]]) for i in (at, at + 1))
            raise ValueError(
                f"tokens[{short}] is the beginning of tokens[{long}]: wanted no semantic ID that "
                "continues another"
            )
        parents.append(level_start[level] + above[real])
        starts = boundary[real]
        if not len(starts):
            break
        token.append(column[starts])
        lows.append(starts)
        highs.append(ends[real])
        level_start.append(level_start[-1] + len(starts))
    total = level_start[-1]
    degree = np.bincount(np.concatenate(parents), minlength=total)
    return {
        "token": np.concatenate(token),
        "row_lo": np.concatenate(lows),
        "row_hi": np.concatenate(highs),
        "child_ptr": 1 + np.concatenate([[0], np.cumsum(degree)]),
        "level_start": np.array(level_start),
    }

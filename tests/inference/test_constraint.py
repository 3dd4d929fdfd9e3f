"""Row filters against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gr.inference.constraint import RowFilter, build_filter
from gr.tokenizer.trie import ItemTrie

subsets = st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=4)


@given(subsets, st.sampled_from(["without", "only", "mask"]))
@settings(max_examples=80, deadline=None)
def test_rank_and_select_count_permitted_rows(listed: list[set[int]], form: str) -> None:
    n, cpu = 12, torch.device("cpu")
    arrays = [np.array(sorted(s), dtype=np.int64) for s in listed]
    permitted = [[r for r in range(n) if (r in s) != (form == "without")] for s in listed]
    if form == "mask":
        mask = torch.zeros(len(listed), n, dtype=torch.bool)
        for b, rows in enumerate(permitted):
            mask[b, rows] = True
        rows_filter = RowFilter.from_mask(mask)
    elif form == "only":
        rows_filter = RowFilter.only(arrays, n, cpu)
    else:
        rows_filter = RowFilter.without(arrays, n, cpu)
    every = torch.arange(n + 1).expand(len(listed), -1)
    assert rows_filter.rank(every).tolist() == [
        [sum(r < at for r in rows) for at in range(n + 1)] for rows in permitted
    ]
    assert rows_filter.select(every[:, :n]).tolist() == [
        rows + [n] * (n - len(rows)) for rows in permitted
    ]


@pytest.mark.parametrize("as_mask", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_allowed_and_excluded_together(as_mask: bool, shared: bool) -> None:
    trie = ItemTrie(torch.tensor([[1, 5], [2, 4], [1, 3], [1, 5], [2, 9]]))
    allowed = [[0, 1, 2, 3]] if shared else [[0, 1, 2, 3], [1, 4]]
    excluded = [np.array([3, 4]), np.array([1, 1])]
    given_allowed: Any
    if as_mask:
        given_allowed = torch.zeros(len(allowed), 5, dtype=torch.bool)
        for b, rows in enumerate(allowed):
            given_allowed[b, rows] = True
    else:
        given_allowed = [np.array(rows) for rows in allowed]
    keep = build_filter(trie, excluded, given_allowed)
    left = [{0, 1, 2}, {0, 2, 3} if shared else {4}]
    nodes = trie.walk(torch.tensor([[1, -1], [2, -1], [1, 5], [2, 9], [1, 3]]))
    below = [{0, 2, 3}, {1, 4}, {0, 3}, {4}, {2}]
    got = keep.count(trie, torch.stack([nodes, nodes]))
    assert got.tolist() == [[len(kept & rows) for rows in below] for kept in left]
    assert keep.count(trie, torch.full((2, 1), -1)).tolist() == [[0], [0]]


def test_bad_masks_are_named() -> None:
    trie = ItemTrie(torch.tensor([[1], [2]]))
    with pytest.raises(ValueError, match=r"wanted torch.bool \[B or 1, 2\]"):
        build_filter(trie, None, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="allowed has 3 rows: wanted 1 or 2"):
        build_filter(trie, [np.array([0])] * 2, [np.array([0])] * 3)

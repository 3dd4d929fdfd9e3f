"""Row filters against plain lists."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gr.inference.constraint import Allowed, ItemSubset, RowFilter, build_filter
from gr.tokenizer import Catalog, SidVocabulary
from gr.tokenizer.trie import ItemTrie

N = 12
rows = st.sets(st.integers(0, N - 1))
subsets = st.lists(rows, min_size=1, max_size=4)


def assert_holds(keep: RowFilter, permitted: list[set[int]], n: int = N) -> None:
    """``rank`` and ``select`` of every row, against the permitted sorted rows of each request."""
    kept = [sorted(rows) for rows in permitted]
    every = torch.arange(n + 1).expand(len(permitted), -1)
    assert keep.rank(every).tolist() == [
        [sum(r < at for r in p) for at in range(n + 1)] for p in kept
    ]
    assert keep.select(every[:, :n]).tolist() == [p + [n] * (n - len(p)) for p in kept]


@given(subsets, st.sampled_from(["without", "only", "mask"]))
@settings(max_examples=80, deadline=None)
def test_rank_and_select_count_permitted_rows(listed: list[set[int]], form: str) -> None:
    cpu = torch.device("cpu")
    arrays = [np.array(sorted(s), dtype=np.int64) for s in listed]
    permitted = [{r for r in range(N) if (r in s) != (form == "without")} for s in listed]
    if form == "mask":
        mask = torch.zeros(len(listed), N, dtype=torch.bool)
        for b, kept in enumerate(permitted):
            mask[b, list(kept)] = True
        keep = RowFilter.from_mask(mask)
    elif form == "only":
        keep = RowFilter.only(arrays, N, cpu)
    else:
        keep = RowFilter.without(arrays, N, cpu)
    assert_holds(keep, permitted)


@given(
    st.lists(
        st.tuples(st.sampled_from(["all", "old", "new", "own"]), rows, rows), min_size=1, max_size=5
    ),
    rows,
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_base_without_any_exclusions(
    requests: list[tuple[str, set[int], set[int]]], new: set[int], excluding: bool
) -> None:
    """Requests of one batch may differ in kind; items of 12 IDs in another order than the rows'."""
    trie = ItemTrie(torch.tensor([[(7 * i) % N, 20] for i in range(N)]))
    fresh = ItemSubset(trie, np.array(sorted(new), dtype=np.int64))
    allowed: list[ItemSubset | np.ndarray[Any, Any] | None] = []
    permitted = []
    for kind, own, excluded in requests:
        base = {"all": set(range(N)), "new": new, "old": set(range(N)) - new, "own": own}[kind]
        listed = np.array(sorted(own), dtype=np.int64)
        allowed.append({"all": None, "new": fresh, "old": ~fresh, "own": listed}[kind])
        permitted.append(
            {int(trie.sorted_row[i]) for i in base - (excluded if excluding else set())}
        )
    without = [np.array(list(excluded), dtype=np.int64) for *_, excluded in requests]
    keep = build_filter(trie, without if excluding else None, allowed)
    assert keep.num_requests in (1, len(requests))
    assert_holds(keep, permitted)
    # Every node counts what is permitted below it.
    node = torch.arange(-1, trie.num_nodes).expand(len(requests), -1)
    low, high = trie.rows(node[0])
    wanted = [
        [sum(a <= r < b for r in p) for a, b in zip(low, high, strict=True)] for p in permitted
    ]
    assert keep.count(trie, node).tolist() == wanted


@pytest.mark.parametrize("as_mask", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_allowed_and_excluded_together(as_mask: bool, shared: bool) -> None:
    trie = ItemTrie(torch.tensor([[1, 5], [2, 4], [1, 3], [1, 5], [2, 9]]))
    allowed = [[0, 1, 2, 3]] if shared else [[0, 1, 2, 3], [1, 4]]
    excluded = [np.array([3, 4]), np.array([1, 1])]
    given_allowed: Any
    if as_mask:
        given_allowed = torch.zeros(len(allowed), 5, dtype=torch.bool)
        for b, kept in enumerate(allowed):
            given_allowed[b, kept] = True
    else:
        given_allowed = [np.array(kept) for kept in allowed]
    keep = build_filter(trie, excluded, given_allowed)
    left = [{0, 1, 2}, {0, 2, 3} if shared else {4}]
    nodes = trie.walk(torch.tensor([[1, -1], [2, -1], [1, 5], [2, 9], [1, 3]]))
    below = [{0, 2, 3}, {1, 4}, {0, 3}, {4}, {2}]
    got = keep.count(trie, torch.stack([nodes, nodes]))
    assert got.tolist() == [[len(kept & rows) for rows in below] for kept in left]
    assert keep.count(trie, torch.full((2, 1), -1)).tolist() == [[0], [0]]


def test_a_shared_subset_is_used_where_it_lies() -> None:
    """However many requests and exclusions there are, nothing of the catalogue's size is made."""
    n = 50_000
    trie = ItemTrie(torch.arange(n)[:, None])
    stock, new = ItemSubset(trie, np.arange(n) % 2 == 0), ItemSubset(trie, np.arange(n) > 9)
    excluded = [np.array([4, 6, 20_000 + b]) for b in range(64)]
    allowed: list[Allowed] = [
        stock,
        [stock, new] * 32,
        [stock, None, np.array([1, 4])] * 21 + [new],
    ]
    assert trie.sorted_row is not None  # made on first use, once per trie
    for each in allowed:
        tracemalloc.start()
        with torch.profiler.profile(profile_memory=True) as profile:
            keep = build_filter(trie, excluded, each)
            keep.count(trie, torch.arange(100).expand(64, -1))
        _, arrays = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        tensors = max(event.self_cpu_memory_usage for event in profile.events())
        # One bit per item and request would be 400,000 bytes.
        assert max(arrays, tensors) < 64 * n // 8
    assert keep.count(trie, torch.zeros(64, 1, dtype=torch.int64))[:3, 0].tolist() == [
        n // 2 - 3,
        n - 3,
        1,
    ]


def test_subsets_combine_as_sets() -> None:
    trie = ItemTrie(torch.tensor([[3, 1], [1, 1], [2, 5], [2, 5], [1, 9]]))
    first, second = (
        ItemSubset(trie, [0, 2, 2]),
        ItemSubset(trie, torch.tensor([True] * 3 + [False] * 2)),
    )
    for subset, wanted in (
        (first, {0, 2}),
        (second, {0, 1, 2}),
        (first & second, {0, 2}),
        (first | second, {0, 1, 2}),
        (~first, {1, 3, 4}),
        (~first & ~second, {3, 4}),
        (ItemSubset(trie, []), set()),
    ):
        assert len(subset) == len(wanted)
        assert_holds(
            build_filter(trie, None, subset), [{int(trie.sorted_row[i]) for i in wanted}], 5
        )


def test_a_subset_does_not_keep_a_trie_that_nobody_uses() -> None:
    trie = ItemTrie(torch.tensor([[3, 1], [1, 1]]))
    subset, held = ItemSubset(trie, [0]), weakref.ref(trie)
    subset = ~(subset | ~subset)
    del trie
    gc.collect()
    assert held() is None
    assert len(subset) == 0
    with pytest.raises(ValueError, match="the subset's trie is gone"):
        assert ~subset


def test_the_types_of_a_catalogue_are_subsets() -> None:
    sizes = {"song": (4, 4), "artist": (5,), "label": (2,)}
    catalog = Catalog(
        item_ids=["a", "b", "c", "d"],
        codes=np.array([[0, 1], [2, -1], [0, 1], [3, 3]], dtype=np.int32),
        level_sizes=sizes,
        item_types=["song", "artist", "song", "song"],
    )
    trie = ItemTrie.from_catalog(catalog, SidVocabulary(sizes))
    for name, wanted in (("song", {0, 2, 3}), ("artist", {1}), ("label", set())):
        subset = ItemSubset.of_type(trie, catalog, name)
        keep = build_filter(trie, None, subset)
        assert_holds(keep, [{int(trie.sorted_row[i]) for i in wanted}], 4)
    with pytest.raises(
        ValueError, match=r"type is 'film': wanted one of \('song', 'artist', 'label'\)"
    ):
        ItemSubset.of_type(trie, catalog, "film")
    with pytest.raises(ValueError, match=r"mask of shape \(4,\): wanted \(2,\)"):
        ItemSubset.of_type(ItemTrie(torch.tensor([[1], [2]])), catalog, "song")


def test_bad_arguments_are_named() -> None:
    trie, other = (ItemTrie(torch.tensor([[1], [2]])) for _ in range(2))
    one, two = np.array([0]), np.array([0, 2])
    everything = ItemSubset(trie, [0, 1])
    with pytest.raises(ValueError, match=r"wanted torch.bool \[B or 1, 2\]"):
        build_filter(trie, None, torch.ones(1, 3, dtype=torch.bool))
    for allowed in ([one] * 3, [everything] * 3, [None] * 3, torch.ones(3, 2, dtype=torch.bool)):
        with pytest.raises(ValueError, match="allowed has 3 rows: wanted 1 or 2"):
            build_filter(trie, [one] * 2, allowed)
    with pytest.raises(ValueError, match=r"excluded\[1\] has row 2: wanted 0 to 1"):
        build_filter(trie, [one, two])
    with pytest.raises(ValueError, match=r"allowed\[1\] has row -1: wanted 0 to 1"):
        build_filter(trie, None, [None, np.array([-1])])
    with pytest.raises(ValueError, match=r"allowed\[0\] is of float64: wanted integers"):
        build_filter(trie, None, [np.array([0.5])])
    with pytest.raises(ValueError, match=r"items has row 2: wanted 0 to 1"):
        ItemSubset(trie, two)
    with pytest.raises(ValueError, match=r"items is a mask of shape \(3,\): wanted \(2,\)"):
        ItemSubset(trie, np.ones(3, dtype=bool))
    for use in (
        lambda: build_filter(other, None, everything),
        lambda: everything & ItemSubset(other, []),
    ):
        with pytest.raises(ValueError, match="made for another trie"):
            use()

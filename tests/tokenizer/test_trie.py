"""The trie against plain Python dictionaries and lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gr.tokenizer.catalog import Catalog
from gr.tokenizer.trie import DENSE_ENTRIES, ItemTrie, sorted_order
from gr.tokenizer.vocabulary import SidVocabulary

# Types of one, two and three tokens; their tokens do not overlap, as in a real vocabulary.
Row = tuple[int, ...]
rows = st.one_of(
    st.tuples(st.integers(100, 103)),
    st.tuples(st.integers(50, 53), st.integers(60, 62)),
    st.tuples(st.integers(5, 9), st.integers(20, 23), st.integers(30, 34)),
)


def padded(items: list[Row]) -> torch.Tensor:
    width = max(len(row) for row in items)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in items])


@given(st.lists(rows, min_size=1, max_size=40), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_a_node_with_its_items_in_order_of_popularity(
    items: list[Row], seed: int
) -> None:
    popularity = np.random.default_rng(seed).integers(0, 3, len(items))
    trie = ItemTrie(padded(items), torch.from_numpy(popularity))
    prefixes = {row[:depth] for row in items for depth in range(len(row) + 1)}
    assert trie.num_nodes == len(prefixes)
    assert trie.mixed == (len({len(row) for row in items}) > 1)
    for prefix in prefixes:
        node = trie.walk(torch.tensor([[*prefix]], dtype=torch.int64))
        below = [i for i, row in enumerate(items) if row[: len(prefix)] == prefix]
        low, high = (int(v) for v in trie.rows(node))
        listed = trie.order[low:high].tolist()
        assert sorted(listed) == below
        longer = [row for row in items if row[: len(prefix)] == prefix and len(row) > len(prefix)]
        follows = sorted({row[len(prefix)] for row in longer})
        child, real = trie.children(node, max(len(follows), 1))
        assert trie.token[child[real]].tolist() == follows
        assert bool(trie.is_leaf(node)) == (not follows)
        if not follows:
            assert listed == sorted(below, key=lambda i: (-popularity[i], i))
    for outside in ((0,), (101, 60), (5, 20, 999), (9, 9, 9)):
        if outside not in prefixes:
            assert trie.walk(torch.tensor([outside])).item() == -1
    depths = [{row[:d] for row in items} for d in range(1, trie.levels + 1)]
    assert trie.level_width == tuple(len(at) for at in depths)


def test_parents_invert_children() -> None:
    trie = ItemTrie(torch.tensor([[1, 2], [1, 3], [4, 2], [4, 2]]))
    parents = trie.parents().tolist()
    assert parents[0] == -1
    for node in range(trie.num_nodes):
        child, real = trie.children(torch.tensor([node]), 2)
        assert all(parents[c] == node for c in child[real].tolist())


def test_dead_nodes_have_nothing() -> None:
    trie = ItemTrie(torch.tensor([[1, 2]]))
    dead = torch.tensor([-1])
    assert not trie.children(dead, 3)[1].any()
    assert trie.step(dead, torch.tensor([1])).item() == -1
    low, high = trie.rows(dead)
    assert low == high
    assert not trie.is_leaf(dead)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.empty(0, 2, dtype=torch.int64), "at least one item"),
        (torch.tensor([[1, 2], [-1, -1]]), r"tokens\[1\] has no tokens"),
        (torch.tensor([[1, 2, 3], [1, -1, 3]]), r"tokens\[1, 1\] is padding before a token"),
        (torch.tensor([[7, 8], [1, -1], [1, 2]]), r"tokens\[1\] is the beginning of tokens\[2\]"),
        (
            torch.tensor([[7, 8], [1, 2**31]]),
            r"tokens\[1, 1\] is 2147483648: wanted less than 2\^31",
        ),
    ],
)
def test_refuses_what_is_no_set_of_semantic_ids(tokens: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ItemTrie(tokens)


@pytest.mark.parametrize("shift", [0, 2**17, 2**40])
@pytest.mark.parametrize("popular", [False, True])
def test_rows_sort_as_tuples_do(shift: int, popular: bool) -> None:
    """The wider the tokens, the fewer of them fit into one sort key, until none do."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, (50, 5)) * np.array([shift + 1, 1, shift + 1, 1, shift + 1])
    popularity = rng.integers(0, 3, 50) if popular else np.zeros(50, dtype=np.int64)
    wanted = sorted(range(50), key=lambda i: (*tokens[i], -popularity[i], i))
    assert sorted_order(tokens, popularity if popular else None).tolist() == wanted


@pytest.mark.parametrize(
    ("spread", "dense"),
    [((1, 1, 1), 3), ((1, 1, 10**5), 2), ((1, 10**6, 1), 1), ((10**6, 1, 1), 0)],
)
def test_tables_and_searches_take_the_same_steps(spread: tuple[int, ...], dense: int) -> None:
    """A level far apart in tokens has no table, nor have those below it."""
    rng = np.random.default_rng(2)
    tokens = torch.from_numpy(rng.integers(0, 9, (80, 3)) * np.array(spread) + 3)
    trie = ItemTrie(tokens)
    assert trie.dense_levels == dense
    assert sum(table.child.numel() for table in trie._dense) <= DENSE_ENTRIES
    child_of: dict[tuple[int, int], int] = {}
    for parent in range(trie.num_nodes):
        child, real = trie.children(torch.tensor([parent]), 9)
        child_of |= {(parent, int(trie.token[c])): c for c in child[real].tolist()}
    every = sorted({-1, 0, 2, 10**6 + 4, *(t for _, t in child_of)})
    node = torch.arange(-1, trie.num_nodes).repeat_interleave(len(every))
    token = torch.tensor(every * (trie.num_nodes + 1))
    wanted = [child_of.get(pair, -1) for pair in zip(node.tolist(), token.tolist(), strict=True)]
    assert trie.step(node, token).tolist() == wanted
    low, high = trie.rows(trie.walk(tokens))
    assert bool((low < high).all())


@given(st.lists(rows, min_size=1, max_size=40), st.integers(0, 10**6), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_fan_out_lists_the_children_of_every_beam(items: list[Row], seed: int, width: int) -> None:
    trie = ItemTrie(padded(items))
    rng = np.random.default_rng(seed)
    starts = trie.level_starts
    leaf = trie.is_leaf(torch.arange(trie.num_nodes)).numpy()
    for depth in range(trie.levels):
        here = np.arange(starts[depth], starts[depth + 1])
        possible = np.concatenate([here, np.flatnonzero(leaf[: starts[depth]])])
        beams = np.full((3, width), -1)
        for places in beams:
            chosen = rng.permutation(possible)[: rng.integers(0, width + 1)]
            places[rng.permutation(width)[: len(chosen)]] = chosen
        child, beam = trie.fan_out(torch.from_numpy(beams), depth)
        for number, row in enumerate(beams.tolist()):
            wanted = []
            for place, node in enumerate(row):
                first, last = (
                    (int(v) for v in trie.child_ptr[node : node + 2]) if node >= 0 else (0, 0)
                )
                below = list(range(first, last)) or [node]
                wanted += [(c, place) for c in below if node >= 0]
            assert len(wanted) <= trie.most(depth, width)
            got = list(zip(child[number].tolist(), beam[number].tolist(), strict=True))
            assert got[: len(wanted)] == wanted
            assert all(c == -1 for c, _ in got[len(wanted) :])


def catalog_of_two_types() -> tuple[Catalog, SidVocabulary]:
    sizes = {"song": (4, 4), "artist": (5,)}
    catalog = Catalog(
        item_ids=["a", "b", "c", "d"],
        codes=np.array([[0, 1], [2, -1], [0, 1], [3, 3]], dtype=np.int32),
        level_sizes=sizes,
        item_types=["song", "artist", "song", "song"],
        popularity=np.array([1, 5, 9, 0]),
    )
    return catalog, SidVocabulary(sizes, ("like",))


def test_catalog_with_types_of_different_length(tmp_path: Path) -> None:
    catalog, vocabulary = catalog_of_two_types()
    trie = ItemTrie.from_catalog(catalog, vocabulary)
    assert trie.mixed
    song = torch.from_numpy(vocabulary.item_tokens([[0, 1]], "song"))
    low, high = (int(v) for v in trie.rows(trie.walk(song)))
    assert [catalog.item_ids[i] for i in trie.order[low:high]] == ["c", "a"]
    artist = torch.tensor([[vocabulary.level_start("artist", 0) + 2]])
    assert trie.is_leaf(trie.walk(artist))

    trie.save(tmp_path / "trie.safetensors")
    loaded = ItemTrie.load(tmp_path / "trie.safetensors")
    assert loaded.belongs_to(catalog, vocabulary)
    for name in ("order", "token", "child_ptr", "row_lo", "row_hi"):
        assert torch.equal(getattr(loaded, name), getattr(trie, name))
    assert torch.equal(loaded.walk(song), trie.walk(song))
    assert loaded.dense_levels == trie.dense_levels
    assert (loaded.level_degree, loaded.level_width) == (trie.level_degree, trie.level_width)
    catalog.popularity[0] = 100
    assert not loaded.belongs_to(catalog, vocabulary)
    whole = (tmp_path / "trie.safetensors").read_bytes()
    (tmp_path / "trie.safetensors").write_bytes(whole[:40])
    with pytest.raises(ValueError, match=r"trie\.safetensors is not a safetensors file"):
        ItemTrie.load(tmp_path / "trie.safetensors")
    with pytest.raises(FileNotFoundError, match="wanted a saved trie"):
        ItemTrie.load(tmp_path / "nothing.safetensors")


def test_files_of_the_first_version_load_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trie.safetensors"
    catalog, vocabulary = catalog_of_two_types()
    trie = ItemTrie.from_catalog(catalog, vocabulary)
    trie.save(path)
    arrays = load_file(path)
    # It kept the table of the first level in the file, and the lowest token in it.
    old = arrays | {"first_child": torch.tensor([1, 2], dtype=torch.int32)}
    save_file(old | {"about": torch.tensor([6, trie.checksum])}, path)
    loaded = ItemTrie.load(path)
    assert loaded.belongs_to(catalog, vocabulary)
    everything = torch.tensor(vocabulary.mixed_item_tokens(catalog.codes, catalog.type_index))
    assert torch.equal(loaded.walk(everything), trie.walk(everything))
    save_file(arrays | {"row_lo": arrays["row_lo"][:-1].clone()}, path)
    with pytest.raises(ValueError, match=r"trie\.safetensors has arrays for \[\d+, \d+\] nodes"):
        ItemTrie.load(path)
    save_file({name: arrays[name] for name in arrays if name != "row_hi"}, path)
    with pytest.raises(ValueError, match=r"has no array 'row_hi': wanted a saved trie"):
        ItemTrie.load(path)


def test_a_hundred_thousand_items_build_and_answer() -> None:
    """The size a test can afford; every item must be found again."""
    rng = np.random.default_rng(1)
    tokens = torch.from_numpy(rng.integers(0, 256, (100_000, 4)) + 256 * np.arange(4))
    trie = ItemTrie(tokens)
    low, high = trie.rows(trie.walk(tokens))
    own = torch.from_numpy(trie.sorted_row)
    assert bool(((own >= low) & (own < high)).all())
    bytes_held = sum(
        getattr(trie, name).nbytes for name in ("order", "token", "child_ptr", "row_lo", "row_hi")
    )
    bytes_held += sum(table.child.nbytes for table in trie._dense)
    # Four int32 per node and at most one entry of a table; at most one node per token of an item.
    assert trie.dense_levels == 2
    assert bytes_held < 100_000 * (8 + 4 * 5 * 4) + 2**20

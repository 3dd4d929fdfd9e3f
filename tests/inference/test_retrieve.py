"""Retrieval against stock ``generate`` at equal width and against a brute force over all items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gr.inference import Backbone, RowFilter, beam_search, build_filter, prefill, retrieve
from gr.inference.constraint import ItemSubset
from gr.inference.retrieve import child_log_probs
from gr.tokenizer import Catalog, SidVocabulary
from gr.tokenizer.trie import ItemTrie

KINDS = ("llama", "gpt2", "transformer", "hstu")
Make = Callable[..., Any]


def histories(batch: int = 3, width: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 48, (batch, width), generator=generator)
    lengths = torch.randint(1, width + 1, (batch,), generator=generator)
    lengths[0] = width
    return ids, lengths


def stock_beams(
    model: Any, ids: Tensor, lengths: Tensor, items: Tensor, width: int, **extra: Tensor
) -> list[dict[tuple[int, ...], float]]:
    """{semantic ID: score} per row from ``generate`` with a per-prefix callback."""
    total = ids.shape[1]
    left = torch.zeros_like(ids)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths.tolist()):
        left[row, total - length :] = ids[row, :length]
        mask[row, total - length :] = 1
    legal: dict[tuple[int, ...], set[int]] = {}
    for item in items.tolist():
        for depth in range(len(item)):
            legal.setdefault(tuple(item[:depth]), set()).add(item[depth])

    def allowed(_: int, sequence: Tensor) -> list[int]:
        # Beams outside the trie (more beams than children) go on; their score is -inf already.
        return sorted(legal.get(tuple(sequence[total:].tolist()), {0}))

    out = model.generate(
        left,
        attention_mask=mask,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=items.shape[1],
        length_penalty=0.0,
        early_stopping=False,
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
        return_dict_in_generate=True,
        output_scores=True,
        **extra,
    )
    found: list[dict[tuple[int, ...], float]] = [{} for _ in lengths]
    for at, (sequence, score) in enumerate(
        zip(out.sequences[:, total:].tolist(), out.sequences_scores.tolist(), strict=True)
    ):
        if score > -1e8:
            found[at // width][tuple(sequence)] = score
    return found


@pytest.mark.parametrize("width", [2, 4, 12, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_same_beams_and_scores_as_stock_generate(
    kind: str, width: int, make_model: Make, item_tokens: Tensor
) -> None:
    model, trie = make_model(kind), ItemTrie(item_tokens)
    ids, lengths = histories()
    prefix = prefill(Backbone(model), ids, lengths)
    keep = RowFilter.everything(trie.num_items, trie.device)
    beams = beam_search(prefix, trie, width, keep)
    expected = stock_beams(model, ids, lengths, item_tokens, width)
    for row in range(3):
        alive = beams.node_BW[row] >= 0
        leaves = trie.order[trie.rows(beams.node_BW[row][alive])[0]]
        got = {
            tuple(item_tokens[leaf].tolist()): score
            for leaf, score in zip(
                leaves.tolist(), beams.score_BW[row][alive].tolist(), strict=True
            )
        }
        assert got.keys() == expected[row].keys()
        assert len(got) == int(alive.sum())
        for key, score in got.items():
            assert score == pytest.approx(expected[row][key], abs=1e-4)


@pytest.mark.parametrize("kind", ["transformer", "hstu"])
def test_same_as_stock_generate_with_times_and_grammar(kind: str, make_model: Make) -> None:
    vocabulary = SidVocabulary({"item": (5, 5, 5)}, ("like", "skip"))
    codes = np.random.default_rng(0).integers(0, 5, (40, 3))
    items = torch.from_numpy(vocabulary.item_tokens(codes))
    model = make_model(kind, vocabulary.size, item_loss="level", vocabulary=vocabulary.to_dict())
    # [BOS] item action item action, three users of one length: `generate` pads times no other way.
    like = vocabulary.action_token("like")
    ids = torch.cat(
        [torch.ones(3, 1, dtype=torch.int64)]
        + [torch.cat([items[3 * i : 3 * i + 3], torch.full((3, 1), like)], 1) for i in range(2)],
        dim=1,
    )
    times = 10**9 + torch.tensor([0, 0, 0, 0, 0, 70, 70, 70, 70]) * torch.tensor([[1], [50], [9]])
    asked = times[:, -1] + torch.tensor([10, 10**6, 500])
    lengths = torch.full((3,), 9)
    expected = stock_beams(model, ids, lengths, items, 6, timestamps=times, request_times=asked)
    trie = ItemTrie(items)
    row_Bk, score_Bk = retrieve(
        prefill(Backbone(model), ids, lengths, times, asked), trie, k=6, num_beams=6
    )
    for row in range(3):
        got = {}
        for item, score in zip(row_Bk[row].tolist(), score_Bk[row].tolist(), strict=True):
            got[tuple(items[item].tolist())] = score
            assert score == pytest.approx(expected[row][tuple(items[item].tolist())], abs=1e-4)
        assert len(got) <= 6


ragged = st.lists(
    st.one_of(
        st.tuples(st.integers(10, 13)),
        st.tuples(st.integers(20, 22), st.integers(23, 25)),
        st.tuples(st.integers(30, 32), st.integers(33, 34), st.integers(35, 38)),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("kind", ["llama", "hstu"])
@given(items=ragged, seed=st.integers(0, 10**6), k=st.integers(1, 30), extra=st.integers(0, 20))
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_equals_a_brute_force_when_the_beams_cover(
    kind: str,
    items: list[tuple[int, ...]],
    seed: int,
    k: int,
    extra: int,
    make_model: Make,
    brute_force: Callable[..., Tensor],
) -> None:
    """Random tries of mixed lengths, masks, widths and histories."""
    rng = np.random.default_rng(seed)
    model = make_model(kind)
    width = max(len(item) for item in items)
    tokens = torch.tensor([[*item, *[-1] * (width - len(item))] for item in items])
    popularity = torch.from_numpy(rng.integers(0, 4, len(items)))
    trie = ItemTrie(tokens, popularity)
    ids, lengths = histories(seed=seed)
    allowed = rng.random((3, len(items))) < rng.choice([0.0, 0.3, 0.9, 1.0])
    excluded = [rng.integers(0, len(items), rng.integers(0, 4)) for _ in range(3)]
    keep = build_filter(trie, excluded, [np.flatnonzero(row) for row in allowed])
    beams = max(k, len(items)) + extra
    row_Bk, score_Bk = retrieve(prefill(Backbone(model), ids, lengths), trie, k, beams, keep)
    assert not score_Bk.isnan().any()
    for row in range(3):
        exact = brute_force(model, ids[row, : lengths[row]], tokens)
        left = set(np.flatnonzero(allowed[row])) - set(excluded[row].tolist())
        # Nearly equal scores may swap, so positions are compared by score.
        best = exact[sorted(left)].sort(descending=True).values[:k]
        got = [item for item in row_Bk[row].tolist() if item >= 0]
        assert len(got) == len(set(got)) == min(k, len(left))
        assert set(got) <= left
        torch.testing.assert_close(score_Bk[row, : len(got)], best, atol=1e-4, rtol=0)
        torch.testing.assert_close(score_Bk[row, : len(got)], exact[got], atol=1e-4, rtol=0)
        for a, b in pairwise(got):
            if torch.equal(tokens[a], tokens[b]):
                assert (-popularity[a], a) < (-popularity[b], b)


def test_types_of_different_levels_and_codes_under_one_trie(
    make_model: Make, brute_force: Callable[..., Tensor]
) -> None:
    """Each request asks for its own types, beside its own exclusions."""
    rng = np.random.default_rng(4)
    sizes = {"song": (5, 4, 6), "artist": (9,), "album": (3, 5)}
    types = [*["song"] * 40, *["artist"] * 12, *["album"] * 20]
    codes = np.full((72, 3), -1, dtype=np.int32)
    for row, name in enumerate(types):
        codes[row, : len(sizes[name])] = rng.integers(0, sizes[name])
    catalog = Catalog([f"i{row}" for row in range(72)], codes, sizes, types)
    vocabulary = SidVocabulary(sizes)
    trie = ItemTrie.from_catalog(catalog, vocabulary)
    song, artist, album = (ItemSubset.of_type(trie, catalog, name) for name in sizes)
    new = ItemSubset(trie, np.arange(72) % 3 == 0)
    allowed = [song & new, artist | album, None, np.array([1, 41, 71]), album]
    permitted = [
        {i for i in range(0, 72, 3) if types[i] == "song"},
        {i for i in range(72) if types[i] != "song"},
        set(range(72)),
        {1, 41, 71},
        {i for i in range(72) if types[i] == "album"},
    ]
    excluded = [rng.integers(0, 72, count) for count in (9, 20, 70, 1, 0)]
    model = make_model("hstu", vocabulary.size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary.size, (5, 6), generator=generator)
    lengths = torch.tensor([6, 2, 5, 1, 3])
    keep = build_filter(trie, excluded, allowed)
    row_Bk, score_Bk = retrieve(prefill(Backbone(model), ids, lengths), trie, 20, 80, keep)
    at = np.array([vocabulary.types.index(name) for name in types])
    tokens = torch.from_numpy(vocabulary.mixed_item_tokens(codes, at))
    for row in range(5):
        exact = brute_force(model, ids[row, : lengths[row]], tokens)
        left = sorted(permitted[row] - set(excluded[row].tolist()))
        best = exact[left].sort(descending=True).values[:20]
        got = [item for item in row_Bk[row].tolist() if item >= 0]
        assert len(got) == len(set(got)) == len(best)
        assert set(got) <= set(left)
        torch.testing.assert_close(score_Bk[row, : len(got)], best, atol=1e-4, rtol=0)
        torch.testing.assert_close(score_Bk[row, : len(got)], exact[got], atol=1e-4, rtol=0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
def test_the_best_items_excluded_leave_the_next_best(
    levels: int, shared: bool, make_model: Make, brute_force: Callable[..., Tensor]
) -> None:
    """More children than beams: exclusions are then looked up for the best alone."""
    model = make_model("llama")
    first = torch.arange(5, 45)[:, None]
    items = first if levels == 1 else torch.cat([first, (first - 5) % 3 + 45], dim=1)
    trie = ItemTrie(items)
    stock = ItemSubset(trie, np.arange(40) % 4 != 1)
    ids, lengths = histories()
    exact = [brute_force(model, ids[row, : lengths[row]], items) for row in range(3)]
    ranked = [scores.argsort(descending=True).tolist() for scores in exact]
    excluded = [np.array(order[:count]) for order, count in zip(ranked, (7, 0, 3), strict=True)]
    keep = build_filter(trie, excluded, stock if shared else None)
    row_Bk, score_Bk = retrieve(prefill(Backbone(model), ids, lengths), trie, 5, 5, keep)
    for row in range(3):
        gone = set(excluded[row].tolist()) | (set(range(1, 40, 4)) if shared else set())
        wanted = [item for item in ranked[row] if item not in gone][:5]
        if levels == 1:
            assert row_Bk[row].tolist() == wanted
            torch.testing.assert_close(score_Bk[row], exact[row][wanted], atol=1e-4, rtol=0)
        assert not set(row_Bk[row].tolist()) & gone
        assert bool((row_Bk[row] >= 0).all())


@pytest.mark.parametrize("width", [1, 2, 7, 31, 200])
def test_as_many_beams_live_as_there_are_leaves_for(
    width: int, make_model: Make, item_tokens: Tensor
) -> None:
    rng = np.random.default_rng(width)
    trie = ItemTrie(item_tokens)
    ids, lengths = histories()
    allowed = [rng.permutation(60)[:count] for count in (60, 11, 1)]
    prefix = prefill(Backbone(make_model("gpt2")), ids, lengths)
    beams = beam_search(prefix, trie, width, build_filter(trie, None, allowed))
    for row in range(3):
        leaves = {tuple(item_tokens[item].tolist()) for item in allowed[row]}
        node, score = beams.node_BW[row], beams.score_BW[row]
        alive = int((node >= 0).sum())
        assert alive == min(width, len(leaves))
        assert len(set(node[:alive].tolist())) == alive
        assert bool(trie.is_leaf(node[:alive]).all())
        # The dead ones say so, and come last.
        assert bool((node[alive:] == -1).all())
        assert bool((score[alive:] == -torch.inf).all())
        assert bool((score[:alive].diff() <= 0).all())


def test_what_the_model_forbids_is_dead_too(make_model: Make) -> None:
    """Half of these items begin with a token that the model's grammar puts at the second place."""
    vocabulary = SidVocabulary({"item": (5, 5)})
    good = torch.from_numpy(vocabulary.item_tokens([[0, 1], [3, 3], [4, 0]]))
    items = torch.cat([good, good.flip(1)])
    trie = ItemTrie(items)
    model = make_model("hstu", vocabulary.size, item_loss="level", vocabulary=vocabulary.to_dict())
    prefix = prefill(Backbone(model), torch.ones(2, 1, dtype=torch.int64), torch.ones(2).long())
    beams = beam_search(prefix, trie, 9, RowFilter.everything(6, trie.device))
    assert (beams.node_BW >= 0).sum(1).tolist() == [3, 3]
    assert (beams.score_BW > -torch.inf).sum(1).tolist() == [3, 3]
    row_Bk, _ = retrieve(prefix, trie, 6, 9)
    assert [sorted(row) for row in row_Bk.tolist()] == [[-1, -1, -1, 0, 1, 2]] * 2


def test_a_row_for_which_the_model_forbids_everything_is_dead(
    make_model: Make, item_tokens: Tensor
) -> None:
    """All logits -inf are neither NaN nor an answer, and the other rows keep theirs."""
    trie = ItemTrie(item_tokens)
    ids, lengths = histories()
    prefix = prefill(Backbone(make_model("llama")), ids, lengths)
    wanted = retrieve(prefix, trie, 5)
    logits_BV = prefix.logits_BV.clone()
    logits_BV[1] = -torch.inf
    row_Bk, score_Bk = retrieve(replace(prefix, logits_BV=logits_BV), trie, 5)
    assert row_Bk[1].tolist() == [-1] * 5
    assert score_Bk[1].tolist() == [-torch.inf] * 5
    assert torch.equal(row_Bk[::2], wanted[0][::2])
    torch.testing.assert_close(score_Bk[::2], wanted[1][::2])


def test_nothing_left_is_an_empty_answer_not_an_unconstrained_one(
    make_model: Make, item_tokens: Tensor
) -> None:
    trie = ItemTrie(item_tokens)
    ids, lengths = histories()
    prefix = prefill(Backbone(make_model("llama")), ids, lengths)
    every = np.arange(len(item_tokens))
    keep = build_filter(trie, [every, every[:-1], every[:0]])
    row_Bk, score_Bk = retrieve(prefix, trie, 5, keep=keep)
    assert row_Bk[0].tolist() == [-1] * 5
    assert bool((score_Bk[0] == -torch.inf).all())
    assert row_Bk[1].tolist() == [len(item_tokens) - 1] + [-1] * 4
    assert bool((row_Bk[2] >= 0).all())


@pytest.mark.parametrize("tokens", [[[11]], [[11, 12, 13]], [[11, 12]] * 4])
def test_a_catalogue_of_one_semantic_id(
    tokens: list[list[int]], make_model: Make, brute_force: Callable[..., Tensor]
) -> None:
    model, items = make_model("hstu"), torch.tensor(tokens)
    ids, lengths = histories()
    row_Bk, score_Bk = retrieve(prefill(Backbone(model), ids, lengths), ItemTrie(items), 3, 50)
    wanted = list(range(min(3, len(tokens))))
    for row in range(3):
        assert row_Bk[row].tolist() == wanted + [-1] * (3 - len(wanted))
        exact = brute_force(model, ids[row, : lengths[row]], items)
        torch.testing.assert_close(score_Bk[row, :1], exact[:1], atol=1e-4, rtol=0)


def test_one_token_items_need_no_pass_after_the_history(make_model: Make) -> None:
    model = make_model("hstu")
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    ids, lengths = histories()
    items = torch.arange(5, 48)[:, None]
    prefix = prefill(Backbone(model), ids, lengths)
    row_Bk, score_Bk = retrieve(prefix, ItemTrie(items), 100, 1000)
    exact = prefix.logits_BV.log_softmax(-1)[:, 5:48].sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(score_Bk[:, :43], exact.values)
    assert torch.equal(row_Bk[:, :43], exact.indices)
    assert bool((row_Bk[:, 43:] == -1).all())
    assert len(calls) == 1


def test_a_grammar_that_allows_nothing_is_dead_not_nan() -> None:
    logits = torch.full((1, 1, 4), -torch.inf)
    assert child_log_probs(logits, torch.tensor([[[0, 2]]])).tolist() == [[[-torch.inf] * 2]]


def test_bad_arguments_are_named(make_model: Make, item_tokens: Tensor) -> None:
    model, trie = make_model("llama"), ItemTrie(item_tokens)
    ids, lengths = histories()
    prefix = prefill(Backbone(model), ids, lengths)
    with pytest.raises(ValueError, match="num_beams is 3: wanted at least k, which is 10"):
        retrieve(prefix, trie, 10, 3)
    with pytest.raises(ValueError, match="k is 0"):
        retrieve(prefix, trie, 0)
    with pytest.raises(ValueError, match="the filter holds 2 requests: wanted 3"):
        retrieve(prefix, trie, 1, keep=build_filter(trie, [np.array([0]), np.array([1])]))
    with pytest.raises(ValueError, match="keep is over 2 items: wanted the trie's 60"):
        retrieve(prefix, trie, 1, keep=build_filter(ItemTrie(torch.tensor([[1], [2]]))))
    with pytest.raises(ValueError, match="the trie has token 48: wanted less than 48"):
        retrieve(prefix, ItemTrie(torch.tensor([[1], [48]])), 1)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN logits"):
        retrieve(prefill(Backbone(model), ids, lengths), trie, 1)

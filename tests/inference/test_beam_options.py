"""Tempered, spread and sampled beams against brute force and exact probabilities.

Statistical tests have fixed seeds, and bounds that a right sampler would exceed once in 10,000.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, gumbel_r, kstest
from torch import Tensor

from gr.inference import Backbone, Prefix, RowFilter, beam_search, build_filter, prefill, retrieve
from gr.inference.beam_options import (
    BeamOptions,
    conditioned,
    gumbel_noise,
    logsumexp_of_group,
    spread_topk,
    sum_before_in_group,
)
from gr.tokenizer.trie import ItemTrie

Make = Callable[..., Any]
Row = tuple[int, ...]
HISTORY = torch.tensor([[3, 17, 9, 40]])


def repeated(model: Any, count: int) -> Prefix:
    return prefill(Backbone(model), HISTORY.repeat(count, 1), torch.full((count,), 4))


def padded(items: Sequence[Row]) -> Tensor:
    width = max(len(item) for item in items)
    return torch.tensor([[*item, *[-1] * (width - len(item))] for item in items])


def mixed_items(seed: int, count: int = 40) -> list[Row]:
    """Semantic IDs of one to three tokens, several items behind some of them."""
    rng = np.random.default_rng(seed)
    kinds = [((10, 14),), ((20, 23), (23, 26)), ((30, 33), (33, 35), (35, 39))]
    return [
        tuple(int(rng.integers(*level)) for level in kinds[rng.integers(3)]) for _ in range(count)
    ]


@torch.no_grad()
def walk_probabilities(model: Any, items: Sequence[Row]) -> dict[Row, float]:
    """The distribution that sampling promises: a walk among the tokens that lead to an item."""
    found: dict[Row, float] = {(): 1.0}
    for depth in range(max(len(item) for item in items)):
        for prefix in [p for p in found if len(p) == depth and p not in items]:
            follow = sorted({i[depth] for i in items if i[:depth] == prefix and len(i) > depth})
            ids = torch.cat([HISTORY[0], torch.tensor(prefix, dtype=torch.int64)])[None]
            chance = model(input_ids=ids).logits[0, -1].double()[follow].softmax(-1)
            mass = found.pop(prefix)
            found |= {(*prefix, t): mass * c for t, c in zip(follow, chance.tolist(), strict=True)}
    return found


def assert_frequencies(counted: Counter[Any], chance: dict[Any, float], total: int) -> None:
    """Pearson's chi-square over the cells that expect five or more, the rest as one cell."""
    assert set(counted) <= set(chance)
    big = [cell for cell in chance if chance[cell] * total >= 5]
    seen, wanted = [counted[c] for c in big], [chance[c] * total for c in big]
    seen.append(total - sum(seen))
    wanted.append(max(total - sum(wanted), 1e-9))
    if wanted[-1] < 5:
        assert seen.pop() <= 30
        wanted.pop()
    assert len(seen) > 3
    statistic = sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True))
    assert statistic < chi2.ppf(1 - 1e-4, len(seen) - 1)


# ---- temperature -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_temperature_divides_the_logits(
    temperature: float, make_model: Make, brute_force: Callable[..., Tensor]
) -> None:
    model, items = make_model("llama"), padded(mixed_items(0))
    tempered = copy.deepcopy(model)
    with torch.no_grad():
        tempered.lm_head.weight /= temperature
    exact = brute_force(tempered, HISTORY[0], items)
    row_Bk, score_Bk = retrieve(
        repeated(model, 1), ItemTrie(items), 10, options=BeamOptions(temperature)
    )
    best = exact.sort(descending=True).values[:10]
    torch.testing.assert_close(score_Bk[0], best, atol=1e-4, rtol=0)
    torch.testing.assert_close(score_Bk[0], exact[row_Bk[0]], atol=1e-4, rtol=0)


def test_no_temperature_overflows(make_model: Make) -> None:
    prefix, trie = repeated(make_model("llama"), 1), ItemTrie(padded(mixed_items(0)))
    for temperature in (1e-30, 1e-3, 1e30):
        row_Bk, score_Bk = retrieve(prefix, trie, 5, options=BeamOptions(temperature))
        assert not score_Bk.isnan().any()
    # As hot as that, every token of the vocabulary is as probable as any other.
    lengths = [len(mixed_items(0)[item]) for item in row_Bk[0].tolist()]
    torch.testing.assert_close(score_Bk[0], -torch.tensor(lengths) * np.log(48).astype(np.float32))


# ---- spread over prefixes --------------------------------------------------------------------


def capped(ranked: list[int], items: list[Row], cap: int, levels: int, k: int) -> list[int]:
    """The definition: down the ranking, an item is left out if its prefix has had its share."""
    had: Counter[Row] = Counter()
    out = []
    for item in ranked:
        had[items[item][:levels]] += 1
        if had[items[item][:levels]] <= cap:
            out.append(item)
    return out[:k]


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("cap", [1, 2, 5])
@pytest.mark.parametrize("width", [12, 60])
def test_no_prefix_has_more_than_its_share(
    width: int, cap: int, levels: int, make_model: Make, brute_force: Callable[..., Tensor]
) -> None:
    """Wide beams give the definition exactly; narrow ones keep the rule and fill the answer."""
    k = 12
    for seed in range(4):
        items = mixed_items(seed)
        rng = np.random.default_rng(seed)
        popularity = torch.from_numpy(rng.permutation(len(items)))
        trie = ItemTrie(padded(items), popularity)
        model = make_model("llama")
        excluded = [rng.permutation(len(items))[:count] for count in (0, 5, 30)]
        row_Bk, score_Bk = retrieve(
            repeated(model, 3),
            trie,
            k,
            width,
            build_filter(trie, excluded),
            BeamOptions(max_per_prefix=cap, prefix_levels=levels),
        )
        exact = brute_force(model, HISTORY[0], padded(items))
        # Items behind one ID differ in their last digits only, so the ID's first score counts.
        score = [float(exact[items.index(item)]) for item in items]
        for row in range(3):
            left = sorted(set(range(len(items))) - set(excluded[row].tolist()))
            left.sort(key=lambda i: (-score[i], items[i], -int(popularity[i])))
            wanted = capped(left, items, cap, levels, k)
            got = [item for item in row_Bk[row].tolist() if item >= 0]
            assert len(got) == len(wanted)
            assert capped(got, items, cap, levels, k) == got
            if width == 60:
                assert got == wanted
            wanted_score = torch.tensor([score[item] for item in got])
            torch.testing.assert_close(score_Bk[row, : len(got)], wanted_score, atol=1e-4, rtol=0)


def test_the_places_go_to_other_prefixes(make_model: Make) -> None:
    """One prefix holds the ten best items; without the rule, all ten beams end below it."""
    model = make_model("llama")
    items = [(10, t) for t in range(20, 30)] + [(t, 30) for t in range(11, 19)]
    with torch.no_grad():
        model.lm_head.weight[10] = 3 * model.lm_head.weight.norm(dim=1).max()
        hidden = model.model(HISTORY).last_hidden_state[0, -1]
        model.lm_head.weight[10] = hidden / hidden.norm() * 20
    trie, prefix = ItemTrie(padded(items)), repeated(model, 1)
    everything = RowFilter.everything(18, trie.device)
    node = beam_search(prefix, trie, 10, everything).node_BW[0]
    assert {items[trie.order[trie.rows(n)[0]]][0] for n in node} == {10}
    options = BeamOptions(max_per_prefix=2)
    node = beam_search(prefix, trie, 10, everything, options).node_BW[0]
    assert sorted(items[trie.order[trie.rows(n)[0]]][0] for n in node) == [10, 10, *range(11, 19)]
    # More beams than that find nothing else, and say so.
    node = beam_search(prefix, trie, 14, everything, options).node_BW[0]
    assert (node >= 0).tolist() == [True] * 10 + [False] * 4


# ---- sampling --------------------------------------------------------------------------------


def test_one_draw_follows_the_walk(make_model: Make) -> None:
    """Mixed lengths, collisions, and a filter that forbids much of the probability."""
    items = mixed_items(1)
    model, trie = make_model("llama"), ItemTrie(padded(items))
    allowed = [i for i in range(len(items)) if i % 3]
    chance = walk_probabilities(model, sorted({items[i] for i in allowed}))
    assert sum(chance.values()) == pytest.approx(1)
    count = 6000
    keep = build_filter(trie, None, [np.array(allowed)])
    row_Bk, _ = retrieve(repeated(model, count), trie, 1, 1, keep, BeamOptions(seed=11))
    assert_frequencies(Counter(items[item] for item in row_Bk[:, 0].tolist()), chance, count)


def test_four_items_are_drawn_without_replacement(make_model: Make) -> None:
    """Every order of the four items, against q1 * q2 / (1 - q1) * ..; and q is not p."""
    items = [(10, 20), (10, 21), (11, 20), (12, 22)]
    model, trie = make_model("llama"), ItemTrie(padded(items))
    chance = walk_probabilities(model, items)
    count = 12_000
    options = BeamOptions(temperature=1.0, seed=5)
    row_Bk, _ = retrieve(repeated(model, count), trie, 4, 4, options=options)
    orders = {}
    for order in permutations(range(4)):
        left, orders[order] = 1.0, 1.0
        for item in order:
            orders[order] *= chance[items[item]] / left
            left = max(left - chance[items[item]], 1e-12)
    assert sum(orders.values()) == pytest.approx(1)
    assert_frequencies(Counter(tuple(row) for row in row_Bk.tolist()), orders, count)


def test_temperature_shapes_the_draws(make_model: Make) -> None:
    items = [(10, 20), (10, 21), (11, 20), (12, 22), (13, 20)]
    model, trie = make_model("llama"), ItemTrie(padded(items))
    tempered = copy.deepcopy(model)
    with torch.no_grad():
        tempered.lm_head.weight /= 3
    count = 4000
    options = BeamOptions(temperature=3.0, seed=0)
    row_Bk, _ = retrieve(repeated(model, count), trie, 1, 1, options=options)
    drawn = Counter(items[item] for item in row_Bk[:, 0].tolist())
    assert_frequencies(drawn, walk_probabilities(tempered, items), count)


@pytest.mark.parametrize("kind", ["llama", "hstu"])
def test_draws_are_all_items_with_their_log_probabilities(
    kind: str, make_model: Make, brute_force: Callable[..., Tensor]
) -> None:
    """With beams for every item, sampling is an order of the whole catalogue."""
    items = mixed_items(2)
    rng = np.random.default_rng(0)
    popularity = rng.permutation(len(items))
    model, trie = make_model(kind), ItemTrie(padded(items), torch.from_numpy(popularity))
    row_Bk, score_Bk = retrieve(repeated(model, 8), trie, 40, 40, options=BeamOptions(seed=3))
    exact = brute_force(model, HISTORY[0], padded(items))
    for row, score in zip(row_Bk.tolist(), score_Bk, strict=True):
        assert sorted(row) == list(range(40))
        torch.testing.assert_close(score, exact[row], atol=1e-4, rtol=0)
        # The items behind one ID stay together, the popular ones first.
        runs = [
            items[a]
            for a, b in zip(row, [*row[1:], None], strict=True)
            if b is None or items[a] != items[b]
        ]
        assert len(runs) == len(set(items))
        for a, b in pairwise(row):
            assert items[a] != items[b] or popularity[a] > popularity[b]
    assert len({tuple(row) for row in row_Bk.tolist()}) == 8
    assert any(not torch.equal(score, score.sort(descending=True).values) for score in score_Bk)


def test_an_answer_depends_on_seed_and_number_only(make_model: Make) -> None:
    """Not on the batch, the order in it, the number of beams or how many items are asked for."""
    model, trie = make_model("hstu"), ItemTrie(padded(mixed_items(3)))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 48, (5, 6), generator=generator)
    lengths = torch.tensor([6, 2, 5, 1, 3])
    numbers = torch.tensor([7, 0, 10**12, 3, 8])
    options = BeamOptions(seed=1)

    def drawn(rows: list[int], k: int, width: int, seed: int = 1) -> list[list[int]]:
        prefix = prefill(Backbone(model), ids[rows], lengths[rows])
        return retrieve(
            prefix, trie, k, width, options=BeamOptions(seed=seed), request_B=numbers[rows]
        )[0].tolist()

    together = drawn([0, 1, 2, 3, 4], 9, 40)
    for row in range(5):
        assert drawn([row], 9, 40) == [together[row]]
        assert drawn([row], 5, 5) == [together[row][:5]]
    assert drawn([4, 3, 2, 1, 0], 9, 9) == together[::-1]
    assert drawn([0, 1, 2, 3, 4], 9, 40, seed=2) != together
    # Without numbers, rows are numbered by place.
    prefix = prefill(Backbone(model), ids[[1]], lengths[[1]])
    assert retrieve(prefix, trie, 9, options=options)[0].tolist() == [together[1]]


@pytest.mark.parametrize(("cap", "levels"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_spread_draws_are_the_draws_without_those_beyond_the_share(
    cap: int, levels: int, make_model: Make
) -> None:
    """Exactly so for any number of beams: what is beyond a share never hides what is not."""
    items = mixed_items(4, 60)
    model, trie = make_model("llama"), ItemTrie(padded(items))
    prefix, k = repeated(model, 30), 8
    whole, _ = retrieve(prefix, trie, 60, 60, options=BeamOptions(seed=2))
    for width in (8, 11, 60):
        row_Bk, _ = retrieve(prefix, trie, k, width, options=BeamOptions(1.0, cap, levels, seed=2))
        for got, ranked in zip(row_Bk.tolist(), whole.tolist(), strict=True):
            wanted = capped(ranked, items, cap, levels, k)
            assert [item for item in got if item >= 0] == wanted


def test_nothing_permitted_draws_nothing(make_model: Make) -> None:
    items = mixed_items(0)
    trie = ItemTrie(padded(items))
    keep = build_filter(trie, [np.arange(40), np.arange(39), np.arange(0)])
    row_Bk, score_Bk = retrieve(
        repeated(make_model("llama"), 3), trie, 5, keep=keep, options=BeamOptions(seed=0)
    )
    assert row_Bk[0].tolist() == [-1] * 5
    assert row_Bk[1].tolist() == [39, -1, -1, -1, -1]
    assert bool((row_Bk[2] >= 0).all())
    assert (score_Bk == -torch.inf).tolist() == (row_Bk == -1).tolist()


# ---- the arithmetic --------------------------------------------------------------------------


def test_conditioned_is_its_formula() -> None:
    rng = np.random.default_rng(0)
    drawn = torch.from_numpy(rng.gumbel(size=(50, 7)))
    top = drawn.amax(1, keepdim=True)
    largest = torch.from_numpy(rng.gumbel(size=(50, 1)))
    naive = -((-largest).exp() - (-top).exp() + (-drawn).exp()).log()
    got = conditioned(drawn, top, largest)
    torch.testing.assert_close(got, naive, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(got.amax(1, keepdim=True), largest)
    # Far apart, where the formula overflows.
    far = conditioned(
        torch.tensor([-900.0, 5.0, -torch.inf]), torch.tensor(5.0), torch.tensor(-800.0)
    )
    assert far.tolist() == pytest.approx([-900.0, -800.0, -torch.inf])


def test_noise_is_gumbel_and_never_infinite() -> None:
    bits = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, 20_000))
    assert kstest(gumbel_noise(bits).numpy(), gumbel_r.cdf).pvalue > 1e-4
    assert bool(gumbel_noise(torch.tensor([0, -1, 2**63 - 1, -(2**63)])).isfinite().all())


def test_sums_in_groups() -> None:
    rng = np.random.default_rng(1)
    group = rng.integers(-1, 4, (6, 30))
    weight = rng.integers(0, 3, (6, 30))
    wanted = [
        [sum(w[j] for j in range(i) if g[j] == g[i]) for i in range(30)]
        for g, w in zip(group.tolist(), weight.tolist(), strict=True)
    ]
    got = sum_before_in_group(torch.from_numpy(group), torch.from_numpy(weight))
    assert got.tolist() == wanted
    value = torch.from_numpy(rng.normal(size=(6, 30)))
    value[0] = -torch.inf
    at = torch.from_numpy(group + 1)
    sums = torch.zeros(6, 5, dtype=torch.float64).scatter_add_(1, at, value.exp()).gather(1, at)
    torch.testing.assert_close(logsumexp_of_group(value, at, 5), sums.log())


def test_places_beyond_the_shares_go_to_the_best_of_the_rest() -> None:
    rng = np.random.default_rng(2)
    key = rng.normal(size=(20, 30))
    key[rng.random((20, 30)) < 0.3] = -np.inf
    group = rng.integers(0, 5, (20, 30))
    got_key, best, beyond = spread_topk(torch.from_numpy(key), torch.from_numpy(group), 3, 18)
    for row in range(20):
        ranked = [int(i) for i in np.argsort(-key[row]) if key[row, i] > -np.inf]
        had: Counter[int] = Counter()
        shares: list[int] = []
        rest: list[int] = []
        for at in ranked:
            had[group[row, at]] += 1
            (shares if had[group[row, at]] <= 3 else rest).append(at)
        wanted = (shares + rest)[:18]
        assert best[row, : len(wanted)].tolist() == wanted
        assert beyond[row, : len(wanted)].tolist() == [at in rest for at in wanted]
        assert got_key[row, : len(wanted)].tolist() == key[row, wanted].tolist()
        assert bool((got_key[row, len(wanted) :] == -torch.inf).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0: wanted 1e-30 to 1e30"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"max_per_prefix": 0}, "max_per_prefix is 0: wanted at least 1, or None"),
        ({"prefix_levels": 0}, "prefix_levels is 0: wanted at least 1"),
        ({"seed": -1}, r"seed is -1: wanted 0 to 2\^63 - 1, or None"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamOptions(**options)


def test_options_that_do_not_fit_are_named(make_model: Make) -> None:
    prefix, trie = repeated(make_model("llama"), 2), ItemTrie(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="prefix_levels is 3: wanted at most 2"):
        retrieve(prefix, trie, 1, options=BeamOptions(max_per_prefix=1, prefix_levels=3))
    with pytest.raises(ValueError, match=r"request_B has shape \(3,\): wanted \(2,\)"):
        retrieve(prefix, trie, 1, options=BeamOptions(seed=1), request_B=torch.arange(3))

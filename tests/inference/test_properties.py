"""Whatever the catalogue, the masks, the widths and the histories: the answers of brute force.

Random catalogues (of one or several lengths of semantic IDs, with collisions), permitted and
excluded items per request, ragged histories in one batch, both kinds of backbone.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gr.inference import Backbone, BeamOptions, build_filter, catalog_log_probs, prefill, retrieve
from gr.inference.exhaustive import CatalogPlan
from gr.model import GRConfig, GRForCausalLM
from gr.tokenizer.trie import ItemTrie

VOCABULARY, CODES, FIRST = 40, 8, 10
NOW = 1_700_000_000
PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "max_position_embeddings": 24,
        "initializer_range": 0.5,
    }
    llama = LlamaConfig(num_hidden_layers=2, intermediate_size=24, num_key_value_heads=1, **sizes)
    return {
        "llama": LlamaForCausalLM(llama).eval(),
        "hstu": GRForCausalLM(GRConfig(layer_types=["hstu"] * 2, **sizes)).eval(),
        "transformer": GRForCausalLM(GRConfig(layer_types=["transformer"] * 2, **sizes)).eval(),
    }


MODELS = models()


class Case(NamedTuple):
    kind: str
    tokens: Tensor  # [n, M], -1 padded
    popularity: Tensor
    histories: list[list[int]]
    times: list[list[int]]
    allowed: list[np.ndarray[Any, Any] | None]
    excluded: list[np.ndarray[Any, Any]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    levels = draw(st.integers(1, 3))
    mixed = levels > 1 and draw(st.booleans())
    spelled = draw(
        st.lists(st.tuples(*[st.integers(0, CODES - 1)] * levels), min_size=1, max_size=14)
    )
    tokens = (
        torch.tensor(spelled).reshape(len(spelled), levels) + FIRST + CODES * torch.arange(levels)
    )
    if mixed:
        # Items whose first code is odd have one token less; no ID is the beginning of another.
        tokens[tokens[:, 0] % 2 == 1, -1] = -1
    n = len(tokens)
    rows = draw(st.integers(1, 3))
    histories = draw(
        st.lists(
            st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=12),
            min_size=rows,
            max_size=rows,
        )
    )
    gaps = st.sampled_from([0, 1, 60, 86_400, 30 * 86_400])
    times = [
        [NOW + sum(draw(gaps) for _ in range(2)) * at for at, _ in enumerate(h)] for h in histories
    ]
    some = st.lists(st.integers(0, n - 1), max_size=n).map(lambda r: np.array(r, dtype=np.int64))
    return Case(
        kind=draw(st.sampled_from(sorted(MODELS))),
        tokens=tokens,
        popularity=torch.tensor(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))),
        histories=histories,
        times=[sorted(row) for row in times],
        allowed=[draw(st.one_of(st.none(), some)) for _ in histories],
        excluded=[draw(some) for _ in histories],
    )


@torch.no_grad()
def brute_force(case: Case, row: int) -> Tensor:
    """log p of every item, by one whole forward for each."""
    model, history, times = MODELS[case.kind], case.histories[row], case.times[row]
    scores = []
    for spelled in case.tokens.tolist():
        item = [token for token in spelled if token >= 0]
        extra = {}
        if case.kind == "hstu":
            asked = times[-1] + 3600
            extra = {
                "timestamps": torch.tensor([times + [asked] * len(item)]),
                "request_times": torch.tensor([asked]),
            }
        logits = model(input_ids=torch.tensor([history + item]), **extra).logits[0]
        log_probs = logits.double().log_softmax(-1)[len(history) - 1 : -1]
        scores.append(log_probs[torch.arange(len(item)), item].sum())
    return torch.stack(scores)


def read(case: Case) -> Any:
    width = max(len(history) for history in case.histories)
    ids = torch.tensor([h + [3] * (width - len(h)) for h in case.histories])
    lengths = torch.tensor([len(history) for history in case.histories])
    clock: dict[str, Any] = {}
    if case.kind == "hstu":
        clock = {
            "time_BP": torch.tensor([t + [0] * (width - len(t)) for t in case.times]),
            "request_time_B": torch.tensor([t[-1] + 3600 for t in case.times]),
        }
    return prefill(Backbone(MODELS[case.kind]), ids, lengths, **clock)


def permitted(case: Case, row: int) -> list[int]:
    allowed = case.allowed[row]
    keep = set(range(len(case.tokens))) if allowed is None else set(allowed.tolist())
    return sorted(keep - set(case.excluded[row].tolist()))


@PROPERTY
@given(case=cases(), k=st.integers(1, 20), extra=st.integers(0, 30), data=st.data())
def test_answers_are_those_of_brute_force(
    case: Case, k: int, extra: int, data: st.DataObject
) -> None:
    trie = ItemTrie(case.tokens, case.popularity)
    keep = build_filter(trie, case.excluded, case.allowed)
    prefix = read(case)
    everything = catalog_log_probs(prefix, CatalogPlan(trie, data.draw(st.integers(1, 9))))
    rows_Bk, scores_Bk = retrieve(prefix, trie, k, k + extra, keep)
    assert not scores_Bk.isnan().any()
    covers = k + extra >= len(case.tokens)
    for row in range(len(case.histories)):
        exact = brute_force(case, row)
        torch.testing.assert_close(everything[row].double(), exact, atol=1e-4, rtol=1e-4)
        items = permitted(case, row)
        got = [r for r in rows_Bk[row].tolist() if r >= 0]
        scores = scores_Bk[row][: len(got)].double()
        # Never an item twice, never one that is not permitted, and as many as there are.
        assert len(set(got)) == len(got) == min(k, len(items))
        assert set(got) <= set(items)
        assert (rows_Bk[row][len(got) :] == -1).all()
        assert (scores_Bk[row][len(got) :] == -math.inf).all()
        torch.testing.assert_close(scores, exact[got], atol=1e-4, rtol=1e-4)
        assert (scores.diff() <= 1e-6).all()
        if covers and items:
            best = exact[items].sort(descending=True).values[: len(got)]
            torch.testing.assert_close(scores, best, atol=1e-4, rtol=1e-4)
        # Items of one semantic ID: the more popular first, then the lower row.
        for one, other in pairwise(got):
            if torch.equal(case.tokens[one], case.tokens[other]):
                rank = [(-int(case.popularity[r]), r) for r in (one, other)]
                assert rank == sorted(rank)


@PROPERTY
@given(
    case=cases(),
    k=st.integers(1, 12),
    extra=st.integers(0, 10),
    temperature=st.sampled_from([0.1, 1.0, 5.0]),
    cap=st.one_of(st.none(), st.integers(1, 3)),
    seed=st.one_of(st.none(), st.integers(0, 5)),
)
def test_options_never_break_the_rules(
    case: Case, k: int, extra: int, temperature: float, cap: int | None, seed: int | None
) -> None:
    trie = ItemTrie(case.tokens, case.popularity)
    keep = build_filter(trie, case.excluded, case.allowed)
    options = BeamOptions(temperature, cap, 1, seed)
    rows_Bk, scores_Bk = retrieve(read(case), trie, k, k + extra, keep, options)
    assert not scores_Bk.isnan().any()
    for row in range(len(case.histories)):
        got = [r for r in rows_Bk[row].tolist() if r >= 0]
        items = permitted(case, row)
        assert len(set(got)) == len(got) <= min(k, len(items))
        assert set(got) <= set(items)
        assert bool(got) == bool(items)
        if cap is None:
            assert len(got) == min(k, len(items))
        else:
            first = [int(case.tokens[r, 0]) for r in got if (case.tokens[r] >= 0).sum() > 1]
            assert max((first.count(token) for token in first), default=0) <= cap
        if seed is None:
            assert (scores_Bk[row][: len(got)].diff() <= 1e-6).all()


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_one_item(kind: str) -> None:
    """A catalogue of one item, permitted and not."""
    case = Case(
        kind,
        torch.tensor([[FIRST, FIRST + CODES]]),
        torch.tensor([1]),
        [[5, 6], [7]],
        [[NOW, NOW + 1], [NOW]],
        [None, None],
        [np.zeros(0, dtype=np.int64), np.array([0])],
    )
    trie = ItemTrie(case.tokens)
    rows, scores = retrieve(read(case), trie, 1, 50, build_filter(trie, case.excluded))
    assert rows.tolist() == [[0], [-1]]
    assert scores[0, 0] == pytest.approx(float(brute_force(case, 0)[0]), abs=1e-4)
    assert scores[1, 0] == -math.inf

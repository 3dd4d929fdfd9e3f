"""Losses against sums written out by hand, and the head against the losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gr.model import GRConfig, GRForCausalLM
from gr.model.heads import follow_table, token_logits
from gr.model.losses import Head, StreamLoss, sampled_softmax
from gr.tokenizer.vocabulary import SidVocabulary

VOCABULARY = SidVocabulary({"film": (4, 3), "song": (5,)}, ("like", "skip"))


def names_after(token: str) -> set[str]:
    tokens = VOCABULARY.tokens()
    group = VOCABULARY.groups()[tokens.index(token)]
    allowed = follow_table(VOCABULARY)[group]
    return {name.rsplit(":", 1)[0] for name, yes in zip(tokens, allowed, strict=True) if yes}


def test_the_grammar_of_the_stream() -> None:
    start = {"<film:0", "<song:0"}
    assert names_after("[BOS]") == names_after("[UNK]") == names_after("<action:skip>") == start
    assert names_after("<film:0:2>") == {"<film:1"}
    assert names_after("<film:1:0>") == names_after("<song:0:4>") == {"<action"}


def by_hand(
    hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, l2: bool, temperature: float
) -> Tensor:
    """Softmax over exactly the tokens that may stand where the target stands."""
    table, groups = follow_table(VOCABULARY), VOCABULARY.groups()
    total = torch.zeros(())
    for row, wanted in enumerate(target.tolist()):
        peers = next(set(line.nonzero()[:, 0].tolist()) for line in table if line[wanted])
        scores = {}
        for token in peers:
            score = hidden[row] @ weight[token]
            if l2:
                score = score / (hidden[row].norm() * weight[token].norm())
            scores[token] = score / temperature + bias[token]
        lse = torch.logsumexp(torch.stack(list(scores.values())), 0)
        action = groups[wanted] == groups.max()
        total = total + (lse - scores[wanted]) * (0.5 if action else 1.0)
    return total / len(target)


@pytest.mark.parametrize(("l2", "temperature"), [(False, 1.0), (True, 0.05)])
def test_level_loss_is_a_softmax_over_what_may_come(l2: bool, temperature: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 6), torch.randn(VOCABULARY.end, 6)
    bias = torch.randn(VOCABULARY.end)
    target = torch.arange(6, 18)
    loss = StreamLoss("level", VOCABULARY, action_weight=0.5)
    got = loss(hidden, Head(weight, bias, l2, temperature), target)
    expected = by_hand(hidden, weight, bias, target, l2, temperature)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("item_loss", ["full", "level", "sampled"])
def test_parts_of_a_step_add_up_to_the_whole(item_loss: str) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(9, 6), torch.randn(VOCABULARY.end, 6)
    target = torch.arange(7, 16)
    loss = StreamLoss(item_loss, VOCABULARY, action_weight=2.0)
    head = Head(weight, None, True, 0.1)
    whole = loss(hidden, head, target)
    parts = [loss(hidden[at], head, target[at], 9) for at in (slice(0, 2), slice(2, 9))]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    empty = loss(hidden[:0], head, target[:0])
    assert empty == 0


@pytest.mark.parametrize("shared", [True, False])
def test_sampled_softmax_never_meets_its_own_target(shared: bool) -> None:
    torch.manual_seed(2)
    hidden, weight = torch.randn(7, 4), torch.randn(2, 4)
    target = torch.tensor([0, 1, 0, 1, 1, 0, 0])
    got = sampled_softmax(hidden, Head(weight, temperature=0.5), target, 400, shared)
    # Of two items the one that is not the target is drawn about 200 times: the loss is
    # log(1 + R · exp(other − own)) with R the number of draws that were kept.
    own = (hidden * weight[target]).sum(1) / 0.5
    other = (hidden * weight[1 - target]).sum(1) / 0.5
    draws = (torch.expm1(got) / torch.exp(other - own)).round()
    torch.testing.assert_close(
        got, torch.log1p(draws * torch.exp(other - own)), atol=1e-4, rtol=1e-4
    )
    assert ((draws > 140) & (draws < 260)).all()


def test_sampled_softmax_nears_the_full_one_with_every_item_sampled() -> None:
    torch.manual_seed(3)
    hidden, weight = torch.randn(5, 4), torch.randn(40, 4)
    target = torch.arange(5)
    got = sampled_softmax(hidden, Head(weight, None, True), target, 400_000, True)
    cosine = token_logits(hidden, weight, l2_normalize=True)
    others = cosine.exp().sum(1) - cosine[range(5), target].exp()
    # Draws are uniform over 40 rows and hits are dropped, so each other row is met R/40 times.
    expected = torch.log1p(10_000 * others / cosine[range(5), target].exp())
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)


def test_logits_of_the_model_are_the_ones_the_loss_trains() -> None:
    torch.manual_seed(4)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY.end,
        "hidden_size": 8,
        "layer_types": ["hstu"],
        "vocabulary": VOCABULARY.to_dict(),
        "l2_normalize": True,
        "temperature": 0.2,
    }
    ids = torch.tensor([[1, 6, 11, 18, 13, 19, 9, 10, 18]])
    for item_loss in ("full", "level"):
        model = GRForCausalLM(GRConfig(item_loss=item_loss, **settings)).eval()
        out = model(input_ids=ids, labels=ids)
        log_p = out.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        torch.testing.assert_close(out.loss, -log_p.mean())
        assert math.isfinite(out.loss.item())


def test_bfloat16_sampled_softmax_stays_finite() -> None:
    torch.manual_seed(5)
    hidden = torch.randn(20, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(300, 8, dtype=torch.bfloat16, requires_grad=True)
    loss = sampled_softmax(
        hidden, Head(weight, None, True, 0.05), torch.arange(20), 128, True
    ).mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
    assert weight.grad is not None and torch.isfinite(weight.grad).all()

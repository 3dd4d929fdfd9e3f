"""Branches against whole forwards of every path: no cache, no tree, no batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor, nn

from gr.inference import Backbone, Prefix, prefill
from gr.model.hf_cache import layer_tensors

KINDS = ("llama", "qwen3", "gpt2", "transformer", "hstu")

# A tree of two calls: numbers of parents, -1 for the prefix.
FIRST = [-1, 0, -1, 2, 1]
SECOND = [4, -1, 0, 3]


def paths() -> list[list[int]]:
    parents = FIRST + SECOND
    out = []
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        out.append(path)
    return out


def batch(with_time: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.randint(1, 48, (3, 9))
    lengths = torch.tensor([9, 1, 5])
    if not with_time:
        return {"input_ids_BP": ids, "length_B": lengths}
    times = torch.randint(0, 10**6, (3, 9)).cumsum(1) + 10**9
    asked = times.gather(1, lengths[:, None] - 1)[:, 0] + torch.tensor([5, 10**5, 10**7])
    return {"input_ids_BP": ids, "length_B": lengths, "time_BP": times, "request_time_B": asked}


def full_logits(model: nn.Module, given: dict[str, Any], row: int, tokens: Tensor) -> Tensor:
    length = int(given["length_B"][row])
    ids = torch.cat([given["input_ids_BP"][row, :length], tokens])[None]
    extra = {}
    if "time_BP" in given:
        asked = given["request_time_B"][row]
        times = torch.cat([given["time_BP"][row, :length], asked.expand(len(tokens))])
        extra = {"timestamps": times[None], "request_times": asked[None]}
    logits: Tensor = model(input_ids=ids, **extra).logits[0, -1]
    return logits


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_node_sees_its_path_and_nothing_else(
    kind: str, make_model: Callable[..., Any]
) -> None:
    model = make_model(kind)
    given = batch(with_time=kind == "hstu")
    prefix = prefill(Backbone(model), **given)
    tokens = torch.randint(1, 48, (3, len(FIRST) + len(SECOND)))
    branches = prefix.branch()
    first = branches.append(tokens[:, : len(FIRST)], torch.tensor([FIRST] * 3), levels=3)
    second = branches.append(tokens[:, len(FIRST) :], torch.tensor([SECOND]))
    got = torch.cat([first, second], dim=1)
    for row in range(3):
        nothing = torch.empty(0, dtype=torch.int64)
        expected = full_logits(model, given, row, nothing)
        torch.testing.assert_close(prefix.logits_BV[row], expected, atol=2e-5, rtol=1e-5)
        for node, path in enumerate(paths()):
            expected = full_logits(model, given, row, tokens[row, path])
            torch.testing.assert_close(got[row, node], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rows_do_not_depend_on_their_batch(kind: str, make_model: Callable[..., Any]) -> None:
    backbone = Backbone(make_model(kind))
    given = batch(with_time=kind == "hstu")
    tokens, parents = torch.randint(1, 48, (3, 4)), torch.tensor([[-1, 0, 0, -1]])
    together = prefill(backbone, **given)
    logits = together.branch().append(tokens, parents, levels=2)
    for row in range(3):
        length = int(given["length_B"][row])
        one = {name: value[row : row + 1] for name, value in given.items()}
        for name in ("input_ids_BP", "time_BP"):
            if name in one:
                one[name] = one[name][:, :length]
        alone = prefill(backbone, **one)
        expected = together.logits_BV[row]
        torch.testing.assert_close(alone.logits_BV[0], expected, atol=2e-5, rtol=1e-5)
        got = alone.branch().append(tokens[row : row + 1], parents, levels=2)
        torch.testing.assert_close(got[0], logits[row], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "hstu"])
@torch.no_grad()
def test_a_prefix_serves_many_branches_and_is_never_copied(
    kind: str, make_model: Callable[..., Any]
) -> None:
    model = make_model(kind)
    calls: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    prefix = prefill(Backbone(model), **batch(with_time=False))
    keys = [layer_tensors(prefix.cache, layer)[0] for layer in range(2)]
    one, two = prefix.branch(), prefix.branch()
    tokens, root = torch.randint(1, 48, (3, 4)), torch.full((3, 4), -1)
    first = one.append(tokens, root)
    one.append(tokens, torch.arange(4).expand(3, -1))
    torch.testing.assert_close(two.append(tokens, root), first, atol=0, rtol=0)
    assert calls == [(3, 9), (3, 4), (3, 4), (3, 4)]
    for layer in range(2):
        assert layer_tensors(prefix.cache, layer)[0] is keys[layer]
        # Three rows stay three rows: beams are more keys, not more copies of the history.
        grown = layer_tensors(one.cache, layer)[0]
        assert (grown.shape[0], grown.shape[2]) == (3, 9 + 8)


@torch.no_grad()
def test_a_model_in_training_answers_as_in_evaluation(make_model: Callable[..., Any]) -> None:
    model = make_model("hstu", dropout=0.5)
    expected = prefill(Backbone(model), **batch(False)).logits_BV
    model.train()
    torch.testing.assert_close(prefill(Backbone(model), **batch(False)).logits_BV, expected)
    assert model.training
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prefill(Backbone(model), **batch(False))
    broken.remove()
    assert all(module.training for module in model.modules())


def test_learnt_prompts_are_refused(make_model: Callable[..., Any]) -> None:
    """They live in the adapter's forward, which the branches do not go through."""
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(TypeError, match="wanted an adapter inside the layers"):
        Backbone(get_peft_model(make_model("llama"), prompts))


def test_eager_attention_takes_the_mask(make_model: Callable[..., Any]) -> None:
    def run(kind: str) -> Prefix:
        return prefill(Backbone(make_model("llama", attn_implementation=kind)), **batch(False))

    tokens, parents = torch.randint(1, 48, (3, 4)), torch.tensor([[-1, 0, 0, -1]])
    eager = run("eager").branch().append(tokens, parents, levels=2)
    sdpa = run("sdpa").branch().append(tokens, parents, levels=2)
    torch.testing.assert_close(eager, sdpa, atol=2e-5, rtol=1e-5)


def test_refuses_what_it_cannot_do_exactly(make_model: Callable[..., Any]) -> None:
    model = make_model("llama", max_position_embeddings=10)
    prefix = prefill(Backbone(model), **batch(False))
    branches = prefix.branch()
    one = torch.ones(3, 1, dtype=torch.int64)
    branches.append(one, -one)
    with pytest.raises(ValueError, match="a history of 9 tokens and 2 appended need 11 positions"):
        branches.append(one, 0 * one)
    with pytest.raises(ValueError, match=r"length_B\[1\] is 0"):
        prefill(Backbone(model), torch.ones(2, 3, dtype=torch.int64), torch.tensor([1, 0]))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="takes no 4-D mask"):
        Backbone(model)
    with pytest.raises(TypeError, match="wanted a decoder"):
        Backbone(nn.Linear(2, 2))
    window = make_model("qwen3", use_sliding_window=True, sliding_window=8)
    with pytest.raises(ValueError, match="sliding window is 8"):
        prefill(Backbone(window), **batch(False))

"""Prefixes that are extended, compacted and shared, against histories read in one go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gr.inference import Backbone, Prefix, prefill
from gr.model.hf_cache import layer_tensors

KINDS = ("llama", "qwen3", "gpt2", "transformer", "hstu")
LENGTHS = torch.tensor([9, 4, 7])
NODES, PARENTS = torch.arange(12).view(3, 4) + 1, torch.tensor([[-1, 0, 1, -1]])


def streams(with_time: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    given = {"ids": torch.randint(1, 48, (3, 9))}
    if with_time:
        given["times"] = torch.randint(0, 10**6, (3, 9)).cumsum(1) + 10**9
        given["asked"] = given["times"][:, -1] + torch.tensor([0, 10**4, 10**7])
    return given


def cut(values: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Columns start .. stop of every row, padded on the right with 7."""
    width = max(1, int((stop - start).max()))
    out = values.new_full((len(values), width), 7)
    for row, (a, b) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        out[row, : b - a] = values[row, a:b]
    return out


def read(model: nn.Module, given: dict[str, Tensor], stops: list[Tensor], room: int = 0) -> Prefix:
    """Histories read up to the first stops, then extended to each of the others."""
    prefix = None
    start = torch.zeros(3, dtype=torch.int64)
    for number, stop in enumerate(stops):
        times = asked = None
        if "times" in given:
            times = cut(given["times"], start, stop)
            last = number + 1 == len(stops)
            latest = given["times"].gather(1, stop[:, None] - 1)[:, 0]
            asked = given["asked"] if last else latest + 12345
        ids = cut(given["ids"], start, stop)
        if prefix is None:
            prefix = prefill(Backbone(model), ids, stop - start, times, asked, room=room)
        else:
            prefix = prefix.extend(ids, stop - start, times, asked)
        start = stop
    assert prefix is not None
    return prefix


def answers(prefix: Prefix) -> Tensor:
    nodes = prefix.branch().append(NODES[: prefix.num_rows], PARENTS, levels=3)
    return torch.cat([prefix.logits_BV[:, None], nodes], dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", [0, 40])
@torch.no_grad()
def test_extended_equals_read_in_one_go(
    kind: str, room: int, make_model: Callable[..., Any]
) -> None:
    model, given = make_model(kind), streams(kind == "hstu")
    whole = read(model, given, [LENGTHS])
    first, second = torch.tensor([3, 4, 1]), torch.tensor([8, 4, 6])
    parts = read(model, given, [first, second, LENGTHS], room)
    assert parts.length_B.tolist() == LENGTHS.tolist() and parts.longest == 9
    torch.testing.assert_close(answers(parts), answers(whole), atol=2e-5, rtol=1e-5)
    compact = parts.compact()
    assert compact.num_keys == 9
    torch.testing.assert_close(answers(compact), answers(whole), atol=2e-5, rtol=1e-5)
    more = torch.tensor([[5, 6], [7, 8], [9, 1]]), torch.tensor([2, 0, 1])
    later = (whole.request_time_B,) * 2 if whole.request_time_B is not None else (None, None)
    new_times = None if later[0] is None else later[0][:, None].expand(-1, 2)
    for one in (compact, parts):
        torch.testing.assert_close(
            answers(one.extend(*more, new_times, later[0])),
            answers(whole.extend(*more, new_times, later[0])),
            atol=2e-5,
            rtol=1e-5,
        )


@torch.no_grad()
def test_a_later_request_costs_one_token(make_model: Callable[..., Any]) -> None:
    model, given = make_model("hstu"), streams(True)
    prefix = read(model, given, [LENGTHS])
    read_tokens: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: read_tokens.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    later = given["asked"] + 10**6
    nothing = torch.empty(3, 0, dtype=torch.int64)
    moved = prefix.extend(nothing, torch.zeros(3, dtype=torch.int64), nothing, later)
    assert read_tokens == [1]
    expected = read(model, given | {"asked": later}, [LENGTHS])
    torch.testing.assert_close(answers(moved), answers(expected), atol=2e-5, rtol=1e-5)
    assert not torch.allclose(answers(moved), answers(prefix), atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "hstu"])
@pytest.mark.parametrize("room", [0, 3, 50])
@torch.no_grad()
def test_whoever_shares_a_room_changes_nobody(
    kind: str, room: int, make_model: Callable[..., Any]
) -> None:
    """Branches and extensions of one prefix, interleaved, against each one on its own."""
    model, given = make_model(kind), streams(False)
    stop = torch.tensor([5, 3, 4])
    expected_prefix = answers(read(model, given, [stop]))
    expected_longer = answers(read(model, given, [stop, LENGTHS]))
    prefix = read(model, given, [stop], room)
    keys = layer_tensors(prefix.cache, 0)[0].clone()
    one, two = prefix.branch(), prefix.branch()
    first = one.append(NODES, PARENTS, levels=3)
    longer = prefix.extend(cut(given["ids"], stop, LENGTHS), LENGTHS - stop)
    again = two.append(NODES, PARENTS, levels=3)
    below = one.append(NODES[:, :1], torch.tensor([[2]]))
    torch.testing.assert_close(first, again, atol=0, rtol=0)
    torch.testing.assert_close(answers(longer), expected_longer, atol=2e-5, rtol=1e-5)
    del one, two
    # The prefix's room is free again, unless the longer prefix lives there.
    three = prefix.branch()
    three.append(NODES, PARENTS, levels=3)
    torch.testing.assert_close(
        three.append(NODES[:, :1], torch.tensor([[2]])), below, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(answers(longer), expected_longer, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(answers(prefix), expected_prefix, atol=2e-5, rtol=1e-5)
    assert torch.equal(layer_tensors(prefix.cache, 0)[0], keys)


@torch.no_grad()
def test_an_extension_survives_its_own_origin(make_model: Callable[..., Any]) -> None:
    """A chain of extensions in one buffer, of which the middle one is gone."""
    model, given = make_model("llama"), streams(False)
    stops = [torch.tensor([2, 2, 2]), torch.tensor([4, 3, 3]), LENGTHS]
    first = read(model, given, stops[:1], room=60)
    second = first.extend(cut(given["ids"], stops[0], stops[1]), stops[1] - stops[0])
    third = second.extend(cut(given["ids"], stops[1], stops[2]), stops[2] - stops[1])
    before = answers(third)
    del second
    answers(first)
    torch.testing.assert_close(answers(third), before, atol=0, rtol=0)


@torch.no_grad()
def test_branches_write_into_the_room_and_copy_nothing(make_model: Callable[..., Any]) -> None:
    model, given = make_model("llama"), streams(False)
    prefix = read(model, given, [LENGTHS], room=8)
    start = layer_tensors(prefix.cache, 0)[0].data_ptr()
    branches = prefix.branch()
    branches.append(NODES, PARENTS, levels=3)
    assert layer_tensors(branches.cache, 0)[0].data_ptr() == start
    other = prefix.branch()
    other.append(NODES, PARENTS, levels=3)
    assert layer_tensors(other.cache, 0)[0].data_ptr() != start


@torch.no_grad()
def test_refuses_times_that_do_not_fit(make_model: Callable[..., Any]) -> None:
    given = streams(True)
    one, zero = torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    timed = read(make_model("hstu"), given, [LENGTHS])
    with pytest.raises(ValueError, match="time_BM is no times: wanted int64 seconds"):
        timed.extend(one, zero + 1)
    untimed = read(make_model("llama"), {"ids": given["ids"]}, [LENGTHS])
    with pytest.raises(ValueError, match="time_BM is given times: wanted none"):
        untimed.extend(one, zero + 1, one)
    short = read(make_model("llama", max_position_embeddings=10), {"ids": given["ids"]}, [LENGTHS])
    with pytest.raises(ValueError, match="the model has 10"):
        short.extend(torch.ones(3, 2, dtype=torch.int64), zero + 2)

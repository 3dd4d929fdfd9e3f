"""Ranking against one whole forward per candidate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gr.inference import Backbone, action_log_probs, prefill

Make = Callable[..., Any]
ACTIONS = torch.tensor([40, 41, 42])
# Candidates of one, two and three tokens; the last of the second row is missing.
CANDIDATES = torch.tensor(
    [
        [[10, 20, 30], [11, -1, -1], [12, 21, -1], [10, 20, 31], [13, -1, -1]],
        [[10, 20, 31], [12, 21, -1], [13, 23, 33], [11, -1, -1], [-1, -1, -1]],
    ]
)


def setting(kind: str) -> dict[str, Any]:
    torch.manual_seed(1)
    given: dict[str, Any] = {
        "input_ids_BP": torch.randint(1, 48, (2, 7)),
        "length_B": torch.tensor([4, 7]),
    }
    if kind == "hstu":
        given["time_BP"] = 10**9 + torch.randint(0, 10**5, (2, 7)).cumsum(1)
        given["request_time_B"] = given["time_BP"].amax(1) + 777
    return given


@pytest.mark.parametrize("kind", ["llama", "gpt2", "transformer", "hstu"])
@torch.no_grad()
def test_equals_one_candidate_at_a_time(kind: str, make_model: Make) -> None:
    model, given = make_model(kind), setting(kind)
    prefix = prefill(Backbone(model), **given)
    every = [
        action_log_probs(prefix, CANDIDATES, ACTIONS, microbatch).exp() for microbatch in (1, 2, 99)
    ]
    for row in range(2):
        length = int(given["length_B"][row])
        for at, candidate in enumerate(CANDIDATES[row]):
            tokens = candidate[candidate >= 0]
            if not len(tokens):
                continue
            ids = torch.cat([given["input_ids_BP"][row, :length], tokens])[None]
            extra = {}
            if "time_BP" in given:
                asked = given["request_time_B"][row]
                times = torch.cat([given["time_BP"][row, :length], asked.expand(len(tokens))])
                extra = {"timestamps": times[None], "request_times": asked[None]}
            logits = model(input_ids=ids, **extra).logits[0, -1]
            expected = logits[ACTIONS].softmax(-1)
            for got in every:
                torch.testing.assert_close(got[row, at], expected, atol=1e-5, rtol=0)


def test_swapping_candidates_swaps_scores(make_model: Make) -> None:
    prefix = prefill(Backbone(make_model("hstu")), **setting("hstu"))
    order = torch.tensor([3, 1, 0, 2, 4])
    one = action_log_probs(prefix, CANDIDATES, ACTIONS)
    two = action_log_probs(prefix, CANDIDATES[:, order], ACTIONS)
    real = CANDIDATES[:, order, 0] >= 0
    torch.testing.assert_close(two[real], one[:, order][real], atol=1e-6, rtol=0)


def test_no_candidates_and_bad_arguments(make_model: Make) -> None:
    prefix = prefill(Backbone(make_model("llama")), **setting("llama"))
    assert action_log_probs(prefix, CANDIDATES[:, :0], ACTIONS).shape == (2, 0, 3)
    with pytest.raises(ValueError, match="microbatch is 0"):
        action_log_probs(prefix, CANDIDATES, ACTIONS, 0)
    with pytest.raises(ValueError, match="at least one action"):
        action_log_probs(prefix, CANDIDATES, ACTIONS[:0])

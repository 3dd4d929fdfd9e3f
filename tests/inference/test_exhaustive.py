"""Whole-catalogue scores against one whole forward per item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gr.inference import Backbone, CatalogPlan, catalog_log_probs, prefill
from gr.tokenizer.trie import ItemTrie

MIXED = torch.tensor(
    [[9, -1, -1], [10, 20, 30], [10, 20, 31], [10, 21, 30], [11, 22, -1], [12, 20, 30], [9, -1, -1]]
)


@pytest.mark.parametrize("chunk", [1, 2, 7, 512])
@pytest.mark.parametrize("kind", ["llama", "hstu"])
@pytest.mark.parametrize("catalogue", ["random", "mixed", "atomic"])
def test_equals_one_item_at_a_time(
    kind: str,
    chunk: int,
    catalogue: str,
    make_model: Callable[..., Any],
    brute_force: Callable[..., Tensor],
    item_tokens: Tensor,
) -> None:
    items = {"random": item_tokens, "mixed": MIXED, "atomic": torch.arange(20)[:, None]}[catalogue]
    model = make_model(kind)
    torch.manual_seed(2)
    ids, lengths = torch.randint(1, 48, (2, 6)), torch.tensor([6, 2])
    times = asked = None
    if kind == "hstu":
        times = 10**9 + torch.randint(0, 10**5, (2, 6)).cumsum(1)
        asked = times.amax(1) + 99
    prefix = prefill(Backbone(model), ids, lengths, times, asked)
    got = catalog_log_probs(prefix, CatalogPlan(ItemTrie(items), chunk))
    for row in range(2):
        end = int(lengths[row])
        timed = (
            {}
            if times is None or asked is None
            else {"times": times[row, :end], "asked": int(asked[row])}
        )
        expected = brute_force(model, ids[row, :end], items, **timed)
        torch.testing.assert_close(got[row], expected, atol=5e-5, rtol=0)


def test_a_chunk_of_nothing_is_refused(item_tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="chunk is 0"):
        CatalogPlan(ItemTrie(item_tokens), 0)

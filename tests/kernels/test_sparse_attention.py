"""The rule in other words, the specification against stock attention, the CPU path against both.

Legend: B batch, H query heads, G key heads, K keys (context, then candidates), Q queries.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gr.kernels.sparse_attention import Impl, SparseMask, sparse_attention, windowed


@pytest.fixture(autouse=True)
def small_tiles_and_memory_that_starts_as_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # What is not written stays NaN and equals nothing.
    monkeypatch.setattr(windowed, "TILE", 8)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def ragged(num_keys: int, candidates: int) -> Tensor:
    """A full row, one padded in front and among the candidates, one of no token at all."""
    valid = torch.ones(3, num_keys, dtype=torch.bool)
    valid[1, : (num_keys - candidates) // 3] = False
    if candidates > 1:
        valid[1, -2] = False
    valid[2] = False
    return valid


def draw(mask: SparseMask, num_keys: int, batch: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries = mask.context_queries(num_keys) + mask.num_candidates
    return {
        "q": normal(batch, 4, queries, 3),
        "k": normal(batch, 2, num_keys, 3),
        "v": normal(batch, 2, num_keys, 5),
    }


def run(
    tensors: dict[str, Tensor], mask: SparseMask, valid: Tensor | None, impl: Impl
) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out = sparse_attention(**_named(leaves), mask=mask, valid_BK=valid, scale=0.9, impl=impl)
    weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    (out * weight.to(out.dtype)).sum().backward()
    results = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype, name
        results[name] = leaf.grad
    return results


def _named(x: dict[str, Tensor]) -> dict[str, Any]:
    return {"q_BHQd": x["q"], "k_BGKd": x["k"], "v_BGKe": x["v"]}


MASKS = [
    (SparseMask(), 1),
    (SparseMask(window=1), 3),
    (SparseMask(window=5, num_sink=1, num_candidates=3), 33),
    (SparseMask(window=5, num_sink=3, num_candidates=2, num_queries=10), 33),
    (SparseMask(window=100, num_sink=2, num_candidates=1), 17),  # wider than the sequence
    (SparseMask(window=9, num_queries=20), 65),  # no candidates
    (SparseMask(window=4, num_sink=50), 30),  # nothing but sinks
    (SparseMask(window=4, num_sink=1, num_candidates=5), 5),  # no history
    (SparseMask(window=4, num_sink=1, num_candidates=5, num_queries=0), 20),  # candidates alone
    (SparseMask(window=4, num_sink=1), 0),  # nothing at all
    (SparseMask(num_queries=40, num_candidates=2), 33),  # more than there are
]


def sees(mask: SparseMask, valid: list[bool], query: int, key: int) -> bool:
    """The rule for one pair of columns, in words of its own."""
    context = len(valid) - mask.num_candidates
    if not (valid[query] and valid[key]):
        return False
    if query >= context:
        return key < context or key == query
    if key > query:
        return False
    tokens_before = sum(valid[:key])
    return mask.window is None or query - key < mask.window or tokens_before < mask.num_sink


@pytest.mark.parametrize(("mask", "num_keys"), MASKS)
@pytest.mark.parametrize("padding", [False, True])
def test_the_mask_is_its_rule(mask: SparseMask, num_keys: int, padding: bool) -> None:
    valid = ragged(num_keys, mask.num_candidates) if padding else None
    got = mask.matrix(num_keys, valid, torch.device("cpu"))
    first = num_keys - mask.num_candidates - mask.context_queries(num_keys)
    rows = [[True] * num_keys] if valid is None else valid.tolist()
    wanted = [
        [[sees(mask, row, i, j) for j in range(num_keys)] for i in range(first, num_keys)]
        for row in rows
    ]
    assert got.tolist() == wanted


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize(("mask", "num_keys"), MASKS[2:6])
def test_it_is_stock_attention_with_a_dense_mask(
    mask: SparseMask, num_keys: int, impl: Impl
) -> None:
    tensors = draw(mask, num_keys)
    valid = ragged(num_keys, mask.num_candidates)[[0, 1, 0]]
    got = run(tensors, mask, valid, impl)
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    seen = mask.matrix(num_keys, valid, torch.device("cpu"))[:, None]
    alone = seen.any(-1, keepdim=True)
    # Stock attention has nothing to say of a query that sees nothing: it gets all keys, then 0.
    out = F.scaled_dot_product_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        attn_mask=seen | ~alone,
        scale=0.9,
        enable_gqa=True,
    )
    out = out * alone
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    torch.testing.assert_close(got["out"], out.detach(), atol=1e-12, rtol=1e-12)
    for name, leaf in leaves.items():
        torch.testing.assert_close(got[name], leaf.grad, atol=1e-12, rtol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mask", "num_keys"), MASKS)
@pytest.mark.parametrize("padding", [False, True])
def test_the_cpu_path_equals_the_reference(
    mask: SparseMask, num_keys: int, padding: bool, dtype: torch.dtype
) -> None:
    valid = ragged(num_keys, mask.num_candidates) if padding else None
    low = {name: x.to(dtype) for name, x in draw(mask, num_keys).items()}
    exact = run({name: x.double() for name, x in low.items()}, mask, valid, "reference")
    eager = run(low, mask, valid, "reference")
    fast = run(low, mask, valid, "cpu")
    for name, truth in exact.items():
        assert fast[name].shape == truth.shape, name
        if not truth.numel():
            continue
        # A few times what plain torch loses in this dtype. Where plain torch is lucky, a few
        # roundings of the largest value, and the error of a sum (it grows with the root of the
        # number of terms, which may be larger than their sum) in the dtype that it is taken in.
        error, largest = float((eager[name] - truth).abs().max()), float(truth.abs().max())
        wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        terms = 4 * low["q"].shape[2] * num_keys
        bound = 4 * error + 8 * torch.finfo(dtype).eps * largest
        bound += 4 * terms**0.5 * wide * (1 + largest)
        assert float((fast[name] - truth).abs().max()) <= bound, name


def test_padding_is_never_read() -> None:
    mask, num_keys = MASKS[2]
    valid = ragged(num_keys, mask.num_candidates)
    tensors = draw(mask, num_keys)
    clean = run(tensors, mask, valid, "cpu")
    hidden = ~valid[:, None, :, None]
    poisoned = {name: x.masked_fill(hidden, math.nan) for name, x in tensors.items()}
    dirty = run(poisoned, mask, valid, "cpu")
    for name, wanted in clean.items():
        assert torch.equal(dirty[name], wanted), name
        assert not wanted[hidden.expand_as(wanted)].any(), name


def test_padding_in_front_changes_nothing_and_candidates_never_meet() -> None:
    mask = SparseMask(window=5, num_sink=2, num_candidates=3)
    tensors = draw(mask, 23, batch=1)
    alone = run(tensors, mask, None, "cpu")["out"]
    padded = {name: F.pad(x, (0, 0, 7, 0), value=3.0) for name, x in tensors.items()}
    valid = torch.arange(30)[None] >= 7
    got = run(padded, mask, valid, "cpu")["out"]
    torch.testing.assert_close(got[:, :, 7:], alone, atol=1e-14, rtol=0)
    swapped = {n: torch.cat([x[:, :, :20], x[:, :, 20:].flip(2)], 2) for n, x in tensors.items()}
    flipped = run(swapped, mask, None, "cpu")["out"]
    torch.testing.assert_close(flipped[:, :, 20:].flip(2), alone[:, :, 20:], atol=1e-14, rtol=0)
    assert torch.equal(flipped[:, :, :20], alone[:, :, :20])


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_cpu_tensors_are_refused_by_triton() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(RuntimeError, match=r"q is on cpu; wanted a CUDA device, or TRITON_INT"):
            run(draw(SparseMask(), 3), SparseMask(), None, "triton")


def test_wrong_arguments_are_named() -> None:
    mask = SparseMask(window=4, num_candidates=2, num_queries=3)
    x = draw(mask, 9)
    q, k, v = x.values()

    def wrong(message: str, **changed: Any) -> None:
        arguments = {"q_BHQd": q, "k_BGKd": k, "v_BGKe": v, "mask": mask, **changed}
        with pytest.raises(ValueError, match=message):
            sparse_attention(**arguments)

    wrong("impl: 'fast', wanted 'auto', 'reference', 'cpu' or 'triton'", impl="fast")
    wrong(
        "q: 5 queries, wanted 11: the context's newest 9 and 2 candidates",
        mask=SparseMask(num_candidates=2),
        k_BGKd=k.new_zeros(3, 2, 11, 3),
        v_BGKe=v.new_zeros(3, 2, 11, 5),
    )
    wrong("mask: 10 candidates, wanted at most 9 keys", mask=SparseMask(num_candidates=10))
    wrong("q: 3 heads, wanted a multiple of the 2 heads of k", q_BHQd=q[:, :3])
    wrong("q, k, v: 4, 3 and 4 axes, wanted 4 each", k_BGKd=k[0])
    wrong(r"v: shape \(3, 2, 8, 5\), wanted \(3, 2, 9, 5\)", v_BGKe=v[:, :, 1:])
    wrong("k: dtype torch.float32, wanted torch.float64", k_BGKd=k.float())
    wrong(r"valid_BK: torch.bool of shape \(3, 8\), wanted", valid_BK=torch.ones(3, 8).bool())
    with pytest.raises(ValueError, match="window: 0, wanted at least 1 place, or None"):
        SparseMask(window=0)
    with pytest.raises(ValueError, match="num_queries: -1, wanted 0 or more"):
        SparseMask(num_queries=-1)

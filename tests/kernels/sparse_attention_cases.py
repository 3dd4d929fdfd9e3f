"""The Triton path of sparse_attention against the specification in float64.

``test_fused.py`` runs this file in a process of its own, because Triton reads
``TRITON_INTERPRET`` when it is imported. On a GPU:

    pytest tests/kernels/sparse_attention_cases.py

Legend: B batch, H query heads, G key heads, K keys (context, then candidates), Q queries.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gr.kernels.branch_attention import fused as branch_fused
from gr.kernels.sparse_attention import Impl, SparseMask, fused, sparse_attention
from gr.kernels.triton_path import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
OWN_TILES = branch_fused.tile_size


@pytest.fixture(autouse=True)
def small_tiles_that_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever a kernel does not write stays NaN, and no comparison holds.
    allocate = branch_fused.allocate
    for module in (fused, branch_fused):
        monkeypatch.setattr(module, "allocate", lambda *a, **k: allocate(*a, **k).fill_(math.nan))
        monkeypatch.setattr(module, "tile_size", lambda q, v: 16)


def draw(
    mask: SparseMask, num_keys: int, batch: int = 1, heads: tuple[int, int] = (1, 1)
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    queries = mask.context_queries(num_keys) + mask.num_candidates
    return {
        "q": normal(batch, heads[0], queries, 3),
        "k": normal(batch, heads[1], num_keys, 3),
        "v": normal(batch, heads[1], num_keys, 5),
    }


def run(
    tensors: dict[str, Tensor], mask: SparseMask, valid: Tensor | None, impl: Impl
) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    q, k, v = leaves.values()
    out = sparse_attention(q, k, v, mask, valid, scale=0.9, impl=impl)
    weight = torch.linspace(-1, 2, out.numel(), device=DEVICE).view(out.shape)
    (out * weight.to(out.dtype)).sum().backward()
    results = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype, name
        results[name] = leaf.grad
    return results


def check(
    tensors: dict[str, Tensor],
    mask: SparseMask,
    valid: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    low = {name: x.to(dtype) for name, x in tensors.items()}
    exact = run({name: x.double() for name, x in low.items()}, mask, valid, "reference")
    eager = run(low, mask, valid, "reference")
    got = run(low, mask, valid, "triton")
    for name, truth in exact.items():
        assert got[name].shape == truth.shape, name
        if not truth.numel():
            continue
        # A few times what plain torch loses in this dtype, or a few roundings of the largest value
        # where plain torch is lucky, and sums in float32 of terms larger than what they sum to.
        error, largest = float((eager[name] - truth).abs().max()), float(truth.abs().max())
        terms = low["q"].shape[2] * low["k"].shape[2]
        bound = 4 * error + 8 * torch.finfo(dtype).eps * largest
        bound += 4 * terms**0.5 * torch.finfo(torch.float32).eps * (1 + largest)
        assert float((got[name] - truth).abs().max()) <= bound, name


@pytest.mark.parametrize(
    ("mask", "num_keys"),
    [
        (SparseMask(), 1),
        (SparseMask(window=1), 3),
        (SparseMask(window=5, num_sink=1), 65),  # tiles between sink and window are left out
        (SparseMask(window=5, num_sink=20, num_candidates=3), 51),  # sinks in two tiles
        (SparseMask(window=20, num_sink=2, num_queries=17), 65),  # windows over two tiles
        (SparseMask(window=100, num_sink=2, num_candidates=1), 17),  # wider than the sequence
        (SparseMask(window=4, num_sink=1, num_candidates=5), 5),  # no history
        (SparseMask(window=4, num_candidates=5, num_queries=0), 20),  # candidates alone
        (SparseMask(window=4, num_sink=1), 0),  # nothing at all
    ],
)
def test_any_rule_at_any_length(mask: SparseMask, num_keys: int) -> None:
    check(draw(mask, num_keys), mask, None)


def ragged(num_keys: int) -> Tensor:
    """A row padded in front by more than a tile, and among the candidates; and an empty row."""
    valid = torch.ones(2, num_keys, dtype=torch.bool)
    valid[0, :18] = False
    valid[0, -2] = False
    valid[1] = False
    return valid.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_in_every_precision(dtype: torch.dtype) -> None:
    mask = SparseMask(window=6, num_sink=2, num_candidates=3, num_queries=20)
    check(draw(mask, 39, batch=2), mask, ragged(39), dtype)


def test_tiles_of_their_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused, branch_fused):
        monkeypatch.setattr(module, "tile_size", OWN_TILES)
    mask = SparseMask(window=50, num_sink=2, num_candidates=3)
    check(draw(mask, 140), mask, None)


def test_heads_in_groups() -> None:
    mask = SparseMask(window=6, num_sink=1, num_candidates=2)
    check(draw(mask, 18, heads=(4, 2)), mask, None)


def test_padding_is_never_read() -> None:
    mask = SparseMask(window=6, num_sink=2, num_candidates=3)
    valid = ragged(33)
    low = {name: x.float() for name, x in draw(mask, 33, batch=2).items()}
    clean = run(low, mask, valid, "triton")
    hidden = ~valid[:, None, :, None]
    dirty = run({n: x.masked_fill(hidden, math.nan) for n, x in low.items()}, mask, valid, "triton")
    for name, wanted in clean.items():
        # A candidate's own key gets its gradient by an atomic addition, of one term.
        assert torch.equal(dirty[name], wanted), name
        assert not wanted[hidden.expand_as(wanted)].any(), name


def test_what_it_cannot_run_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: q has dtype torch.float64"):
        run(draw(SparseMask(), 2), SparseMask(), None, "triton")

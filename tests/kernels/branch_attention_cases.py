"""The Triton path of branch_attention against the specification in float64.

``test_fused.py`` runs this file in a process of its own, because Triton reads
``TRITON_INTERPRET`` when it is imported. On a GPU:

    pytest tests/kernels/branch_attention_cases.py

Legend: B batch, H query heads, G key heads, N nodes that ask, A all nodes, P prefix keys, L most
ancestors, d, e head sizes.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gr.kernels.branch_attention import Form, Impl, branch_attention, fused
from gr.kernels.triton_path import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
OWN_TILES = fused.tile_size
NAMES = ("q", "k_prefix", "v_prefix", "k_nodes", "v_nodes")
FORMS: tuple[Form, ...] = ("softmax", "silu")


@pytest.fixture(autouse=True)
def small_tiles_that_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever a kernel does not write stays NaN, and no comparison holds.
    allocate = fused.allocate
    monkeypatch.setattr(fused, "allocate", lambda *a, **k: allocate(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(fused, "tile_size", lambda q, v: 16)


def draw(
    batch: int,
    nodes: int,
    asking: int,
    prefix: int,
    *,
    heads: tuple[int, int] = (1, 1),
    sizes: tuple[int, int] = (3, 5),
    line: int = 2,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tensors in float64, any ancestors, and a mask with gaps and one empty row."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    (queries, groups), (size, value_size) = heads, sizes
    tensors = {
        "q": normal(batch, queries, asking, size),
        "k_prefix": normal(batch, groups, prefix, size),
        "v_prefix": normal(batch, groups, prefix, value_size),
        "k_nodes": normal(batch, groups, nodes, size),
        "v_nodes": normal(batch, groups, nodes, value_size),
    }
    ancestors = torch.randint(-1, nodes, (batch, asking, line), generator=generator)
    valid = torch.rand(batch, prefix, generator=generator) < 0.7
    if batch > 1:
        valid[-1] = False
    if asking:
        ancestors[-1, 0] = -1  # who sees nothing
    return tensors, ancestors.to(DEVICE), valid.to(DEVICE)


def run(
    tensors: dict[str, Tensor],
    ancestors: Tensor,
    valid: Tensor | None,
    form: Form,
    impl: Impl,
) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    q, k_prefix, v_prefix, k_nodes, v_nodes = (leaves[name] for name in NAMES)
    out = branch_attention(
        q,
        k_prefix,
        v_prefix,
        k_nodes,
        v_nodes,
        ancestors,
        valid,
        form=form,
        scale=0.9,
        norm_length=7.0 if form == "silu" else None,
        impl=impl,
    )
    weight = torch.linspace(-1, 2, out.numel(), device=DEVICE).view(out.shape)
    (out * weight.to(out.dtype)).sum().backward()
    results = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype, name
        results[name] = leaf.grad
    return results


def check(
    tensors: dict[str, Tensor],
    ancestors: Tensor,
    valid: Tensor | None,
    form: Form,
    dtype: torch.dtype = torch.float32,
) -> None:
    low = {name: x.to(dtype) for name, x in tensors.items()}
    exact = run({name: x.double() for name, x in low.items()}, ancestors, valid, form, "reference")
    eager = run(low, ancestors, valid, form, "reference")
    got = run(low, ancestors, valid, form, "triton")
    for name, truth in exact.items():
        assert got[name].shape == truth.shape, name
        if not truth.numel():
            continue
        # A few times what plain torch loses in this dtype, or a few roundings of the largest value
        # where plain torch is lucky. Sums are in float32 here, so their length does not come in.
        error = float((eager[name] - truth).abs().max())
        bound = 4 * error + 8 * torch.finfo(dtype).eps * float(truth.abs().max())
        assert float((got[name] - truth).abs().max()) <= bound, name


SHAPES = [(1, 1, 1, 0), (1, 1, 1, 1), (2, 3, 3, 17), (1, 33, 17, 1), (1, 17, 33, 33), (2, 4, 0, 3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "nodes", "asking", "prefix"), SHAPES)
def test_any_lengths(batch: int, nodes: int, asking: int, prefix: int, form: Form) -> None:
    check(*draw(batch, nodes, asking, prefix), form)


@pytest.mark.parametrize("form", FORMS)
def test_tiles_of_their_own_size(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "tile_size", OWN_TILES)
    check(*draw(1, 70, 70, 65), form)


@pytest.mark.parametrize("form", FORMS)
def test_heads_of_any_size_in_groups(form: Form) -> None:
    tensors, ancestors, _ = draw(1, 5, 5, 17, heads=(4, 2), sizes=(16, 20), line=1)
    check(tensors, ancestors[:1], None, form)  # and one forest for all rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_low_precision_loses_no_more_than_plain_torch(dtype: torch.dtype, form: Form) -> None:
    check(*draw(1, 17, 17, 33), form, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_no_ancestors_and_no_nodes(form: Form) -> None:
    check(*draw(2, 0, 5, 9, line=0), form)
    check(*draw(2, 3, 5, 0, line=0), form)


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_never_read(form: Form) -> None:
    tensors, ancestors, valid = draw(2, 5, 5, 9)
    low = {name: x.float() for name, x in tensors.items()}
    clean = run(low, ancestors, valid, form, "triton")
    hidden = ~valid[:, None, :, None]
    low["k_prefix"] = low["k_prefix"].masked_fill(hidden, math.inf)
    low["v_prefix"] = low["v_prefix"].masked_fill(hidden, math.nan)
    dirty = run(low, ancestors, valid, form, "triton")
    for name, wanted in clean.items():
        if DEVICE == "cpu" or not name.endswith("nodes"):
            assert torch.equal(dirty[name], wanted), name


def test_other_ways_to_lay_out_the_inputs() -> None:
    # What a cache gives: prefix and nodes in one buffer, tokens before heads.
    tensors, ancestors, valid = draw(2, 5, 5, 9)
    low = {name: x.float() for name, x in tensors.items()}
    wanted = run(low, ancestors, valid, "softmax", "triton")["out"]
    k, v = (
        torch.cat([low[x + "_prefix"], low[x + "_nodes"]], dim=2).transpose(1, 2).contiguous()
        for x in "kv"
    )
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    q = low["q"].mT.contiguous().mT
    parts = q, k[:, :, :9], v[:, :, :9], k[:, :, 9:], v[:, :, 9:]
    got = branch_attention(*parts, ancestors, valid, scale=0.9, impl="triton")
    assert torch.equal(got, wanted)


def test_what_it_cannot_run_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: q has dtype torch.float64"):
        run(*draw(1, 1, 1, 1), "softmax", "triton")

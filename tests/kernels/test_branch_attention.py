"""The specification against sums written out and stock attention, the CPU path against both.

Legend: B batch, H query heads, G key heads, N nodes that ask, A all nodes, P prefix keys, L most
ancestors, d, e head sizes.
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

from gr.kernels.branch_attention import Form, Impl, branch_attention, two_parts

NAMES = ("q", "k_prefix", "v_prefix", "k_nodes", "v_nodes")
FORMS: tuple[Form, ...] = ("softmax", "silu")


@pytest.fixture(autouse=True)
def small_tiles_and_memory_that_starts_as_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The least number of rows per tile; and what is not written stays NaN and equals nothing.
    monkeypatch.setattr(two_parts, "GATHER_BYTES", 1)
    monkeypatch.setattr(two_parts, "SCORE_BYTES", 1)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def draw(
    batch: int, nodes: int, asking: int, prefix: int, seed: int = 0, line: int = 4
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tensors in float64, a random forest's ancestors, and a mask with one empty row."""
    generator = torch.Generator().manual_seed(seed)
    heads, groups, size, value_size = 4, 2, 3, 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "q": normal(batch, heads, asking, size),
        "k_prefix": normal(batch, groups, prefix, size),
        "v_prefix": normal(batch, groups, prefix, value_size),
        "k_nodes": normal(batch, groups, nodes, size),
        "v_nodes": normal(batch, groups, nodes, value_size),
    }
    ancestors = torch.full((batch, nodes, line), -1)
    for b in range(batch):
        for node in range(nodes):
            parent = int(torch.randint(-1, max(node, 1), (), generator=generator))
            chain = [node]
            if 0 <= parent < node:
                chain += [x for x in ancestors[b, parent].tolist() if x >= 0][: line - 1]
            places = torch.randperm(line, generator=generator)[: len(chain)]
            ancestors[b, node, places] = torch.tensor(chain)
    valid = torch.rand(batch, prefix, generator=generator) < 0.7
    valid[-1] = False
    return tensors, ancestors[:, nodes - asking :], valid


def run(
    tensors: dict[str, Tensor],
    ancestors: Tensor,
    valid: Tensor | None,
    form: Form,
    impl: Impl,
    weight: Tensor | None = None,
) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    norm_length = 7.0 if form == "silu" else None
    out = branch_attention(
        leaves["q"],
        leaves["k_prefix"],
        leaves["v_prefix"],
        leaves["k_nodes"],
        leaves["v_nodes"],
        ancestors,
        valid,
        form=form,
        scale=0.9,
        norm_length=norm_length,
        impl=impl,
    )
    if weight is None:
        weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    (out * weight.to(out.dtype)).sum().backward()
    results = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype, name
        results[name] = leaf.grad
    return results


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_is_the_formula(form: Form) -> None:
    tensors, ancestors, valid = draw(2, 6, 4, 5)
    got = run(tensors, ancestors, valid, form, "reference")["out"]
    for b in range(2):
        for h in range(4):
            for n in range(4):
                seen = [("prefix", j) for j in range(5) if valid[b, j]]
                seen += [("nodes", j) for j in ancestors[b, n].tolist() if j >= 0]
                scores = [
                    0.9 * float(tensors["q"][b, h, n] @ tensors["k_" + part][b, h // 2, j])
                    for part, j in seen
                ]
                if form == "softmax":
                    total = sum(math.exp(s) for s in scores)
                    weights = [math.exp(s) / total for s in scores]
                else:
                    weights = [s / (1 + math.exp(-s)) / 7.0 for s in scores]
                wanted = sum(
                    w * tensors["v_" + part][b, h // 2, j]
                    for w, (part, j) in zip(weights, seen, strict=True)
                )
                torch.testing.assert_close(got[b, h, n], wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_softmax_is_stock_attention_with_a_dense_mask(impl: Impl) -> None:
    tensors, ancestors, valid = draw(3, 40, 33, 17)
    got = run(tensors, ancestors, valid, "softmax", impl)
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    own = F.one_hot(ancestors + 1, 41).sum(2)[..., 1:].bool()
    mask = torch.cat([valid[:, None].expand(-1, 33, -1), own], dim=2)
    k, v = (torch.cat([leaves[x + "_prefix"], leaves[x + "_nodes"]], dim=2) for x in "kv")
    out = F.scaled_dot_product_attention(
        leaves["q"], k, v, attn_mask=mask[:, None], scale=0.9, enable_gqa=True
    )
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    torch.testing.assert_close(got["out"], out.detach(), atol=1e-12, rtol=1e-12)
    for name in NAMES:
        torch.testing.assert_close(got[name], leaves[name].grad, atol=1e-12, rtol=1e-12, msg=name)


SHAPES = [(1, 1, 1, 0), (1, 1, 1, 1), (2, 3, 3, 17), (2, 33, 17, 1), (3, 65, 65, 33), (2, 4, 0, 3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "nodes", "asking", "prefix"), SHAPES)
def test_the_cpu_path_equals_the_reference(
    batch: int, nodes: int, asking: int, prefix: int, dtype: torch.dtype, form: Form
) -> None:
    tensors, ancestors, valid = draw(batch, nodes, asking, prefix)
    low = {name: x.to(dtype) for name, x in tensors.items()}
    exact = run({name: x.double() for name, x in low.items()}, ancestors, valid, form, "reference")
    eager = run(low, ancestors, valid, form, "reference")
    fast = run(low, ancestors, valid, form, "cpu")
    for name, truth in exact.items():
        assert fast[name].shape == truth.shape, name
        if not truth.numel():
            continue
        # A few times what plain torch loses in this dtype. Where plain torch is lucky, a few
        # roundings of the largest value, and the error of a sum (it grows with the root of the
        # number of terms, which may be larger than their sum) in the dtype that it is taken in.
        error, largest = float((eager[name] - truth).abs().max()), float(truth.abs().max())
        wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        terms = asking * (prefix + 4) * tensors["q"].shape[1]
        bound = 4 * error + 8 * torch.finfo(dtype).eps * largest
        bound += 4 * terms**0.5 * wide * (1 + largest)
        assert float((fast[name] - truth).abs().max()) <= bound, name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_one_forest_may_serve_all_rows(form: Form, impl: Impl) -> None:
    tensors, ancestors, _ = draw(3, 20, 18, 9)
    shared = run(tensors, ancestors[:1], None, form, impl)
    full = torch.ones(3, 9, dtype=torch.bool)
    apart = run(tensors, ancestors[:1].repeat(3, 1, 1), full, form, impl)
    for name, wanted in apart.items():
        torch.testing.assert_close(shared[name], wanted, msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_who_sees_nothing_gets_zero(form: Form, impl: Impl) -> None:
    tensors, ancestors, valid = draw(2, 5, 5, 4)
    ancestors[1, 2] = -1  # in the row whose prefix is all padding
    got = run(tensors, ancestors, valid, form, impl)
    assert not got["out"][1, :, 2].any() and not got["q"][1, :, 2].any()
    assert got["out"][1, :, 3].any()
    for name, value in got.items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_never_read(form: Form) -> None:
    tensors, ancestors, valid = draw(2, 5, 5, 9)
    clean = run(tensors, ancestors, valid, form, "cpu")
    hidden = ~valid[:, None, :, None]
    tensors["k_prefix"] = tensors["k_prefix"].masked_fill(hidden, math.inf)
    tensors["v_prefix"] = tensors["v_prefix"].masked_fill(hidden, math.nan)
    dirty = run(tensors, ancestors, valid, form, "cpu")
    for name, wanted in clean.items():
        assert torch.equal(dirty[name], wanted), name
    for name in ("k_prefix", "v_prefix"):
        assert not dirty[name][hidden.expand_as(dirty[name])].any(), name


def test_no_ancestors_at_all() -> None:
    tensors, ancestors, _ = draw(2, 5, 5, 9)
    empty = ancestors[..., :0]
    got = run(tensors, empty, None, "softmax", "cpu")
    for name, wanted in run(tensors, empty, None, "softmax", "reference").items():
        torch.testing.assert_close(got[name], wanted, msg=name)


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_cpu_tensors_are_refused_by_triton() -> None:
    tensors, ancestors, _ = draw(1, 2, 2, 2)
    low = {name: x.float() for name, x in tensors.items()}
    if os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(RuntimeError, match=r"q is on cpu; wanted a CUDA device, or TRITON_INT"):
            run(low, ancestors, None, "softmax", "triton")


def test_wrong_arguments_are_named() -> None:
    tensors, ancestors, valid = draw(2, 3, 3, 4)
    good = (*tensors.values(), ancestors, valid)

    def wrong(message: str, error: type = ValueError, at: int = 0, x: Any = None, **o: Any) -> None:
        arguments = [*good[:at], good[at] if x is None else x, *good[at + 1 :]]
        with pytest.raises(error, match=message):
            branch_attention(*arguments, **o)

    q, k = tensors["q"], tensors["k_nodes"]
    wrong("impl: 'fast', wanted 'auto', 'reference', 'cpu' or 'triton'", impl="fast")
    wrong("form: 'relu', wanted 'softmax' or 'silu'", form="relu")
    wrong("norm_length: None, wanted a positive number for 'silu'", form="silu")
    wrong("norm_length: 0, wanted a positive number for 'silu'", form="silu", norm_length=0)
    wrong("norm_length: 3, wanted None: a softmax has none", norm_length=3)
    wrong("q: 3 heads, wanted a multiple of the 2 heads of k_prefix", x=q[:, :3])
    wrong(r"q, k_prefix, v_prefix: 3, 4 and 4 axes, wanted 4 each", x=q[0])
    wrong(r"k_nodes: shape \(2, 2, 3, 2\), wanted \(2, 2, 3, 3\)", at=3, x=k[..., :2])
    wrong("k_nodes: dtype torch.float32, wanted torch.float64", at=3, x=k.float())
    wrong(r"ancestors_BNL: shape \(2, 2, 4\), wanted \(2 or 1, 3, L\)", at=5, x=ancestors[:, :2])
    wrong("ancestors_BNL: dtype torch.int32, wanted torch.int64", at=5, x=ancestors.int())
    outside = torch.tensor([-1, 3]).expand(2, 3, 2)
    wrong("ancestors_BNL: nodes -1 to 3, wanted -1 to 2", IndexError, at=5, x=outside)
    wrong(r"valid_BP: torch.int64 of shape \(2, 4\), wanted torch.bool", at=6, x=valid.long())

"""item_softmax against sums written out, torch's cross-entropy, and itself in other tiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gr.kernels.item_softmax import item_softmax, tiled

SETTINGS: list[dict[str, Any]] = [
    {},
    {"l2_normalize": True, "temperature": 0.05},
    {"temperature": 0.7, "smooth": 0.2},
]


def inputs(targets: int = 37, rows: int = 53, width: int = 8) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(targets + rows)
    hidden, weight = (
        torch.randn(n, width, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (targets, rows)
    )
    bias = torch.randn(rows, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, weight, bias, torch.randint(rows, (targets,), generator=generator)


def gradients(loss: Tensor, *parameters: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 2, len(loss), dtype=loss.dtype)
    return list(torch.autograd.grad((loss * weights).sum(), parameters))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("options", SETTINGS)
def test_the_whole_table_is_torchs_cross_entropy(impl: Any, options: dict[str, Any]) -> None:
    hidden, weight, bias, target = inputs()
    got = item_softmax(hidden, weight, target, bias, impl=impl, **options)
    x, w = hidden, weight
    if options.get("l2_normalize"):
        x, w = F.normalize(x, dim=-1, eps=1e-6), F.normalize(w, dim=-1, eps=1e-6)
    score = x @ w.T / options.get("temperature", 1.0) + bias
    wanted = F.cross_entropy(
        score, target, reduction="none", label_smoothing=options.get("smooth", 0.0)
    )
    torch.testing.assert_close(got, wanted)
    for a, b in zip(
        gradients(got, hidden, weight, bias), gradients(wanted, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("per_target", [False, True])
def test_negatives_by_hand(impl: Any, per_target: bool) -> None:
    hidden, weight, bias, target = inputs(9, 6, 4)
    generator = torch.Generator().manual_seed(1)
    negative = torch.randint(6, (9, 11) if per_target else (11,), generator=generator)
    got = item_softmax(hidden, weight, target, bias, negative, temperature=0.5, impl=impl)
    for t in range(9):
        own = int(target[t])
        score = hidden[t] @ weight.T / 0.5 + bias
        drawn = negative[t] if per_target else negative
        competing = [own] + [int(r) for r in drawn if int(r) != own]
        wanted = math.log(sum(math.exp(score[r].item()) for r in competing)) - score[own].item()
        assert math.isclose(got[t].item(), wanted, rel_tol=1e-9)


@pytest.mark.parametrize("per_target", [None, False, True])
@pytest.mark.parametrize("keep", [0, 2**26])
def test_tiles_change_nothing(
    per_target: bool | None, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias, target = inputs(100, 53, 8)
    negative = None
    if per_target is not None:
        negative = torch.randint(53, (100, 19) if per_target else (19,))
    options: dict[str, Any] = {"l2_normalize": True, "temperature": 0.3}
    wanted = item_softmax(hidden, weight, target, bias, negative, impl="reference", **options)
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 16 * 53)
    monkeypatch.setattr(tiled, "KEEP_BYTES", keep)
    got = item_softmax(hidden, weight, target, bias, negative, impl="cpu", **options)
    torch.testing.assert_close(got, wanted)
    for a, b in zip(
        gradients(got, hidden, weight, bias), gradients(wanted, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_logits_of_a_large_table_are_never_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "KEEP_BYTES", 0)
    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(4096, 4)
    saved = 0

    def count(x: Tensor) -> Tensor:
        nonlocal saved
        saved = max(saved, x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        item_softmax(hidden, weight, torch.zeros(512, dtype=torch.int64), impl="cpu")
    assert saved == weight.numel()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_small_temperature_stays_finite(impl: Any) -> None:
    hidden, weight, _, target = (
        x.detach().float() if x.is_floating_point() else x for x in inputs()
    )
    hidden.requires_grad_()
    loss = item_softmax(hidden, weight, target, temperature=1e-4, impl=impl)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_bfloat16_cosines_are_taken_in_float32() -> None:
    hidden, weight, bias, target = inputs()
    low = [x.detach().bfloat16() for x in (hidden, weight, bias)]
    got = item_softmax(low[0], low[1], target, low[2], l2_normalize=True, temperature=0.05)
    wanted = item_softmax(
        low[0].double(),
        low[1].double(),
        target,
        low[2].double(),
        l2_normalize=True,
        temperature=0.05,
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)


def test_no_target_and_one_row() -> None:
    hidden, weight, bias, target = inputs()
    loss = item_softmax(hidden[:0], weight, target[:0], bias)
    loss.sum().backward()
    assert loss.shape == (0,) and weight.grad is not None and not weight.grad.any()
    alone = item_softmax(hidden, weight[:1], torch.zeros_like(target))
    torch.testing.assert_close(alone, torch.zeros_like(alone))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_T": torch.zeros(3, dtype=torch.int64)}, r"target_T: shape \(3,\)"),
        ({"target_T": torch.zeros(37)}, "target_T: dtype torch.float32"),
        ({"bias_V": torch.zeros(5)}, r"bias_V: shape \(5,\)"),
        ({"negative": torch.zeros(2, 5, dtype=torch.int64)}, r"negative: shape \(2, 5\)"),
        ({"negative": torch.zeros(0, dtype=torch.int64)}, r"negative: shape \(0,\)"),
        ({"temperature": 0.0}, "temperature: 0.0"),
        ({"smooth": 1.0}, "smooth: 1.0"),
        ({"smooth": 0.1, "negative": torch.zeros(4, dtype=torch.int64)}, "smooth: 0.1"),
        ({"weight_VD": torch.zeros(5, 3)}, "wanted .T, D. and .V, D."),
        ({"impl": "cuda"}, "impl: 'cuda'"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    hidden, weight, bias, target = inputs()
    arguments = {"hidden_TD": hidden, "weight_VD": weight, "target_T": target, "bias_V": bias}
    with pytest.raises(ValueError, match=message):
        item_softmax(**{**arguments, **change})


@pytest.mark.parametrize("name", ["target_T", "negative"])
def test_rows_outside_the_table_are_refused(name: str) -> None:
    hidden, weight, bias, target = inputs()
    rows = torch.full((37,), 53)
    arguments: dict[str, Any] = {"target_T": target, "negative": None, name: rows}
    with pytest.raises(IndexError, match=f"{name}: rows 53 to 53, wanted 0 to 52"):
        item_softmax(hidden, weight, bias_V=bias, **arguments)


def test_triton_says_what_it_lacks() -> None:
    hidden, weight, _, target = inputs()
    with pytest.raises(RuntimeError, match="impl: 'triton' cannot run: "):
        item_softmax(hidden, weight, target, impl="triton")

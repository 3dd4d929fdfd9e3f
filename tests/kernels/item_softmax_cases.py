"""The Triton path of item_softmax against the specification in float64.

``test_fused.py`` runs this file in a process of its own, because Triton reads
``TRITON_INTERPRET`` when it is imported. On a GPU:

    pytest tests/kernels/item_softmax_cases.py

Legend: T targets, V rows, R negatives, D width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gr.kernels.item_softmax import Impl, fused, item_softmax
from gr.kernels.triton_path import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
NAMES = ("hidden", "weight", "bias")


@pytest.fixture(autouse=True)
def small_tiles_that_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever a kernel does not write stays NaN, and no comparison holds.
    allocate = fused._allocate
    monkeypatch.setattr(fused, "_allocate", lambda *a, **k: allocate(*a, **k).fill_(float("nan")))
    for name in ("BLOCK_T", "BLOCK_R", "MAX_BLOCK_D"):
        monkeypatch.setattr(fused, name, 16)


def results(
    tensors: dict[str, Tensor],
    target: Tensor,
    negative: Tensor | None,
    impl: Impl,
    dtype: torch.dtype,
    **options: Any,
) -> dict[str, Tensor]:
    """Losses and all gradients, as float64 on the CPU."""
    inputs = {name: x.to(DEVICE, dtype, copy=True).requires_grad_() for name, x in tensors.items()}
    loss = item_softmax(
        inputs["hidden"],
        inputs["weight"],
        target.to(DEVICE),
        inputs.get("bias"),
        None if negative is None else negative.to(DEVICE),
        impl=impl,
        **options,
    )
    weights = torch.linspace(-1, 2, len(target), dtype=torch.float64).to(DEVICE)
    (loss.double() * weights).sum().backward()
    found = {"loss": loss.detach()}
    for name, x in inputs.items():
        assert x.grad is not None
        found["d " + name] = x.grad
    return {name: x.double().cpu() for name, x in found.items()}


def case(targets: int, rows: int, width: int, bias: bool, negatives: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(targets * 1000 + rows * 10 + width)
    tensors = {
        "hidden": torch.randn(targets, width, generator=generator, dtype=torch.float64),
        "weight": torch.randn(rows, width, generator=generator, dtype=torch.float64),
    }
    if bias:
        tensors["bias"] = torch.randn(rows, generator=generator, dtype=torch.float64)
    target = torch.randint(rows, (targets,), generator=generator)
    negative = torch.randint(rows, (negatives,), generator=generator) if negatives else None
    return tensors, target, negative


SIZES = [(1, 1, 1), (17, 33, 5), (33, 17, 33)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("bias", "negatives", "options"),
    [
        (False, 0, {}),
        (True, 0, {"l2_normalize": True, "temperature": 0.2, "smooth": 0.1}),
        (True, 19, {"temperature": 0.5}),
        (False, 1, {"l2_normalize": True, "temperature": 0.2}),
    ],
)
def test_loss_and_gradients(
    sizes: tuple[int, int, int], bias: bool, negatives: int, options: dict[str, Any]
) -> None:
    tensors, target, negative = case(*sizes, bias, negatives)
    expected = results(tensors, target, negative, "reference", torch.float64, **options)
    eager = results(tensors, target, negative, "reference", torch.float32, **options)
    got = results(tensors, target, negative, "triton", torch.float32, **options)
    for name, wanted in expected.items():
        error = (eager[name] - wanted).abs().max()
        limit = 4 * error + 1e-6 * (1 + wanted.abs().max())
        assert (got[name] - wanted).abs().max() <= limit, name


def test_bfloat16() -> None:
    tensors, target, _ = case(33, 40, 24, True, 0)
    tensors = {name: x.bfloat16().double() for name, x in tensors.items()}
    expected = results(tensors, target, None, "reference", torch.float64)
    eager = results(tensors, target, None, "reference", torch.bfloat16)
    got = results(tensors, target, None, "triton", torch.bfloat16)
    for name, wanted in expected.items():
        error = (eager[name] - wanted).abs().max()
        assert (got[name] - wanted).abs().max() <= 2 * error + 1e-6, name


def test_no_target_gives_zero_gradients() -> None:
    tensors, target, _ = case(0, 20, 8, True, 0)
    got = results(tensors, target, None, "triton", torch.float32)
    assert got["loss"].shape == (0,)
    assert not got["d weight"].any() and not got["d bias"].any()


def test_large_scores_stay_finite() -> None:
    tensors, target, negative = case(17, 33, 8, False, 40)
    for chosen in (None, negative):
        got = results(tensors, target, chosen, "triton", torch.float32, temperature=1e-3)
        assert all(torch.isfinite(x).all() for x in got.values())

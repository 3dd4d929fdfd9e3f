"""The Triton path of retention against the specification in float64.

``test_fused.py`` runs this file in a process of its own, because Triton reads
``TRITON_INTERPRET`` when it is imported. On a GPU:

    pytest tests/kernels/retention_cases.py

Legend: B batch, H heads, N tokens, d, e head sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gr.kernels.retention import Impl, fused, retention
from gr.kernels.triton_path import interpreted

DEVICE = "cpu" if interpreted() else "cuda"


@pytest.fixture(autouse=True)
def outputs_that_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever a kernel does not write stays NaN, and no comparison holds.
    allocate = fused._allocate
    monkeypatch.setattr(fused, "_allocate", lambda *a, **k: allocate(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(fused, "STATE_COLUMNS", 16)


def case(
    tokens: int, size: int, value_size: int, per_step: bool, initial: bool
) -> dict[str, Tensor]:
    """Two rows of two heads, or one where the stream is long: the interpreter is slow."""
    generator = torch.Generator().manual_seed(tokens * 1000 + size * 10 + value_size)
    rows = 2 if tokens < 17 else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, 2, *shape, generator=generator, dtype=torch.float64)

    found = {
        "q": normal(tokens, size),
        "k": normal(tokens, size),
        "v": normal(tokens, value_size),
        "log_decay": torch.tensor([-0.14, -0.001], dtype=torch.float64),
    }
    if per_step:
        found["log_decay"] = torch.nn.functional.logsigmoid(normal(tokens) + 2.0)
    if initial:
        found["initial"] = normal(size, value_size)
    return found


def results(
    tensors: dict[str, Tensor],
    impl: Impl,
    dtype: torch.dtype,
    valid: Tensor | None = None,
    chunk: int | None = 16,
) -> dict[str, Tensor]:
    """Output, state and all gradients, as float64 on the CPU."""
    x = {name: t.to(DEVICE, dtype, copy=True).requires_grad_() for name, t in tensors.items()}
    mask = None if valid is None else valid.to(DEVICE)
    # Tokens come as blocks have them: [B, N, H, size], transposed.
    q, k, v = (x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v"))
    found: dict[str, Any] = dict(
        zip(
            ("out", "state"),
            retention(q, k, v, x["log_decay"], x.get("initial"), mask, chunk=chunk, impl=impl),
            strict=True,
        )
    )
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for t in list(found.values()):
        weight = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(DEVICE)
        loss = loss + (t.double() * weight).sum()
    loss.backward()
    for name, t in x.items():
        found["d " + name] = torch.zeros_like(t) if t.grad is None else t.grad
    return {name: t.detach().double().cpu() for name, t in found.items()}


def check(tensors: dict[str, Tensor], valid: Tensor | None = None, chunk: int | None = 16) -> None:
    expected = results(tensors, "reference", torch.float64, valid)
    eager = results(tensors, "reference", torch.float32, valid)
    got = results(tensors, "triton", torch.float32, valid, chunk)
    for name, wanted in expected.items():
        if wanted.numel() == 0:
            continue
        limit = 4 * (eager[name] - wanted).abs().max() + 1e-6 * (1 + wanted.abs().max())
        assert (got[name] - wanted).abs().max() <= limit, name


@pytest.mark.parametrize(
    ("tokens", "size", "value_size", "per_step", "initial"),
    [
        (0, 4, 4, True, True),
        (1, 1, 1, False, True),
        (3, 5, 17, True, False),
        (17, 16, 33, False, False),
        (17, 3, 5, True, True),
        (33, 17, 8, False, True),
    ],
)
def test_results_and_gradients(
    tokens: int, size: int, value_size: int, per_step: bool, initial: bool
) -> None:
    check(case(tokens, size, value_size, per_step, initial))


def test_padding() -> None:
    valid = torch.ones(1, 33, dtype=torch.bool)
    valid[0, :18] = valid[0, 25] = valid[0, 30:] = False
    check(case(33, 8, 8, False, True), valid)
    # Rows of their own lengths, one of them empty.
    valid = torch.arange(12)[None, :] < torch.tensor([[0], [7]])
    check(case(12, 8, 8, True, True), valid)


def test_the_chunk_of_its_own_choice() -> None:
    check(case(70, 8, 8, True, True), chunk=None)


def test_bfloat16() -> None:
    tensors = {n: x.bfloat16().double() for n, x in case(20, 24, 16, True, True).items()}
    expected = results(tensors, "reference", torch.float64)
    eager = results(tensors, "reference", torch.bfloat16)
    got = results(tensors, "triton", torch.bfloat16)
    for name, wanted in expected.items():
        error = (eager[name] - wanted).abs().max()
        assert (got[name] - wanted).abs().max() <= 2 * error + 1e-6, name


def test_a_fast_decay_stays_finite() -> None:
    tensors = case(20, 4, 4, True, True)
    tensors["log_decay"] = torch.full((1, 2, 20), -80.0, dtype=torch.float64)
    check(tensors)


def test_it_says_what_it_cannot_do() -> None:
    x = torch.zeros(1, 1, 2, 129, device=DEVICE)
    decay = torch.zeros(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="head sizes are 129 and 129; wanted 1 to 64 in torch"):
        retention(x, x, x, decay, impl="triton")
    x = x[..., :8]
    with pytest.raises(RuntimeError, match="chunk is 24; wanted one of"):
        retention(x, x, x, decay, chunk=24, impl="triton")
    with pytest.raises(RuntimeError, match=r"q_BHNd has dtype torch\.float64"):
        retention(x.double(), x.double(), x.double(), decay, impl="triton")

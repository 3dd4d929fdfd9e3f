"""retention against its recurrence as a loop, and its forms against one another.

Legend: B batch, H heads, N tokens, d, e head sizes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gr.kernels.retention import Impl, retention, retention_step

B, H, D, E = 2, 3, 5, 4
HALF_LIVES = torch.tensor([5.0, 25.0, 625.0], dtype=torch.float64)
NAMES = ("q", "k", "v", "log_decay", "initial")


def inputs(tokens: int, per_step: bool, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    decay = -math.log(2) / HALF_LIVES
    if per_step:
        decay = torch.nn.functional.logsigmoid(normal(B, H, tokens) + 2.0)
    found = {
        "q": normal(B, H, tokens, D),
        "k": normal(B, H, tokens, D),
        "v": normal(B, H, tokens, E),
        "log_decay": decay,
        "initial": normal(B, H, D, E),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in found.items()}


def run(
    x: dict[str, Tensor], impl: Impl, valid: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    state = x.get("initial")
    return retention(x["q"], x["k"], x["v"], x["log_decay"], state, valid, impl=impl, **options)


def loop(x: dict[str, Tensor], valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S ← g S + k vᵀ, o = qᵀ S, for one row, head and token after another."""
    rows, heads, tokens, _ = x["q"].shape
    out, end = [], []
    for b in range(rows):
        for h in range(heads):
            state = x["initial"][b, h]
            for t in range(tokens):
                if valid is None or valid[b, t]:
                    a = x["log_decay"][h] if x["log_decay"].dim() == 1 else x["log_decay"][b, h, t]
                    state = a.exp() * state + torch.outer(x["k"][b, h, t], x["v"][b, h, t])
                out.append(x["q"][b, h, t] @ state)
            end.append(state)
    shape = (rows, heads, tokens, x["v"].shape[-1])
    stacked = torch.stack(out).view(shape) if out else x["v"].new_zeros(shape)
    return stacked, torch.stack(end).view(rows, heads, *end[0].shape)


def gradients(results: tuple[Tensor, Tensor], x: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for result in results:
        weight = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        loss = loss + (result.double() * weight).sum()
    found = torch.autograd.grad(loss, list(x.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x[name]) if g is None else g
        for name, g in zip(x, found, strict=True)
    }


def agree(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], x: dict[str, Tensor]) -> None:
    expected = gradients(wanted, x) | dict(zip(("out", "state"), wanted, strict=True))
    found = gradients(got, x) | dict(zip(("out", "state"), got, strict=True))
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_both_forms_are_the_recurrence(impl: Impl, tokens: int, per_step: bool) -> None:
    x = inputs(tokens, per_step)
    agree(run(x, impl, chunk=4), loop(x), x)


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_padding_neither_decays_nor_adds(impl: Impl, per_step: bool) -> None:
    x = inputs(17, per_step)
    valid = torch.ones(B, 17, dtype=torch.bool)
    valid[0, 11:] = False
    valid[1, :3] = valid[1, 8] = False
    agree(run(x, impl, valid, chunk=4), loop(x, valid), x)
    # What stands in the padding's keys does not matter, NaN included.
    x["k"] = x["k"].detach().masked_fill(~valid[:, None, :, None], math.nan).requires_grad_()
    out, state = run(x, impl, valid, chunk=4)
    assert torch.isfinite(out).all() and torch.isfinite(state).all()
    assert not run(x, impl, torch.zeros_like(valid))[1].sub(x["initial"]).any()


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize(("tokens", "chunk"), [(33, 1), (65, 32), (64, 32), (300, None)])
def test_chunks_change_nothing(tokens: int, chunk: int | None, per_step: bool) -> None:
    x = inputs(tokens, per_step)
    agree(run(x, "cpu", chunk=chunk), run(x, "reference"), x)


def test_without_an_initial_state_it_is_zero() -> None:
    x = inputs(33, True)
    del x["initial"]
    for impl in ("reference", "cpu"):
        zeros = torch.zeros(B, H, D, E, dtype=torch.float64)
        agree(run(x, impl, chunk=8), run({**x, "initial": zeros}, impl, chunk=8), x)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_stream_goes_on_from_its_state(impl: Impl) -> None:
    x = inputs(65, True)
    whole = run(x, impl, chunk=16)
    state, outs = x["initial"], []
    for part in (slice(0, 20), slice(20, 20), slice(20, 65)):
        q, k, v, decay = (x[n][:, :, part] for n in ("q", "k", "v", "log_decay"))
        out, state = retention(q, k, v, decay, state, impl=impl, chunk=16)
        outs.append(out)
    agree((torch.cat(outs, 2), state), whole, x)


def test_steps_are_the_stream() -> None:
    x = inputs(17, True)
    valid = torch.ones(B, 17, dtype=torch.bool)
    valid[1, 4:6] = False
    wanted, end = run(x, "reference", valid)
    state = x["initial"]
    for t in range(17):
        q, k, v, decay = (x[n][:, :, t] for n in ("q", "k", "v", "log_decay"))
        out, state = retention_step(q, k, v, decay, state, valid[:, t])
        torch.testing.assert_close(out, wanted[:, :, t])
    torch.testing.assert_close(state, end)


def test_fuxis_weights_are_a_scaled_call() -> None:
    # FuXi-Linear: exp(−γ (i − j + 1)) for j <= i.
    x = inputs(9, False)
    gamma = -x["log_decay"]
    step = torch.arange(9)
    back = (step[:, None] - step[None, :] + 1).double()
    weight = torch.exp(-gamma[:, None, None] * back).tril()
    wanted = (x["q"] @ x["k"].transpose(-1, -2) * weight) @ x["v"]
    out, _ = retention(x["q"], x["k"], x["v"], -gamma)
    torch.testing.assert_close(out * torch.exp(-gamma)[:, None, None], wanted)


@pytest.mark.parametrize("per_step", [False, True])
def test_float32_stays_finite_and_near_float64_on_a_long_stream(per_step: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 3, 4096, 8), (1, 3, 4096, 8), (1, 3, 4096, 8), (1, 3, 8, 8))
    exact = {
        name: torch.randn(*size, generator=generator, dtype=torch.float64)
        for name, size in zip(("q", "k", "v", "initial"), sizes, strict=True)
    }
    decay = -math.log(2) / HALF_LIVES
    decay = decay[None, :, None].repeat(1, 1, 4096) if per_step else decay
    if per_step:
        # The whole memory is wiped now and then.
        decay[:, :, ::700] = -300.0
    exact["log_decay"] = decay
    # The same numbers in both precisions.
    exact = {name: x.float().double().requires_grad_() for name, x in exact.items()}
    low = {name: x.detach().float().requires_grad_() for name, x in exact.items()}
    wanted, got = run(exact, "cpu"), run(low, "cpu")
    pairs = dict(zip(("out", "state"), zip(got, wanted, strict=True), strict=True))
    # A weight is as exact as the sum of its chunk's decays is.
    largest = 128 * math.log(2) / 5 + (300 if per_step else 0)
    limit = 2 * torch.finfo(torch.float32).eps * (1 + largest)
    tiny = torch.finfo(torch.float32).tiny
    expected = gradients(wanted, exact)
    for name, grad in gradients(got, low).items():
        pairs["d " + name] = (grad, expected[name])
    for name, (a, b) in pairs.items():
        assert torch.isfinite(a).all(), name
        assert (a.double() - b).abs().max() <= limit * b.abs().max() + tiny, name


@pytest.mark.parametrize("per_step", [False, True])
def test_bfloat16_is_no_worse_than_eager(per_step: bool) -> None:
    low = inputs(130, per_step, torch.bfloat16)
    exact = {name: x.detach().double().requires_grad_() for name, x in low.items()}
    wanted, eager, got = run(exact, "reference"), run(low, "reference"), run(low, "cpu")
    assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
    truth = dict(zip(("out", "state"), wanted, strict=True), **gradients(wanted, exact))
    coarse = dict(zip(("out", "state"), eager, strict=True), **gradients(eager, low))
    ours = dict(zip(("out", "state"), got, strict=True), **gradients(got, low))
    for name, b in truth.items():
        limit = 1.5 * (coarse[name].double() - b).abs().max() + 1e-6 * b.abs().max()
        assert (ours[name].double() - b).abs().max() <= limit, name


def test_what_is_kept_grows_with_tokens_not_with_their_square() -> None:
    x = {name: t.float() for name, t in inputs(1024, True).items()}
    saved = []

    def count(t: Tensor) -> Tensor:
        saved.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        retention(*x.values(), chunk=128)
    assert max(saved) < B * H * 1024 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(B, H, 7, D + 1)}, r"q_BHNd, k_BHNd, v_BHNe: shapes"),
        ({"v": torch.zeros(B, H, 6, E)}, r"q_BHNd, k_BHNd, v_BHNe: shapes"),
        ({"v": torch.zeros(B, H, 7, E).bfloat16()}, r"dtypes torch.float32"),
        ({"log_decay": torch.zeros(H + 1)}, r"log_decay: shape \(4,\), wanted \(3,\) or"),
        ({"log_decay": torch.ones(H)}, "log_decay: values from 1.0 to 1.0, wanted finite"),
        ({"log_decay": torch.full((H,), -math.inf)}, "log_decay: values from -inf"),
        ({"log_decay": torch.full((H,), math.nan)}, "log_decay: values from nan"),
        ({"initial": torch.zeros(B, H, E, D)}, r"initial_state_BHde: shape \(2, 3, 4, 5\)"),
        ({"valid": torch.ones(B, 7)}, "valid_BN: torch.float32"),
        ({"chunk": 0}, "chunk: 0, wanted at least 1 token"),
        ({"impl": "cuda"}, "impl: 'cuda'"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    x: dict[str, Any] = {n: t.detach() for n, t in inputs(7, False, torch.float32).items()}
    x = {**x, "impl": "auto", **change}
    with pytest.raises(ValueError, match=message):
        run(**{"x": {n: x.pop(n) for n in NAMES}, **x})


def test_a_step_names_bad_shapes() -> None:
    q, v, state = torch.zeros(B, H, D), torch.zeros(B, H, E), torch.zeros(B, H, D, E)
    with pytest.raises(ValueError, match=r"state_BHde: shapes"):
        retention_step(q, q, v, torch.zeros(H), state.transpose(-1, -2))
    with pytest.raises(ValueError, match=r"log_decay: shape \(4,\)"):
        retention_step(q, q, v, torch.zeros(H + 1), state)


def test_triton_says_what_it_lacks() -> None:
    x = inputs(3, False)
    with pytest.raises(RuntimeError, match="impl: 'triton' cannot run: "):
        run(x, "triton")

"""norm_mul against the formula row by row, torch's modules, and its mask read off its output."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gr.kernels.norm_mul import Impl, norm_mul

NAMES = ("a", "u", "weight_D", "bias_D")
SHAPES = [(1, 1), (3, 2, 5), (17, 33), (2, 65, 3), (0, 4), (2, 0, 7)]


def inputs(*shape: int, affine: str = "", dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(shape))

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    found: dict[str, Any] = {"a": drawn(*shape) * 2 + 1, "u": drawn(*shape)}
    found["weight_D"] = drawn(shape[-1]) if "w" in affine else None
    found["bias_D"] = drawn(shape[-1]) if "b" in affine else None
    return found


def results(given: dict[str, Any], impl: Impl, **options: Any) -> dict[str, Tensor]:
    """The output and the gradient of everything, for an upstream gradient of some pattern."""
    leaves: dict[str, Any] = {
        name: x.clone().requires_grad_() if x is not None else None for name, x in given.items()
    }
    out = norm_mul(**leaves, impl=impl, **options)
    upstream = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(upstream.to(out.dtype))
    found = {"out": out.detach()}
    for name, leaf in leaves.items():
        if leaf is not None:
            assert leaf.grad is not None, name
            found["d " + name] = leaf.grad
    return found


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("concat", [False, True])
def test_rows_by_hand(impl: Impl, concat: bool) -> None:
    given = inputs(4, 5, affine="wb")
    a, u, w, b = ([] if x is None else x.tolist() for x in given.values())
    got = norm_mul(**given, eps=0.1, concat=concat, impl=impl)
    for i in range(4):
        mean = sum(a[i]) / 5
        variance = sum((x - mean) ** 2 for x in a[i]) / 5
        gated = [
            ((a[i][d] - mean) / math.sqrt(variance + 0.1) * w[d] + b[d]) * u[i][d] for d in range(5)
        ]
        wanted = u[i] + a[i] + gated if concat else gated
        assert got[i].tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_it_is_torchs_modules(impl: Impl) -> None:
    given = inputs(2, 9, 6, affine="wb")
    found = results(given, impl, eps=1e-3)
    norm = nn.LayerNorm(6, eps=1e-3, dtype=torch.float64)
    a, u, w, b = (x.clone() for x in given.values() if x is not None)
    norm.load_state_dict({"weight": w, "bias": b})
    a, u = a.requires_grad_(), u.requires_grad_()
    out = u * norm(a)
    out.backward(torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape))
    wanted = (out.detach(), a.grad, u.grad, norm.weight.grad, norm.bias.grad)
    for (name, x), y in zip(found.items(), wanted, strict=True):
        torch.testing.assert_close(x, y, msg=name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", ["", "w", "wb"])
@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_cpu_path_is_the_reference(
    shape: tuple[int, ...], affine: str, concat: bool, dropout: float
) -> None:
    given = inputs(*shape, affine=affine)
    options: dict[str, Any] = {"concat": concat, "dropout": dropout, "training": True}
    torch.manual_seed(1)
    wanted = results(given, "reference", **options)
    torch.manual_seed(1)
    got = results(given, "cpu", **options)
    assert wanted.keys() == got.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("concat", [False, True])
def test_backward_drops_what_forward_dropped(impl: Impl, concat: bool) -> None:
    given = inputs(40, 11, affine="wb")
    torch.manual_seed(2)
    dropped = results(given, impl, concat=concat, dropout=0.25, training=True)
    keep = dropped["out"] != 0
    assert 0.6 < keep.double().mean() < 0.9
    leaves: dict[str, Any] = {
        name: x.clone().requires_grad_() for name, x in given.items() if x is not None
    }
    whole = norm_mul(**leaves, concat=concat, impl="reference") * keep / 0.75
    whole.backward(torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view(whole.shape))
    torch.testing.assert_close(dropped["out"], whole.detach())
    for name, leaf in leaves.items():
        torch.testing.assert_close(dropped["d " + name], leaf.grad, msg=name)


def test_the_gradient_is_the_slope() -> None:
    given = [x.requires_grad_() for x in inputs(3, 4, affine="wb").values() if x is not None]

    def run(*leaves: Tensor) -> Tensor:
        torch.manual_seed(0)
        return norm_mul(*leaves, concat=True, dropout=0.5, training=True, impl="cpu")

    assert torch.autograd.gradcheck(run, given)


@pytest.mark.parametrize("wanted", [("a",), ("u",), ("weight_D",), ("bias_D",), ("a", "u")])
def test_only_some_gradients(wanted: tuple[str, ...]) -> None:
    given = inputs(6, 5, affine="wb")
    torch.manual_seed(0)
    every = results(given, "cpu", dropout=0.2, training=True)
    leaves: dict[str, Any] = {
        name: x.clone().requires_grad_(name in wanted) for name, x in given.items() if x is not None
    }
    torch.manual_seed(0)
    out = norm_mul(**leaves, dropout=0.2, training=True, impl="cpu")
    out.backward(torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape))
    for name, leaf in leaves.items():
        if name in wanted:
            torch.testing.assert_close(leaf.grad, every["d " + name], msg=name)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("concat", [False, True])
def test_bfloat16(dropout: float, concat: bool) -> None:
    given = inputs(65, 48, affine="wb", dtype=torch.bfloat16)
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    options: dict[str, Any] = {"concat": concat, "dropout": dropout, "training": True}
    found = {}
    kinds: list[tuple[str, Any, Impl]] = [
        ("exact", exact, "reference"),
        ("eager", given, "reference"),
        ("ours", given, "cpu"),
    ]
    for kind, tensors, impl in kinds:
        torch.manual_seed(4)
        found[kind] = results(tensors, impl, **options)
    for name, wanted in found["exact"].items():
        assert found["ours"][name].dtype == torch.bfloat16
        error = (found["eager"][name].double() - wanted).abs().max()
        assert (found["ours"][name].double() - wanted).abs().max() <= 1.5 * error, name


def test_weights_may_be_wider_than_activations() -> None:
    given = inputs(9, 16, affine="wb", dtype=torch.bfloat16)
    for name in ("weight_D", "bias_D"):
        given[name] = given[name].float()
    for dropout in (0.0, 0.1):
        got = results(given, "cpu", dropout=dropout, training=True)
        dtypes = [x.dtype for x in got.values()]
        assert dtypes == [torch.bfloat16] * 3 + [torch.float32] * 2


def test_a_gate_that_is_a_slice() -> None:
    given = inputs(7, 12)
    wide = torch.randn(7, 48, dtype=torch.float64)
    torch.manual_seed(0)
    got = norm_mul(given["a"], wide[:, 12:24], dropout=0.3, training=True)
    torch.manual_seed(0)
    wanted = norm_mul(
        given["a"],
        wide[:, 12:24].contiguous(),
        dropout=0.3,
        training=True,
        impl="reference",
    )
    torch.testing.assert_close(got, wanted)


def test_checkpointing_drops_the_same_again() -> None:
    a, u = (x.requires_grad_() for x in inputs(30, 6).values() if x is not None)
    found = []
    for again in (False, True):
        torch.manual_seed(6)

        def layer(a: Tensor, u: Tensor) -> Tensor:
            return norm_mul(a, u, dropout=0.5, training=True)

        out = checkpoint(layer, a, u, use_reentrant=False) if again else layer(a, u)
        assert isinstance(out, Tensor)
        found.append(torch.autograd.grad(out.square().sum(), (a, u)))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_nothing_is_dropped_outside_training() -> None:
    given = inputs(5, 4)
    wanted = norm_mul(given["a"], given["u"])
    assert torch.equal(norm_mul(given["a"], given["u"], dropout=0.9), wanted)


def test_a_compiled_graph_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(5, 4, affine="wb")
    run = torch.compile(norm_mul, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(**given), norm_mul(**given, impl="reference"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(2, 3)}, r"a, u: shapes \(2, 4\) and \(2, 3\)"),
        ({"a": torch.zeros(2, 0), "u": torch.zeros(2, 0)}, r"wanted the same, \[..., D\], D > 0"),
        ({"u": torch.zeros(2, 4).half()}, "a, u: dtypes torch.float32 and torch.float16"),
        ({"weight_D": torch.ones(3)}, r"weight_D: shape \(3,\), wanted \(4,\)"),
        ({"weight_D": torch.ones(4), "bias_D": torch.ones(1)}, r"bias_D: shape \(1,\)"),
        ({"bias_D": torch.ones(4)}, "bias_D: given without weight_D"),
        ({"eps": 0.0}, "eps: 0.0, wanted a positive number"),
        ({"dropout": 1.0}, "dropout: 1.0, wanted a probability, 0 <= dropout < 1"),
        ({"dropout": -0.1}, "dropout: -0.1"),
        ({"impl": "cuda"}, "impl: 'cuda', wanted 'auto'"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"a": torch.zeros(2, 4), "u": torch.zeros(2, 4), **change}
    with pytest.raises(ValueError, match=message):
        norm_mul(**arguments)


def test_impls_say_what_they_lack() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="impl: 'triton' cannot run: "):
        norm_mul(x, x, impl="triton")
    away = torch.zeros(2, 4, device="meta")
    with pytest.raises(RuntimeError, match="impl: 'cpu' cannot run: a is on meta"):
        norm_mul(away, away, impl="cpu")
    assert norm_mul(away, away, concat=True).shape == (2, 12)

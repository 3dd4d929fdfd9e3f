"""group_layer_norm against the formula token by token, and against one nn.LayerNorm per group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gr.kernels.group_layer_norm import Impl, group_layer_norm

SHAPES = [(1, 1), (3, 2, 5), (17, 33), (2, 65, 3), (0, 4), (2, 0, 7)]


def inputs(
    *shape: int, groups: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Any], Tensor]:
    generator = torch.Generator().manual_seed(sum(shape) + groups)
    sizes = {"x": shape, "weight_GD": (groups, shape[-1]), "bias_GD": (groups, shape[-1])}
    drawn = {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for name, size in sizes.items()
    }
    return drawn, torch.randint(groups, shape[:-1], generator=generator)


def results(given: dict[str, Any], group: Tensor, impl: Impl, **options: Any) -> dict[str, Tensor]:
    leaves: dict[str, Any] = {name: x.clone().requires_grad_() for name, x in given.items()}
    out = group_layer_norm(group=group, impl=impl, **leaves, **options)
    upstream = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(upstream.to(out.dtype))
    found = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        found["d " + name] = leaf.grad
    return found


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_tokens_by_hand(impl: Impl) -> None:
    given, group = inputs(4, 5)
    got = group_layer_norm(group=group, eps=0.1, impl=impl, **given)
    for i in range(4):
        x, g = given["x"][i].tolist(), int(group[i])
        mean = sum(x) / 5
        variance = sum((value - mean) ** 2 for value in x) / 5
        weight, bias = given["weight_GD"][g].tolist(), given["bias_GD"][g].tolist()
        wanted = [(x[d] - mean) / math.sqrt(variance + 0.1) * weight[d] + bias[d] for d in range(5)]
        assert got[i].tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_one_layer_norm_per_group(impl: Impl, shape: tuple[int, ...]) -> None:
    given, group = inputs(*shape, groups=4)
    found = results(given, group, impl, eps=1e-3)
    x = given["x"].clone().requires_grad_()
    wanted, norms = torch.zeros_like(x), []
    for g in range(4):
        norm = nn.LayerNorm(shape[-1], eps=1e-3, dtype=torch.float64)
        norm.load_state_dict({"weight": given["weight_GD"][g], "bias": given["bias_GD"][g]})
        wanted = torch.where((group == g)[..., None], norm(x), wanted)
        norms.append(norm)
    wanted.backward(torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(x.shape))
    torch.testing.assert_close(found["out"], wanted.detach())
    torch.testing.assert_close(found["d x"], x.grad)
    for name, table in (("d weight_GD", "weight"), ("d bias_GD", "bias")):
        rows = [getattr(norm, table).grad for norm in norms]
        torch.testing.assert_close(found[name], torch.stack(rows), msg=name)


def test_the_gradient_is_the_slope() -> None:
    given, group = inputs(5, 4)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return group_layer_norm(x, group, weight, bias, impl="cpu")

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in given.values()])


@pytest.mark.parametrize("wanted", ["x", "weight_GD", "bias_GD"])
def test_only_one_gradient(wanted: str) -> None:
    given, group = inputs(6, 5)
    every = results(given, group, "cpu")
    leaves: dict[str, Any] = {
        name: x.clone().requires_grad_(name == wanted) for name, x in given.items()
    }
    out = group_layer_norm(group=group, impl="cpu", **leaves)
    out.backward(torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape))
    for name, leaf in leaves.items():
        if name == wanted:
            torch.testing.assert_close(leaf.grad, every["d " + name])
        else:
            assert leaf.grad is None


def test_a_group_without_tokens_learns_nothing() -> None:
    given, _ = inputs(9, 4, groups=5)
    group = torch.tensor([0, 4, 4, 0, 2, 2, 2, 0, 4])
    found = results(given, group, "cpu")
    for name in ("d weight_GD", "d bias_GD"):
        assert found[name].any(1).tolist() == [True, False, True, False, True]


def test_a_token_does_not_depend_on_those_beside_it() -> None:
    given, group = inputs(8, 16)
    whole = group_layer_norm(group=group, **given)
    alone = group_layer_norm(given["x"][3:4], group[3:4], given["weight_GD"], given["bias_GD"])
    torch.testing.assert_close(alone, whole[3:4])


def test_bfloat16() -> None:
    given, group = inputs(65, 48, dtype=torch.bfloat16)
    exact = results({name: x.double() for name, x in given.items()}, group, "reference")
    eager = results(given, group, "reference")
    ours = results(given, group, "cpu")
    for name, wanted in exact.items():
        assert ours[name].dtype == torch.bfloat16
        error = (eager[name].double() - wanted).abs().max()
        assert (ours[name].double() - wanted).abs().max() <= 1.5 * error, name


def test_tables_may_be_wider_than_tokens() -> None:
    given, group = inputs(9, 16, dtype=torch.bfloat16)
    tables = {name: given[name].float() for name in ("weight_GD", "bias_GD")}
    for impl in ("reference", "cpu"):
        got = results({**given, **tables}, group, impl)
        dtypes = [x.dtype for x in got.values()]
        assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_a_compiled_graph_takes_the_reference() -> None:
    given, group = inputs(5, 4)
    run = torch.compile(group_layer_norm, backend="eager", fullgraph=True)
    wanted = group_layer_norm(group=group, impl="reference", **given)
    torch.testing.assert_close(run(group=group, **given), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.tensor(1.0)}, r"x: torch.float32 \(\), wanted a floating"),
        ({"x": torch.zeros(2, 4, dtype=torch.int64)}, r"x: torch.int64 \(2, 4\)"),
        ({"group": torch.zeros(3, dtype=torch.int64)}, r"group: torch.int64 \(3,\), wanted .*2,"),
        ({"group": torch.zeros(2)}, "group: torch.float32"),
        ({"weight_GD": torch.ones(3, 5)}, r"weight_GD, bias_GD: shapes \(3, 5\) and \(3, 4\)"),
        ({"bias_GD": torch.ones(2, 4)}, r"shapes \(3, 4\) and \(2, 4\), wanted \(G, 4\) both"),
        ({"eps": -1.0}, "eps: -1.0, wanted a positive number"),
        ({"impl": "cuda"}, "impl: 'cuda', wanted 'auto'"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(2, 4),
        "group": torch.zeros(2, dtype=torch.int64),
        "weight_GD": torch.ones(3, 4),
        "bias_GD": torch.ones(3, 4),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        group_layer_norm(**arguments)


@pytest.mark.parametrize("group", [[0, 3], [-1, 2]])
def test_groups_outside_the_tables_are_refused(group: list[int]) -> None:
    given, _ = inputs(2, 4)
    message = f"group: groups {group[0]} to {group[1]}, wanted 0 to 2"
    with pytest.raises(IndexError, match=message):
        group_layer_norm(group=torch.tensor(group), **given)


def test_impls_say_what_they_lack() -> None:
    given, group = inputs(2, 4)
    with pytest.raises(RuntimeError, match="impl: 'triton' cannot run: "):
        group_layer_norm(group=group, impl="triton", **given)
    away: dict[str, Any] = {name: x.to("meta") for name, x in given.items()}
    with pytest.raises(RuntimeError, match="impl: 'cpu' cannot run: x is on meta"):
        group_layer_norm(group=group.to("meta"), impl="cpu", **away)
    assert group_layer_norm(group=group.to("meta"), **away).shape == (2, 4)

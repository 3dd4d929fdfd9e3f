"""The Triton path of group_layer_norm against the specification in float64.

``test_fused.py`` runs this file in a process of its own, because Triton reads ``TRITON_INTERPRET``
when it is imported. With a GPU: ``pytest tests/kernels/group_layer_norm_cases.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gr.kernels.group_layer_norm import Impl, fused, group_layer_norm
from gr.kernels.triton_path import interpreted

DEVICE = "cpu" if interpreted() else "cuda"


@pytest.fixture(autouse=True)
def small_tiles_that_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever a kernel does not write stays NaN, and no comparison holds.
    allocate = fused._allocate
    monkeypatch.setattr(fused, "_allocate", lambda *a, **k: allocate(*a, **k).fill_(float("nan")))
    # Several tokens a tile and more tiles than runs, even for a few tokens.
    monkeypatch.setattr(fused, "TILE", 256)
    monkeypatch.setattr(fused, "MAX_RUNS", 2)


def inputs(*shape: int, groups: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(sum(shape) + groups)
    sizes = {"x": shape, "weight_GD": (groups, shape[-1]), "bias_GD": (groups, shape[-1])}
    drawn = {
        name: torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in sizes.items()
    }
    return drawn, torch.randint(groups, shape[:-1], generator=generator)


def results(
    tensors: dict[str, Tensor], group: Tensor, impl: Impl, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Output and all gradients, as float64 on the CPU."""
    leaves: dict[str, Any] = {
        name: x.to(DEVICE, dtype, copy=True).requires_grad_() for name, x in tensors.items()
    }
    out = group_layer_norm(group=group.to(DEVICE), impl=impl, **leaves)
    upstream = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(upstream.to(out))
    found = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        found["d " + name] = leaf.grad
    return {name: x.double().cpu() for name, x in found.items()}


def compare(
    tensors: dict[str, Tensor], group: Tensor, dtype: torch.dtype, factor: float
) -> dict[str, Tensor]:
    tensors = {name: x.to(dtype).double() for name, x in tensors.items()}
    expected = results(tensors, group, "reference", torch.float64)
    eager = results(tensors, group, "reference", dtype)
    got = results(tensors, group, "triton", dtype)
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted.numel() == 0:
            assert got[name].shape == wanted.shape
            continue
        error = (eager[name] - wanted).abs().max()
        limit = factor * error + 1e-6 * (1 + wanted.abs().max())
        assert (got[name] - wanted).abs().max() <= limit, name
    return got


@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 5), (17, 33), (65, 3), (2, 0, 7)])
@pytest.mark.parametrize("groups", [1, 3])
def test_output_and_gradients(shape: tuple[int, ...], groups: int) -> None:
    compare(*inputs(*shape, groups=groups), torch.float32, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    compare(*inputs(33, 24, groups=4), dtype, 1.5)


def test_a_group_without_tokens_learns_nothing() -> None:
    tensors, _ = inputs(9, 4, groups=5)
    group = torch.tensor([0, 4, 4, 0, 2, 2, 2, 0, 4])
    got = compare(tensors, group, torch.float32, 4)
    for name in ("d weight_GD", "d bias_GD"):
        assert got[name].any(1).tolist() == [True, False, True, False, True]


def test_the_sums_of_many_groups_take_fewer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SUMS_SIZE", 1)
    compare(*inputs(65, 5, groups=3), torch.float32, 4)


def test_slices_are_read_where_they_lie() -> None:
    tensors, group = inputs(5, 6, groups=2)
    apart = torch.randn(5, 24, dtype=torch.float64)
    tables = (tensors["weight_GD"], tensors["bias_GD"])
    wanted = group_layer_norm(apart[:, 6:12], group, *tables, impl="reference")
    low = apart.float().to(DEVICE)[:, 6:12]
    given = (table.float().to(DEVICE) for table in tables)
    got = group_layer_norm(low, group.to(DEVICE), *given, impl="triton")
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_an_unknown_group_shows() -> None:
    # The public function refuses it on a CPU and cannot look on a GPU without waiting for it.
    tensors, _ = inputs(3, 4, groups=2)
    x, weight, bias = (
        tensors[name].float().to(DEVICE).requires_grad_() for name in ("x", "weight_GD", "bias_GD")
    )
    group = torch.tensor([0, 2, -1], device=DEVICE)
    out = fused.fused_group_layer_norm(x, group, weight, bias, 1e-6)
    assert out.isnan().all(1).tolist() == [False, True, True]
    out[0].sum().backward()
    assert weight.grad is not None and not weight.grad[1].any()


def test_what_it_lacks() -> None:
    table = torch.ones(2, 3, dtype=torch.float64, device=DEVICE)
    group = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"x has dtype torch.float64; wanted one of torch"):
        group_layer_norm(table, group, table, table, impl="triton")
    many = torch.ones(2**16, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="there are 65536 groups; wanted at most 65535"):
        group_layer_norm(table.float(), group, many, many, impl="triton")
    wide = torch.ones(2, 8193, device=DEVICE)
    with pytest.raises(RuntimeError, match="x has width 8193; wanted at most 8192"):
        group_layer_norm(wide, group, wide, wide, impl="triton")

"""The Triton path of norm_mul against the specification in float64.

``test_fused.py`` runs this file in a process of its own, because Triton reads
``TRITON_INTERPRET`` when it is imported. With a GPU: ``pytest tests/kernels/norm_mul_cases.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gr.kernels.norm_mul import Impl, fused, norm_mul
from gr.kernels.triton_path import interpreted

DEVICE = "cpu" if interpreted() else "cuda"


@pytest.fixture(autouse=True)
def small_tiles_that_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever a kernel does not write stays NaN, and no comparison holds.
    allocate = fused._allocate
    monkeypatch.setattr(fused, "_allocate", lambda *a, **k: allocate(*a, **k).fill_(float("nan")))
    # Several rows a tile and more tiles than programs, even for a few tokens.
    monkeypatch.setattr(fused, "TILE", 256)
    monkeypatch.setattr(fused, "MAX_PROGRAMS", 2)


def inputs(*shape: int, affine: str = "wb") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    found = {"a": drawn(*shape) * 2 + 1, "u": drawn(*shape)}
    if "w" in affine:
        found["weight_D"] = drawn(shape[-1])
    if "b" in affine:
        found["bias_D"] = drawn(shape[-1])
    return found


def results(
    tensors: dict[str, Tensor],
    impl: Impl,
    dtype: torch.dtype,
    keep: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Output and all gradients as float64 on the CPU; ``keep`` is a mask to put on the output."""
    leaves: dict[str, Any] = {
        name: x.to(DEVICE, dtype, copy=True).requires_grad_() for name, x in tensors.items()
    }
    out = norm_mul(**leaves, impl=impl, **options)
    if keep is not None:
        out = out * keep.to(out)
    upstream = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(upstream.to(out))
    found = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        found["d " + name] = leaf.grad
    return {name: x.double().cpu() for name, x in found.items()}


def compare(tensors: dict[str, Tensor], dtype: torch.dtype, factor: float, **options: Any) -> None:
    tensors = {name: x.to(dtype).double() for name, x in tensors.items()}
    expected = results(tensors, "reference", torch.float64, **options)
    eager = results(tensors, "reference", dtype, **options)
    got = results(tensors, "triton", dtype, **options)
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted.numel() == 0:
            assert got[name].shape == wanted.shape
            continue
        error = (eager[name] - wanted).abs().max()
        limit = factor * error + 1e-6 * (1 + wanted.abs().max())
        assert (got[name] - wanted).abs().max() <= limit, name


@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 5), (17, 33), (65, 3), (2, 0, 7)])
@pytest.mark.parametrize("affine", ["", "w", "wb"])
@pytest.mark.parametrize("concat", [False, True])
def test_output_and_gradients(shape: tuple[int, ...], affine: str, concat: bool) -> None:
    compare(inputs(*shape, affine=affine), torch.float32, 4, concat=concat)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("concat", [False, True])
def test_low_precision(dtype: torch.dtype, concat: bool) -> None:
    compare(inputs(33, 24), dtype, 1.5, concat=concat)


@pytest.mark.parametrize("affine", ["", "wb"])
@pytest.mark.parametrize("concat", [False, True])
def test_backward_drops_what_forward_dropped(affine: str, concat: bool) -> None:
    tensors = inputs(17, 9, affine=affine)
    torch.manual_seed(2)
    options: dict[str, Any] = {"dropout": 0.25, "training": True}
    got = results(tensors, "triton", torch.float32, concat=concat, **options)
    keep = (got["out"] != 0) / 0.75
    wanted = results(tensors, "reference", torch.float64, keep, concat=concat)
    for name, x in wanted.items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5, msg=name)


def test_shares_seeds_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "TILE", 2048)
    ones = torch.ones(40, 60, device=DEVICE)
    a = torch.randn(40, 60, device=DEVICE)

    def kept(seed: int) -> Tensor:
        torch.manual_seed(seed)
        out = norm_mul(a, ones, concat=True, dropout=0.3, training=True, impl="triton")
        return (out != 0).cpu()

    mask = kept(0)
    assert torch.equal(mask, kept(0)) and not torch.equal(mask, kept(1))
    # Six standard deviations of a binomial's share, and of the share in which two agree.
    parts = [part.double() for part in mask.chunk(3, dim=1)]
    for part in parts:
        assert abs(part.mean() - 0.7) < 6 * (0.21 / 2400) ** 0.5
    pairs = [(parts[0], parts[1]), (parts[0], parts[2]), (parts[1], parts[2])]
    pairs += [(part[1:], part[:-1]) for part in parts]
    pairs += [(part[:, 1:], part[:, :-1]) for part in parts]
    for one, other in pairs:
        together = ((one - 0.7) * (other - 0.7)).mean() / 0.21
        assert abs(together) < 6 / one.numel() ** 0.5


def test_slices_are_read_where_they_lie() -> None:
    tensors = inputs(2, 5, 6, affine="")
    wide = torch.randn(2, 5, 24, dtype=torch.float64)
    tensors["u"] = wide[..., 6:12]
    u = wide.float().to(DEVICE)[..., 6:12]
    a = tensors["a"].float().to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1)
    got = norm_mul(a, u, impl="triton")
    wanted = norm_mul(tensors["a"], tensors["u"], impl="reference")
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_what_it_lacks() -> None:
    x = torch.ones(2, 3, dtype=torch.float64, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"a has dtype torch.float64; wanted one of torch"):
        norm_mul(x, x, impl="triton")
    wide = torch.ones(1, 8193, device=DEVICE)
    with pytest.raises(RuntimeError, match="a has width 8193; wanted at most 8192"):
        norm_mul(wide, wide, impl="triton")

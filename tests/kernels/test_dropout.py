"""fast_dropout: how often it drops, what is left of x, and which random numbers it takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gr.kernels.dropout import draw_mask, fast_dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.97])
def test_share_mean_and_variance(p: float) -> None:
    torch.manual_seed(0)
    count = 200_000
    y = fast_dropout(torch.ones(count, dtype=torch.float64), p, training=True)
    keep = 1 - round(p * 2**16) / 2**16
    assert set(y.unique().tolist()) == {0.0, 1 / keep}
    # Six standard deviations of a binomial's share.
    share = (y != 0).double().mean().item()
    assert abs(share - keep) < 6 * math.sqrt(keep * (1 - keep) / count)
    # Given the share, mean and variance of y follow; what is left to see is that places are apart.
    kept = (y != 0).double() - keep
    for lag in (1, 2, 3, 4, 8):
        together = (kept[lag:] * kept[:-lag]).mean().item() / (keep * (1 - keep))
        assert abs(together) < 6 / math.sqrt(count), lag
    for place in range(4):
        # The four numbers of one draw are equally uniform, the one with the sign bit included.
        part = (y[place::4] != 0).double().mean().item()
        assert abs(part - keep) < 6 * math.sqrt(4 * keep * (1 - keep) / count), place


def test_every_step_of_the_threshold_counts() -> None:
    # By hand: of 65,536 equally likely numbers, `steps` lie below the threshold.
    for steps in (1, 2, 2**15, 2**16 - 1):
        numbers = torch.arange(-(2**15), 2**15)
        assert int((numbers < 2**15 - steps).sum()) == 2**16 - steps
    torch.manual_seed(0)
    assert 0 < int((draw_mask((2**20,), 1) == 0).sum()) < 60
    assert 0 < int(draw_mask((2**20,), 2**16 - 1).sum()) < 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (17, 33), (5, 0), (2, 3, 65)])
def test_gradient_has_the_mask_of_the_output(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.rand(shape, dtype=torch.float64).add_(1).to(dtype).requires_grad_()
    y = fast_dropout(x, 0.4, training=True)
    upstream = torch.rand(shape, dtype=torch.float64).add_(1).to(dtype)
    (grad,) = torch.autograd.grad(y, x, upstream)
    kept = y != 0
    scale = 2**16 / (2**16 - round(0.4 * 2**16))
    # The scale is rounded once, and the product once.
    rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), kept * x.double() * scale, rtol=rtol, atol=0.0)
    torch.testing.assert_close(grad.double(), kept * upstream.double() * scale, rtol=rtol, atol=0.0)
    assert y.dtype == grad.dtype == dtype and y.shape == x.shape


def test_seeds_decide() -> None:
    x = torch.ones(1000)

    def drop(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return fast_dropout(x, 0.5, training=True)

    first = drop(1)
    assert torch.equal(first, drop(1)) and not torch.equal(first, drop(2))
    assert not torch.equal(fast_dropout(x, 0.5, True), fast_dropout(x, 0.5, True))


@pytest.mark.parametrize("p", [0.0, 1e-9])
def test_nothing_dropped_is_x(p: float) -> None:
    x = torch.randn(7)
    state = torch.get_rng_state()
    assert fast_dropout(x, p, training=True) is x
    assert fast_dropout(x, 0.5, training=False) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("p", [1.0, 1 - 1e-9])
def test_everything_dropped_is_zero(p: float) -> None:
    x = torch.randn(7, requires_grad=True)
    y = fast_dropout(x, p, training=True)
    y.sum().backward()
    assert x.grad is not None and not y.any() and not x.grad.any()


def test_a_slice_keeps_its_places() -> None:
    base = torch.arange(1.0, 61.0).view(4, 15)
    for x in (base[:, 3:8], base.t()):
        y = fast_dropout(x, 0.25, training=True)
        assert torch.equal(y[y != 0], (x * (4 / 3))[y != 0])


def test_checkpointed_layers_drop_the_same_again() -> None:
    x = torch.randn(64, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 9, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return fast_dropout(torch.tanh(x @ weight), 0.3, training=True).square()

    found = []
    for again in (False, True):
        torch.manual_seed(5)
        y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        assert isinstance(y, Tensor)
        found.append((y, *torch.autograd.grad(y.sum(), (x, weight))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_gradients_of_gradients() -> None:
    x = torch.randn(11, dtype=torch.float64, requires_grad=True)

    def drop(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return fast_dropout(x, 0.5, training=True) ** 3

    assert torch.autograd.gradgradcheck(drop, x)


def test_one_byte_per_element_is_kept() -> None:
    kept = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fast_dropout(torch.ones(33, 5, requires_grad=True), 0.5, training=True)
    assert kept == [33 * 5]


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_a_bad_probability_is_named(p: float) -> None:
    with pytest.raises(ValueError, match=f"p: {p}, wanted a probability"):
        fast_dropout(torch.ones(2), p, training=True)

"""The CPU path against the specification, and the specification against a loop."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from torch import Tensor

from gr.kernels.hstu_attention import Impl, build_geometry, hstu_attention, pointwise, time_bucket

NAMES = ("q", "k", "v", "position_table", "time_table")


def inputs(
    batch: int, queries: int, keys: int, dtype: torch.dtype, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {
        "q": draw(batch, 2, queries, 3),
        "k": draw(batch, 2, keys, 3),
        "v": draw(batch, 2, keys, 4),
        "position_table": draw(6),
        "time_table": draw(41),
    }
    time_BK = 1_700_000_000 + torch.randint(0, 10**6, (batch, keys), generator=generator).cumsum(1)
    query_time = torch.cat([time_BK[:, 1:], time_BK[:, -1:] + 60], dim=1)[:, keys - queries :]
    visible = torch.rand(batch, queries, keys, generator=generator) < 0.7
    return tensors, time_BK, query_time, visible


def run(
    tensors: dict[str, Tensor],
    time_BK: Tensor,
    query_time: Tensor,
    mask: Tensor,
    impl: Impl,
    causal: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
    batch, queries, keys = mask.shape
    position = torch.arange(keys).expand(batch, -1)
    geometry = build_geometry(
        mask,
        position[:, keys - queries :],
        position,
        query_time,
        time_BK,
        max_distance=6,
        num_buckets=40,
        causal=causal,
    )
    out = hstu_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        geometry,
        leaves["position_table"],
        leaves["time_table"],
        scale=0.7,
        norm_length=5.0,
        impl=impl,
    )
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weight).sum().backward()
    grads = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        grads[name] = leaf.grad
    return out.detach(), grads


def test_the_reference_is_the_formula() -> None:
    tensors, time_BK, query_time, mask = inputs(2, 4, 5, torch.float64)
    got, _ = run(tensors, time_BK, query_time, mask, "reference")
    for b in range(2):
        for h in range(2):
            for i in range(4):
                total = torch.zeros(4, dtype=torch.float64)
                for j in range(5):
                    if not mask[b, i, j]:
                        continue
                    gap = abs(int(query_time[b, i]) - int(time_BK[b, j]))
                    bucket = min(40, int(math.log(max(1, gap)) / 0.301))
                    distance = min(5, max(0, (i + 1) - j))
                    score = 0.7 * float(tensors["q"][b, h, i] @ tensors["k"][b, h, j])
                    score += float(tensors["position_table"][distance])
                    score += float(tensors["time_table"][bucket])
                    total += score / (1 + math.exp(-score)) / 5.0 * tensors["v"][b, h, j]
                torch.testing.assert_close(got[b, h, i], total, atol=1e-12, rtol=1e-12)


SHAPES = [(1, 1, 1), (3, 7, 7), (2, 3, 9), (2, 0, 4), (2, 129, 150), (1, 200, 200)]


@pytest.mark.parametrize(("batch", "queries", "keys"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 2**28])
def test_the_cpu_path_equals_the_reference(
    batch: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    causal: bool,
    keep_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pointwise, "KEEP_BYTES", keep_bytes)
    tensors, time_BK, query_time, mask = inputs(batch, queries, keys, torch.float64)
    if causal:
        mask = mask & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    exact, exact_grads = run(tensors, time_BK, query_time, mask, "reference")
    low = {name: value.to(dtype) for name, value in tensors.items()}
    eager, eager_grads = run(low, time_BK, query_time, mask, "reference")
    fast, fast_grads = run(low, time_BK, query_time, mask, "cpu", causal)

    def bound(reference: Tensor, truth: Tensor) -> float:
        # A few times what the plain computation in this dtype loses, plus the rounding of a sum
        # taken in another order (it grows with the root of the number of terms).
        error = (reference - truth).abs().max() if truth.numel() else torch.zeros(())
        scale = truth.abs().max() if truth.numel() else torch.zeros(())
        terms = max(1, batch * queries * keys) ** 0.5
        return float(4 * error + 4 * terms * torch.finfo(dtype).eps * (1 + scale))

    assert fast.shape == eager.shape
    assert not fast.numel() or (fast - exact).abs().max() <= bound(eager, exact)
    for name in NAMES:
        assert fast_grads[name].dtype == dtype, name
        if exact_grads[name].numel():
            error = (fast_grads[name] - exact_grads[name]).abs().max()
            assert error <= bound(eager_grads[name], exact_grads[name]), name


def test_time_buckets_are_exact_for_large_timestamps() -> None:
    now = 1_700_000_000
    gaps = torch.tensor([0, 1, 2, 59, 60, 3600, 86400, 10**9, -3600])
    expected = [min(128, int(math.log(max(1, abs(int(gap)))) / 0.301)) for gap in gaps]
    got = time_bucket((now + gaps) - now, 128)
    assert got.tolist() == expected
    assert time_bucket(torch.tensor([2**62]), 10).tolist() == [10]


def test_wrong_arguments_are_named() -> None:
    tensors, time_BK, query_time, mask = inputs(1, 2, 2, torch.float32)
    with pytest.raises(ValueError, match=r"impl: 'fast', wanted 'auto', 'reference', 'cpu'"):
        run(tensors, time_BK, query_time, mask, cast(Impl, "fast"))
    geometry = build_geometry(
        mask,
        torch.zeros(1, 2, dtype=torch.int64),
        torch.zeros(1, 2, dtype=torch.int64),
        None,
        None,
        max_distance=6,
        num_buckets=40,
        causal=False,
    )
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    with pytest.raises(ValueError, match="no timestamps"):
        hstu_attention(q, k, v, geometry, None, tensors["time_table"], norm_length=1.0)
    with pytest.raises(ValueError, match="norm_length: 0"):
        hstu_attention(q, k, v, geometry, norm_length=0)
    with pytest.raises(ValueError, match="head size 3, k has 2"):
        hstu_attention(q, k[..., :2], v, geometry, norm_length=1.0)

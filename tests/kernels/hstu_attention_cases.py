"""The Triton path against the specification in float64, on a GPU or under Triton's interpreter.

``test_fused.py`` runs this file in a process of its own, because Triton reads
``TRITON_INTERPRET`` when it is imported. On a GPU:

    pytest tests/kernels/hstu_attention_cases.py

Legend: B batch, H heads, N tokens, Q queries, K keys, A branch nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gr.kernels.hstu_attention import (
    Geometry,
    Impl,
    Visibility,
    build_geometry,
    fused,
    hstu_attention,
    time_bucket,
)
from gr.kernels.hstu_attention.geometry import bucket_starts
from gr.kernels.triton_path import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
NAMES = ("q", "k", "v", "position_table", "time_table")
DISTANCES, BUCKETS = 40, 50


@pytest.fixture(autouse=True)
def results_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever a kernel does not write stays NaN, and no comparison holds.
    allocate = fused._allocate
    monkeypatch.setattr(
        fused, "_allocate", lambda *arguments: allocate(*arguments).fill_(float("nan"))
    )


@dataclass(frozen=True)
class Case:
    visible: Visibility
    tensors: dict[str, Tensor]  # float64
    query_time_BQ: Tensor | None
    time_BK: Tensor | None

    def geometry(self) -> Geometry:
        queries = self.visible.num_queries
        position = self.visible.position_BK
        return build_geometry(
            self.visible,
            position[:, position.shape[1] - queries :],
            position,
            self.query_time_BQ,
            self.time_BK,
            max_distance=DISTANCES,
            num_buckets=BUCKETS,
        )


def ragged(num_keys: int) -> Tensor:
    """A full row, one padded in front, one behind, one of a single token, one of none at all."""
    valid = torch.ones(5, num_keys, dtype=torch.bool)
    valid[1, : num_keys // 3] = False
    valid[2, num_keys - num_keys // 3 :] = False
    valid[3, :-1] = False
    valid[4] = False
    return valid


def make_case(
    queries: int,
    keys: int,
    valid_BK: Tensor | None = None,
    *,
    clock: bool = True,
    sizes: tuple[int, int] = (3, 5),
    heads: int = 1,
    seed: int = 0,
    **rule: Any,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    valid = ragged(keys) if valid_BK is None else valid_BK
    batch = len(valid)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    tensors = {
        "q": draw(batch, heads, queries, sizes[0]),
        "k": draw(batch, heads, keys, sizes[0]),
        "v": draw(batch, heads, keys, sizes[1]),
        "position_table": draw(DISTANCES),
    }
    time = query_time = None
    if clock:
        tensors["time_table"] = draw(BUCKETS + 1)
        steps = torch.randint(0, 10**6, (batch, keys), generator=generator)
        time = 1_700_000_000 + steps.cumsum(1)
        query_time = torch.cat([time[:, 1:], time[:, -1:] + 60], dim=1)[:, keys - queries :]
        time, query_time = time.to(DEVICE), query_time.to(DEVICE)
    position = (valid.long().cumsum(1) - 1).clamp_min(0)
    rule = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rule.items()}
    visible = Visibility(valid.to(DEVICE), position.to(DEVICE), queries, **rule)
    return Case(visible, tensors, query_time, time)


def run(
    case: Case, tensors: dict[str, Tensor], impl: Impl, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
    out = hstu_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        case.geometry(),
        leaves.get("position_table"),
        leaves.get("time_table"),
        scale=0.7,
        norm_length=5.0,
        impl=impl,
    )
    if weight is None:
        weight = torch.linspace(-1, 2, out.numel(), device=DEVICE).reshape(out.shape)
    (out * weight.to(out.dtype)).sum().backward()
    results = {"out": out.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype, name
        results[name] = leaf.grad
    return results


def check(case: Case, dtype: torch.dtype = torch.float32, wide_tables: bool = False) -> None:
    low = {name: value.to(dtype) for name, value in case.tensors.items()}
    exact = run(case, {name: value.double() for name, value in low.items()}, "reference")
    eager = run(case, low, "reference")
    given = {n: x.float() if wide_tables and n.endswith("table") else x for n, x in low.items()}
    got = run(case, given, "triton")
    for name, truth in exact.items():
        # A few times what plain torch loses in this dtype, or a few roundings of the largest value
        # where plain torch is lucky. Sums are in float32 here, so their length does not come in.
        error = float((eager[name] - truth).abs().max())
        bound = 4 * error + 4 * torch.finfo(dtype).eps * float(truth.abs().max())
        assert got[name].shape == truth.shape, name
        assert (got[name] - truth).abs().max() <= bound, name


def ancestors(batch: int, queries: int, nodes: int) -> Tensor:
    """A random forest of nodes: each sees itself and its ancestors; the last ones are queries."""
    generator = torch.Generator().manual_seed(7)
    seen = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    for b in range(batch):
        for node in range(nodes):
            parent = int(torch.randint(-1, node, (), generator=generator)) if node else -1
            if parent >= 0:
                seen[b, node] = seen[b, parent]
            seen[b, node, node] = True
    return seen[:, nodes - queries :]


@pytest.mark.parametrize("length", [1, 17, 63, 64, 65, 100])
def test_streams_of_any_length(length: int) -> None:
    check(make_case(length, length))


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (20, 50, {}),
        (18, 18, {"heads": 2, "sizes": (16, 20)}),
        (18, 18, {"clock": False}),
        (33, 33, {"window": 9}),
        (33, 33, {"context": 20}),
        (33, 50, {"window": 5, "context": 4}),
        (24, 50, {"branch_BQA": ancestors(2, 24, 24)}),
        (10, 50, {"branch_BQA": ancestors(2, 10, 24)}),
        (24, 50, {"branch_BQA": ancestors(2, 24, 24), "window": 11, "context": 6}),
    ],
)
def test_prefixes_heads_windows_contexts_and_branches(
    queries: int, keys: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small tiles, so that some are skipped, some are whole and some are cut by the mask.
    monkeypatch.setattr(fused, "_tile_size", lambda q, v: 16)
    check(make_case(queries, keys, ragged(keys)[1:3], **options))


@pytest.mark.parametrize("kept", [(), ("position_table",), ("time_table",)])
def test_either_table_may_be_absent(kept: tuple[str, ...]) -> None:
    case = make_case(21, 30, ragged(30)[1:3])
    names = ("q", "k", "v", *kept)
    check(replace(case, tensors={name: case.tensors[name] for name in names}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide_tables", [False, True])
def test_low_precision_loses_no_more_than_plain_torch(
    dtype: torch.dtype, wide_tables: bool
) -> None:
    check(make_case(65, 65, ragged(65)[1:3]), dtype, wide_tables)


def test_no_queries() -> None:
    case = make_case(0, 7)
    low = {name: value.float() for name, value in case.tensors.items()}
    got = run(case, low, "triton")
    assert got["out"].shape == (5, 1, 0, 5)
    for name in NAMES:
        assert torch.equal(got[name], torch.zeros_like(low[name])), name


def test_padding_is_never_read() -> None:
    case = make_case(65, 70, ragged(70)[[1, 2, 4]])
    valid = case.visible.valid_BK
    weight = torch.randn(3, 1, 65, 5, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight = weight * valid[:, None, 5:, None]
    clean = {name: value.float() for name, value in case.tensors.items()}
    dirty = dict(clean)
    for name, poison in (("q", math.nan), ("k", math.inf), ("v", math.nan)):
        padding = ~valid[:, None, valid.shape[1] - clean[name].shape[2] :, None]
        dirty[name] = clean[name].masked_fill(padding, poison)

    def masked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
        q, k, v, position, time = (leaves[name] for name in NAMES)
        out = hstu_attention(
            q, k, v, case.geometry(), position, time, norm_length=5.0, impl="triton"
        )
        out.backward(weight)
        grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return {"out": out.detach()[valid[:, None, 5:]], **grads}

    expected, got = masked(clean), masked(dirty)
    assert expected.keys() == got.keys() == {"out", *NAMES}
    for name, value in got.items():
        # Equal to the bit, but for sums that a GPU takes in any order: 65 · 70 terms in each row.
        loose = name.endswith("table") and DEVICE == "cuda"
        atol = 3 * 65 * 70 * 6e-8 * float(expected[name].abs().max()) if loose else 0
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=name)
    for name in ("q", "k", "v"):
        padding = ~valid[:, valid.shape[1] - got[name].shape[2] :]
        assert not got[name].transpose(1, 2)[padding].any(), name


def test_a_row_does_not_depend_on_its_mates_or_its_padding() -> None:
    alone = make_case(30, 30, torch.ones(1, 30, dtype=torch.bool), seed=3)
    low = {name: value.float() for name, value in alone.tensors.items()}
    expected = run(alone, low, "triton", torch.ones(1, 1, 30, 5, device=DEVICE))
    for side, start in (("behind", 0), ("in front", 40)):
        valid = torch.ones(3, 70, dtype=torch.bool)
        valid[1] = False
        valid[1, start : start + 30] = True
        mates = make_case(70, 70, valid, seed=4)
        batch = {name: value.float() for name, value in mates.tensors.items()}
        batch |= {name: low[name] for name in ("position_table", "time_table")}
        for name in ("q", "k", "v"):
            batch[name][1, :, start : start + 30] = low[name][0]
        assert mates.time_BK is not None and mates.query_time_BQ is not None
        assert alone.time_BK is not None and alone.query_time_BQ is not None
        mates.time_BK[1, start : start + 30] = alone.time_BK[0]
        mates.query_time_BQ[1, start : start + 30] = alone.query_time_BQ[0]
        weight = torch.zeros(3, 1, 70, 5, device=DEVICE)
        weight[1, :, start : start + 30] = 1
        got = run(mates, batch, "triton", weight)
        for name in ("out", "q", "k", "v"):
            row = got[name][1, :, start : start + 30]
            # Padding in front moves tokens to other places of a tile: sums of 30 in another order.
            atol = 0 if side == "behind" and DEVICE == "cpu" else 30 * 6e-8
            atol *= float(expected[name].abs().max())
            torch.testing.assert_close(row, expected[name][0], rtol=0, atol=atol, msg=side + name)
        for name in ("position_table", "time_table"):
            atol = 30 * 30 * 6e-8 * float(expected[name].abs().max())
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=atol, msg=name)


def test_time_buckets_agree_to_the_second() -> None:
    starts = bucket_starts(128)
    starts = starts[starts < 2**62]
    gaps = torch.cat([starts - 1, starts, starts + 1, torch.tensor([0, 2**62, -1, -3600])])
    count = len(gaps)
    # Every token sees itself alone and is its own question, ``gap`` seconds later.
    time = torch.zeros(1, count, dtype=torch.int64)
    zeros = torch.zeros(1, 1, count, 1, device=DEVICE)
    valid = torch.ones(1, count, dtype=torch.bool, device=DEVICE)
    alone = torch.eye(count, dtype=torch.bool, device=DEVICE)[None]
    position = torch.zeros(1, count, dtype=torch.int64, device=DEVICE)
    geometry = build_geometry(
        Visibility(valid, position, count, alone),
        position,
        position,
        gaps[None].to(DEVICE),
        time.to(DEVICE),
        max_distance=1,
        num_buckets=128,
    )
    table = (1 + torch.arange(129) / 8).to(DEVICE)
    out = hstu_attention(
        zeros, zeros, zeros + 1, geometry, None, table, norm_length=1.0, impl="triton"
    )
    entries = torch.nn.functional.silu(table)
    got = (out[0, 0] - entries).abs().argmin(-1).cpu()
    assert got.tolist() == time_bucket(gaps, 128).tolist()
    # And with the formula in float64, but for seconds that float32 cannot tell from a boundary.
    for gap, bucket in zip(gaps.tolist(), got.tolist(), strict=True):
        exact = math.log(max(1, abs(gap))) / 0.301
        assert bucket == min(128, int(exact)) or abs(exact - round(exact)) < 2e-5


def test_other_ways_to_lay_out_the_inputs() -> None:
    # What blocks pass: heads cut out of one projection, and a gradient that is an expanded scalar.
    case = make_case(20, 20, ragged(20)[1:3])
    low = {name: value.float() for name, value in case.tensors.items()}
    ones = torch.ones(2, 1, 20, 5, device=DEVICE)
    expected = run(case, low, "triton", ones)
    packed = torch.cat([low[n].transpose(1, 2).flatten(2) for n in ("q", "k", "v")], dim=-1)
    packed = packed.requires_grad_()
    q, k, v = (x.unflatten(-1, (1, -1)).transpose(1, 2) for x in packed.split([3, 3, 5], dim=-1))
    out = hstu_attention(
        q,
        k,
        v,
        case.geometry(),
        low["position_table"],
        low["time_table"],
        scale=0.7,
        norm_length=5.0,
        impl="triton",
    )
    out.sum().backward()
    assert torch.equal(out, expected["out"])
    wanted = [expected[n].transpose(1, 2).flatten(2) for n in ("q", "k", "v")]
    assert packed.grad is not None
    assert torch.equal(packed.grad, torch.cat(wanted, dim=-1))


def test_what_it_cannot_run_is_named() -> None:
    case = make_case(4, 4)
    wide = case.tensors
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: q, k and v have dtypes .*64"):
        run(case, wide, "triton")
    geometry = replace(case.geometry(), visible=case.visible.mask_BQK)
    q, k, v = (wide[name].float() for name in ("q", "k", "v"))
    with pytest.raises(RuntimeError, match=r"'triton' cannot run: the geometry holds a mask"):
        hstu_attention(q, k, v, geometry, norm_length=1.0, impl="triton")

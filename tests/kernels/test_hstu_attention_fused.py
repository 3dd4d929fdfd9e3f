"""What the Triton path of hstu_attention rests on; the path itself is in its cases."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from gr.kernels import hstu_attention as op
from gr.kernels.hstu_attention import Visibility, build_geometry, hstu_attention, time_bucket
from gr.kernels.hstu_attention.geometry import bucket_starts
from gr.kernels.hstu_attention.needed_tiles import listed, needed_tiles

HAS_TRITON = find_spec("triton") is not None


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_cpu_tensors_are_refused_and_auto_leaves_them_to_torch() -> None:
    x, at = torch.ones(1, 1, 2, 2), torch.arange(2)[None]
    rule = Visibility(torch.ones(1, 2, dtype=torch.bool), at, 2)
    geometry = build_geometry(rule, at, at, None, None, max_distance=2, num_buckets=2)
    if os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(RuntimeError, match=r"q is on cpu; wanted a CUDA device, or TRITON_INT"):
            hstu_attention(x, x, x, geometry, norm_length=1.0, impl="triton")
    assert not op._wants_triton(x)
    assert torch.equal(
        hstu_attention(x, x, x, geometry, norm_length=1.0),
        hstu_attention(x, x, x, geometry, norm_length=1.0, impl="cpu"),
    )


def sees(rule: Visibility, b: int, i: int, j: int) -> bool:
    """The rule for one pair, in words of its own."""
    keys = rule.num_keys
    own = keys - rule.num_queries + i
    if own == j:
        return True
    if not (rule.valid_BK[b, own] and rule.valid_BK[b, j]):
        return False
    first_node = keys if rule.branch_BQA is None else keys - rule.branch_BQA.shape[2]
    if j < first_node and int(rule.position_BK[b, j]) < rule.context:
        return True
    back = int(rule.position_BK[b, own]) - int(rule.position_BK[b, j])
    if rule.window is not None and back >= rule.window:
        return False
    if rule.branch_BQA is None:
        return j < own
    return j < first_node or bool(rule.branch_BQA[b, i, j - first_node])


def rules() -> list[Visibility]:
    generator = torch.Generator().manual_seed(0)
    valid = torch.rand(4, 23, generator=generator) < 0.8
    valid[1, :9] = False
    valid[2, 12:] = False
    valid[3] = False
    position = (valid.long().cumsum(1) - 1).clamp_min(0)
    branch = torch.rand(4, 11, 13, generator=generator) < 0.1
    return [
        Visibility(valid, position, queries, branch_BQA, window, context)
        for queries, branch_BQA in ((23, None), (11, None), (11, branch))
        for window in (None, 1, 6)
        for context in (0, 5)
    ]


@pytest.mark.parametrize("rule", rules())
def test_visibility_is_its_rule(rule: Visibility) -> None:
    expected = [
        [[sees(rule, b, i, j) for j in range(rule.num_keys)] for i in range(rule.num_queries)]
        for b in range(4)
    ]
    assert rule.mask_BQK.tolist() == expected


@pytest.mark.parametrize("rule", rules())
@pytest.mark.parametrize("size", [4, 16])
def test_no_tile_that_holds_something_is_left_out(rule: Visibility, size: int) -> None:
    keys, queries = rule.num_keys, rule.num_queries
    position_BQ = rule.position_BK[:, keys - queries :]
    needed = needed_tiles(rule, position_BQ, rule.position_BK, size)
    holds = torch.zeros_like(needed)
    for b, i, j in rule.mask_BQK.nonzero().tolist():
        # A padding query sees itself, which is no tile's business.
        if rule.valid_BK[b, keys - queries + i]:
            holds[b, i // size, j // size] = True
    assert not (holds & ~needed).any()
    for lists in (needed, needed.transpose(1, 2)):
        tiles, count = listed(lists)
        assert tiles.is_contiguous() and count.is_contiguous()
        for b in range(4):
            for s, wanted in enumerate(lists[b].tolist()):
                read = tiles[b, s, : count[b, s]].tolist()
                assert read == [t for t, kept in enumerate(wanted) if kept]


def skipped(**options: object) -> Tensor:
    valid = torch.ones(1, 64, dtype=torch.bool)
    valid[0, 48:] = False
    rule = Visibility(valid, torch.arange(64)[None], 64, **options)  # type: ignore[arg-type]
    return ~needed_tiles(rule, rule.position_BK, rule.position_BK, 16)[0]


def test_empty_tiles_are_left_out() -> None:
    # By hand, in tiles of 16: 48 tokens, then padding.
    above = torch.ones(4, 4).triu(1).bool()
    padding = torch.zeros(4, 4, dtype=torch.bool)
    padding[3], padding[:, 3] = True, True
    assert torch.equal(skipped(), above | padding)
    assert torch.equal(skipped(window=17), above | padding | torch.ones(4, 4).tril(-2).bool())
    assert torch.equal(
        skipped(window=1, context=1), ~torch.eye(4).bool() & (torch.arange(4) > 0) | padding
    )
    branch = torch.zeros(1, 64, 32, dtype=torch.bool)
    branch[0, 40, 0] = True
    nodes = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 0]]).bool()
    nodes[1, 1] = nodes[0, 0] = False
    assert torch.equal(skipped(branch_BQA=branch)[:3, :3], nodes)


def test_bucket_starts_are_where_buckets_start() -> None:
    starts = bucket_starts(200)
    reached = starts < 2**63 - 1
    # ln(2^63) / 0.301 = 145.08: no later bucket is ever reached.
    assert reached.tolist() == [bucket <= 145 for bucket in range(201)]
    bucket = torch.arange(201)[reached]
    assert (time_bucket(starts[reached], 200) >= bucket).all()
    assert (time_bucket(starts[reached][1:] - 1, 200) < bucket[1:]).all()


def test_windows_and_contexts_are_checked() -> None:
    valid, position = torch.ones(1, 2, dtype=torch.bool), torch.arange(2)[None]
    with pytest.raises(ValueError, match="window: 0, wanted at least 1"):
        Visibility(valid, position, 2, window=0)
    with pytest.raises(ValueError, match="context: -1, wanted 0 or more"):
        Visibility(valid, position, 2, context=-1)

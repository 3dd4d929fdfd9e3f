"""The Triton kernels behind ``fused.py``: a program goes through whole rows, read once.

    y = (n ⊙ w + b) ⊙ u      da = r (dn − mean(dn) − n · mean(dn ⊙ n))

with r = 1/√(variance + ε), n = (a − mean) r and dn = dy ⊙ u · w. The random bits of an element
depend on the seed, its row and its column only, so the backward pass draws the same ones.

Legend: N rows, D width.
"""

# Kernels are not Python: their parameters have no Python types, and triton.jit has none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LENGTHS = ("num_rows", "drop")


@triton.jit
def _bits(seed, row, column):
    """Three numbers of 16 bits per element: for u, for a and for the product."""
    seed_value = tl.load(seed)
    zero = row[:, None] * 0 + column[None, :] * 0
    for_u, for_a, for_y, _ = tl.philox(
        seed_value, column[None, :] + zero, row[:, None] + zero, zero, zero
    )
    return (for_u >> 16).to(tl.int32), (for_a >> 16).to(tl.int32), (for_y >> 16).to(tl.int32)


@triton.jit
def _normed(x, inside, eps, D: tl.constexpr):
    """n and r of rows that are 0 outside ``inside``."""
    mean = tl.sum(x, axis=1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / D + eps)
    return centred * rstd[:, None], rstd


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    a,
    u,
    weight,
    bias,
    out,
    seed,
    a_row,
    u_row,
    num_rows,
    eps,
    drop,
    scale,
    D: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CONCAT: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    present = column < D
    inside = (row < num_rows)[:, None] & present[None, :]
    at = row.to(tl.int64)[:, None]
    x = tl.load(a + at * a_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(u + at * u_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    y, _ = _normed(x, inside, eps, D)
    if WEIGHT:
        y *= tl.load(weight + column, mask=present, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        y += tl.load(bias + column, mask=present, other=0.0).to(tl.float32)[None, :]
    y *= gate
    if DROPOUT:
        for_u, for_a, for_y = _bits(seed, row, column)
        gate = tl.where(for_u >= drop, gate * scale, 0.0)
        x = tl.where(for_a >= drop, x * scale, 0.0)
        y = tl.where(for_y >= drop, y * scale, 0.0)
    if CONCAT:
        to = out + at * (3 * D) + column[None, :]
        tl.store(to, gate, mask=inside)
        tl.store(to + D, x, mask=inside)
        tl.store(to + 2 * D, y, mask=inside)
    else:
        tl.store(out + at * D + column[None, :], y, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def backward(
    a,
    u,
    weight,
    bias,
    grad_out,
    grad_a,
    grad_u,
    grad_weight,
    grad_bias,
    seed,
    a_row,
    u_row,
    num_rows,
    eps,
    drop,
    scale,
    D: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CONCAT: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Every program's sums for ``grad_weight`` and ``grad_bias`` are a row of their own."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_D)
    present = column < D
    scaling = tl.full((BLOCK_D,), 1.0, dtype=tl.float32)
    shift = tl.zeros((BLOCK_D,), dtype=tl.float32)
    if WEIGHT:
        scaling = tl.load(weight + column, mask=present, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=present, other=0.0).to(tl.float32)
    sum_weight = tl.zeros((BLOCK_D,), dtype=tl.float32)
    sum_bias = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for first in range(program * BLOCK_N, num_rows, tl.num_programs(0) * BLOCK_N):
        row = first + tl.arange(0, BLOCK_N)
        inside = (row < num_rows)[:, None] & present[None, :]
        at = row.to(tl.int64)[:, None]
        x = tl.load(a + at * a_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(u + at * u_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        n, rstd = _normed(x, inside, eps, D)
        if CONCAT:
            source = grad_out + at * (3 * D) + column[None, :]
            direct_u = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            direct_a = tl.load(source + D, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(source + 2 * D, mask=inside, other=0.0).to(tl.float32)
        else:
            source = grad_out + at * D + column[None, :]
            grad = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            for_u, for_a, for_y = _bits(seed, row, column)
            grad = tl.where(for_y >= drop, grad * scale, 0.0)
            if CONCAT:
                direct_u = tl.where(for_u >= drop, direct_u * scale, 0.0)
                direct_a = tl.where(for_a >= drop, direct_a * scale, 0.0)
        to_u = grad * (n * scaling[None, :] + shift[None, :])
        pull = grad * gate
        sum_weight += tl.sum(pull * n, axis=0)
        sum_bias += tl.sum(pull, axis=0)
        pull *= scaling[None, :]
        along = tl.sum(pull * n, axis=1) / D
        to_a = (pull - (tl.sum(pull, axis=1) / D)[:, None] - n * along[:, None]) * rstd[:, None]
        if CONCAT:
            to_u += direct_u
            to_a += direct_a
        tl.store(grad_u + at * D + column[None, :], to_u, mask=inside)
        tl.store(grad_a + at * D + column[None, :], to_a, mask=inside)
    if WEIGHT:
        tl.store(grad_weight + program.to(tl.int64) * D + column, sum_weight, mask=present)
    if BIAS:
        tl.store(grad_bias + program.to(tl.int64) * D + column, sum_bias, mask=present)

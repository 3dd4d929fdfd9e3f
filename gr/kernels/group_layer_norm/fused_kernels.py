"""The Triton kernels behind ``fused.py``. ``forward`` and ``backward`` own whole rows.

    y = n ⊙ γ[g] + β[g],  n = (x − mean) r      dx = r (dn − mean(dn) − n · mean(dn ⊙ n))

with r = 1/√(variance + ε) and dn = dy ⊙ γ[g]. ``backward_tables`` owns a group and a run of rows,
of which it reads those of its group only: dγ[g] = Σ dy ⊙ n, dβ[g] = Σ dy.

Legend: N rows, D width, G groups.
"""

# Kernels are not Python: their parameters have no Python types, and triton.jit has none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LENGTHS = ("num_rows", "num_groups")


@triton.jit
def _standardized(x, inside, eps, D: tl.constexpr):
    """n and r of rows that are 0 outside ``inside``."""
    mean = tl.sum(x, axis=1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / D + eps)
    return centred * rstd[:, None], rstd


@triton.jit
def _of_group(table, group, num_groups, column, inside, D: tl.constexpr):
    """Rows of a table, NaN for a group that it does not have."""
    known = inside & ((group >= 0) & (group < num_groups))[:, None]
    at = table + group[:, None] * D + column[None, :]
    return tl.load(at, mask=known, other=float("nan")).to(tl.float32)


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    x_in,
    group_in,
    weight,
    bias,
    out,
    x_row,
    num_rows,
    num_groups,
    eps,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    inside = (row < num_rows)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None]
    x = tl.load(x_in + at * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    group = tl.load(group_in + row, mask=row < num_rows, other=-1)
    n, _ = _standardized(x, inside, eps, D)
    y = n * _of_group(weight, group, num_groups, column, inside, D)
    y += _of_group(bias, group, num_groups, column, inside, D)
    tl.store(out + at * D + column[None, :], y, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def backward(
    x_in,
    group_in,
    weight,
    grad_out,
    grad_x,
    x_row,
    num_rows,
    num_groups,
    eps,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    inside = (row < num_rows)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None]
    x = tl.load(x_in + at * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + at * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    group = tl.load(group_in + row, mask=row < num_rows, other=-1)
    n, rstd = _standardized(x, inside, eps, D)
    scaling = _of_group(weight, group, num_groups, column, inside, D)
    pull = tl.where(inside, grad * scaling, 0.0)
    along = tl.sum(pull * n, axis=1) / D
    to_x = (pull - (tl.sum(pull, axis=1) / D)[:, None] - n * along[:, None]) * rstd[:, None]
    tl.store(grad_x + at * D + column[None, :], to_x, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def backward_tables(
    x_in,
    group_in,
    grad_out,
    grad_weight,
    grad_bias,
    x_row,
    num_rows,
    num_groups,
    eps,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The first program index names the run of rows, the second the group."""
    run, mine = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    present = column < D
    sum_weight = tl.zeros((BLOCK_D,), dtype=tl.float32)
    sum_bias = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for first in range(run * BLOCK_N, num_rows, tl.num_programs(0) * BLOCK_N):
        row = first + tl.arange(0, BLOCK_N)
        group = tl.load(group_in + row, mask=row < num_rows, other=-1)
        inside = (group == mine)[:, None] & present[None, :]
        at = row.to(tl.int64)[:, None]
        x = tl.load(x_in + at * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + at * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
        n, _ = _standardized(x, inside, eps, D)
        sum_weight += tl.sum(grad * n, axis=0)
        sum_bias += tl.sum(grad, axis=0)
    to = (run.to(tl.int64) * num_groups + mine) * D + column
    tl.store(grad_weight + to, sum_weight, mask=present)
    tl.store(grad_bias + to, sum_bias, mask=present)

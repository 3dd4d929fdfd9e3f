"""The Triton kernels behind ``fused.py``. No logit leaves its tile.

``forward`` and ``backward_hidden`` own a tile of targets and go through the rows; ``backward_rows``
owns a tile of rows and goes through the targets. Legend: t targets and r rows of a tile, D width.

    s = x wᵀ + b,  −inf where the row is the target itself and the target is scored elsewhere
    lse = ln Σ exp(s)        d = g (exp(s − lse) − [own])        dx = d w    dw = dᵀ x    db = Σ d
"""

# Kernels are not Python: their parameters have no Python types, and triton.jit has none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LENGTHS = ("num_targets", "num_rows")


@triton.jit
def _block(matrix, row, count, start, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a contiguous matrix [count, D], columns from ``start``; 0 outside."""
    column = start + tl.arange(0, BLOCK_D)[None, :]
    at = matrix + row.to(tl.int64)[:, None] * D + column
    return tl.load(at, mask=(row < count)[:, None] & (column < D), other=0.0)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    # The interpreter has no product of two bfloat16; the product of two is exact in float32.
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc=total, input_precision=PRECISION)


@triton.jit
def _scores(
    hidden,
    rows,
    bias,
    row_id,
    target,
    row,
    num_targets,
    num_rows,
    wanted,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Scores [t, r], and where a row is the target."""
    score = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        x = _block(hidden, target, num_targets, start, D, BLOCK_D)
        w = _block(rows, row, num_rows, start, D, BLOCK_D)
        score = _dot(x, tl.trans(w), score, PRECISION, WIDE)
    inside = row < num_rows
    if BIAS:
        score += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    name = row.to(tl.int64)
    if SAMPLED:
        name = tl.load(row_id + row, mask=inside, other=-1)
    own = (name[None, :] == wanted[:, None]) & inside[None, :]
    hidden_row = own | ~inside[None, :] if SAMPLED else ~inside[None, :]
    return tl.where(hidden_row, -float("inf"), score), own


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    hidden,
    rows,
    bias,
    row_id,
    target_id,
    positive,
    lse_out,
    own_out,
    num_targets,
    num_rows,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    target = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    present = target < num_targets
    wanted = tl.load(target_id + target, mask=present, other=-2)
    own_score = tl.zeros((BLOCK_T,), dtype=tl.float32)
    highest = tl.full((BLOCK_T,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    if SAMPLED:
        own_score = tl.load(positive + target, mask=present, other=0.0).to(tl.float32)
        highest, total = own_score, total + 1.0
    for first in range(0, num_rows, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        score, own = _scores(
            hidden,
            rows,
            bias,
            row_id,
            target,
            row,
            num_targets,
            num_rows,
            wanted,
            D,
            BIAS,
            SAMPLED,
            BLOCK_T,
            BLOCK_R,
            BLOCK_D,
            PRECISION,
            WIDE,
        )
        if not SAMPLED:
            own_score += tl.sum(tl.where(own, score, 0.0), axis=1)
        # Finite from the first tile on: the table's first row competes, or the positive does.
        higher = tl.maximum(highest, tl.max(score, axis=1))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(score - higher[:, None]), axis=1)
        highest = higher
    tl.store(lse_out + target, highest + tl.log(total), mask=present)
    tl.store(own_out + target, own_score, mask=present)


@triton.jit
def _pull(score, own, lse, grad, SAMPLED: tl.constexpr):
    """d loss / d score times the upstream gradient, [t, r]."""
    p = tl.exp(score - lse[:, None])
    if not SAMPLED:
        p -= tl.where(own, 1.0, 0.0)
    return p * grad[:, None]


@triton.jit(do_not_specialize=LENGTHS)
def backward_hidden(
    hidden,
    rows,
    bias,
    row_id,
    target_id,
    lse_in,
    grad_in,
    grad_hidden,
    num_targets,
    num_rows,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Columns of ``grad_hidden`` that the second program index names."""
    target = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = tl.program_id(1) * BLOCK_D
    present = target < num_targets
    wanted = tl.load(target_id + target, mask=present, other=-2)
    lse = tl.load(lse_in + target, mask=present, other=0.0)
    grad = tl.load(grad_in + target, mask=present, other=0.0)
    total = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for first in range(0, num_rows, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        score, own = _scores(
            hidden,
            rows,
            bias,
            row_id,
            target,
            row,
            num_targets,
            num_rows,
            wanted,
            D,
            BIAS,
            SAMPLED,
            BLOCK_T,
            BLOCK_R,
            BLOCK_D,
            PRECISION,
            WIDE,
        )
        pull = _pull(score, own, lse, grad, SAMPLED)
        w = _block(rows, row, num_rows, mine, D, BLOCK_D)
        total = _dot(pull.to(w.dtype), w, total, PRECISION, WIDE)
    column = mine + tl.arange(0, BLOCK_D)[None, :]
    at = grad_hidden + target.to(tl.int64)[:, None] * D + column
    keep = present[:, None] & (column < D)
    tl.store(at, total.to(grad_hidden.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=LENGTHS)
def backward_rows(
    hidden,
    rows,
    bias,
    row_id,
    target_id,
    lse_in,
    grad_in,
    grad_rows,
    grad_bias,
    num_targets,
    num_rows,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Columns of ``grad_rows`` that the second program index names, and the bias with the first."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mine = tl.program_id(1) * BLOCK_D
    total = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    total_bias = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for first in range(0, num_targets, BLOCK_T):
        target = first + tl.arange(0, BLOCK_T)
        present = target < num_targets
        wanted = tl.load(target_id + target, mask=present, other=-2)
        lse = tl.load(lse_in + target, mask=present, other=0.0)
        grad = tl.load(grad_in + target, mask=present, other=0.0)
        score, own = _scores(
            hidden,
            rows,
            bias,
            row_id,
            target,
            row,
            num_targets,
            num_rows,
            wanted,
            D,
            BIAS,
            SAMPLED,
            BLOCK_T,
            BLOCK_R,
            BLOCK_D,
            PRECISION,
            WIDE,
        )
        pull = _pull(score, own, lse, grad, SAMPLED)
        x = _block(hidden, target, num_targets, mine, D, BLOCK_D)
        total = _dot(tl.trans(pull).to(x.dtype), x, total, PRECISION, WIDE)
        total_bias += tl.sum(pull, axis=0)
    column = mine + tl.arange(0, BLOCK_D)[None, :]
    inside = row < num_rows
    at = grad_rows + row.to(tl.int64)[:, None] * D + column
    tl.store(at, total.to(grad_rows.dtype.element_ty), mask=inside[:, None] & (column < D))
    if BIAS:
        tl.store(grad_bias + row, total_bias, mask=inside & (mine == 0))

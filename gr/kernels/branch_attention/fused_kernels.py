"""The Triton kernels behind ``fused.py``.

``forward`` and ``backward_nodes`` own a tile of nodes of one head: they go through the tiles of the
prefix and then through the L ancestors of every node, whose rows they gather. ``backward_prefix``
owns a tile of prefix keys of one key head and goes through all nodes of the R heads that share it.

    softmax:  p = exp(s − l)      ds = p (do vᵀ − Σ do out)
    silu:     p = SiLU(s) / n     ds = SiLU'(s) do vᵀ / n
    dq = α ds k        dk = α dsᵀ q        dv = pᵀ do

Padding of the prefix is never loaded into a tile.
"""

# Kernels are not Python: their parameters have no Python types, and triton.jit has none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# Lengths change from batch to batch; a kernel compiled for one serves the others.
LENGTHS = ("num_queries", "num_prefix", "num_nodes", "ancestors_row")


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    # The interpreter has no product of two bfloat16; the product of two is exact in float32.
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc=total, input_precision=PRECISION)


@triton.jit
def load_rows(matrix, token_stride, token, keep, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``token`` of a matrix [N, SIZE], 0 where not kept."""
    column = tl.arange(0, BLOCK)[None, :]
    at = matrix + token.to(tl.int64)[:, None] * token_stride + column
    return tl.load(at, mask=keep[:, None] & (column < SIZE), other=0.0)


@triton.jit
def store_rows(matrix, token_stride, token, keep, value, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    at = matrix + token.to(tl.int64)[:, None] * token_stride + column
    tl.store(at, value.to(matrix.dtype.element_ty), mask=keep[:, None] & (column < SIZE))


@triton.jit
def _add_rows(matrix, token, keep, value, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Add to rows of a contiguous float32 matrix; others may add to the same rows."""
    column = tl.arange(0, BLOCK)[None, :]
    at = matrix + token.to(tl.int64)[:, None] * SIZE + column
    tl.atomic_add(at, value, mask=keep[:, None] & (column < SIZE), sem="relaxed")


@triton.jit
def softmax_step(top, mass, score, seen):
    """Weights of one more tile of scores, and what the sums so far are multiplied by."""
    score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # −inf − −inf is no number: who has seen nothing yet measures from 0.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp(top - base)
    weight = tl.exp(score - base[:, None])
    return new_top, mass * shrink + tl.sum(weight, 1), weight, shrink


@triton.jit
def softmax_end(top, mass):
    """What to divide by, and the log-sum-exp; 1 and 0 for who has seen nothing."""
    empty = mass == 0
    divisor = tl.where(empty, 1.0, mass)
    return divisor, tl.where(empty, 0.0, top + tl.log(divisor))


@triton.jit
def _weights(score, seen, lse, change, mean, norm, SOFTMAX: tl.constexpr):
    """p and ds of scores; ``change`` is do vᵀ."""
    if SOFTMAX:
        weight = tl.where(seen, tl.exp(score - lse), 0.0)
        return weight, weight * (change - mean)
    gate = 1.0 / (1.0 + tl.exp(-score))
    weight = score * gate
    slope = gate + weight * (1.0 - gate)
    return tl.where(seen, weight / norm, 0.0), tl.where(seen, slope * change / norm, 0.0)


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q,
    k,
    v,
    k_nodes,
    v_nodes,
    out,
    lse,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    k_nodes_row,
    k_nodes_head,
    k_nodes_token,
    v_nodes_row,
    v_nodes_head,
    v_nodes_token,
    out_row,
    out_head,
    out_token,
    ancestors,
    ancestors_row,
    valid,
    heads,
    num_queries,
    num_prefix,
    num_nodes,
    scale,
    norm,
    SOFTMAX: tl.constexpr,
    VALID: tl.constexpr,
    REPEAT: tl.constexpr,
    LINE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    blocks = tl.cdiv(num_queries, TILE)
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    group = head // REPEAT
    q += row * q_row + head * q_head
    k += row * k_row + group * k_head
    v += row * v_row + group * v_head
    k_nodes += row * k_nodes_row + group * k_nodes_head
    v_nodes += row * v_nodes_row + group * v_nodes_head
    valid += row * num_prefix
    node = (tl.program_id(0) % blocks) * TILE + tl.arange(0, TILE)
    inside = node < num_queries
    ancestors += row * ancestors_row + node.to(tl.int64) * LINE

    q_tile = load_rows(q, q_token, node, inside, SIZE, BLOCK_SIZE)
    total = tl.zeros([TILE, BLOCK_VALUE], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, num_prefix, TILE):
        key = start + tl.arange(0, TILE)
        seen = key < num_prefix
        if VALID:
            seen = tl.load(valid + key, mask=seen, other=0) != 0
        k_tile = load_rows(k, k_token, key, seen, SIZE, BLOCK_SIZE)
        v_tile = load_rows(v, v_token, key, seen, VALUE_SIZE, BLOCK_VALUE)
        zero = tl.zeros([TILE, TILE], tl.float32)
        score = dot(q_tile, tl.trans(k_tile), zero, PRECISION, WIDE) * scale
        if SOFTMAX:
            top, mass, weight, shrink = softmax_step(top, mass, score, seen[None, :])
            total = total * shrink[:, None]
        else:
            weight = score / (1.0 + tl.exp(-score))
            weight = tl.where(seen[None, :], weight, 0.0)
        total = dot(weight.to(v_tile.dtype), v_tile, total, PRECISION, WIDE)

    q_wide = q_tile.to(tl.float32)
    for place in range(0, LINE):
        parent = tl.load(ancestors + place, mask=inside, other=-1)
        seen = parent >= 0
        k_own = load_rows(k_nodes, k_nodes_token, parent, seen, SIZE, BLOCK_SIZE).to(tl.float32)
        v_own = load_rows(v_nodes, v_nodes_token, parent, seen, VALUE_SIZE, BLOCK_VALUE)
        score = tl.sum(q_wide * k_own, 1)[:, None] * scale
        if SOFTMAX:
            top, mass, weight, shrink = softmax_step(top, mass, score, seen[:, None])
            total = total * shrink[:, None]
        else:
            # An ancestor that is none is loaded as 0, which SiLU takes to 0.
            weight = score / (1.0 + tl.exp(-score))
        total += weight * v_own.to(tl.float32)
    if SOFTMAX:
        norm, length = softmax_end(top, mass)
        tl.store(lse + (row * heads + head) * num_queries + node, length, mask=inside)
        total = total / norm[:, None]
    else:
        total = total / norm
    out += row * out_row + head * out_head
    store_rows(out, out_token, node, inside, total, VALUE_SIZE, BLOCK_VALUE)


@triton.jit(do_not_specialize=LENGTHS)
def backward_nodes(
    q,
    k,
    v,
    k_nodes,
    v_nodes,
    out,
    grad,
    lse,
    mean,
    grad_q,
    grad_k_nodes,
    grad_v_nodes,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    k_nodes_row,
    k_nodes_head,
    k_nodes_token,
    v_nodes_row,
    v_nodes_head,
    v_nodes_token,
    out_row,
    out_head,
    out_token,
    grad_row,
    grad_head,
    grad_token,
    grad_q_row,
    grad_q_head,
    grad_q_token,
    ancestors,
    ancestors_row,
    valid,
    heads,
    num_queries,
    num_prefix,
    num_nodes,
    scale,
    norm,
    SOFTMAX: tl.constexpr,
    VALID: tl.constexpr,
    REPEAT: tl.constexpr,
    LINE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dq, Σ do out for the kernel after it, and (float32, added to) the gradients of the nodes."""
    blocks = tl.cdiv(num_queries, TILE)
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    group = head // REPEAT
    q += row * q_row + head * q_head
    k += row * k_row + group * k_head
    v += row * v_row + group * v_head
    k_nodes += row * k_nodes_row + group * k_nodes_head
    v_nodes += row * v_nodes_row + group * v_nodes_head
    out += row * out_row + head * out_head
    grad += row * grad_row + head * grad_head
    first = (row * (heads // REPEAT) + group) * num_nodes
    grad_k_nodes += first * SIZE
    grad_v_nodes += first * VALUE_SIZE
    valid += row * num_prefix
    node = (tl.program_id(0) % blocks) * TILE + tl.arange(0, TILE)
    inside = node < num_queries
    ancestors += row * ancestors_row + node.to(tl.int64) * LINE
    at = (row * heads + head) * num_queries + node

    q_tile = load_rows(q, q_token, node, inside, SIZE, BLOCK_SIZE)
    grad_tile = load_rows(grad, grad_token, node, inside, VALUE_SIZE, BLOCK_VALUE)
    grad_wide = grad_tile.to(tl.float32)
    length = tl.zeros([TILE], tl.float32)
    average = length
    if SOFTMAX:
        length = tl.load(lse + at, mask=inside, other=0.0)
        out_tile = load_rows(out, out_token, node, inside, VALUE_SIZE, BLOCK_VALUE)
        average = tl.sum(grad_wide * out_tile.to(tl.float32), 1)
        tl.store(mean + at, average, mask=inside)
    total = tl.zeros([TILE, BLOCK_SIZE], tl.float32)
    for start in range(0, num_prefix, TILE):
        key = start + tl.arange(0, TILE)
        seen = key < num_prefix
        if VALID:
            seen = tl.load(valid + key, mask=seen, other=0) != 0
        k_tile = load_rows(k, k_token, key, seen, SIZE, BLOCK_SIZE)
        v_tile = load_rows(v, v_token, key, seen, VALUE_SIZE, BLOCK_VALUE)
        zero = tl.zeros([TILE, TILE], tl.float32)
        score = dot(q_tile, tl.trans(k_tile), zero, PRECISION, WIDE) * scale
        change = dot(grad_tile, tl.trans(v_tile), zero, PRECISION, WIDE)
        _, change = _weights(
            score, seen[None, :], length[:, None], change, average[:, None], norm, SOFTMAX
        )
        total = dot(change.to(k_tile.dtype), k_tile, total, PRECISION, WIDE)

    q_wide = q_tile.to(tl.float32)
    for place in range(0, LINE):
        parent = tl.load(ancestors + place, mask=inside, other=-1)
        seen = parent >= 0
        k_own = load_rows(k_nodes, k_nodes_token, parent, seen, SIZE, BLOCK_SIZE).to(tl.float32)
        v_own = load_rows(v_nodes, v_nodes_token, parent, seen, VALUE_SIZE, BLOCK_VALUE)
        score = tl.sum(q_wide * k_own, 1) * scale
        change = tl.sum(grad_wide * v_own.to(tl.float32), 1)
        weight, change = _weights(score, seen, length, change, average, norm, SOFTMAX)
        total += change[:, None] * k_own
        change = change * scale
        _add_rows(grad_k_nodes, parent, seen, change[:, None] * q_wide, SIZE, BLOCK_SIZE)
        _add_rows(grad_v_nodes, parent, seen, weight[:, None] * grad_wide, VALUE_SIZE, BLOCK_VALUE)
    grad_q += row * grad_q_row + head * grad_q_head
    store_rows(grad_q, grad_q_token, node, inside, total * scale, SIZE, BLOCK_SIZE)


@triton.jit(do_not_specialize=LENGTHS)
def backward_prefix(
    q,
    k,
    v,
    grad,
    lse,
    mean,
    grad_k,
    grad_v,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    grad_row,
    grad_head,
    grad_token,
    grad_k_row,
    grad_k_head,
    grad_k_token,
    grad_v_row,
    grad_v_head,
    grad_v_token,
    valid,
    heads,
    num_queries,
    num_prefix,
    scale,
    norm,
    SOFTMAX: tl.constexpr,
    VALID: tl.constexpr,
    REPEAT: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dk and dv of the prefix."""
    blocks = tl.cdiv(num_prefix, TILE)
    groups = heads // REPEAT
    row = (tl.program_id(0) // blocks // groups).to(tl.int64)
    group = (tl.program_id(0) // blocks % groups).to(tl.int64)
    k += row * k_row + group * k_head
    v += row * v_row + group * v_head
    key = (tl.program_id(0) % blocks) * TILE + tl.arange(0, TILE)
    key_inside = key < num_prefix
    seen = key_inside
    if VALID:
        seen = tl.load(valid + row * num_prefix + key, mask=seen, other=0) != 0
    k_tile = load_rows(k, k_token, key, seen, SIZE, BLOCK_SIZE)
    v_tile = load_rows(v, v_token, key, seen, VALUE_SIZE, BLOCK_VALUE)
    total_k = tl.zeros([TILE, BLOCK_SIZE], tl.float32)
    total_v = tl.zeros([TILE, BLOCK_VALUE], tl.float32)
    num_tiles = tl.cdiv(num_queries, TILE)
    for number in range(0, REPEAT * num_tiles):
        head = group * REPEAT + number // num_tiles
        node = (number % num_tiles) * TILE + tl.arange(0, TILE)
        inside = node < num_queries
        q_tile = load_rows(q + row * q_row + head * q_head, q_token, node, inside, SIZE, BLOCK_SIZE)
        grad_tile = load_rows(
            grad + row * grad_row + head * grad_head,
            grad_token,
            node,
            inside,
            VALUE_SIZE,
            BLOCK_VALUE,
        )
        length = tl.zeros([TILE], tl.float32)
        average = length
        if SOFTMAX:
            at = (row * heads + head) * num_queries + node
            length = tl.load(lse + at, mask=inside, other=0.0)
            average = tl.load(mean + at, mask=inside, other=0.0)
        zero = tl.zeros([TILE, TILE], tl.float32)
        score = dot(q_tile, tl.trans(k_tile), zero, PRECISION, WIDE) * scale
        change = dot(grad_tile, tl.trans(v_tile), zero, PRECISION, WIDE)
        pair = inside[:, None] & seen[None, :]
        weight, change = _weights(
            score, pair, length[:, None], change, average[:, None], norm, SOFTMAX
        )
        total_v = dot(tl.trans(weight.to(grad_tile.dtype)), grad_tile, total_v, PRECISION, WIDE)
        total_k = dot(tl.trans(change.to(q_tile.dtype)), q_tile, total_k, PRECISION, WIDE)
    grad_k += row * grad_k_row + group * grad_k_head
    grad_v += row * grad_v_row + group * grad_v_head
    store_rows(grad_k, grad_k_token, key, key_inside, total_k * scale, SIZE, BLOCK_SIZE)
    store_rows(grad_v, grad_v_token, key, key_inside, total_v, VALUE_SIZE, BLOCK_VALUE)

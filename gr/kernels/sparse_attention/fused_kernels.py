"""The Triton kernels behind ``fused.py``: blocks that hold no visible pair are never visited.

``forward`` and ``backward_queries`` own a tile of queries of one head and go through the tiles of
its sinks and of its window. ``backward_keys`` owns a tile of keys of one key head and goes through
the queries that may see it: those of a window behind it, or all of them if it holds a sink; and
that for each of the heads that share it.

    p = exp(s − l)    ds = p (do vᵀ − Σ do out)    dq = α ds k    dk = α dsᵀ q    dv = pᵀ do

Padding is never loaded into a tile.
"""

# Kernels are not Python: their parameters have no Python types, and triton.jit has none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gr.kernels.branch_attention.fused_kernels import (
    dot,
    load_rows,
    softmax_end,
    softmax_step,
    store_rows,
)

# Lengths change from batch to batch; a kernel compiled for one serves the others.
LENGTHS = ("num_queries", "num_keys", "window", "sinks")


@triton.jit
def _valid(valid, token, count, VALID: tl.constexpr):
    inside = (token >= 0) & (token < count)
    if VALID:
        inside = tl.load(valid + token, mask=inside, other=0) != 0
    return inside


@triton.jit
def _visible(own, own_valid, key, key_valid, window, last_sink):
    """``SparseMask`` for a tile of context queries and keys; ``own`` are the queries' columns."""
    back = own[:, None] - key[None, :]
    seen = (back >= 0) & ((back < window) | (key[None, :] < last_sink))
    return seen & own_valid[:, None] & key_valid[None, :]


@triton.jit
def _key_tiles(start, num_keys, window, first, sinks, TILE: tl.constexpr):
    """First tile with sinks, how many of those before the window, first and last of the window."""
    low = tl.maximum(start - window + 1, 0) // TILE
    high = tl.cdiv(tl.minimum(start + TILE, num_keys), TILE)
    sink_low = first // TILE
    sink_high = tl.minimum(tl.cdiv(first + sinks, TILE), low)
    count = tl.maximum(sink_high - sink_low, 0)
    return sink_low, tl.where(sinks > 0, count, 0), low, high


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q,
    k,
    v,
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
    out_row,
    out_head,
    out_token,
    valid,
    first_token,
    heads,
    num_queries,
    num_keys,
    window,
    sinks,
    scale,
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
    blocks = tl.cdiv(num_queries, TILE)
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    q += row * q_row + head * q_head
    k += row * k_row + head // REPEAT * k_head
    v += row * v_row + head // REPEAT * v_head
    valid += row * num_keys
    first = tl.load(first_token + row)
    shift = num_keys - num_queries
    start = (tl.program_id(0) % blocks) * TILE
    query = start + tl.arange(0, TILE)
    own_valid = _valid(valid, query + shift, num_keys, VALID)
    q_tile = load_rows(q, q_token, query, own_valid, SIZE, BLOCK_SIZE)
    total = tl.zeros([TILE, BLOCK_VALUE], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    sink_low, count, low, high = _key_tiles(start + shift, num_keys, window, first, sinks, TILE)
    for number in range(0, count + high - low):
        tile = tl.where(number < count, sink_low + number, low + number - count)
        key = tile * TILE + tl.arange(0, TILE)
        key_valid = _valid(valid, key, num_keys, VALID)
        k_tile = load_rows(k, k_token, key, key_valid, SIZE, BLOCK_SIZE)
        v_tile = load_rows(v, v_token, key, key_valid, VALUE_SIZE, BLOCK_VALUE)
        zero = tl.zeros([TILE, TILE], tl.float32)
        score = dot(q_tile, tl.trans(k_tile), zero, PRECISION, WIDE) * scale
        seen = _visible(query + shift, own_valid, key, key_valid, window, first + sinks)
        top, mass, weight, shrink = softmax_step(top, mass, score, seen)
        total = dot(weight.to(v_tile.dtype), v_tile, total * shrink[:, None], PRECISION, WIDE)
    divisor, length = softmax_end(top, mass)
    inside = query < num_queries
    tl.store(lse + (row * heads + head) * num_queries + query, length, mask=inside)
    out += row * out_row + head * out_head
    store_rows(out, out_token, query, inside, total / divisor[:, None], VALUE_SIZE, BLOCK_VALUE)


@triton.jit(do_not_specialize=LENGTHS)
def backward_queries(
    q,
    k,
    v,
    out,
    grad,
    lse,
    mean,
    grad_q,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    out_row,
    out_head,
    out_token,
    grad_row,
    grad_head,
    grad_token,
    grad_q_row,
    grad_q_head,
    grad_q_token,
    valid,
    first_token,
    heads,
    num_queries,
    num_keys,
    window,
    sinks,
    scale,
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
    """dq, and Σ do out for the kernel after it."""
    blocks = tl.cdiv(num_queries, TILE)
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    q += row * q_row + head * q_head
    k += row * k_row + head // REPEAT * k_head
    v += row * v_row + head // REPEAT * v_head
    out += row * out_row + head * out_head
    grad += row * grad_row + head * grad_head
    grad_q += row * grad_q_row + head * grad_q_head
    valid += row * num_keys
    first = tl.load(first_token + row)
    shift = num_keys - num_queries
    start = (tl.program_id(0) % blocks) * TILE
    query = start + tl.arange(0, TILE)
    inside = query < num_queries
    own_valid = _valid(valid, query + shift, num_keys, VALID)
    q_tile = load_rows(q, q_token, query, own_valid, SIZE, BLOCK_SIZE)
    out_tile = load_rows(out, out_token, query, own_valid, VALUE_SIZE, BLOCK_VALUE)
    grad_tile = load_rows(grad, grad_token, query, own_valid, VALUE_SIZE, BLOCK_VALUE)
    at = (row * heads + head) * num_queries + query
    length = tl.load(lse + at, mask=inside, other=0.0)
    average = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(mean + at, average, mask=inside)
    total = tl.zeros([TILE, BLOCK_SIZE], tl.float32)
    sink_low, count, low, high = _key_tiles(start + shift, num_keys, window, first, sinks, TILE)
    for number in range(0, count + high - low):
        tile = tl.where(number < count, sink_low + number, low + number - count)
        key = tile * TILE + tl.arange(0, TILE)
        key_valid = _valid(valid, key, num_keys, VALID)
        k_tile = load_rows(k, k_token, key, key_valid, SIZE, BLOCK_SIZE)
        v_tile = load_rows(v, v_token, key, key_valid, VALUE_SIZE, BLOCK_VALUE)
        zero = tl.zeros([TILE, TILE], tl.float32)
        score = dot(q_tile, tl.trans(k_tile), zero, PRECISION, WIDE) * scale
        change = dot(grad_tile, tl.trans(v_tile), zero, PRECISION, WIDE)
        seen = _visible(query + shift, own_valid, key, key_valid, window, first + sinks)
        weight = tl.where(seen, tl.exp(score - length[:, None]), 0.0)
        change = (weight * (change - average[:, None])).to(k_tile.dtype)
        total = dot(change, k_tile, total, PRECISION, WIDE)
    store_rows(grad_q, grad_q_token, query, inside, total * scale, SIZE, BLOCK_SIZE)


@triton.jit(do_not_specialize=LENGTHS)
def backward_keys(
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
    first_token,
    heads,
    num_queries,
    num_keys,
    window,
    sinks,
    scale,
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
    """dk and dv."""
    blocks = tl.cdiv(num_keys, TILE)
    groups = heads // REPEAT
    row = (tl.program_id(0) // blocks // groups).to(tl.int64)
    group = (tl.program_id(0) // blocks % groups).to(tl.int64)
    k += row * k_row + group * k_head
    v += row * v_row + group * v_head
    grad_k += row * grad_k_row + group * grad_k_head
    grad_v += row * grad_v_row + group * grad_v_head
    valid += row * num_keys
    first = tl.load(first_token + row)
    shift = num_keys - num_queries
    start = (tl.program_id(0) % blocks) * TILE
    key = start + tl.arange(0, TILE)
    key_valid = _valid(valid, key, num_keys, VALID)
    k_tile = load_rows(k, k_token, key, key_valid, SIZE, BLOCK_SIZE)
    v_tile = load_rows(v, v_token, key, key_valid, VALUE_SIZE, BLOCK_VALUE)
    total_k = tl.zeros([TILE, BLOCK_SIZE], tl.float32)
    total_v = tl.zeros([TILE, BLOCK_VALUE], tl.float32)
    has_sink = (start < first + sinks) & (start + TILE > first)
    end = tl.where(has_sink, num_keys, tl.minimum(start + TILE - 1 + window, num_keys))
    low = tl.maximum(start - shift, 0) // TILE
    each = tl.maximum(tl.cdiv(tl.maximum(end - shift, 0), TILE) - low, 0)
    for number in range(0, REPEAT * each):
        head = group * REPEAT + number // each
        query = (low + number % each) * TILE + tl.arange(0, TILE)
        own_valid = _valid(valid, query + shift, num_keys, VALID)
        q_tile = load_rows(
            q + row * q_row + head * q_head, q_token, query, own_valid, SIZE, BLOCK_SIZE
        )
        grad_tile = load_rows(
            grad + row * grad_row + head * grad_head,
            grad_token,
            query,
            own_valid,
            VALUE_SIZE,
            BLOCK_VALUE,
        )
        at = (row * heads + head) * num_queries + query
        length = tl.load(lse + at, mask=own_valid, other=0.0)
        average = tl.load(mean + at, mask=own_valid, other=0.0)
        zero = tl.zeros([TILE, TILE], tl.float32)
        score = dot(q_tile, tl.trans(k_tile), zero, PRECISION, WIDE) * scale
        change = dot(grad_tile, tl.trans(v_tile), zero, PRECISION, WIDE)
        seen = _visible(query + shift, own_valid, key, key_valid, window, first + sinks)
        weight = tl.where(seen, tl.exp(score - length[:, None]), 0.0)
        change = (weight * (change - average[:, None])).to(q_tile.dtype)
        total_v = dot(tl.trans(weight.to(grad_tile.dtype)), grad_tile, total_v, PRECISION, WIDE)
        total_k = dot(tl.trans(change), q_tile, total_k, PRECISION, WIDE)
    inside = key < num_keys
    store_rows(grad_k, grad_k_token, key, inside, total_k * scale, SIZE, BLOCK_SIZE)
    store_rows(grad_v, grad_v_token, key, inside, total_v, VALUE_SIZE, BLOCK_VALUE)

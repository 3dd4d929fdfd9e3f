"""The Triton kernels behind ``fused.py``: mask, distance and time bucket made where they are used.

A program owns one tile of queries (``forward``, ``backward_queries``) or of keys
(``backward_keys``) of one head of one row, and goes through the tiles listed for it.

    s = α q kᵀ + w_pos[distance] + w_time[bucket]        p = SiLU(s), 0 where not visible
    out = p v / n                                        ds = (do vᵀ) SiLU'(s), 0 where not visible
    dq = α ds k / n      dk = α dsᵀ q / n      dv = pᵀ do / n      dw[index] = Σ ds / n

Padding is never loaded into a tile. A padding query sees itself alone; that one term per row
("alone" below) is added beside the tiles.
"""

# Kernels are not Python: their parameters have no Python types, and triton.jit has none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from gr.kernels.hstu_attention.geometry import BUCKET_WIDTH

INVERSE_WIDTH = tl.constexpr(1 / BUCKET_WIDTH)
# Far more than the error of a float32 logarithm over a width, far less than a bucket.
MARGIN = tl.constexpr(1e-3)
# Lengths change from batch to batch; a kernel compiled for one serves the others.
LENGTHS = (
    "num_queries",
    "num_keys",
    "num_branch",
    "max_distance",
    "num_buckets",
    "window",
    "context",
    "copies",
    "branch_row",
    "branch_token",
)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    # The interpreter has no product of two bfloat16; the product of two is exact in float32.
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc=total, input_precision=PRECISION)


@triton.jit
def _load(matrix, token_stride, token, keep, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``token`` of a matrix [N, SIZE], 0 where not kept."""
    column = tl.arange(0, BLOCK)[None, :]
    at = matrix + token.to(tl.int64)[:, None] * token_stride + column
    return tl.load(at, mask=keep[:, None] & (column < SIZE), other=0.0)


@triton.jit
def _store(matrix, token_stride, token, keep, value, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    at = matrix + token.to(tl.int64)[:, None] * token_stride + column
    tl.store(at, value.to(matrix.dtype.element_ty), mask=keep[:, None] & (column < SIZE))


@triton.jit
def _tokens(valid, position, time, token, count, TIME: tl.constexpr):
    """Validity, position and time of some tokens; false and 0 past the end."""
    inside = (token >= 0) & (token < count)
    is_valid = tl.load(valid + token, mask=inside, other=0) != 0
    at = tl.load(position + token, mask=inside, other=0)
    when = at
    if TIME:
        when = tl.load(time + token, mask=inside, other=0)
    return inside, is_valid, at, when


@triton.jit
def _visible(
    query,
    key,
    query_valid,
    key_valid,
    query_position,
    key_position,
    branch,
    branch_token,
    num_queries,
    num_keys,
    num_branch,
    window,
    context,
    BRANCH: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """``Visibility`` for a tile of valid queries and keys."""
    own = query[:, None] + (num_keys - num_queries)
    itself = own == key[None, :]
    if BRANCH:
        node = key[None, :] - (num_keys - num_branch)
        inside = query_valid[:, None] & key_valid[None, :] & (node >= 0)
        at = branch + query.to(tl.int64)[:, None] * branch_token + node
        seen = (tl.load(at, mask=inside, other=0) != 0) | (node < 0)
    else:
        seen = own >= key[None, :]
    if WINDOW:
        seen = seen & (query_position[:, None] - key_position[None, :] < window)
    if CONTEXT:
        early = key_position[None, :] < context
        if BRANCH:
            early = early & (key[None, :] < num_keys - num_branch)
        seen = seen | early
    return (seen | itself) & query_valid[:, None] & key_valid[None, :]


@triton.jit
def _bias(
    difference,
    elapsed,
    position_table,
    time_table,
    starts,
    max_distance,
    num_buckets,
    POSITION: tl.constexpr,
    TIME: tl.constexpr,
):
    """The relative bias of pairs, and the two table entries that it was read from."""
    bias = tl.zeros(difference.shape, tl.float32)
    distance = tl.minimum(tl.maximum(difference, 0), max_distance - 1)
    bucket = distance
    if POSITION:
        bias += tl.load(position_table + distance).to(tl.float32)
    if TIME:
        seconds = tl.maximum(tl.abs(elapsed), 1)
        # At most one too many, and never too few; comparing integers then settles it.
        guess = (tl.log(seconds.to(tl.float32)) * INVERSE_WIDTH + MARGIN).to(tl.int32)
        bucket = tl.minimum(guess, num_buckets)
        bucket -= (seconds < tl.load(starts + bucket)).to(tl.int32)
        bias += tl.load(time_table + bucket).to(tl.float32)
    return bias, distance, bucket


@triton.jit
def _silu(score):
    """SiLU(s) and its slope σ(s) + SiLU(s) (1 − σ(s))."""
    gate = 1.0 / (1.0 + tl.exp(-score))
    weight = score * gate
    return weight, gate + weight * (1.0 - gate)


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q,
    k,
    v,
    out,
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
    position_table,
    time_table,
    starts,
    valid,
    query_position,
    key_position,
    query_time,
    key_time,
    branch,
    branch_row,
    branch_token,
    tiles,
    num_tiles,
    heads,
    num_queries,
    num_keys,
    num_branch,
    max_distance,
    num_buckets,
    window,
    context,
    scale,
    norm,
    POSITION: tl.constexpr,
    TIME: tl.constexpr,
    BRANCH: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXT: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    blocks = tl.cdiv(num_queries, TILE)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    valid += row * num_keys
    key_position += row * num_keys
    key_time += row * num_keys
    shift = num_keys - num_queries

    query = block * TILE + tl.arange(0, TILE)
    query_inside, query_valid, query_at, query_when = _tokens(
        valid + shift,
        query_position + row * num_queries,
        query_time + row * num_queries,
        query,
        num_queries,
        TIME,
    )
    q_tile = _load(q, q_token, query, query_valid, SIZE, BLOCK_SIZE)
    total = tl.zeros([TILE, BLOCK_VALUE], tl.float32)
    tiles += (row * blocks + block) * tl.cdiv(num_keys, TILE)
    for number in range(0, tl.load(num_tiles + row * blocks + block)):
        key = tl.load(tiles + number) * TILE + tl.arange(0, TILE)
        _, key_valid, key_at, key_when = _tokens(valid, key_position, key_time, key, num_keys, TIME)
        k_tile = _load(k, k_token, key, key_valid, SIZE, BLOCK_SIZE)
        v_tile = _load(v, v_token, key, key_valid, VALUE_SIZE, BLOCK_VALUE)
        bias, _, _ = _bias(
            query_at[:, None] - key_at[None, :],
            query_when[:, None] - key_when[None, :],
            position_table,
            time_table,
            starts,
            max_distance,
            num_buckets,
            POSITION,
            TIME,
        )
        product = _dot(
            q_tile, tl.trans(k_tile), tl.zeros([TILE, TILE], tl.float32), PRECISION, WIDE
        )
        weight, _ = _silu(product * scale + bias)
        seen = _visible(
            query,
            key,
            query_valid,
            key_valid,
            query_at,
            key_at,
            branch + row * branch_row,
            branch_token,
            num_queries,
            num_keys,
            num_branch,
            window,
            context,
            BRANCH,
            WINDOW,
            CONTEXT,
        )
        weight = tl.where(seen, weight, 0.0).to(v_tile.dtype)
        total = _dot(weight, v_tile, total, PRECISION, WIDE)

    alone = query_inside & (query_valid == 0)
    if tl.max(alone.to(tl.int32), 0) > 0:
        own = query + shift
        _, _, own_at, own_when = _tokens(valid, key_position, key_time, own, num_keys, TIME)
        bias, _, _ = _bias(
            query_at - own_at,
            query_when - own_when,
            position_table,
            time_table,
            starts,
            max_distance,
            num_buckets,
            POSITION,
            TIME,
        )
        q_own = _load(q, q_token, query, alone, SIZE, BLOCK_SIZE).to(tl.float32)
        k_own = _load(k, k_token, own, alone, SIZE, BLOCK_SIZE).to(tl.float32)
        v_own = _load(v, v_token, own, alone, VALUE_SIZE, BLOCK_VALUE).to(tl.float32)
        weight, _ = _silu(tl.sum(q_own * k_own, 1) * scale + bias)
        total += weight[:, None] * v_own
    out += row * out_row + head * out_head
    _store(out, out_token, query, query_inside, total / norm, VALUE_SIZE, BLOCK_VALUE)


@triton.jit(do_not_specialize=LENGTHS)
def backward_queries(
    q,
    k,
    v,
    out,
    grad_q,
    grad_position,
    grad_time,
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
    grad_q_row,
    grad_q_head,
    grad_q_token,
    position_table,
    time_table,
    starts,
    valid,
    query_position,
    key_position,
    query_time,
    key_time,
    branch,
    branch_row,
    branch_token,
    tiles,
    num_tiles,
    heads,
    num_queries,
    num_keys,
    num_branch,
    max_distance,
    num_buckets,
    window,
    context,
    copies,
    scale,
    norm,
    POSITION: tl.constexpr,
    TIME: tl.constexpr,
    GRAD_POSITION: tl.constexpr,
    GRAD_TIME: tl.constexpr,
    LANES: tl.constexpr,
    BRANCH: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXT: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dq and the tables. ``out`` is the gradient of the output."""
    blocks = tl.cdiv(num_queries, TILE)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    out += row * out_row + head * out_head
    valid += row * num_keys
    key_position += row * num_keys
    key_time += row * num_keys
    shift = num_keys - num_queries
    copy = (tl.program_id(0) % copies).to(tl.int64)
    grad_position += copy * max_distance
    grad_time += copy * LANES * (num_buckets + 1)

    query = block * TILE + tl.arange(0, TILE)
    query_inside, query_valid, query_at, query_when = _tokens(
        valid + shift,
        query_position + row * num_queries,
        query_time + row * num_queries,
        query,
        num_queries,
        TIME,
    )
    q_tile = _load(q, q_token, query, query_valid, SIZE, BLOCK_SIZE)
    grad = _load(out, out_token, query, query_valid, VALUE_SIZE, BLOCK_VALUE)
    total = tl.zeros([TILE, BLOCK_SIZE], tl.float32)
    tiles += (row * blocks + block) * tl.cdiv(num_keys, TILE)
    for number in range(0, tl.load(num_tiles + row * blocks + block)):
        key = tl.load(tiles + number) * TILE + tl.arange(0, TILE)
        _, key_valid, key_at, key_when = _tokens(valid, key_position, key_time, key, num_keys, TIME)
        k_tile = _load(k, k_token, key, key_valid, SIZE, BLOCK_SIZE)
        v_tile = _load(v, v_token, key, key_valid, VALUE_SIZE, BLOCK_VALUE)
        bias, distance, bucket = _bias(
            query_at[:, None] - key_at[None, :],
            query_when[:, None] - key_when[None, :],
            position_table,
            time_table,
            starts,
            max_distance,
            num_buckets,
            POSITION,
            TIME,
        )
        zero = tl.zeros([TILE, TILE], tl.float32)
        product = _dot(q_tile, tl.trans(k_tile), zero, PRECISION, WIDE)
        _, slope = _silu(product * scale + bias)
        seen = _visible(
            query,
            key,
            query_valid,
            key_valid,
            query_at,
            key_at,
            branch + row * branch_row,
            branch_token,
            num_queries,
            num_keys,
            num_branch,
            window,
            context,
            BRANCH,
            WINDOW,
            CONTEXT,
        )
        change = _dot(grad, tl.trans(v_tile), zero, PRECISION, WIDE)
        change = tl.where(seen, change * slope, 0.0)
        total = _dot(change.to(k_tile.dtype), k_tile, total, PRECISION, WIDE)
        if GRAD_POSITION:
            tl.atomic_add(grad_position + distance, change, mask=seen, sem="relaxed")
        if GRAD_TIME:
            # Neighbouring keys often share a bucket: they add to different copies of it.
            lane = (key % LANES)[None, :] * (num_buckets + 1)
            tl.atomic_add(grad_time + lane + bucket, change, mask=seen, sem="relaxed")

    alone = query_inside & (query_valid == 0)
    if tl.max(alone.to(tl.int32), 0) > 0:
        own = query + shift
        _, _, own_at, own_when = _tokens(valid, key_position, key_time, own, num_keys, TIME)
        bias, distance, bucket = _bias(
            query_at - own_at,
            query_when - own_when,
            position_table,
            time_table,
            starts,
            max_distance,
            num_buckets,
            POSITION,
            TIME,
        )
        grad_own = _load(out, out_token, query, alone, VALUE_SIZE, BLOCK_VALUE).to(tl.float32)
        # Nobody asked for this row: its gradients are 0 whatever its padding holds.
        alone = alone & (tl.max((grad_own != 0).to(tl.int32), 1) > 0)
        q_own = _load(q, q_token, query, alone, SIZE, BLOCK_SIZE).to(tl.float32)
        k_own = _load(k, k_token, own, alone, SIZE, BLOCK_SIZE).to(tl.float32)
        v_own = _load(v, v_token, own, alone, VALUE_SIZE, BLOCK_VALUE).to(tl.float32)
        _, slope = _silu(tl.sum(q_own * k_own, 1) * scale + bias)
        change = tl.sum(grad_own * v_own, 1) * slope
        total += change[:, None] * k_own
        if GRAD_POSITION:
            tl.atomic_add(grad_position + distance, change, mask=alone, sem="relaxed")
        if GRAD_TIME:
            tl.atomic_add(grad_time + bucket, change, mask=alone, sem="relaxed")
    grad_q += row * grad_q_row + head * grad_q_head
    total = total * (scale / norm)
    _store(grad_q, grad_q_token, query, query_inside, total, SIZE, BLOCK_SIZE)


@triton.jit(do_not_specialize=LENGTHS)
def backward_keys(
    q,
    k,
    v,
    out,
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
    out_row,
    out_head,
    out_token,
    grad_k_row,
    grad_k_head,
    grad_k_token,
    grad_v_row,
    grad_v_head,
    grad_v_token,
    position_table,
    time_table,
    starts,
    valid,
    query_position,
    key_position,
    query_time,
    key_time,
    branch,
    branch_row,
    branch_token,
    tiles,
    num_tiles,
    heads,
    num_queries,
    num_keys,
    num_branch,
    max_distance,
    num_buckets,
    window,
    context,
    scale,
    norm,
    POSITION: tl.constexpr,
    TIME: tl.constexpr,
    BRANCH: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXT: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dk and dv. ``out`` is the gradient of the output."""
    blocks = tl.cdiv(num_keys, TILE)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    out += row * out_row + head * out_head
    valid += row * num_keys
    query_position += row * num_queries
    query_time += row * num_queries
    shift = num_keys - num_queries

    key = block * TILE + tl.arange(0, TILE)
    key_inside, key_valid, key_at, key_when = _tokens(
        valid, key_position + row * num_keys, key_time + row * num_keys, key, num_keys, TIME
    )
    k_tile = _load(k, k_token, key, key_valid, SIZE, BLOCK_SIZE)
    v_tile = _load(v, v_token, key, key_valid, VALUE_SIZE, BLOCK_VALUE)
    total_k = tl.zeros([TILE, BLOCK_SIZE], tl.float32)
    total_v = tl.zeros([TILE, BLOCK_VALUE], tl.float32)
    tiles += (row * blocks + block) * tl.cdiv(num_queries, TILE)
    for number in range(0, tl.load(num_tiles + row * blocks + block)):
        query = tl.load(tiles + number) * TILE + tl.arange(0, TILE)
        _, query_valid, query_at, query_when = _tokens(
            valid + shift, query_position, query_time, query, num_queries, TIME
        )
        q_tile = _load(q, q_token, query, query_valid, SIZE, BLOCK_SIZE)
        grad = _load(out, out_token, query, query_valid, VALUE_SIZE, BLOCK_VALUE)
        bias, _, _ = _bias(
            query_at[:, None] - key_at[None, :],
            query_when[:, None] - key_when[None, :],
            position_table,
            time_table,
            starts,
            max_distance,
            num_buckets,
            POSITION,
            TIME,
        )
        zero = tl.zeros([TILE, TILE], tl.float32)
        product = _dot(q_tile, tl.trans(k_tile), zero, PRECISION, WIDE)
        weight, slope = _silu(product * scale + bias)
        seen = _visible(
            query,
            key,
            query_valid,
            key_valid,
            query_at,
            key_at,
            branch + row * branch_row,
            branch_token,
            num_queries,
            num_keys,
            num_branch,
            window,
            context,
            BRANCH,
            WINDOW,
            CONTEXT,
        )
        weight = tl.where(seen, weight, 0.0).to(grad.dtype)
        total_v = _dot(tl.trans(weight), grad, total_v, PRECISION, WIDE)
        change = _dot(grad, tl.trans(v_tile), zero, PRECISION, WIDE)
        change = tl.where(seen, change * slope, 0.0).to(q_tile.dtype)
        total_k = _dot(tl.trans(change), q_tile, total_k, PRECISION, WIDE)

    own = key - shift
    alone = key_inside & (key_valid == 0) & (own >= 0)
    if tl.max(alone.to(tl.int32), 0) > 0:
        _, _, own_at, own_when = _tokens(
            valid + shift, query_position, query_time, own, num_queries, TIME
        )
        bias, _, _ = _bias(
            own_at - key_at,
            own_when - key_when,
            position_table,
            time_table,
            starts,
            max_distance,
            num_buckets,
            POSITION,
            TIME,
        )
        grad_own = _load(out, out_token, own, alone, VALUE_SIZE, BLOCK_VALUE).to(tl.float32)
        alone = alone & (tl.max((grad_own != 0).to(tl.int32), 1) > 0)
        q_own = _load(q, q_token, own, alone, SIZE, BLOCK_SIZE).to(tl.float32)
        k_own = _load(k, k_token, key, alone, SIZE, BLOCK_SIZE).to(tl.float32)
        v_own = _load(v, v_token, key, alone, VALUE_SIZE, BLOCK_VALUE).to(tl.float32)
        weight, slope = _silu(tl.sum(q_own * k_own, 1) * scale + bias)
        change = tl.sum(grad_own * v_own, 1) * slope
        total_k += change[:, None] * q_own
        total_v += weight[:, None] * grad_own
    grad_k += row * grad_k_row + head * grad_k_head
    grad_v += row * grad_v_row + head * grad_v_head
    total_k = total_k * (scale / norm)
    _store(grad_k, grad_k_token, key, key_inside, total_k, SIZE, BLOCK_SIZE)
    _store(grad_v, grad_v_token, key, key_inside, total_v / norm, VALUE_SIZE, BLOCK_VALUE)

"""The Triton kernels behind ``fused.py``; the formulas are those of ``chunked.py``.

``states`` and ``state_gradients`` go along the chunks, one program for each row, head and slice of
e; ``outputs`` and ``gradients`` have one program for each row, head and chunk. Nothing is added
with atomics. Legend: C tokens of a chunk, d, e head sizes, T chunks; states are [B·H, T + 1, d, e],
the first before all chunks and the last after them.
"""

# Kernels are not Python: their parameters have no Python types, and triton.jit has none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LENGTHS = ("num_tokens", "num_chunks")


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    # The interpreter has no product of two bfloat16; the product of two is exact in float32.
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _head(x, pair, heads, x_row, x_head):
    """Where a row's head begins; ``pair`` counts heads of all rows."""
    row, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    return x + row * x_row + head * x_head


@triton.jit
def _tile(x, token, x_token, num_tokens, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens [C, BLOCK] of one head, columns from ``start``; 0 outside."""
    column = start + tl.arange(0, BLOCK)[None, :]
    keep = (token < num_tokens)[:, None] & (column < SIZE)
    return tl.load(x + token.to(tl.int64)[:, None] * x_token + column, mask=keep, other=0.0)


@triton.jit
def _write(x, value, token, x_token, num_tokens, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)[None, :]
    keep = (token < num_tokens)[:, None] & (column < SIZE)
    at = x + token.to(tl.int64)[:, None] * x_token + column
    tl.store(at, value.to(x.dtype.element_ty), mask=keep)


@triton.jit
def _state_places(
    x,
    pair,
    number,
    count,
    start,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
):
    """Pointers and mask [BD, BE] of state ``number`` of ``count``, columns from ``start``."""
    row, column = tl.arange(0, BD)[:, None], start + tl.arange(0, BE)[None, :]
    base = x + (pair.to(tl.int64) * count + number) * (D * E)
    return base + row * E + column, (row < D) & (column < E)


@triton.jit
def _sums(decay, token, decay_token, num_tokens):
    """A of the chunk's tokens and of its end; tokens past the stream do not decay."""
    step = tl.load(decay + token.to(tl.int64) * decay_token, mask=token < num_tokens, other=0.0)
    return tl.cumsum(step, axis=0), tl.sum(step, axis=0)


@triton.jit
def _weight(exponent):
    # A sum of another order may round to the other side of 0.
    return tl.exp(tl.minimum(exponent, 0.0))


@triton.jit
def _pairs(sums, C: tl.constexpr):
    """D [C, C]; the exponents that are left out are positive."""
    at = tl.arange(0, C)
    between = _weight(sums[:, None] - sums[None, :])
    return tl.where(at[:, None] >= at[None, :], between, 0.0)


@triton.jit(do_not_specialize=LENGTHS)
def states(
    k,
    v,
    decay,
    initial,
    states_out,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    decay_row,
    decay_head,
    decay_token,
    heads,
    num_tokens,
    num_chunks,
    INITIAL: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Every chunk's state before it, and the last after all: columns of the second index."""
    pair, start = tl.program_id(0), tl.program_id(1) * BE
    k = _head(k, pair, heads, k_row, k_head)
    v = _head(v, pair, heads, v_row, v_head)
    decay = _head(decay, pair, heads, decay_row, decay_head)
    state = tl.zeros((BD, BE), dtype=tl.float32)
    if INITIAL:
        at, keep = _state_places(initial, pair, 0, 1, start, D, E, BD, BE)
        state += tl.load(at, mask=keep, other=0.0).to(tl.float32)
    for number in range(0, num_chunks):
        at, keep = _state_places(states_out, pair, number, num_chunks + 1, start, D, E, BD, BE)
        tl.store(at, state, mask=keep)
        token = number * C + tl.arange(0, C)
        sums, end = _sums(decay, token, decay_token, num_tokens)
        key = _tile(k, token, k_token, num_tokens, 0, D, BD)
        value = _tile(v, token, v_token, num_tokens, start, E, BE)
        key = (key * _weight(end - sums)[:, None]).to(value.dtype)
        state = state * tl.exp(end) + _dot(tl.trans(key), value, PRECISION, WIDE)
    at, keep = _state_places(states_out, pair, num_chunks, num_chunks + 1, start, D, E, BD, BE)
    tl.store(at, state, mask=keep)


@triton.jit(do_not_specialize=LENGTHS)
def outputs(
    q,
    k,
    v,
    decay,
    states_in,
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
    decay_row,
    decay_head,
    decay_token,
    heads,
    num_tokens,
    num_chunks,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    pair, number = tl.program_id(0), tl.program_id(1)
    token = number * C + tl.arange(0, C)
    query = _tile(_head(q, pair, heads, q_row, q_head), token, q_token, num_tokens, 0, D, BD)
    key = _tile(_head(k, pair, heads, k_row, k_head), token, k_token, num_tokens, 0, D, BD)
    value = _tile(_head(v, pair, heads, v_row, v_head), token, v_token, num_tokens, 0, E, BE)
    decay = _head(decay, pair, heads, decay_row, decay_head)
    sums, _ = _sums(decay, token, decay_token, num_tokens)
    at, keep = _state_places(states_in, pair, number, num_chunks + 1, 0, D, E, BD, BE)
    state = tl.load(at, mask=keep, other=0.0)
    result = _dot(query, state.to(query.dtype), PRECISION, WIDE) * tl.exp(sums)[:, None]
    score = _dot(query, tl.trans(key), PRECISION, WIDE) * _pairs(sums, C)
    result += _dot(score.to(value.dtype), value, PRECISION, WIDE)
    out = _head(out, pair, heads, out_row, out_head)
    _write(out, result, token, out_token, num_tokens, 0, E, BE)


@triton.jit(do_not_specialize=LENGTHS)
def state_gradients(
    q,
    grad,
    decay,
    grad_final,
    grads_out,
    grad_initial,
    q_row,
    q_head,
    q_token,
    grad_row,
    grad_head,
    grad_token,
    decay_row,
    decay_head,
    decay_token,
    heads,
    num_tokens,
    num_chunks,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradients of every chunk's state after it [B·H, T, d, e], and of the initial state."""
    pair, start = tl.program_id(0), tl.program_id(1) * BE
    q = _head(q, pair, heads, q_row, q_head)
    grad = _head(grad, pair, heads, grad_row, grad_head)
    decay = _head(decay, pair, heads, decay_row, decay_head)
    at, keep = _state_places(grad_final, pair, 0, 1, start, D, E, BD, BE)
    total = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    for done in range(0, num_chunks):
        number = num_chunks - 1 - done
        at, keep = _state_places(grads_out, pair, number, num_chunks, start, D, E, BD, BE)
        tl.store(at, total, mask=keep)
        token = number * C + tl.arange(0, C)
        sums, end = _sums(decay, token, decay_token, num_tokens)
        query = _tile(q, token, q_token, num_tokens, 0, D, BD)
        pull = _tile(grad, token, grad_token, num_tokens, start, E, BE)
        query = (query * tl.exp(sums)[:, None]).to(pull.dtype)
        total = total * tl.exp(end) + _dot(tl.trans(query), pull, PRECISION, WIDE)
    at, keep = _state_places(grad_initial, pair, 0, 1, start, D, E, BD, BE)
    tl.store(at, total, mask=keep)


@triton.jit(do_not_specialize=LENGTHS)
def gradients(
    q,
    k,
    v,
    grad,
    decay,
    states_in,
    grads_in,
    grad_q,
    grad_k,
    grad_v,
    grad_decay,
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
    decay_row,
    decay_head,
    decay_token,
    grad_q_row,
    grad_q_head,
    grad_q_token,
    grad_v_row,
    grad_v_head,
    grad_v_token,
    heads,
    num_tokens,
    num_chunks,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """All gradients of one chunk; ``grad_k`` lies as ``grad_q``, ``grad_decay`` is [B·H, N]."""
    pair, number = tl.program_id(0), tl.program_id(1)
    token = number * C + tl.arange(0, C)
    query = _tile(_head(q, pair, heads, q_row, q_head), token, q_token, num_tokens, 0, D, BD)
    key = _tile(_head(k, pair, heads, k_row, k_head), token, k_token, num_tokens, 0, D, BD)
    value = _tile(_head(v, pair, heads, v_row, v_head), token, v_token, num_tokens, 0, E, BE)
    pull = _tile(
        _head(grad, pair, heads, grad_row, grad_head), token, grad_token, num_tokens, 0, E, BE
    )
    decay = _head(decay, pair, heads, decay_row, decay_head)
    sums, end = _sums(decay, token, decay_token, num_tokens)
    pairs, until_end = _pairs(sums, C), _weight(end - sums)[:, None]
    at, keep = _state_places(states_in, pair, number, num_chunks + 1, 0, D, E, BD, BE)
    before = tl.load(at, mask=keep, other=0.0).to(query.dtype)
    at, keep = _state_places(states_in, pair, number + 1, num_chunks + 1, 0, D, E, BD, BE)
    after = tl.load(at, mask=keep, other=0.0)
    at, keep = _state_places(grads_in, pair, number, num_chunks, 0, D, E, BD, BE)
    grad_after = tl.load(at, mask=keep, other=0.0)
    crossing = tl.sum(tl.sum(after * grad_after, axis=1), axis=0)
    grad_after = grad_after.to(query.dtype)

    score = (_dot(query, tl.trans(key), PRECISION, WIDE) * pairs).to(query.dtype)
    dv = _dot(tl.trans(score), pull, PRECISION, WIDE)
    dv += _dot(key, grad_after, PRECISION, WIDE) * until_end
    back = (_dot(pull, tl.trans(value), PRECISION, WIDE) * pairs).to(query.dtype)
    dq = _dot(back, key, PRECISION, WIDE)
    dq += _dot(pull, tl.trans(before), PRECISION, WIDE) * tl.exp(sums)[:, None]
    dk = _dot(tl.trans(back), query, PRECISION, WIDE)
    dk += _dot(value, tl.trans(grad_after), PRECISION, WIDE) * until_end

    grad_q = _head(grad_q, pair, heads, grad_q_row, grad_q_head)
    grad_k = _head(grad_k, pair, heads, grad_q_row, grad_q_head)
    grad_v = _head(grad_v, pair, heads, grad_v_row, grad_v_head)
    _write(grad_q, dq, token, grad_q_token, num_tokens, 0, D, BD)
    _write(grad_k, dk, token, grad_q_token, num_tokens, 0, D, BD)
    _write(grad_v, dv, token, grad_v_token, num_tokens, 0, E, BE)
    of_sums = tl.sum(query * dq, axis=1) - tl.sum(key * dk, axis=1)
    of_steps = tl.cumsum(of_sums, axis=0, reverse=True) + crossing
    at = grad_decay + pair.to(tl.int64) * num_tokens + token
    tl.store(at, of_steps, mask=token < num_tokens)

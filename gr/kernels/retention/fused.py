"""Triton path: two passes along the chunks for states, two over all chunks at once for the rest.

Kept for the backward pass are q, k, v and a float32 state per chunk. Sums are in float32. Products
of float32 inputs follow ``torch.get_float32_matmul_precision()``. Nothing is added with atomics, so
gradients repeat exactly.

Legend: B batch, H heads, N tokens, d, e head sizes, T chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.retention import fused_kernels as kernels
from gr.kernels.triton_path import interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 64
CHUNKS = (16, 32, 64)
# Bytes of a head of one token: two states and the tiles of a chunk share a program's memory.
MAX_ROW = 256
# Columns of the state that one program carries along the stream.
STATE_COLUMNS = 64


def why_not(q: Tensor, v: Tensor, chunk: int | None) -> str | None:
    """What this path lacks for these arguments, or None."""
    if q.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        return f"q_BHNd has dtype {q.dtype}; wanted one of {names}"
    most = MAX_ROW // q.element_size()
    if not (0 < q.shape[-1] <= most and 0 < v.shape[-1] <= most):
        sizes = f"{q.shape[-1]} and {v.shape[-1]}"
        return f"head sizes are {sizes}; wanted 1 to {most} in {q.dtype}"
    if chunk is not None and chunk not in CHUNKS:
        return f"chunk is {chunk}; wanted one of {CHUNKS}, or None"
    return None


def _allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _like_tokens(x: Tensor) -> Tensor:
    """[B, H, N, size] laid out as [B, N, H, size], which is how blocks read it."""
    batch, heads, tokens, size = x.shape
    return _allocate(x, batch, tokens, heads, size).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(size: int) -> int:
    # A matrix product of Triton takes sides of 16 at least.
    return max(16, 1 << (size - 1).bit_length())


class _Run:
    """Sizes and options of one call, and its launches."""

    def __init__(self, q: Tensor, v: Tensor, decay: Tensor, chunk: int) -> None:
        self.device, self.decay = q.device, decay
        self.batch, self.heads, self.tokens, self.size = q.shape
        self.value_size = v.shape[-1]
        self.pairs, self.chunks = self.batch * self.heads, triton.cdiv(self.tokens, chunk)
        exact = torch.get_float32_matmul_precision() == "highest"
        self.options = {
            "heads": self.heads,
            "num_tokens": self.tokens,
            "num_chunks": self.chunks,
            "D": self.size,
            "E": self.value_size,
            "BD": _padded(self.size),
            "C": chunk,
            "PRECISION": "ieee" if exact else "tf32",
            "WIDE": interpreted(),
            **self.strides(decay=decay.expand(self.batch, -1, self.tokens)),
        }

    @staticmethod
    def strides(**tensors: Tensor) -> dict[str, int]:
        return {
            f"{name}_{axis}": tensor.stride(place)
            for name, tensor in tensors.items()
            for place, axis in enumerate(("row", "head", "token"))
        }

    def along(self, kernel: Any, **arguments: Any) -> None:
        columns = min(_padded(self.value_size), STATE_COLUMNS)
        grid = (self.pairs, triton.cdiv(self.value_size, columns))
        self._launch(kernel, grid, BE=columns, **arguments)

    def across(self, kernel: Any, **arguments: Any) -> None:
        self._launch(kernel, (self.pairs, self.chunks), BE=_padded(self.value_size), **arguments)

    def _launch(self, kernel: Any, grid: tuple[int, int], **arguments: Any) -> None:
        if min(grid) == 0:
            return
        with torch.cuda.device_of(self.decay):
            kernel[grid](decay=self.decay, **arguments, **self.options)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        initial: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _rows(q), _rows(k), _rows(v)
        run = _Run(q, v, decay, chunk)
        size, value_size = run.size, run.value_size
        shape = (run.pairs, run.chunks + 1, size, value_size)
        states = _allocate(q, *shape, dtype=torch.float32)
        run.along(
            kernels.states,
            k=k,
            v=v,
            # A kernel never reads the stand-in for what is not there.
            initial=q if initial is None else initial.contiguous(),
            states_out=states,
            INITIAL=initial is not None,
            **run.strides(k=k, v=v),
        )
        out = _like_tokens(v)
        run.across(
            kernels.outputs,
            q=q,
            k=k,
            v=v,
            states_in=states,
            out=out,
            **run.strides(q=q, k=k, v=v, out=out),
        )
        ctx.save_for_backward(q, k, v, decay, states)
        ctx.chunk = chunk
        ctx.initial_dtype = None if initial is None else initial.dtype
        final = states[:, -1].view(run.batch, run.heads, size, value_size).clone()
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, states = ctx.saved_tensors
        run = _Run(q, v, decay, ctx.chunk)
        grad = _rows(grad_out.to(v.dtype))
        shape = (run.size, run.value_size)
        grads = _allocate(q, run.pairs, run.chunks, *shape, dtype=torch.float32)
        grad_initial = _allocate(q, run.batch, run.heads, *shape, dtype=torch.float32)
        run.along(
            kernels.state_gradients,
            q=q,
            grad=grad,
            grad_final=grad_final.contiguous(),
            grads_out=grads,
            grad_initial=grad_initial,
            **run.strides(q=q, grad=grad),
        )
        grad_q, grad_k, grad_v = _like_tokens(q), _like_tokens(k), _like_tokens(v)
        grad_decay = _allocate(q, run.batch, run.heads, run.tokens, dtype=torch.float32)
        run.across(
            kernels.gradients,
            q=q,
            k=k,
            v=v,
            grad=grad,
            states_in=states,
            grads_in=grads,
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
            grad_decay=grad_decay,
            **run.strides(q=q, k=k, v=v, grad=grad, grad_q=grad_q, grad_v=grad_v),
        )
        return (
            grad_q,
            grad_k,
            grad_v,
            grad_decay.sum_to_size(decay.shape),
            None if ctx.initial_dtype is None else grad_initial.to(ctx.initial_dtype),
            None,
        )


def fused_retention(
    q_BHNd: Tensor,
    k_BHNd: Tensor,
    v_BHNe: Tensor,
    log_decay: Tensor,
    initial_state_BHde: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.reference_retention``."""
    out: tuple[Tensor, Tensor] = _Fused.apply(
        q_BHNd, k_BHNd, v_BHNe, log_decay, initial_state_BHde, chunk or CHUNK
    )
    return out

"""Triton path: nothing of the size of the scores is ever in memory, forward or backward.

What stays for the backward pass is q, k, v and the geometry; scores are made again, tile by tile.
Sums are in float32, whatever the inputs are. Products of float32 inputs follow
``torch.get_float32_matmul_precision()``, as torch's own do: exact float32 unless it was lowered.

Time buckets are those of ``time_bucket`` on a CPU to the last second (``bucket_starts``). Against
``time_bucket`` on a GPU, whose logarithm may round the other way, a difference can land one bucket
off where |Δ| is within a few 1e-6 of a boundary, relatively.

Table gradients are added with atomics, in float32, to one copy of the table per program (programs
share copies when there are many), and the copies are summed. The order of the additions, and so the
last bits of these two gradients, can change between runs; q, k, v and the output are deterministic.
That is why ``impl="auto"`` leaves ``torch.use_deterministic_algorithms`` to the other path.

Legend: B batch, H heads, Q queries, K keys, d, e head sizes, S, T tiles of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.hstu_attention import fused_kernels as kernels
from gr.kernels.hstu_attention.geometry import Geometry, bucket_starts
from gr.kernels.hstu_attention.needed_tiles import listed, needed_tiles
from gr.kernels.hstu_attention.visibility import Visibility
from gr.kernels.triton_path import interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Copies of a bucket that one program adds to.
LANES = 8
# Floats that all copies of a table take together.
COPIES_SIZE = 2**22


def why_not(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> str | None:
    """What this path lacks for these arguments, or None."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return (
            f"q, k and v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; wanted one of "
            f"{', '.join(str(dtype) for dtype in DTYPES)} for all three"
        )
    if not isinstance(geometry.visible, Visibility):
        return "the geometry holds a mask; wanted one built from a Visibility (layout.geometry)"
    return None


def _tile_size(q: Tensor, v: Tensor) -> int:
    """Queries and keys per tile, so that the tiles of a program fit in shared memory."""
    row = max(_padded(q.shape[-1]), _padded(v.shape[-1])) * q.element_size()
    return 64 if row <= 256 else 32 if row <= 1024 else 16


def _padded(size: int) -> int:
    # A matrix product of Triton takes sides of 16 at least.
    return max(16, 1 << (size - 1).bit_length())


def _allocate(like: Tensor, heads: int, tokens: int, size: int) -> Tensor:
    """[B, H, N, size] laid out as [B, N, H, size], which is how blocks read it."""
    return like.new_empty(like.shape[0], tokens, heads, size).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def _starts(num_buckets: int, device: torch.device) -> Tensor:
    # Copying to a GPU waits for it, so it is done once and not in every step.
    return bucket_starts(num_buckets).to(device)


@dataclass(frozen=True)
class _Plan:
    """The geometry as the kernels read it; computed once for all layers."""

    valid_BK: Tensor
    query_position_BQ: Tensor
    key_position_BK: Tensor
    query_time_BQ: Tensor
    key_time_BK: Tensor
    starts_T: Tensor
    branch_BQA: Tensor
    key_tiles_BST: Tensor
    num_key_tiles_BS: Tensor
    query_tiles_BTS: Tensor
    num_query_tiles_BT: Tensor

    @staticmethod
    def of(geometry: Geometry, batch: int, tile: int) -> _Plan:
        visible = geometry.visible
        assert isinstance(visible, Visibility)
        needed = needed_tiles(visible, geometry.position_BQ, geometry.position_BK, tile)
        needed = needed.expand(batch, -1, -1)
        valid = visible.valid_BK.expand(batch, -1).to(torch.int8).contiguous()
        query_time, key_time, starts = valid, valid, valid
        if geometry.query_time_BQ is not None and geometry.time_BK is not None:
            query_time = geometry.query_time_BQ.expand(batch, -1).contiguous()
            key_time = geometry.time_BK.expand(batch, -1).contiguous()
            starts = _starts(geometry.num_buckets, valid.device)
        branch = valid
        if visible.branch_BQA is not None:
            branch = _rows(visible.branch_BQA).view(torch.int8).expand(batch, -1, -1)

        def positions(position: Tensor) -> Tensor:
            return position.expand(batch, -1).to(torch.int32).contiguous()

        return _Plan(
            valid,
            positions(geometry.position_BQ),
            positions(geometry.position_BK),
            query_time,
            key_time,
            starts,
            branch,
            *listed(needed),
            *listed(needed.transpose(1, 2)),
        )


def _strides(**tensors: Tensor) -> dict[str, int]:
    return {
        f"{name}_{axis}": tensor.stride(place)
        for name, tensor in tensors.items()
        for place, axis in enumerate(("row", "head", "token"))
    }


def _shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    position_table: Tensor | None,
    time_table: Tensor | None,
    geometry: Geometry,
    scale: float,
    norm_length: float,
) -> tuple[_Plan, dict[str, Any]]:
    """The plan, and the arguments that all three kernels take."""
    visible = geometry.visible
    assert isinstance(visible, Visibility)
    tile, batch = _tile_size(q, v), q.shape[0]
    plan = geometry.once(("plan", batch, tile), lambda: _Plan.of(geometry, batch, tile))
    branch = visible.branch_BQA is not None
    exact = torch.get_float32_matmul_precision() == "highest"
    return plan, {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        **_strides(q=q, k=k, v=v, out=out),
        # A kernel never reads the stand-ins for what is not there.
        "position_table": q if position_table is None else position_table,
        "time_table": q if time_table is None else time_table,
        "starts": plan.starts_T,
        "valid": plan.valid_BK,
        "query_position": plan.query_position_BQ,
        "key_position": plan.key_position_BK,
        "query_time": plan.query_time_BQ,
        "key_time": plan.key_time_BK,
        "branch": plan.branch_BQA,
        "branch_row": plan.branch_BQA.stride(0),
        "branch_token": plan.branch_BQA.stride(1),
        "heads": q.shape[1],
        "num_queries": q.shape[2],
        "num_keys": k.shape[2],
        "num_branch": plan.branch_BQA.shape[-1] if branch else 0,
        "max_distance": geometry.max_distance,
        "num_buckets": geometry.num_buckets,
        "window": visible.window or 0,
        "context": visible.context,
        "scale": float(scale),
        "norm": float(norm_length),
        "POSITION": position_table is not None,
        "TIME": time_table is not None,
        "BRANCH": branch,
        "WINDOW": visible.window is not None,
        "CONTEXT": visible.context > 0,
        "SIZE": q.shape[3],
        "VALUE_SIZE": v.shape[3],
        "BLOCK_SIZE": _padded(q.shape[3]),
        "BLOCK_VALUE": _padded(v.shape[3]),
        "TILE": tile,
        "PRECISION": "ieee" if exact else "tf32",
        "WIDE": interpreted(),
        # For sm_90: with four warps a tile of 64 spills registers, wide heads leave no room to
        # prefetch.
        "num_warps": 8 if tile == 64 else 4,
        "num_stages": 2 if tile == 64 else 1,
    }


def _launch(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    with torch.cuda.device_of(arguments["q"]):
        kernel[(programs,)](**arguments)


class _Copies:
    """Copies of a table that programs add gradients to."""

    def __init__(self, table: Tensor | None, wanted: bool, size: int, lanes: int, programs: int):
        self.table, self.size = table, size
        self.wanted = wanted and table is not None
        self.count = max(1, min(programs, COPIES_SIZE // (size * lanes)))
        self.lanes = lanes

    def allocate(self, count: int, device: torch.device) -> Tensor:
        size = count * self.lanes * self.size if self.wanted else 0
        return torch.zeros(size, dtype=torch.float32, device=device)

    def total(self, sums: Tensor, norm_length: float) -> Tensor | None:
        if self.table is None or not self.wanted:
            return None
        grad = torch.zeros_like(self.table)
        grad[: self.size] = (sums.view(-1, self.size).sum(0) / norm_length).to(grad.dtype)
        return grad


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_table: Tensor | None,
        time_table: Tensor | None,
        geometry: Geometry,
        scale: float,
        norm_length: float,
    ) -> Tensor:
        q, k, v = _rows(q), _rows(k), _rows(v)
        ctx.save_for_backward(q, k, v, position_table, time_table)
        ctx.rest = (geometry, scale, norm_length)
        batch, heads, queries, _ = q.shape
        out = _allocate(v, heads, queries, v.shape[-1])
        if out.numel():
            plan, shared = _shared(q, k, v, out, position_table, time_table, *ctx.rest)
            shared |= {"tiles": plan.key_tiles_BST, "num_tiles": plan.num_key_tiles_BS}
            blocks = plan.key_tiles_BST.shape[1]
            _launch(kernels.forward, batch * heads * blocks, shared)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHQe: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_table, time_table = ctx.saved_tensors
        geometry, _, norm_length = ctx.rest
        batch, heads, queries, size = q.shape
        grad_q = _allocate(q, heads, queries, size)
        grad_k = _allocate(k, heads, k.shape[2], size)
        grad_v = _allocate(v, heads, v.shape[2], v.shape[3])
        if not grad_BHQe.numel():
            tables = [
                None if t is None else torch.zeros_like(t) for t in (position_table, time_table)
            ]
            return grad_q, grad_k.zero_(), grad_v.zero_(), *tables, None, None, None
        grad = _rows(grad_BHQe.to(v.dtype))
        plan, shared = _shared(q, k, v, grad, position_table, time_table, *ctx.rest)

        programs = batch * heads * plan.key_tiles_BST.shape[1]
        _, _, _, wants_position, wants_time = ctx.needs_input_grad[:5]
        position = _Copies(position_table, wants_position, geometry.max_distance, 1, programs)
        time = _Copies(time_table, wants_time, geometry.num_buckets + 1, LANES, programs)
        copies = min(position.count, time.count)
        grad_position = position.allocate(copies, q.device)
        grad_time = time.allocate(copies, q.device)
        by_query = {
            "tiles": plan.key_tiles_BST,
            "num_tiles": plan.num_key_tiles_BS,
            "grad_q": grad_q,
            **_strides(grad_q=grad_q),
            "grad_position": grad_position,
            "grad_time": grad_time,
            "copies": copies,
            "GRAD_POSITION": position.wanted,
            "GRAD_TIME": time.wanted,
            "LANES": LANES,
        }
        _launch(kernels.backward_queries, programs, shared | by_query)
        by_key = {
            "tiles": plan.query_tiles_BTS,
            "num_tiles": plan.num_query_tiles_BT,
            "grad_k": grad_k,
            "grad_v": grad_v,
            **_strides(grad_k=grad_k, grad_v=grad_v),
        }
        programs = batch * heads * plan.query_tiles_BTS.shape[1]
        _launch(kernels.backward_keys, programs, shared | by_key)
        return (
            grad_q,
            grad_k,
            grad_v,
            position.total(grad_position, norm_length),
            time.total(grad_time, norm_length),
            None,
            None,
            None,
        )


def _apply(
    q_BHQd: Tensor,
    k_BHKd: Tensor,
    v_BHKe: Tensor,
    geometry: Geometry,
    position_table_P: Tensor | None,
    time_table_T: Tensor | None,
    scale: float,
    norm_length: float,
) -> Tensor:
    """See ``gr.kernels.hstu_attention``."""
    out: Tensor = _Fused.apply(
        q_BHQd, k_BHKd, v_BHKe, position_table_P, time_table_T, geometry, scale, norm_length
    )
    return out


# Under torch.compile the launch stays outside of the graph.
fused_attention: Callable[..., Tensor] = torch.compiler.disable(_apply)

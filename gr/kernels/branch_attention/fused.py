"""Triton path: no scores in memory, forward or backward, and no gathered copies of the nodes.

What stays for the backward pass is q, k, v, and for a softmax the output and one number per query.
Sums are in float32, whatever the inputs are. Products of float32 inputs follow
``torch.get_float32_matmul_precision()``, as torch's own do.

Gradients of the nodes' keys and values are added with atomics, in float32, since any number of
nodes may share an ancestor; the order of the additions can change between runs. Everything else is
deterministic.

Legend: B batch, H query heads, G key heads, N nodes that ask, A all nodes, P prefix keys, L most
ancestors, d, e head sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from gr.kernels.branch_attention import fused_kernels as kernels
from gr.kernels.triton_path import interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(q: Tensor) -> str | None:
    """What this path lacks for these arguments, or None."""
    if q.dtype not in DTYPES:
        return f"q has dtype {q.dtype}; wanted one of {', '.join(str(dtype) for dtype in DTYPES)}"
    return None


def padded(size: int) -> int:
    """The power of two that holds a head; a matrix product of Triton takes sides of 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def tile_size(q: Tensor, v: Tensor) -> int:
    """Queries and keys per tile, so that the tiles of a program fit in shared memory."""
    row = max(padded(q.shape[-1]), padded(v.shape[-1])) * q.element_size()
    return 64 if row <= 256 else 32 if row <= 1024 else 16


def rows(x: Tensor) -> Tensor:
    """With neighbours in memory along the last axis, as kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def allocate(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a result; kernels write all of it."""
    return like.new_empty(shape, dtype=dtype)


def strides(**tensors: Tensor) -> dict[str, int]:
    """Strides of batch, head and token, named as kernels take them."""
    return {
        f"{name}_{axis}": tensor.stride(place)
        for name, tensor in tensors.items()
        for place, axis in enumerate(("row", "head", "token"))
    }


def blocks(q: Tensor, v: Tensor, tile: int) -> dict[str, Any]:
    """The compile-time arguments that all kernels take."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "SIZE": q.shape[3],
        "VALUE_SIZE": v.shape[3],
        "BLOCK_SIZE": padded(q.shape[3]),
        "BLOCK_VALUE": padded(v.shape[3]),
        "TILE": tile,
        "PRECISION": "ieee" if exact else "tf32",
        "WIDE": interpreted(),
        "num_warps": 8 if tile == 64 else 4,
        "num_stages": 2 if tile == 64 else 1,
    }


def launch(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Run a kernel where its q lies; nothing for no programs."""
    if programs:
        with torch.cuda.device_of(arguments["q"]):
            kernel[(programs,)](**arguments)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_nodes: Tensor,
        v_nodes: Tensor,
        ancestors: Tensor,
        valid: Tensor | None,
        scale: float,
        norm_length: float | None,
    ) -> Tensor:
        q, k, v, k_nodes, v_nodes = (rows(x) for x in (q, k, v, k_nodes, v_nodes))
        ancestors = ancestors.contiguous()
        valid = None if valid is None else valid.to(torch.int8).contiguous()
        batch, heads, queries, _ = q.shape
        out = allocate(q, batch, heads, queries, v.shape[-1])
        lse = allocate(q, batch, heads, queries, dtype=torch.float32)
        tile = tile_size(q, v)
        nodes = {
            "k_nodes": k_nodes,
            "v_nodes": v_nodes,
            **strides(k_nodes=k_nodes, v_nodes=v_nodes),
            "ancestors": ancestors,
            "ancestors_row": ancestors.stride(0) if len(ancestors) > 1 else 0,
            "num_nodes": k_nodes.shape[2],
            "LINE": ancestors.shape[2],
        }
        ctx.nodes = {name: x for name, x in nodes.items() if not isinstance(x, Tensor)}
        shared = {
            "q": q,
            "k": k,
            "v": v,
            "lse": lse,
            **strides(q=q, k=k, v=v),
            # A kernel never reads the stand-in for what is not there.
            "valid": q if valid is None else valid,
            "heads": heads,
            "num_queries": queries,
            "num_prefix": k.shape[2],
            "scale": float(scale),
            "norm": 1.0 if norm_length is None else float(norm_length),
            "SOFTMAX": norm_length is None,
            "VALID": valid is not None,
            "REPEAT": heads // k.shape[1],
            **blocks(q, v, tile),
        }
        ctx.shared = {name: x for name, x in shared.items() if not isinstance(x, Tensor)}
        ctx.save_for_backward(q, k, v, k_nodes, v_nodes, ancestors, valid, out, lse)
        programs = batch * heads * triton.cdiv(queries, tile)
        launch(kernels.forward, programs, shared | nodes | {"out": out} | strides(out=out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHNe: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, k_nodes, v_nodes, ancestors, valid, out, lse = ctx.saved_tensors
        grad = rows(grad_BHNe.to(v.dtype))
        batch, heads, queries, _ = q.shape
        groups, tile = k.shape[1], ctx.shared["TILE"]
        grad_q = allocate(q, *q.shape)
        grad_k, grad_v = allocate(k, *k.shape), allocate(v, *v.shape)
        grad_k_nodes = torch.zeros(k_nodes.shape, dtype=torch.float32, device=q.device)
        grad_v_nodes = torch.zeros(v_nodes.shape, dtype=torch.float32, device=q.device)
        shared = ctx.shared | {
            "q": q,
            "k": k,
            "v": v,
            "lse": lse,
            "mean": allocate(lse, *lse.shape),
            "valid": q if valid is None else valid,
            "grad": grad,
            **strides(grad=grad),
        }
        by_node = {
            "k_nodes": k_nodes,
            "v_nodes": v_nodes,
            "ancestors": ancestors,
            "out": out,
            "grad_q": grad_q,
            "grad_k_nodes": grad_k_nodes,
            "grad_v_nodes": grad_v_nodes,
            **strides(out=out, grad_q=grad_q),
        }
        programs = batch * heads * triton.cdiv(queries, tile)
        launch(kernels.backward_nodes, programs, shared | ctx.nodes | by_node)
        by_key = {"grad_k": grad_k, "grad_v": grad_v, **strides(grad_k=grad_k, grad_v=grad_v)}
        programs = batch * groups * triton.cdiv(k.shape[2], tile)
        launch(kernels.backward_prefix, programs, shared | by_key)
        nodes = grad_k_nodes.to(k_nodes.dtype), grad_v_nodes.to(v_nodes.dtype)
        return grad_q, grad_k, grad_v, *nodes, None, None, None, None


def _apply(
    q_BHNd: Tensor,
    k_prefix_BGPd: Tensor,
    v_prefix_BGPe: Tensor,
    k_nodes_BGAd: Tensor,
    v_nodes_BGAe: Tensor,
    ancestors_BNL: Tensor,
    valid_BP: Tensor | None,
    scale: float,
    norm_length: float | None,
) -> Tensor:
    """See ``gr.kernels.branch_attention``; ``norm_length`` is None for a softmax."""
    tensors = (q_BHNd, k_prefix_BGPd, v_prefix_BGPe, k_nodes_BGAd, v_nodes_BGAe)
    out: Tensor = _Fused.apply(*tensors, ancestors_BNL, valid_BP, scale, norm_length)
    return out


# Under torch.compile the launch stays outside of the graph.
fused_attention: Callable[..., Tensor] = torch.compiler.disable(_apply)

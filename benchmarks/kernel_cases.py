"""What ``kernels.py`` measures: each operation of ``gr.kernels`` beside the forms one would write.

A form is a call on tensors that exist already. "ours" is the operation with ``impl="auto"``,
"reference" its specification, which is also the naive form: every intermediate is a tensor. Others
are stock torch. Masks that a stock form takes are made before the clock starts, once.

Legend: B batch, H heads, N tokens, P prefix keys, A nodes, L ancestors of a node, D width, d head
size, T targets, V rows of a table, R negatives, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gr.kernels.branch_attention import branch_attention
from gr.kernels.dropout import fast_dropout
from gr.kernels.group_layer_norm import group_layer_norm
from gr.kernels.hstu_attention import Geometry, Impl, Visibility, build_geometry, hstu_attention
from gr.kernels.item_softmax import item_softmax
from gr.kernels.norm_mul import norm_mul
from gr.kernels.retention import retention
from gr.kernels.sparse_attention import SparseMask, sparse_attention

HEADS, SIZE = 4, 64
BUCKETS, DAY = 128, 86_400
DROP = 0.1


class Form(NamedTuple):
    """A way to compute, and the tensors whose gradients are wanted."""

    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]


Forms = dict[str, Form]


@dataclass(frozen=True)
class Case:
    """An operation at one size.

    Attributes:
        make: the forms, "ours" first; the same numbers each time.
        dropped: the forms leave out elements, each its own.
    """

    op: str
    size: str
    make: Callable[[], Forms]
    dropped: bool = False


def cases(quick: bool) -> list[Case]:
    """All cases; with ``quick`` the smallest of each operation, shrunk to nothing."""
    made = _tiny() if quick else _usual()
    torch.manual_seed(0)
    return made


def _usual() -> list[Case]:
    return [
        Case("hstu_attention", "B 32, N 128", partial(hstu, 32, 128)),
        Case("hstu_attention", "B 4, N 512", partial(hstu, 4, 512)),
        Case("hstu_attention", "B 4, N 512, later layer", partial(hstu, 4, 512, shared=True)),
        Case("hstu_attention", "B 1, N 1024", partial(hstu, 1, 1024)),
        Case("branch_attention", "P 400, A 256, L 4", partial(branch, 400, 64, 4)),
        Case("branch_attention", "P 1600, A 1024, L 4", partial(branch, 1600, 256, 4)),
        Case("branch_attention", "SiLU, P 400, A 256, L 4", partial(branch, 400, 64, 4, silu=True)),
        Case("sparse_attention", "N 512, window 64", partial(sparse, 512, SparseMask(64, 1))),
        Case("sparse_attention", "N 2048, window 128", partial(sparse, 2048, SparseMask(128, 1))),
        Case(
            "sparse_attention",
            "N 1024 + 64, 256 ask",
            partial(sparse, 1088, SparseMask(128, 1, num_candidates=64, num_queries=256)),
        ),
        Case("retention", "B 8, N 128", partial(decaying, 8, 128)),
        Case("retention", "B 2, N 512", partial(decaying, 2, 512)),
        Case("retention", "B 1, N 2048", partial(decaying, 1, 2048)),
        Case("item_softmax", "T 512, V 3,000", partial(softmax, 512, 3_000)),
        Case("item_softmax", "T 512, V 12,000", partial(softmax, 512, 12_000)),
        Case("item_softmax", "T 512, V 50,000", partial(softmax, 512, 50_000)),
        Case("item_softmax", "T 2048, R 128 each", partial(sampled, 2048, 12_000, 128)),
        Case("norm_mul", "2,048 × 256", partial(gate, 2048, 256)),
        Case("norm_mul", "16,384 × 256", partial(gate, 16_384, 256)),
        Case("norm_mul", "16,384 × 256, drop", partial(gate, 16_384, 256, DROP), dropped=True),
        Case("group_layer_norm", "2,048 × 256, G 4", partial(grouped, 2048, 256, 4)),
        Case("group_layer_norm", "16,384 × 256, G 4", partial(grouped, 16_384, 256, 4)),
        Case("dropout", "256 × 256", partial(drop, 256, 256), dropped=True),
        Case("dropout", "4,096 × 256", partial(drop, 4096, 256), dropped=True),
        Case("dropout", "32,768 × 256", partial(drop, 32_768, 256), dropped=True),
    ]


def _tiny() -> list[Case]:
    return [
        Case("hstu_attention", "B 2, N 9", partial(hstu, 2, 9)),
        Case("branch_attention", "P 7, A 6, L 2", partial(branch, 7, 3, 2)),
        Case("sparse_attention", "N 17, window 4", partial(sparse, 17, SparseMask(4, 1))),
        Case("retention", "B 2, N 9", partial(decaying, 2, 9)),
        Case("item_softmax", "T 5, V 11", partial(softmax, 5, 11)),
        Case("item_softmax", "T 5, R 3 each", partial(sampled, 5, 11, 3)),
        Case("norm_mul", "8 × 16", partial(gate, 8, 16)),
        Case("norm_mul", "8 × 64, drop", partial(gate, 8, 64, DROP), dropped=True),
        Case("group_layer_norm", "8 × 16, G 2", partial(grouped, 8, 16, 2)),
        Case("dropout", "16 × 64", partial(drop, 16, 64), dropped=True),
    ]


def leaf(*shape: int, std: float = 1.0) -> Tensor:
    return (std * torch.randn(shape)).requires_grad_()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def clocked(valid_BN: Tensor) -> Geometry:
    """A causal stream in which about a day lies between two events."""
    batch, tokens = valid_BN.shape
    device = valid_BN.device
    position = torch.arange(tokens, device=device).expand(batch, -1)
    gap = torch.empty(batch, tokens, device=device).exponential_(1 / DAY)
    time = gap.long().cumsum(1)
    return build_geometry(
        Visibility(valid_BN, position, tokens),
        position,
        position,
        time.roll(-1, 1),
        time,
        max_distance=tokens,
        num_buckets=BUCKETS,
    )


def hstu(batch: int, tokens: int, shared: bool = False) -> Forms:
    """Geometry is built within each call, as in a first layer; ``shared``: it is there already."""
    q, k, v = (leaf(batch, HEADS, tokens, SIZE) for _ in range(3))
    tables = leaf(tokens, std=0.02), leaf(BUCKETS + 1, std=0.02)
    valid = torch.ones(batch, tokens, dtype=torch.bool)
    stream = clocked(valid)

    def run(impl: Impl) -> Tensor:
        geometry = stream
        if not shared:
            geometry = build_geometry(
                Visibility(valid, stream.position_BK.expand(batch, -1), tokens),
                stream.position_BQ,
                stream.position_BK,
                stream.query_time_BQ,
                stream.time_BK,
                max_distance=stream.max_distance,
                num_buckets=stream.num_buckets,
            )
        return hstu_attention(
            q, k, v, geometry, *tables, scale=SIZE**-0.5, norm_length=tokens, impl=impl
        )

    return _both(run, (q, k, v, *tables))


def branch(prefix: int, candidates: int, length: int, silu: bool = False) -> Forms:
    """Candidates of ``length`` tokens, each a chain of nodes after one shared history."""
    nodes = candidates * length
    q, k_nodes, v_nodes = (leaf(1, HEADS, nodes, SIZE) for _ in range(3))
    k, v = (leaf(1, HEADS, prefix, SIZE) for _ in range(2))
    node = torch.arange(nodes)[:, None]
    before = torch.arange(length)[None]
    ancestors = torch.where(before <= node % length, node - node % length + before, -1)[None]
    own = torch.zeros(nodes, nodes + 1, dtype=torch.bool)
    own.scatter_(1, ancestors[0].where(ancestors[0] >= 0, nodes), True)
    mask = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), own[:, :nodes]], dim=1)

    def run(impl: Impl) -> Tensor:
        return branch_attention(
            q,
            k,
            v,
            k_nodes,
            v_nodes,
            ancestors,
            form="silu" if silu else "softmax",
            norm_length=float(prefix) if silu else None,
            impl=impl,
        )

    def stock() -> Tensor:
        return _sdpa(q, torch.cat([k, k_nodes], 2), torch.cat([v, v_nodes], 2), mask)

    inputs = (q, k, v, k_nodes, v_nodes)
    return _both(run, inputs) | ({} if silu else {"SDPA, mask": Form(stock, inputs)})


def sparse(keys: int, mask: SparseMask) -> Forms:
    queries = mask.context_queries(keys) + mask.num_candidates
    q, k, v = leaf(1, HEADS, queries, SIZE), leaf(1, HEADS, keys, SIZE), leaf(1, HEADS, keys, SIZE)
    matrix = mask.matrix(keys, None, q.device)

    def run(impl: Impl) -> Tensor:
        return sparse_attention(q, k, v, mask, impl=impl)

    stock = Form(lambda: _sdpa(q, k, v, matrix), (q, k, v))
    return _both(run, (q, k, v)) | {"SDPA, mask": stock}


def decaying(batch: int, tokens: int) -> Forms:
    """A decay of its own for each step, with half-lives around 50 tokens."""
    q, k, v = (leaf(batch, HEADS, tokens, SIZE, std=0.3) for _ in range(3))
    decay = (-0.02 * torch.rand(batch, HEADS, tokens)).requires_grad_()
    return _both(lambda impl: retention(q, k, v, decay, impl=impl)[0], (q, k, v, decay))


def softmax(targets: int, items: int) -> Forms:
    hidden, table = leaf(targets, SIZE), leaf(items, SIZE, std=0.1)
    target = torch.randint(items, (targets,))

    def stock() -> Tensor:
        return F.cross_entropy(hidden @ table.T, target, reduction="none")

    return _both(lambda impl: item_softmax(hidden, table, target, impl=impl), (hidden, table)) | {
        "cross_entropy": Form(stock, (hidden, table))
    }


def sampled(targets: int, items: int, negatives: int) -> Forms:
    """Cosines over a temperature, as HSTU trains with."""
    hidden, table = leaf(targets, SIZE), leaf(items, SIZE)
    target, negative = (torch.randint(items, (targets, *n)) for n in ((), (negatives,)))

    def run(impl: Impl) -> Tensor:
        return item_softmax(
            hidden, table, target, None, negative, l2_normalize=True, temperature=0.05, impl=impl
        )

    return _both(run, (hidden, table))


def gate(rows: int, width: int, dropout: float = 0.0) -> Forms:
    """Stock is what one would write; the reference shares our dropout and has no stock affine."""
    a, u, weight, bias = leaf(rows, width), leaf(rows, width), leaf(width), leaf(width)

    def run(impl: Impl) -> Tensor:
        return norm_mul(a, u, weight, bias, dropout=dropout, training=True, impl=impl)

    def stock() -> Tensor:
        return F.dropout(F.layer_norm(a, (width,), weight, bias, 1e-6) * u, dropout, True)

    inputs = (a, u, weight, bias)
    return _both(run, inputs) | {"stock": Form(stock, inputs)}


def grouped(tokens: int, width: int, groups: int) -> Forms:
    x, weight, bias = leaf(tokens, width), leaf(groups, width), leaf(groups, width)
    group = torch.randint(groups, (tokens,))
    return _both(
        lambda impl: group_layer_norm(x, group, weight, bias, impl=impl), (x, weight, bias)
    )


def drop(rows: int, width: int) -> Forms:
    x = leaf(rows, width)
    return {
        "ours": Form(lambda: fast_dropout(x, DROP, True), (x,)),
        "stock": Form(lambda: F.dropout(x, DROP, True), (x,)),
    }


def _both(run: Callable[[Impl], Tensor], inputs: Sequence[Tensor]) -> Forms:
    return {
        "ours": Form(lambda: run("auto"), tuple(inputs)),
        "reference": Form(lambda: run("reference"), tuple(inputs)),
    }

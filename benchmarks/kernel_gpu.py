"""HSTU attention's Triton path beside torch's flash attention, on lengths that differ.

Rows are drawn as after stochastic length with α = 1.8: of a row's events, normal with mean n and
deviation 0.4 n and cut to 1 … n, ``kept_lengths`` says how many stay. Width 512 is 8 heads of 64,
in bfloat16, causal:

- ours: no bias, which is what a softmax computes, or both tables, which is what HSTU computes;
- flash, padded: ``scaled_dot_product_attention`` on rows of n, padding at the end;
- flash, jagged: the same on a nested tensor, which has no padding.

Work is counted once for all: 4 d floating-point operations per head and pair of a query and a key
that it sees, 3.5 times as many with the backward pass. What a form does beyond that, on padding or
to make scores again, is its own loss. The share of the peak is that of the card's data sheet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gr.kernels.hstu_attention import Geometry, Impl, hstu_attention
from gr.training.stochastic_length import StochasticLength, kept_lengths
from kernel_cases import BUCKETS, Form, Forms, clocked

HEADS, SIZE = 8, 64
LENGTHS = (1024, 2048, 4096, 8192)
TOKENS = 65_536  # of a batch, padding among them
ALPHA, DEVIATION = 1.8, 0.4
BACKWARD = 3.5  # forward and backward together: seven matrix products where forward has two
NAMES = ("q", "k", "v", "position_table", "time_table")
# Dense bfloat16 with tensor cores, TFLOP/s, by a word of the card's name.
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L4": 121.0}
SLOWER = {"PCIe", "PCIE", "NVL"}  # cards of these names that have another peak


def peak_of(card: str) -> float | None:
    """TFLOP/s of the card, or None for one that is not in the list."""
    words = set(re.split(r"[ \-_]+", card))
    found = [peak for name, peak in PEAKS.items() if name in words]
    return found[0] if found and not ("H100" in words and words & SLOWER) else None


def jagged_lengths(longest: int, rows: int, seed: int = 0) -> Tensor:
    """Tokens of every row, int64 [rows], the most first."""
    random = np.random.default_rng(seed)
    events = np.clip(random.normal(longest, DEVIATION * longest, rows).round(), 1, longest)
    draw = random.integers(2**64, size=rows, dtype=np.uint64)
    kept = kept_lengths(events.astype(np.int64), draw, longest, StochasticLength(ALPHA))
    return torch.from_numpy(np.sort(kept)[::-1].copy())


def operations(lengths: Tensor, backward: bool) -> float:
    """Floating-point operations that causal attention over these rows takes."""
    pairs = (lengths.double() * (lengths + 1) / 2).sum().item()
    return 4 * SIZE * HEADS * pairs * (BACKWARD if backward else 1)


class Stream(NamedTuple):
    """q, k, v of [B, H, N, d], laid out as [B, N, H, d]; both tables; who sees whom."""

    q: Tensor
    k: Tensor
    v: Tensor
    position_table: Tensor
    time_table: Tensor
    geometry: Geometry
    longest: int

    @staticmethod
    def drawn(lengths: Tensor, longest: int, device: torch.device, heads: int = HEADS) -> Stream:
        torch.manual_seed(0)
        rows = len(lengths)
        valid = torch.arange(longest, device=device) < lengths.to(device)[:, None]

        def leaf(*shape: int, std: float = 1.0) -> Tensor:
            drawn = torch.randn(shape, device=device, dtype=torch.bfloat16)
            return (std * drawn).requires_grad_()

        # Leaves of [B, H, N, d] whose memory is that of [B, N, H, d].
        q, k, v = (
            leaf(rows, longest, heads, SIZE).detach().transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        tables = leaf(longest, std=0.1), leaf(BUCKETS + 1, std=0.1)
        return Stream(q, k, v, *tables, clocked(valid), longest)

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """Copies of the leaves in another precision."""
        return [x.detach().to(dtype).requires_grad_() for x in self[:5]]

    def attend(self, tensors: Sequence[Tensor], impl: Impl) -> Tensor:
        q, k, v, *tables = tensors
        options = {"scale": SIZE**-0.5, "norm_length": float(self.longest)}
        return hstu_attention(q, k, v, self.geometry, *tables, **options, impl=impl)


def forms(stream: Stream, lengths: Tensor) -> Forms:
    q, k, v = stream[:3]

    def padded() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    made = {
        "ours": Form(lambda: stream.attend(stream[:3], "triton"), stream[:3]),
        "ours, tables": Form(lambda: stream.attend(stream[:5], "triton"), stream[:5]),
        "flash, padded": Form(padded, stream[:3]),
    }
    if q.is_cuda:  # on a CPU torch has no causal attention of nested tensors
        made["flash, jagged"] = _jagged(stream, lengths.to(q.device))
    return made


def _jagged(stream: Stream, lengths: Tensor) -> Form:
    longest = stream.longest
    valid = torch.arange(longest, device=lengths.device) < lengths[:, None]
    packed = tuple(x.detach().transpose(1, 2)[valid].requires_grad_() for x in stream[:3])
    offsets = F.pad(lengths.cumsum(0), (1, 0))

    def run() -> Tensor:
        nested = [
            torch.nested.nested_tensor_from_jagged(
                x, offsets, min_seqlen=1, max_seqlen=longest
            ).transpose(1, 2)
            for x in packed
        ]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(nested[0], nested[1], nested[2], is_causal=True)
        values: Tensor = out.transpose(1, 2).values()
        return values

    return Form(run, packed)


def checked(longest: int, length: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Errors of one row and two heads, relative to the size of the exact values.

    Raises:
        RuntimeError: the output or a gradient is more than twice as far from the reference in
            float32 as the reference in bfloat16 is.
    """
    stream = Stream.drawn(torch.tensor([length]), longest, device, heads=2)
    gradient = torch.randn_like(stream.v)
    gradient[:, :, length:] = 0

    def results(dtype: torch.dtype, impl: Impl) -> list[Tensor]:
        tensors = stream.tensors(dtype)
        out = stream.attend(tensors, impl)
        grads = torch.autograd.grad(out, tensors, gradient.to(dtype))
        return [x.detach().float() for x in (out[:, :, :length], *grads)]

    exact = results(torch.float32, "reference")
    plain, ours = results(torch.bfloat16, "reference"), results(torch.bfloat16, "triton")
    errors = {}
    for name, x, y, z in zip(("out", *NAMES), exact, plain, ours, strict=True):
        size = float(x.norm())
        found = {"ours": float((z - x).norm()) / size, "reference": float((y - x).norm()) / size}
        if not found["ours"] <= 2 * found["reference"]:
            raise RuntimeError(
                f"hstu_attention, n {longest}: {name} is off by {found['ours']:.2g} of its size, "
                f"wanted at most twice the {found['reference']:.2g} of the reference in bfloat16"
            )
        errors[name] = found
    return errors


def rates(seconds: float, lengths: Tensor, backward: bool, peak: float | None) -> dict[str, Any]:
    """TFLOP/s, and the share of the peak (None where the card's is not known)."""
    tflops = operations(lengths, backward) / seconds / 1e12
    return {"tflops": tflops, "of_peak": None if peak is None else tflops / peak}

"""When the Triton path of an operation can run, and what to say where it cannot."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether the package is installed; asking imports nothing."""
    return find_spec("triton") is not None


@cache
def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any tensors (``TRITON_INTERPRET=1``)."""
    import triton

    @triton.jit  # type: ignore[untyped-decorator]
    def probe() -> None:
        pass

    return not isinstance(probe, triton.runtime.JITFunction)


def wants_triton(x: Tensor) -> bool:
    """Whether ``impl="auto"`` prefers Triton: a CUDA tensor, outside a compiled graph."""
    return x.is_cuda and not torch.compiler.is_compiling()


def triton_lacks(name: str, x: Tensor) -> str | None:
    """What Triton itself lacks for the argument ``x`` of that name, or None."""
    if not has_triton():
        return "the package triton is not installed; wanted triton>=3.6 (pip install triton)"
    if not x.is_cuda and not interpreted():
        return (
            f"{name} is on {x.device}; wanted a CUDA device, or TRITON_INTERPRET=1 in the "
            "environment before Python starts"
        )
    return None

"""The ``*_cases.py`` beside this file, each in a process where Triton is interpreted or compiles.

Triton reads ``TRITON_INTERPRET`` when it is imported, so one process cannot do both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CASES = sorted(path.name for path in HERE.glob("*_cases.py"))
HAS_TRITON = find_spec("triton") is not None


def interpreter_loops() -> bool:
    """Triton 3.6 takes a loop's bound as ``int(array of one)``, which NumPy 2.4 refuses."""
    triton, numpy = ([int(x) for x in version(n).split(".")[:2]] for n in ("triton", "numpy"))
    return triton >= [3, 7] or numpy < [2, 4]


def python(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: the fused path is NOT tested")
def test_the_fused_path_under_the_interpreter(cases: str) -> None:
    if not interpreter_loops():
        pytest.skip("triton 3.6 interprets no loop on numpy>=2.4: the fused path is NOT tested")
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases), TRITON_INTERPRET="1")


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.skipif(
    not (HAS_TRITON and torch.cuda.is_available()), reason="no GPU: kernels are not compiled"
)
def test_the_fused_path_on_a_gpu(cases: str) -> None:
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases), TRITON_INTERPRET="0")


def test_gr_runs_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch, gr
from gr.kernels.branch_attention import branch_attention
from gr.kernels.group_layer_norm import group_layer_norm
from gr.kernels.hstu_attention import Visibility, build_geometry, hstu_attention
from gr.kernels.item_softmax import item_softmax
from gr.kernels.norm_mul import norm_mul
from gr.kernels.retention import retention
from gr.kernels.sparse_attention import SparseMask, sparse_attention
x, at = torch.ones(1, 1, 2, 2), torch.arange(2)[None]
rule = Visibility(torch.ones(1, 2, dtype=torch.bool), at, 2)
geometry = build_geometry(rule, at, at, None, None, max_distance=2, num_buckets=2)
for call in (
    lambda impl: hstu_attention(x, x, x, geometry, norm_length=1.0, impl=impl),
    lambda impl: item_softmax(x[0, 0], x[0, 0], at[0], impl=impl),
    lambda impl: branch_attention(x, x, x, x, x, at[..., None], impl=impl),
    lambda impl: sparse_attention(x, x, x, SparseMask(), impl=impl),
    lambda impl: norm_mul(x, x, impl=impl),
    lambda impl: group_layer_norm(x[0, 0], at[0], x[0, 0], x[0, 0], impl=impl),
    lambda impl: retention(x, x, x, torch.zeros(1), impl=impl),
):
    call("auto")
    try:
        call("triton")
    except RuntimeError as error:
        assert "'triton' cannot run: the package triton is not installed" in str(error), error
    else:
        raise AssertionError("ran without triton")
"""
    python("-c", code)

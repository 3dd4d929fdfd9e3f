"""benchmarks/kernels.py compares forms that agree, tells those that do not, and counts right."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield


def module(name: str) -> Any:
    return importlib.import_module(name)


def test_every_operation_is_measured_beside_a_form_that_agrees(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "kernels.py"),
            *("--quick", "--only", "cpu", "--output", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))
    kernels = BENCHMARKS.parent / "gr" / "kernels"
    operations = {file.parent.name for file in kernels.glob("*/reference.py")} | {"dropout"}
    assert {row["op"] for row in result["rows"]} == operations
    for row in result["rows"]:
        assert row["milliseconds"].keys() == row["memory_mb"].keys() > {"ours"}
        assert row["time_ratio"].keys() == row["milliseconds"].keys() - {"ours"}
        assert min(row["milliseconds"].values()) > 0
        for found in row["time_ratio"].values():
            assert 0 < found["low"] <= found["median"] <= found["high"]


def test_a_form_that_differs_ends_the_run() -> None:
    kernels, cases = module("kernel_times"), module("kernel_cases")
    x = torch.randn(5, 3, requires_grad=True)

    def form(run: Any) -> Any:
        return cases.Form(run, (x,))

    case = cases.Case("square", "5 × 3", dict)
    ours = form(lambda: x * x)
    kernels.compare(case, {"ours": ours, "other": form(lambda: x**2)})
    with pytest.raises(RuntimeError, match=r"square, 5 × 3: other differs .* in the result"):
        kernels.compare(case, {"ours": ours, "other": form(lambda: x**2 + 1e-2)})
    same_values = form(lambda: (x * x).detach() + x - x.detach())
    with pytest.raises(RuntimeError, match="in gradient 1"):
        kernels.compare(case, {"ours": ours, "other": same_values})


def test_work_on_a_gpu_is_counted_by_pairs_that_see_each_other() -> None:
    gpu = module("kernel_gpu")
    lengths = torch.tensor([3, 1])
    pairs = (1 + 2 + 3) + 1
    assert gpu.operations(lengths, backward=False) == 4 * gpu.SIZE * gpu.HEADS * pairs
    assert gpu.operations(lengths, backward=True) == 3.5 * gpu.operations(lengths, False)
    assert gpu.rates(1.0, lengths, False, None)["of_peak"] is None


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 PCIe", None),
        ("Some Card", None),
    ],
)
def test_the_peak_is_that_of_the_card(card: str, peak: float | None) -> None:
    assert module("kernel_gpu").peak_of(card) == peak


def test_jagged_lengths_are_those_of_stochastic_length() -> None:
    gpu = module("kernel_gpu")
    lengths = gpu.jagged_lengths(1024, 200)
    threshold = 1024 ** (gpu.ALPHA / 2)
    assert torch.equal(lengths, lengths.sort(descending=True).values)
    # Rows below the threshold are whole, those above are mostly cut to it.
    assert lengths.min() >= 1 and lengths.max() <= 1024
    assert (lengths <= threshold + 1).double().mean() > 0.5

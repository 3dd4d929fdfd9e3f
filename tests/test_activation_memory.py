"""The benchmark of activation memory counts what can be counted by hand, and writes its file."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("activation_memory")


def test_storages_count_once_and_parameters_never(benchmark: ModuleType) -> None:
    linear = nn.Linear(6, 8)
    x = torch.randn(5, 6, requires_grad=True)

    def run() -> torch.Tensor:
        left, right = torch.chunk(linear(x), 2, dim=-1)
        # Both halves lie in one storage; tanh keeps its own output.
        return torch.tanh(left * right)

    saved = benchmark.saved_by(run, list(linear.parameters()))
    assert sum(saved.values()) == 4 * (5 * 6 + 5 * 8 + 5 * 4)


def test_hstu_by_hand(benchmark: ModuleType) -> None:
    from gr.model import GRConfig

    config = GRConfig(
        hidden_size=16,
        num_attention_heads=2,
        layer_types=["hstu"],
        max_position_embeddings=32,
    )
    found = benchmark.layer_memory(benchmark.FORMS["hstu"], config, 1, 32, torch.float32)
    # x, its norm, u, v, q and k before and after SiLU, A v, its norm, the gated product, each four
    # bytes wide; beyond them two numbers per token of each of the two norms, and the scale of ones
    # and shift of zeros of the second. A fused kernel keeps fewer.
    norms = 2 * 2 * 4 / 16 + 2 * 4 / 32
    assert 4 * 7 <= found["units"] <= 4 * (2 + 4 + 4 + 3) + norms
    assert found["units"] == pytest.approx(sum(found["parts"].values()))


def test_the_benchmark_runs(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "activation_memory.py"),
            "--quick",
            "--output",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "activation_memory.json").read_text(encoding="utf-8"))
    assert result["config"]["quick"] is True and result["commit"].keys() == {"sha", "dirty"}
    layers = result["layers"]
    assert {"transformer", "hstu", "hstu, scores kept", "hstu, ranking"} <= layers.keys()
    for setting, found in layers["hstu"].items():
        assert found["units"] < layers["transformer"][setting]["units"]
        assert found["units"] < layers["hstu, scores kept"][setting]["units"]
    assert "layer over" in ran.stdout and "the paper: 2.36" in ran.stdout
    setting = next(iter(layers["hstu"]))
    ratio = layers["transformer"][setting]["units"] / layers["hstu"][setting]["units"]
    row = next(line for line in ran.stdout.splitlines() if f" {ratio:.2f} " in line)
    assert "transformer" in row

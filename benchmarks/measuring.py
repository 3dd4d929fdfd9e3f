"""How the benchmarks measure and report: time, memory, the machine, tables and files.

Seconds are wall clock. Memory is what a call adds to the resident set of a process that has loaded
everything the call needs: the highest resident size during the call minus the size before it, in MB
of 10^6 bytes. Each measured call gets a fresh process, so nothing that an earlier call left in the
allocator makes it look smaller.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import transformers
from rich.console import Console
from rich.table import Table

from gr.data.whole_file import whole_file
from peers.watch import peak, reset_peak, trim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

T = TypeVar("T")


# ---- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured(Generic[T]):
    """What one call returned, took and added to the resident set."""

    result: T
    seconds: float
    memory_mb: float


def measured(function: Callable[..., T], *arguments: Any) -> Measured[T]:
    """One call with its time and its extra peak memory."""
    gc.collect()
    trim()
    before = reset_peak()
    seconds, result = timed(function, *arguments)
    return Measured(result, seconds, max(0.0, (peak() - before) / 1e6))


def timed(function: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """Seconds of one call, and what it returned."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` in a process of its own; what it raises is raised here.

    On Linux the process is forked, which saves importing torch and transformers each time. That is
    safe, and the process fresh, as long as this one computes nothing itself: its threads of torch
    would be missing in the fork.
    """
    gc.freeze()  # a collection in the fork would copy, page by page, what the libraries hold
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


# ---- what it was measured on ---------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The processor, how much of it is used, how busy it is already, and the versions."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> dict[str, Any]:
    """The checked-out commit, and whether anything but earlier results differs from it."""
    try:
        sha = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return {"sha": None, "dirty": None}
    return {"sha": sha, "dirty": bool(changed)}


def _git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


# ---- reporting -----------------------------------------------------------------------------------


def arguments(description: str) -> tuple[bool, Path]:
    """``--quick`` and the output folder, which exists afterwards."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, to see that the benchmark works; its numbers mean nothing",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the JSON and the figure (default: benchmarks/results, or with --quick "
        "runs/benchmarks)",
    )
    given = parser.parse_args()
    usual = ROOT / "runs" / "benchmarks" if given.quick else RESULTS
    output: Path = given.output or usual
    output.mkdir(parents=True, exist_ok=True)
    return given.quick, output


def progress(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def write(name: str, output: Path, content: Mapping[str, Any], figure: Figure) -> None:
    """``name.json`` and ``name.png``."""
    with whole_file(output / f"{name}.json") as temporary:
        text = json.dumps(_rounded(content), indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    with whole_file(output / f"{name}.png") as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    Console().print(f"{output / name}.json, .png", highlight=False, soft_wrap=True)


def _rounded(value: Any) -> Any:
    """The same with floats of six digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return value


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)

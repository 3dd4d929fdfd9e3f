"""Every operation of ``gr.kernels`` beside its naive form: time and memory.

    python benchmarks/kernels.py

``kernel_cases.py`` lists the operations, sizes and forms. Forward runs without gradients, as in
serving; with backward, the gradients of all inputs are taken. A form's results are compared with
ours first, and differing ones end the run.

Forms take turns, in rising and falling order, so that whatever slows the machine slows all of them.
Each round gives one ratio, its time over ours; reported are the median ratio and its quartiles.
Memory is what one call adds to the resident set, its results among it, in a process of its own
that has made the same call before (see ``measuring``).

Where there is a GPU, HSTU attention is measured on it beside torch's flash attention, see
``kernel_gpu.py``; those results go to ``kernels_gpu.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

import kernel_gpu
from gr.data.whole_file import whole_file
from kernel_cases import Case, Form, Forms, cases
from measuring import (
    RESULTS,
    ROOT,
    commit,
    in_fresh_process,
    machine,
    measured,
    print_table,
    progress,
    timed,
)

MODES = {"forward": False, "forward+backward": True}
TOLERANCE = 2e-4  # of the largest value, between two float32 results
LEAST_SECONDS = 0.005  # that one timing takes, by repeating short calls
LEAST_ROUNDS, MOST_ROUNDS = 5, 200

Call = Callable[[], object]


# ---- one case ------------------------------------------------------------------------------------


def call_of(form: Form, backward: bool) -> Call:
    """One pass of a form, or one with its gradients."""
    if not backward:
        return torch.no_grad()(form.run)
    with torch.no_grad():
        gradient = torch.randn_like(form.run())

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(form.run(), form.inputs, gradient)

    return run


def take_turns(
    calls: Mapping[str, Call], seconds: float, wait: Call = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each call in each round, for about ``seconds`` in all.

    Args:
        wait: returns when what was asked for has been done.
    """
    repeats = {}

    def several(call: Call, count: int) -> None:
        for _ in range(count):
            call()
        wait()

    for name, call in calls.items():
        several(call, 1)
        took, _ = timed(several, call, 1)
        repeats[name] = max(1, math.ceil(LEAST_SECONDS / took))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, rounds, end = list(calls), 0, time.perf_counter() + seconds
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() < end):
        for name in order:
            took, _ = timed(several, calls[name], repeats[name])
            times[name].append(took / repeats[name])
        order.reverse()
        rounds += 1
    return times


def ratio(other: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of times that were taken in turns."""
    low, middle, high = quantiles(
        [x / y for x, y in zip(other, ours, strict=True)], n=4, method="inclusive"
    )
    return {"low": low, "median": middle, "high": high}


def compare(case: Case, forms: Forms) -> None:
    """See that every form computes what ours does: results, and gradients by position.

    Forms that drop differ in what they drop, so only elements that both keep are compared.

    Raises:
        RuntimeError: they differ.
    """
    wanted = _results(forms["ours"], case.dropped)
    for name, form in forms.items():
        for at, (x, y) in enumerate(zip(wanted, _results(form, case.dropped), strict=True)):
            kept = (x != 0) & (y != 0) if case.dropped else torch.ones_like(x, dtype=torch.bool)
            off = float((x - y)[kept].abs().max() / x.abs().max())
            if not (off <= TOLERANCE and kept.double().mean() > 0.5):
                raise RuntimeError(
                    f"{case.op}, {case.size}: {name} differs from ours by {off:.2g} of the largest "
                    f"value in {'the result' if not at else f'gradient {at}'}, wanted at most "
                    f"{TOLERANCE:g}"
                )


def _results(form: Form, dropped: bool) -> list[Tensor]:
    torch.manual_seed(1)
    out = form.run()
    if dropped:
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out, form.inputs, torch.randn_like(out))]


def times_of(case: Case, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round by mode and form, after the comparison."""
    forms = case.make()
    compare(case, forms)
    return {
        mode: take_turns({n: call_of(form, backward) for n, form in forms.items()}, seconds)
        for mode, backward in MODES.items()
    }


def memory_of(case: Case, name: str) -> dict[str, float]:
    """MB that one call of a form adds, by mode."""
    form, found = case.make()[name], {}
    for mode, backward in MODES.items():
        call = call_of(form, backward)
        call()
        found[mode] = measured(call).memory_mb
    return found


def case_at(at: int, quick: bool, threads: int) -> Case:
    torch.set_num_threads(threads)
    return cases(quick)[at]


def _times_at(at: int, quick: bool, threads: int, seconds: float) -> dict[str, Any]:
    return times_of(case_at(at, quick, threads), seconds)


def _memory_at(at: int, quick: bool, threads: int, name: str) -> dict[str, float]:
    return memory_of(case_at(at, quick, threads), name)


def row_of(
    case: Case, mode: str, times: Mapping[str, Sequence[float]], memory_mb: Mapping[str, float]
) -> dict[str, Any]:
    """A line of the results."""
    return {
        "op": case.op,
        "size": case.size,
        "mode": mode,
        "rounds": len(times["ours"]),
        "milliseconds": {name: 1e3 * median(each) for name, each in times.items()},
        "memory_mb": dict(memory_mb),
        "time_ratio": {
            name: ratio(each, times["ours"]) for name, each in times.items() if name != "ours"
        },
    }


def on_cpu(quick: bool, threads: int, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for at, case in enumerate(cases(quick)):
        progress(f"{case.op}, {case.size}")
        times = in_fresh_process(_times_at, at, quick, threads, seconds)
        memory = {
            name: in_fresh_process(_memory_at, at, quick, threads, name)
            for name in times["forward"]
        }
        for mode in MODES:
            found = {name: each[mode] for name, each in memory.items()}
            rows.append(row_of(case, mode, times[mode], found))
    return rows


# ---- the GPU -------------------------------------------------------------------------------------


def on_gpu(lengths: Sequence[int], tokens: int, seconds: float) -> list[dict[str, Any]]:
    device, rows = torch.device("cuda"), []
    peak = kernel_gpu.peak_of(torch.cuda.get_device_name(device))
    for longest in lengths:
        progress(f"n = {longest}")
        kept = kernel_gpu.jagged_lengths(longest, max(1, tokens // longest))
        errors = kernel_gpu.checked(longest, int(kept[0]), device)
        forms = kernel_gpu.forms(kernel_gpu.Stream.drawn(kept, longest, device), kept)
        case = Case("hstu_attention", f"n {longest}, B {len(kept)}", lambda: {})
        for mode, backward in MODES.items():
            calls = {name: call_of(form, backward) for name, form in forms.items()}
            times = take_turns(calls, seconds, torch.cuda.synchronize)
            row = row_of(case, mode, times, {n: _gpu_memory(call) for n, call in calls.items()})
            rows.append(
                row
                | {
                    "lengths": kept.tolist(),
                    "errors": errors,
                    "rates": {
                        name: kernel_gpu.rates(ms / 1e3, kept, backward, peak)
                        for name, ms in row["milliseconds"].items()
                    },
                }
            )
    return rows


def _gpu_memory(call: Call) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


# ---- reporting -----------------------------------------------------------------------------------


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table per operation: every form at every size, ours first."""
    found: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["op"], {}).setdefault(row["size"], {})[row["mode"]] = row
    columns = ("", "forward ms", "/ ours", "MB", "+backward ms", "/ ours", "MB")
    for op, sizes in found.items():
        lines = []
        for size, modes in sizes.items():
            for name in modes["forward"]["milliseconds"]:
                line = [size if name == "ours" else f"  {name}"]
                for mode in MODES:
                    row = modes[mode]
                    times = row["time_ratio"].get(name)
                    line.append(f"{row['milliseconds'][name]:.2f}")
                    line.append(f"{times['median']:.2f}" if times else "")
                    line.append(f"{row['memory_mb'][name]:.1f}")
                lines.append(line)
        print_table(op, columns, lines)


def show_rates(rows: Sequence[Mapping[str, Any]]) -> None:
    for mode in MODES:
        lines = []
        for row in rows:
            if row["mode"] != mode:
                continue
            for name, found in row["rates"].items():
                share = "" if found["of_peak"] is None else f"{found['of_peak']:.1%}"
                lines.append([row["size"], name, f"{found['tflops']:.1f}", share])
        print_table(f"{mode} on the GPU", ("", "form", "TFLOP/s", "of peak"), lines)


def save(file: Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    content = {"config": config, "machine": machine(), "commit": commit(), "rows": _short(rows)}
    if torch.cuda.is_initialized():
        content["machine"]["gpu"] = torch.cuda.get_device_name()
    with whole_file(file) as temporary:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    print(file)


def _short(value: Any) -> Any:
    """Floats of four digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="of the CPU (%(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="for the turns of one case and mode (%(default)s)",
    )
    parser.add_argument("--only", choices=("cpu", "gpu"), help="measure there alone")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of kernels.json (default: benchmarks/results, or with --quick "
        "runs/benchmarks)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, to see that the benchmark works; its numbers mean nothing",
    )
    given = parser.parse_args()
    output: Path = given.output or (ROOT / "runs" / "benchmarks" if given.quick else RESULTS)
    output.mkdir(parents=True, exist_ok=True)
    seconds = 0.0 if given.quick else given.seconds
    config = {"threads": given.threads, "seconds": seconds, "quick": given.quick}
    torch.set_num_threads(given.threads)
    if given.only != "gpu":
        rows = on_cpu(given.quick, given.threads, seconds)
        show(rows)
        save(output / "kernels.json", config, rows)
    # Asked only now: a process that has looked for a GPU can no longer be forked.
    has_gpu = given.only != "cpu" and torch.cuda.is_available()
    if given.only == "gpu" and not has_gpu:
        parser.error("--only gpu: torch.cuda.is_available() is False, wanted a CUDA device")
    if has_gpu:
        lengths: Sequence[int] = kernel_gpu.LENGTHS
        tokens = kernel_gpu.TOKENS
        if given.quick:
            lengths, tokens = lengths[:1], 2 * lengths[0]
        rows = on_gpu(lengths, tokens, seconds)
        show(rows)
        show_rates(rows)
        about = {"heads": kernel_gpu.HEADS, "size": kernel_gpu.SIZE, "alpha": kernel_gpu.ALPHA}
        events = f"normal(n, {kernel_gpu.DEVIATION:g} n), rounded, 1 to n"
        save(output / "kernels_gpu.json", {**config, **about, "events": events}, rows)

"""The results as Markdown, for docs/benchmarks.md: ``python benchmarks/table.py [DIR]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
WAYS = {
    "ours": "`prefill` + `retrieve`",
    "processor": "`generate`, `TrieLogitsProcessor`",
    "stock": "`generate`, dict callback",
}


def retrieval(result: Mapping[str, Any]) -> Iterator[str]:
    config, seconds, memory = result["config"], result["seconds"], result["memory_mb"]
    yield (
        f"Retrieval: {config['users']} users, {config['history']} history tokens, "
        f"{config['beams']} beams, {config['items']:,} items. {_where(result)}\n"
    )
    rows = [
        [
            label,
            _short(seconds[name]),
            _short(memory[name]),
            f"{seconds[name] / seconds['ours']:.0f}×",
            f"{memory[name] / memory['ours']:.0f}×",
        ]
        for name, label in WAYS.items()
    ]
    rows.append(["`retrieve` on a held prefix", _short(seconds["held_prefix"]), "", "", ""])
    columns = ("", "seconds", "extra MB", "time / ours", "memory / ours")
    yield from _table(columns, rows)
    yield (
        f"\nLargest score difference {result['max_score_diff']:.1g}; trie "
        f"{result['trie_share']:.1%} of the time; a decoding step costs "
        f"{result['step_over_matmul']:.2f} times its bare matrix products.\n"
    )


def ranking(result: Mapping[str, Any]) -> Iterator[str]:
    config = result["config"]
    yield (
        f"Ranking: 1 user, {config['history']} history tokens, {config['candidates']:,} candidates "
        f"of {config['levels']} tokens, {config['microbatch']} in one pass. {_where(result)}\n"
    )
    rows = []
    for backbone, name in (("llama", "Llama"), ("hstu", "HSTU")):
        found = result["backbones"][backbone]
        seconds, memory = found["seconds"], found["memory_mb"]
        for method in memory:
            shown = "ours" if method == "ours" else f"whole sequences, {_batch(method)}"
            ratio = f"{seconds[method] / seconds['ours']:.0f}×"
            rows.append(
                [f"{name}, {shown}", _short(seconds[method]), _short(memory[method]), ratio]
            )
    yield from _table(("", "seconds", "extra MB", "time / ours"), rows)
    over = [
        result["backbones"][name]["breakdown"]["step_over_matmul"] for name in ("llama", "hstu")
    ]
    yield (
        f"\nLargest difference of a log-probability {result['max_score_diff']:.1g}; a pass over "
        f"candidates costs {over[0]:.2f} (Llama) and {over[1]:.2f} (HSTU) times its bare matrix "
        "products.\n"
    )


def tries(result: Mapping[str, Any]) -> Iterator[str]:
    config = result["config"]
    yield (
        f"\nThe trie, and what one beam step costs outside the model: {config['users']} users, "
        f"{config['beams']} beams, without a constraint and with {config['seen']} seen items left "
        f"out within a subset of the catalogue. {_where(result)}\n"
    )
    columns = (
        "items × tokens",
        "build s",
        "build peak MB",
        "trie MB",
        "ms per step",
        "constrained",
    )
    rows = []
    for name, found in result["catalogues"].items():
        build, step = found["build"], found["step_ms"]
        held = build["trie_mb"] + build["tables_mb"]
        cells = (build["seconds"], build["memory_mb"], held, step["all"], step["both"])
        rows.append([name, *map(_short, cells)])
    yield from _table(columns, rows)


def _batch(method: str) -> str:
    return "one by one" if method == "one_by_one" else f"{method.removeprefix('repeated_')} at once"


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _where(result: Mapping[str, Any]) -> str:
    machine, commit = result["machine"], result["commit"]
    sha = f"`{commit['sha'][:7]}`" if commit["sha"] else "unknown"
    changed = " with changes" if commit["dirty"] else ""
    return (
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, commit {sha}{changed}."
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" + "|---:" * (len(columns) - 1) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def training(result: Mapping[str, Any]) -> Iterator[str]:
    config = result["config"]
    yield f"Training: {config['data']}, {config['epochs']} epochs. {_where(result)}\n"
    rows = []
    for name, found in result["peers"].items():
        qualities = (
            " / ".join(f"{found[side][metric]:.3f}" for metric in ("HR@10", "NDCG@10"))
            for side in ("quality", "quality_ours")
        )
        ratios = (found["epoch_speedup"], found["memory_ratio"])
        beside = f"`{name.partition(',')[0]}`", f"`{found['ours']}`"
        rows.append([*beside, *(f"{ratio:.1f}×" for ratio in ratios), *qualities])
    columns = ("peer", "ours", "epoch", "peak memory", "quality, peer", "quality, ours")
    yield from _table(columns, rows)
    yield ""


def kernels(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"Kernels: time of another form over ours, and memory. {_where(result)}\n"
    rows: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        for name, found in row["time_ratio"].items():
            cells = rows.setdefault((f"`{row['op']}`, {row['size']}", name), [])
            memory = row["memory_mb"]
            cells.append(f"{found['median']:.2f}×")
            cells.append(f"{_short(memory[name])} / {_short(memory['ours'])}")
    columns = ("", "beside", "forward", "MB", "with gradients", "MB")
    yield from _table(columns, [[*key, *cells] for key, cells in rows.items()])
    yield ""


def main() -> None:
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(__doc__)
        return
    folder = Path(sys.argv[1]) if sys.argv[1:] else RESULTS
    shows = {
        "retrieve": retrieval,
        "rank": ranking,
        "trie": tries,
        "train": training,
        "kernels": kernels,
    }
    measured = {name: folder / f"{name}.json" for name in shows}
    if not any(file.is_file() for file in measured.values()):
        sys.exit(f"{folder} has no results: wanted one of {[*shows]} as JSON")
    for name, file in measured.items():
        if file.is_file():
            print("\n".join(shows[name](json.loads(file.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()

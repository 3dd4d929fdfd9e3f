"""How results look in a terminal: tables for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gr.eval import ExampleUser

OUT = Console()
ERR = Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output, unstyled."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def fields_table(title: str, fields: Mapping[str, Any]) -> Table:
    """Two columns: a name and its value."""
    table = Table(title=escape(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in fields.items():
        table.add_row(escape(name), escape(shown(value)))
    return table


def retrieval_table(
    retrieval: Mapping[str, Mapping[str, float]],
    columns: Sequence[str] = ("HR@10", "NDCG@10", "HR@50", "coverage@10"),
) -> Table:
    """One row per model; the first column with its interval."""
    table = Table(title="Retrieval on the whole catalogue", title_justify="left")
    table.add_column("model", no_wrap=True)
    for at, name in enumerate(columns):
        table.add_column(name, justify="right", no_wrap=True)
        if at == 0:
            table.add_column("interval", no_wrap=True)
    for model, values in retrieval.items():
        cells = [f"{values[name]:.4f}" if name in values else "–" for name in columns]
        table.add_row(escape(model), cells[0], interval(values, columns[0]), *cells[1:])
    return table


def interval(values: Mapping[str, float], metric: str) -> str:
    """A metric's bootstrap interval, or nothing where it has none."""
    low, high = values.get(f"{metric}_low"), values.get(f"{metric}_high")
    return "" if low is None or high is None else f"{low:.3f} – {high:.3f}"


def difference_line(
    model: str, baseline: str, metric: str, difference: tuple[float, float, float]
) -> str:
    """A paired difference (mean, low, high) of two models over the same users."""
    mean, low, high = difference
    return (
        f"{metric}: {escape(model)} − {escape(baseline)} = {mean:+.4f} ({low:+.4f} … {high:+.4f})"
    )


def metrics_table(title: str, values: Mapping[str, float]) -> Table:
    """One row per metric with its interval; counts last."""
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in values.items():
        if not name.endswith(("_low", "_high")):
            table.add_row(escape(name), shown(value), interval(values, name))
    return table


def example_table(example: ExampleUser) -> Table:
    """A user's newest events beside their recommendations; ✓ marks what came next."""
    title = f"User {example.user_id} ({example.history_length} events), next: {example.target}"
    table = Table(title=escape(title), title_justify="left")
    for heading in ("history, oldest first", "recommended, best first"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=1)
    for row in range(max(len(example.history), len(example.recommendations))):
        left = right = ""
        if row < len(example.history):
            event = example.history[row]
            left = f"[dim]{escape(event.note):8}[/dim]{escape(event.title)}"
        if row < len(example.recommendations):
            item = example.recommendations[row]
            mark = "[green]✓[/green] " if item.is_target else ""
            right = f"[dim]{escape(item.note):7}[/dim]{mark}{escape(item.title)}"
        table.add_row(left, right)
    return table


def shown(value: Any) -> str:
    """A value as a table cell."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(inner) for inner in value)
    return str(value)

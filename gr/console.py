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
    columns: Sequence[str] = ("HR@10", "NDCG@10", "MRR@10", "HR@50", "coverage@10"),
) -> Table:
    """One row per model; HR@10 with its interval."""
    table = Table(title="Retrieval on the whole catalogue", title_justify="left")
    table.add_column("model")
    for name in columns:
        table.add_column(name, justify="right")
    for model, values in retrieval.items():
        cells = []
        for name in columns:
            cell = f"{values[name]:.4f}" if name in values else "–"
            if name == "HR@10" and "HR@10_low" in values:
                cell += f" [{values['HR@10_low']:.3f}, {values['HR@10_high']:.3f}]"
            cells.append(cell)
        table.add_row(escape(model), *cells)
    return table


def example_table(example: ExampleUser) -> Table:
    """A user's newest events beside their recommendations; ✓ marks what came next."""
    title = f"User {example.user_id} ({example.history_length} events), next: {example.target}"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("history, oldest first")
    table.add_column("recommended, best first")
    for row in range(max(len(example.history), len(example.recommendations))):
        left = right = ""
        if row < len(example.history):
            event = example.history[row]
            left = f"{escape(event.title)} [dim]{escape(event.note)}[/dim]"
        if row < len(example.recommendations):
            item = example.recommendations[row]
            mark = " [green]✓[/green]" if item.is_target else ""
            right = f"{escape(item.title)} [dim]{escape(item.note)}[/dim]{mark}"
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

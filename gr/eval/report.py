"""The end of a run: `metrics.json` for machines and `report.html` for people, in one folder.

`metrics.json` has exactly these keys:

    {"dataset": str, "split_hash": str, "seconds": number,
     "retrieval": {model: {"HR@10": number, "HR@10_low": ..., "HR@10_high": ..., ..., "rows": ...}},
     "ranking":   {"AUC": number, "GAUC": number, "NE": number, ...},
     "tokenizer": {"collision_rate": number, ...}}

Every leaf is a number or a string. A number that does not exist is null: JSON has no NaN.

The page is one file: styles and figures are inside it, it loads nothing and runs nothing.
Everything that comes from data (titles, ids, names) is escaped.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from gr.data.whole_file import whole_file
from gr.eval import figures
from gr.eval.protocol import RankingResult, RetrievalResult

METRICS_NAME, REPORT_NAME = "metrics.json", "report.html"
_KEYS = ("dataset", "split_hash", "seconds", "retrieval", "ranking", "tokenizer")


@dataclass(frozen=True)
class Recommendation:
    """One line of an example: an item's title and, in `note`, its score, action, or nothing."""

    title: str
    note: str = ""
    is_target: bool = False


@dataclass(frozen=True)
class ExampleUser:
    """A user whose recommendations a reader can judge.

    The newest part of the history (oldest first; `history_length` is all of it), the
    recommendations (best first), and the title of what came next, where known."""

    user_id: str
    history: Sequence[Recommendation]
    recommendations: Sequence[Recommendation]
    target: str | None = None
    history_length: int | None = None


@dataclass(frozen=True)
class ReportContent:
    """What the page shows besides the numbers; a part that is missing leaves its section out.

    curves: model -> HR@1, HR@2, ... (`RetrievalResult.curve`). codebook_usage: per level, items
    behind each code. losses: name -> (step, loss) points. facts: short label -> text, shown under
    the title (command, device, versions). notes: sentences for the reader, e.g. what the protocol
    counted. main_model: the model that is the subject of the page. headline: the metrics in the
    bars and first in the table; more_columns: what else the table shows. A second table, folded
    away, shows every metric.
    """

    title: str = "Recommendation report"
    main_model: str | None = None
    headline: Sequence[str] = ("HR@10", "NDCG@10", "MRR@10")
    more_columns: Sequence[str] = ("HR@1", "HR@50", "coverage@10")
    curves: Mapping[str, npt.ArrayLike] = field(default_factory=dict)
    codebook_usage: Sequence[npt.ArrayLike] = ()
    losses: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    examples: Sequence[ExampleUser] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def build_metrics(
    dataset: str,
    split_hash: str,
    seconds: float,
    retrieval: Mapping[str, RetrievalResult | Mapping[str, float]],
    ranking: RankingResult | Mapping[str, float] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The contents of `metrics.json` from results; `seconds` is the wall time of the run."""
    return {
        "dataset": dataset,
        "split_hash": split_hash,
        "seconds": seconds,
        "retrieval": {
            name: result.to_dict() if isinstance(result, RetrievalResult) else dict(result)
            for name, result in retrieval.items()
        },
        "ranking": ranking.to_dict() if isinstance(ranking, RankingResult) else dict(ranking or {}),
        "tokenizer": dict(tokenizer or {}),
    }


def write_report(
    folder: str | os.PathLike[str], metrics: Mapping[str, Any], content: ReportContent | None = None
) -> tuple[Path, Path]:
    """Writes `metrics.json` and `report.html` into `folder` (made if missing); their paths.

    Raises ValueError where `metrics` is not of the shape in the module docstring, before anything
    is written.
    """
    content = content or ReportContent()
    clean = checked_metrics(metrics)
    page = render_report(clean, content)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(clean, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return _write(folder / METRICS_NAME, text), _write(folder / REPORT_NAME, page)


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics` as plain JSON values, or a ValueError that names the key that is wrong."""
    if set(metrics) != set(_KEYS):
        raise ValueError(f"metrics must have the keys {list(_KEYS)}, got {sorted(metrics)}")
    if not isinstance(metrics["retrieval"], Mapping) or not metrics["retrieval"]:
        raise ValueError('metrics["retrieval"] must map at least one model name to its metrics')
    return {key: _plain(metrics[key], f"metrics[{key!r}]") for key in _KEYS}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(inner, f"{where}[{place}]") for place, inner in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise ValueError(
        f"{where} must be a number, a string, a list or a mapping, got {type(value).__name__}"
    )


def render_report(metrics: Mapping[str, Any], content: ReportContent) -> str:
    """The page as one HTML string; `metrics` as `checked_metrics` returns it."""
    retrieval: dict[str, dict[str, float]] = metrics["retrieval"]
    headline = [m for m in content.headline if any(m in values for values in retrieval.values())]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gr.eval", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    colours = figures.model_colours(list(retrieval))
    bars = figures.metric_bars(retrieval, _intervals(retrieval), headline) if headline else None
    pictures = {
        "bars": bars,
        "curve": figures.hit_rate_curve(content.curves, colours) if content.curves else None,
        "usage": figures.codebook_usage(content.codebook_usage)
        if len(content.codebook_usage)
        else None,
        "losses": figures.loss_curves(content.losses) if content.losses else None,
    }
    return environment.get_template("report.html").render(
        metrics=metrics,
        content=content,
        pictures={name: _data_uri(svg) for name, svg in pictures.items() if svg},
        table=_table(retrieval, [*headline, *content.more_columns]),
        full_table=_table(retrieval),
        colours=colours,
        ranking=_with_intervals(metrics["ranking"]),
        tokenizer={name: _shown(value) for name, value in metrics["tokenizer"].items()},
        seconds=_duration(metrics["seconds"]),
    )


def _is_bound(name: str, values: Mapping[str, Any]) -> bool:
    stem, _, side = name.rpartition("_")
    return side in ("low", "high") and stem in values


def _intervals(
    retrieval: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, tuple[float, float]]]:
    return {
        model: {
            name: (values[f"{name}_low"], values[f"{name}_high"])
            for name in values
            if values.get(f"{name}_low") is not None and values.get(f"{name}_high") is not None
        }
        for model, values in retrieval.items()
    }


def _table(
    retrieval: Mapping[str, Mapping[str, float]], wanted: Sequence[str] | None = None
) -> dict[str, Any]:
    """Columns (all, or those wanted that exist) and rows; the best of each column is marked."""
    columns: list[str] = []
    for values in retrieval.values():
        columns += [n for n in values if "@" in n and not _is_bound(n, values) and n not in columns]
    if wanted is not None:
        columns = [name for name in dict.fromkeys(wanted) if name in columns]
    best = {
        column: max(
            (v[column] for v in retrieval.values() if v.get(column) is not None), default=None
        )
        for column in columns
    }
    rows = []
    for model, values in retrieval.items():
        cells = [
            {
                "text": _shown(values.get(column)),
                "range": _range(values, column),
                # Coverage is a property, not a contest: guessing at random covers most.
                "best": not column.startswith("coverage") and values.get(column) == best[column],
            }
            for column in columns
        ]
        rows.append({"model": model, "cells": cells})
    return {"columns": columns, "rows": rows}


def _with_intervals(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"name": name, "text": _shown(value), "range": _range(values, name)}
        for name, value in values.items()
        if not _is_bound(name, values)
    ]


def _range(values: Mapping[str, Any], name: str) -> str:
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    return "" if low is None or high is None else f"{low:.3f} – {high:.3f}"


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"
    if isinstance(value, list):
        return ", ".join(_shown(inner) for inner in value)
    return ", ".join(f"{name}: {_shown(inner)}" for name, inner in value.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8")).decode("ascii")


def _write(path: Path, text: str) -> Path:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path

"""The pictures of the results: one PNG per benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

OURS, OTHERS = "#1f6f8b", "#c8553d"
LINES = {"llama": OURS, "hstu": OTHERS}
PHASES = {
    "prefill": "#8fb8c9",
    "model steps": OURS,
    "trie": OTHERS,
    "choosing": "#e0a458",
    "action scores": "#e0a458",
}


def draw_retrieval(result: Mapping[str, Any]) -> Figure:
    """Three ways side by side, where the time of ours goes, and the four sweeps."""
    figure, config = new_figure(15, 11), result["config"]
    top, below = _rows(figure, 1, 1.75)
    figure.suptitle(
        f"Retrieval: {config['users']} users, {config['history']} history tokens, "
        f"{config['beams']} beams, {config['items']:,} items; {_machine(result)}"
    )
    seconds, memory, parts = top.subplots(1, 3, width_ratios=(1, 1, 1.3))
    names = {
        "ours": "ours",
        "processor": "generate,\nour processor",
        "stock": "generate,\ndict callback",
    }
    ways = {label: name for name, label in names.items()}
    _bars(seconds, {label: result["seconds"][name] for label, name in ways.items()}, "s")
    seconds.set_xlabel("seconds per request")
    _bars(memory, {label: result["memory_mb"][name] for label, name in ways.items()}, "MB")
    memory.set_xlabel("extra peak memory, MB")
    _parts(parts, result["breakdown"], ("prefill", "model steps", "trie", "choosing"))
    axes = below.subplots(2, 4, sharex="col", sharey="row")
    labels = {
        "beams": "beams",
        "history": "history tokens",
        "users": "users in a batch",
        "items": "items in the catalogue",
    }
    for column, (name, label) in enumerate(labels.items()):
        points = result["sweeps"][name]
        for at_row, key in enumerate(("seconds", "memory_mb")):
            axis = axes[at_row][column]
            at = [point[name] for point in points]
            axis.plot(at, [p["ours"][key] for p in points], "o-", color=OURS, label="ours")
            if key == "seconds":
                held = [p["ours"]["held_prefix"] for p in points]
                axis.plot(at, held, "o:", color=OURS, label="ours, prefix held")
            stock = [(p[name], p["stock"][key]) for p in points if "stock" in p]
            stock.append((config[name], result[key]["stock"]))
            axis.plot(
                *zip(*sorted(stock), strict=True), "s--", color=OTHERS, label="generate, dict"
            )
            _log_axes(axis, at)
        axes[1][column].set_xlabel(f"{label} (log scale)")
    for row in axes:
        _room(row)
    axes[0][0].set_ylabel("seconds per request (log scale)")
    axes[1][0].set_ylabel("extra peak memory, MB (log scale)")
    axes[0][0].legend()
    return figure


def draw_ranking(result: Mapping[str, Any]) -> Figure:
    """The ways side by side on both backbones, where the time of ours goes, and the two sweeps."""
    figure, config = new_figure(15, 13), result["config"]
    top, middle, below = _rows(figure, 1, 1.1, 1.2)
    figure.suptitle(
        f"Ranking: {config['candidates']:,} candidates of {config['levels']} tokens, "
        f"{config['history']} history tokens, 1 user; {_machine(result)}"
    )
    names = {"llama": "Llama", "hstu": "HSTU"}
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    for backbone, shown in names.items():
        found = result["backbones"][backbone]
        for method, value in found["memory_mb"].items():
            label = f"{shown}: {_ranking_method(method)}"
            memory[label], times[label] = value, found["seconds"][method]
    left, right = top.subplots(1, 2, sharey=True)
    _bars(left, times, "s")
    left.set_xlabel("seconds")
    _bars(right, memory, "MB")
    right.set_xlabel("extra peak memory, MB")
    for axis, (backbone, shown) in zip(middle.subplots(1, 2), names.items(), strict=True):
        breakdown = result["backbones"][backbone]["breakdown"]
        _parts(axis, breakdown, ("prefill", "model steps", "action scores"))
        axis.set_title(f"{shown}: {axis.get_title()}")
    axes = below.subplots(1, 4)
    sweeps = (("candidates", "candidates"), ("microbatch", "candidates in one pass (microbatch)"))
    for pair, (name, label) in enumerate(sweeps):
        for side, key in enumerate(("seconds", "memory_mb")):
            axis = axes[2 * pair + side]
            for backbone, shown in names.items():
                points = result["backbones"][backbone]["sweeps"][name]
                at = [point[name] for point in points]
                values = [point[key] for point in points]
                axis.plot(at, values, "o-", color=LINES[backbone], label=shown)
            _log_axes(axis, at)
            axis.set_xlabel(f"{label}\n(log scale)")
            unit = "seconds" if key == "seconds" else "extra peak memory, MB"
            axis.set_ylabel(f"{unit} (log scale)")
            _room([axis])
            axis.tick_params(axis="x", rotation=40)
    axes[0].legend()
    return figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that is drawn without a display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _rows(figure: Figure, *heights: float) -> list[SubFigure]:
    return list(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def _machine(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['cpu']}, threads: {machine['threads']}, torch {machine['torch']}"


def _ranking_method(method: str) -> str:
    if method == "ours":
        return method
    batch = method.removeprefix("repeated_")
    return "whole, one by one" if batch == method else f"whole, {batch} at once"


def _bars(axis: Axes, values: Mapping[str, float], unit: str) -> None:
    """Horizontal bars, each with its number; ours in the colour of ours."""
    labels = list(values)[::-1]
    colours = [OURS if "ours" in label.split(", ")[0] else OTHERS for label in labels]
    bars = axis.barh(labels, [values[label] for label in labels], color=colours)
    axis.bar_label(bars, [f"{_short(values[label])} {unit}" for label in labels], padding=3)
    axis.set_xlim(0, 1.25 * max(values.values()))
    axis.spines[["top", "right"]].set_visible(False)


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _parts(axis: Axes, breakdown: Mapping[str, Any], phases: Sequence[str]) -> None:
    """Milliseconds of every part of one request, coloured by phase, with its share."""
    parts = [(p, name, 1e3 * s) for p in phases for name, s in breakdown[p].items()][::-1]
    whole = 1e3 * breakdown["seconds_watched"]
    labels = [f"{phase}: {name}" for phase, name, _ in parts]
    bars = axis.barh(labels, [ms for *_, ms in parts], color=[PHASES[p] for p, *_ in parts])
    axis.bar_label(bars, [f"{ms:.1f} ms, {ms / whole:.0%}" for *_, ms in parts], padding=3)
    axis.set_xlim(0, 1.4 * max(ms for *_, ms in parts))
    axis.set_xlabel("milliseconds")
    axis.set_title(f"where the {whole:.0f} ms of ours go")
    axis.spines[["top", "right"]].set_visible(False)


def _log_axes(axis: Axes, sizes: Sequence[int]) -> None:
    """Both axes on log scales: a tick at each measured size, and plain numbers upwards."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(sizes)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for one in (axis.xaxis, axis.yaxis):
        one.set_minor_formatter(NullFormatter())
    axis.minorticks_off()
    axis.grid(True, alpha=0.3)


def _room(axes: Sequence[Axes]) -> None:
    """The same heights for all, with room around them: a flat line should look flat."""
    lows, highs = zip(*(axis.dataLim.intervaly for axis in axes), strict=True)
    for axis in axes:
        axis.set_ylim(min(lows) / 2, 2 * max(highs))

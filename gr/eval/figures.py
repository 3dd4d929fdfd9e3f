"""The report's figures, each an SVG string. Drawn without pyplot: no global state, no display.

Colours are the eight-colour set of Okabe and Ito (2008), distinguishable with the common
colour-vision deficiencies; one model keeps one colour through all figures of a page.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A7A7A", "#000000")
_INK, _GRID = "#3b4252", "#e5e9f0"
# Any: newer Matplotlib types the keys as literals, older ones as strings.
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    # A name with dollar signs is a name, not a formula.
    "text.parse_math": False,
    # Glyphs as paths: the picture looks the same whatever fonts the reader's machine has.
    "svg.fonttype": "path",
    # Ids inside the SVG would be random otherwise, and two equal reports would differ.
    "svg.hashsalt": "gr",
}

Interval = tuple[float, float]
Curve = Sequence[tuple[float, float]]


def model_colours(models: Sequence[str]) -> dict[str, str]:
    """A colour for each model, in order; more than eight models start again."""
    return {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(models)}


def metric_bars(
    values: Mapping[str, Mapping[str, float]],
    intervals: Mapping[str, Mapping[str, Interval]],
    metrics: Sequence[str],
) -> str:
    """A panel per metric, a bar per model, a whisker per interval.

    values: model -> metric -> value; intervals: model -> metric -> (low, high).
    """
    models = list(values)
    colours = model_colours(models)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _panels(len(metrics), width=3.4, height=0.4 + 0.36 * len(models))
        for panel, (axis, metric) in enumerate(zip(axes, metrics, strict=True)):
            top = 0.0
            for place, model in enumerate(models):
                value = values[model].get(metric)
                if value is None:
                    continue
                low, high = intervals.get(model, {}).get(metric, (value, value))
                axis.barh(place, value, color=colours[model], height=0.66)
                if high > low:
                    whisker = [[max(value - low, 0.0)], [max(high - value, 0.0)]]
                    axis.errorbar(value, place, xerr=whisker, color=_INK, capsize=2.5, lw=1.1)
                # The value goes behind the whisker, where it covers neither it nor the bar.
                axis.annotate(
                    f"{value:.3f}",
                    (max(value, high), place),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                )
                top = max(top, value, high)
            axis.set_yticks(range(len(models)), models if panel == 0 else [""] * len(models))
            axis.set_xlim(0.0, top * 1.22 if top > 0 else 1.0)
            axis.xaxis.set_major_locator(MaxNLocator(4))
            axis.invert_yaxis()
            axis.set_title(metric, loc="left", fontweight="bold")
            axis.grid(axis="x", color=_GRID)
        return _svg(figure)


def hit_rate_curve(
    curves: Mapping[str, npt.ArrayLike], colours: Mapping[str, str] | None = None
) -> str:
    """HR@k against k, a line per model. curves: model -> HR@1, HR@2, ..."""
    colours = {**model_colours(list(curves)), **(colours or {})}
    with matplotlib.rc_context(_STYLE):
        figure, (axis,) = _panels(1, width=7.4, height=3.6)
        for model, curve in curves.items():
            heights = np.asarray(curve, dtype=np.float64)
            axis.plot(
                np.arange(1, len(heights) + 1), heights, color=colours[model], lw=2, label=model
            )
        axis.set_xlabel("k: items shown")
        axis.set_ylabel("HR@k")
        axis.set_xlim(left=1)
        axis.set_ylim(bottom=0)
        axis.grid(color=_GRID)
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return _svg(figure)


def codebook_usage(usage: Sequence[npt.ArrayLike]) -> str:
    """Items behind each code, sorted, a panel per level; dashed: an even use of all codes."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _panels(len(usage), width=3.4, height=2.5)
        for level, (axis, counts) in enumerate(zip(axes, usage, strict=True)):
            items = np.sort(np.asarray(counts, dtype=np.float64))[::-1]
            axis.fill_between(
                np.arange(len(items)), items, step="mid", color=PALETTE[level % len(PALETTE)], lw=0
            )
            axis.axhline(items.mean(), color=_INK, ls="--", lw=1)
            axis.set_title(
                f"level {level + 1}: {int((items > 0).sum())} of {len(items)} codes", loc="left"
            )
            axis.set_xlabel("codes, most used first")
            axis.set_xlim(-0.5, max(len(items) - 0.5, 0.5))
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", color=_GRID)
        axes[0].set_ylabel("items")
        return _svg(figure)


def loss_curves(losses: Mapping[str, Curve]) -> str:
    """A line per name over (step, loss) points, e.g. training and validation."""
    colours = model_colours(list(losses))
    with matplotlib.rc_context(_STYLE):
        figure, (axis,) = _panels(1, width=7.4, height=3.2)
        for name, points in losses.items():
            steps = [step for step, _ in points]
            values = [value for _, value in points]
            # A few points (validation) are marked where measured; many (training) are a line.
            marker = "o" if len(points) <= 40 else None
            axis.plot(steps, values, color=colours[name], lw=1.8, marker=marker, ms=3.5, label=name)
        axis.set_xlabel("step")
        axis.set_ylabel("loss")
        axis.grid(color=_GRID)
        axis.legend(frameon=False)
        return _svg(figure)


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A row of `count` axes of about width x height inches each, framed left and below."""
    figure = Figure(figsize=(width * count + 0.4, height + 0.7), layout="constrained")
    FigureCanvasSVG(figure)
    axes = [figure.add_subplot(1, count, place + 1) for place in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#c5cad5")
        axis.tick_params(length=0)
        axis.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = io.BytesIO()
    # No creation date: equal numbers give an equal file.
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().decode("utf-8")

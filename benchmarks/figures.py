"""The pictures of a report: each a function of what was measured that gives one SVG, text as text, nothing loaded."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.interval import Estimate
from dflash_pipe.counted import counted
from dflash_pipe.forecast_table import duration, unit_of
from dflash_pipe.stats import BLOCKED, STARVED
from dflash_pipe.trace import Depth, Timeline

__all__ = [
    "COLOURS",
    "HANDED",
    "WAITS",
    "Panel",
    "channel_depths",
    "stage_colours",
    "step_times",
    "timelines",
    "worker_shares",
]

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F6000", "#5A5A5A")
HANDED = "#A0522D"  # hand-offs
WAITS = {STARVED: "#E9ECEF", BLOCKED: "#F3C6C1"}
_WIDTH = 11.0  # inches
_INK = "#333333"
_STYLE: Any = {  # rcParams, which have a type for each key
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "hatch.linewidth": 0.6,
}
_TITLE, _ROW = 0.34, 0.26  # inches above a topology, for its name; and for a worker
_LETTER = 0.068  # inches: a generous width of a letter at this font size


@dataclass(frozen=True)
class Panel:
    """One topology as the pictures show it.

    timeline: of one of its runs; begin: where the shown part of it starts, in seconds; ends: when each window ended.
    shares: worker -> (busy, starved, blocked). capacities: channel -> messages it has room for. steps: seconds a step,
    of each repeat, and step: their estimate. forecast: seconds a step. colours: of stages, and of `HAND_OFF`.
    """

    name: str
    timeline: Timeline
    begin: float
    ends: tuple[float, ...]
    shares: dict[str, tuple[float, float, float]]
    capacities: dict[str, int]
    steps: tuple[float, ...]
    step: Estimate
    forecast: float
    colours: dict[str, str] = field(default_factory=dict)


def stage_colours(stages: Sequence[str]) -> dict[str, str]:
    """stage -> colour, the same in every picture."""
    return {stage: COLOURS[number % len(COLOURS)] for number, stage in enumerate(stages)}


def timelines(panels: Sequence[Panel], seconds: float) -> str:
    """What every worker did for `seconds`, topology below topology on one time axis. Numbers: index of the message."""
    unit, size = unit_of(seconds)
    rows = [(_TITLE, _ROW * len(panel.timeline.workers)) for panel in panels]
    with _figure("timelines", _total(rows)) as (figure, done):
        axes = _stacked(figure, panels, rows)
        for ax, panel in zip(axes, panels, strict=True):
            _timeline(ax, panel, seconds, 1 / size)
        axes[-1].set_xlabel(f"time in {unit}, from the end of a step")
        return done()


def _timeline(ax: Axes, panel: Panel, seconds: float, scale: float) -> None:
    rows = {worker: number for number, worker in enumerate(panel.timeline.workers)}
    inside = _Window(panel.begin, panel.begin + seconds, scale)
    for state, colour in WAITS.items():
        waits = [w for w in panel.timeline.waits if w.state == state and inside.shows(w.begin, w.end)]
        for worker, row in rows.items():
            bars = [inside.bar(w.begin, w.end) for w in waits if w.worker == worker]
            ax.broken_barh(bars, (row - 0.36, 0.72), color=colour, linewidth=0)
    per_inch = seconds * scale / (_WIDTH * 0.86)
    for span in panel.timeline.spans:
        if not inside.shows(span.begin, span.end):
            continue
        left, width = inside.bar(span.begin, span.end)
        row, colour = rows[span.worker], panel.colours[span.work]
        ax.broken_barh([(left, width)], (row - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=0.4)
        if width > per_inch * (_LETTER * len(str(span.index)) + 0.06):
            ax.text(
                left + width / 2, row, str(span.index), ha="center", va="center_baseline", color=_ink(colour), size=7
            )
    for end in panel.ends:
        if inside.first <= end <= inside.last:
            ax.axvline((end - inside.first) * scale, color=_INK, linewidth=0.8, linestyle=(0, (2, 2)))
    steps = sum(inside.first < end <= inside.last for end in panel.ends)
    ended = f"{counted(steps, 'step')} end{'s' * (steps == 1)}"
    ax.set_title(f"{panel.name}: {ended} in this time", loc="left", size=9, weight="bold")
    ax.set_yticks(list(rows.values()), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, seconds * scale)
    ax.tick_params(axis="y", length=0)


@dataclass(frozen=True)
class _Window:
    """A part of a timeline, from `first` to `last`, drawn from 0 in units of 1 / scale seconds."""

    first: float
    last: float
    scale: float

    def shows(self, begin: float, end: float) -> bool:
        return end > self.first and begin < self.last

    def bar(self, begin: float, end: float) -> tuple[float, float]:
        left, right = max(begin, self.first), min(end, self.last)
        return (left - self.first) * self.scale, (right - left) * self.scale


def worker_shares(panels: Sequence[Panel]) -> str:
    """Each worker's time: busy with each of its stages, starved (waits for input), blocked (for room), in per cent."""
    rows = [(_TITLE, _ROW * len(panel.shares)) for panel in panels]
    with _figure("shares", _total(rows)) as (figure, done):
        axes = _stacked(figure, panels, rows)
        for ax, panel in zip(axes, panels, strict=True):
            for row, worker in enumerate(panel.shares):
                _bar(ax, row, _parts(panel, worker))
            ax.set_title(panel.name, loc="left", size=9, weight="bold")
            ax.set_yticks(range(len(panel.shares)), list(panel.shares))
            ax.set_ylim(len(panel.shares) - 0.5, -0.5)
            ax.set_xlim(0, 100)
            ax.tick_params(axis="y", length=0)
        axes[-1].set_xlabel("share of the worker's time, per cent")
        return done()


def _parts(panel: Panel, worker: str) -> list[tuple[str, float, str]]:
    """(word, share, colour) of what a worker's time was spent on."""
    busy, starved, blocked = panel.shares[worker]
    spent: dict[str, float] = {}
    for span in panel.timeline.spans:
        if span.worker == worker:
            spent[span.work] = spent.get(span.work, 0.0) + span.end - span.begin
    total = sum(spent.values())
    stages = [
        (stage if len(spent) > 1 else "busy", busy * spent[stage] / total, colour)
        for stage, colour in panel.colours.items()
        if total and stage in spent
    ]
    stages = stages or [("busy", busy, COLOURS[-1])]
    return [*stages, ("starved", starved, WAITS[STARVED]), ("blocked", blocked, WAITS[BLOCKED])]


def _bar(ax: Axes, row: int, parts: Sequence[tuple[str, float, str]]) -> None:
    left = 0.0
    for word, share, colour in parts:
        ax.barh(row, 100 * share, 0.72, left, color=colour)
        if share >= 0.03:
            text = f"{word} {share:.0%}" if share >= 0.12 else f"{share:.0%}"
            ink = _ink(colour)
            ax.text(left + 50 * share, row, text, ha="center", va="center_baseline", color=ink, size=7.5)
        left += 100 * share


def step_times(panels: Sequence[Panel]) -> str:
    """Seconds a step: every repeat, the median with its interval, and the forecast."""
    most = max(max(*panel.steps, panel.forecast) for panel in panels)
    unit, size = unit_of(most)
    scale = 1 / size
    with _figure("steps", 0.42 * len(panels) + 0.95) as (figure, done):
        left, total = _left(panels), _height(figure)
        ax = figure.add_axes((left, 0.5 / total, 0.985 - left, 1 - 0.6 / total))
        for row, panel in enumerate(panels):
            low, high = panel.step.low or panel.step.median, panel.step.high or panel.step.median
            ax.barh(row, panel.step.median * scale, 0.5, color="#D5E3EE")
            ax.plot(
                [s * scale for s in panel.steps], [row] * len(panel.steps), "o", color=COLOURS[0], ms=3.5, alpha=0.6
            )
            ax.plot([low * scale, high * scale], [row, row], color=_INK, linewidth=1.6, solid_capstyle="butt")
            ax.plot([panel.step.median * scale] * 2, [row - 0.25, row + 0.25], color=_INK, linewidth=1.6)
            ax.plot(panel.forecast * scale, row, "D", mfc="none", mec=COLOURS[5], ms=8, mew=1.5)
            said = f"{duration(panel.step.median)} (forecast {duration(panel.forecast)})"
            right = max(*panel.steps, high, panel.forecast) * scale
            ax.annotate(said, (right, row), (10, 0), textcoords="offset points", va="center", size=8.5)
        ax.set_yticks(range(len(panels)), [panel.name for panel in panels])
        ax.set_ylim(len(panels) - 0.4, -0.6)
        ax.set_xlim(0, 1.3 * most * scale)
        ax.set_xlabel(f"{unit} a step")
        ax.tick_params(axis="y", length=0)
        return done()


def channel_depths(panels: Sequence[Panel], seconds: float) -> str:
    """Messages in each channel over the time that the timelines show, and its room (dashed)."""
    unit, size = unit_of(seconds)
    scale = 1 / size
    shown = [(panel, name) for panel in panels for name in panel.capacities]
    if not shown:
        return ""
    titles = [name == next(iter(panel.capacities)) for panel, name in shown]
    rows = [(_TITLE if title else 0.12, 0.3) for title in titles]
    with _figure("depths", _total(rows)) as (figure, done):
        axes = _stacked(figure, panels, rows)
        for (panel, name), title, ax in zip(shown, titles, axes, strict=True):
            inside = _Window(panel.begin, panel.begin + seconds, scale)
            times, depths = _steps_of([d for d in panel.timeline.depths if d.channel == name], inside)
            room = panel.capacities[name]
            ax.fill_between(times, depths, step="post", color=COLOURS[4], linewidth=0)
            ax.axhline(room, color="#777777", linewidth=0.8, linestyle=(0, (4, 3)))
            ax.annotate(str(room), (1, room), (3, 0), ("axes fraction", "data"), "offset points", va="center", size=7)
            ax.set_ylim(0, max(room, *depths) * 1.1)
            ax.set_yticks([room / 2], [name])
            ax.set_xlim(0, seconds * scale)
            ax.tick_params(axis="y", length=0)
            if title:
                ax.set_title(panel.name, loc="left", size=9, weight="bold")
        axes[-1].set_xlabel(f"time in {unit}, as in the timelines")
        return done()


def _steps_of(depths: Sequence[Depth], inside: _Window) -> tuple[list[float], list[int]]:
    """Depth as a step function over the window: what it was before it, each change, and what it was at its end."""
    before = [d.items for d in depths if d.at <= inside.first]
    changes = [d for d in depths if inside.first < d.at < inside.last]
    times = [0.0, *((d.at - inside.first) * inside.scale for d in changes)]
    items = [before[-1] if before else 0, *(d.items for d in changes)]
    return [*times, (inside.last - inside.first) * inside.scale], [*items, items[-1]]


# --- layout


def _height(figure: Figure) -> float:
    return float(figure.get_size_inches()[1])


def _left(panels: Sequence[Panel]) -> float:
    """Share of the width that the longest label takes; the same in all pictures, so that their axes stand in line."""
    labels = [label for p in panels for label in (p.name, *p.timeline.workers, *p.capacities)]
    return (max(map(len, labels)) * _LETTER + 0.2) / _WIDTH


def _stacked(figure: Figure, panels: Sequence[Panel], rows: Sequence[tuple[float, float]]) -> list[Axes]:
    """Axes below each other, each (inches above it, inches high), with room for an axis at the bottom."""
    left, total = _left(panels), _height(figure)
    axes, top = [], total
    for above, high in rows:
        top -= above + high
        axes.append(figure.add_axes((left, top / total, 0.985 - left, high / total)))
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
    return axes


def _total(rows: Sequence[tuple[float, float]]) -> float:
    return sum(above + high for above, high in rows) + 0.5


def _ink(colour: str) -> str:
    """What can be read on it: white on dark colours, dark on light ones (relative luminance, WCAG 2)."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return "white" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.3 else "#111111"


@contextmanager
def _figure(name: str, height: float) -> Iterator[tuple[Figure, Callable[[], str]]]:
    """A figure, and how to get it as SVG. name: keeps its ids apart from those of other figures on the page."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height))
        FigureCanvasSVG(figure)

        def done() -> str:
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
            svg = text.getvalue()[text.getvalue().index("<svg") :]
            return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)

        yield figure, done

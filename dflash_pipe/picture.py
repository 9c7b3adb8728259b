"""A run at one moment, drawn: the live picture, the one-line progress, the closing table; pure functions of a View."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_pipe.counted import counted
from dflash_pipe.stats import ChannelLoad, View, WorkerShares

__all__ = ["closing_table", "live_view", "plain_line", "scalars", "unpadded"]

BAR = 30  # cells of a worker's bar
# What a line of progress has room for: these metrics where stages report them, else the first ones there are.
LINE = ("loss", "accuracy", "estimated_acceptance", "tau", "lr")
SHARES = (("busy", "green"), ("starved", "yellow"), ("blocked", "red"))


def unpadded(drawing: RenderableType, width: int) -> str:
    """The drawing as plain text of so many columns, without the blanks that fill its lines up."""
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(drawing)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def plain_line(view: View) -> str:
    """One line of progress: elapsed time, windows, a few metrics, and what every worker did with its time."""
    found = scalars(view)
    chosen = [(name, value) for name, value in found if name in LINE] or found[: len(LINE)]
    metrics = [f"{name} {_number(value)}" for name, value in chosen]
    workers = ", ".join(f"{w.name} {100 * w.busy:.0f}%" for w in view.workers) if view.elapsed >= 1 else ""
    window = f"window {view.window:,}" if view.window else ""
    return " · ".join(filter(None, [_clock(view.elapsed), window, *metrics, f"busy: {workers}" if workers else ""]))


def closing_table(view: View) -> Table:
    """How every worker spent its time, and the last metrics, as a table."""
    metrics = " · ".join(f"{name} {_number(value)}" for name, value in scalars(view))
    table = Table(title=_headline(view), caption=metrics or None, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("worker", style="bold")
    table.add_column("stages")
    for share, colour in SHARES:
        table.add_column(share, justify="right", style=colour)
    table.add_column("messages", justify="right")
    for worker in view.workers:
        shares = (f"{100 * getattr(worker, share):.1f} %" for share, _ in SHARES)
        table.add_row(worker.name, " → ".join(worker.stages), *shares, f"{worker.items:,}")
    return table


def live_view(view: View, curves: Mapping[str, Iterable[float]] | None = None) -> RenderableType:
    """The whole run as one picture: workers with bars of their time, channels with their depth, metrics as curves."""
    workers = _table("worker", "", ">busy", "now")
    workers.columns[1].header = Text.assemble(*((f"{share} ", colour) for share, colour in SHARES))
    for worker in view.workers:
        now = Text(worker.now, "dim", no_wrap=True, overflow="ellipsis")
        workers.add_row(Text(worker.name, "bold"), _bar(worker), f"{100 * worker.busy:.0f} %", now)
    channels = _table("channel", "depth", ">", ">bytes", ">sent")
    for channel in view.channels:
        depth = f"{channel.depth}/{channel.capacity}"
        channels.add_row(channel.name, _gauge(channel), depth, _bytes(channel.nbytes), f"{channel.sent:,}")
    metrics = _table("metric", ">", "")
    for name, value in scalars(view):
        metrics.add_row(Text(name, "bold"), _number(value), Text(_curve((curves or {}).get(name, ())), "cyan"))
    return Group(
        Text(_headline(view), "bold", no_wrap=True, overflow="ellipsis"),
        "",
        workers,
        "",
        channels,
        "",
        metrics if scalars(view) else "",
    )


def _table(*columns: str) -> Table:
    """A table without lines; a column that begins with ">" is aligned right; "now" gives way on a narrow terminal."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in columns:
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=side, no_wrap=column != "now")
    return table


def _headline(view: View) -> str:
    windows = f"{counted(view.window, 'window')} in " if view.window else ""
    return f"{view.run} · {windows}{_clock(view.elapsed)}"


def scalars(view: View) -> list[tuple[str, int | float]]:
    """The metrics that are plain numbers, in the order in which they were reported; the headline counts the steps."""
    numbers = ((name, value) for name, value in view.metrics.items() if isinstance(value, int | float))
    return [(name, value) for name, value in numbers if name != "step"]


def _bar(worker: WorkerShares) -> Text:
    """The three shares, stacked; rounded so that the cells always fill the bar."""
    bar, filled, total = Text(), 0, 0.0
    for share, colour in SHARES:
        total += getattr(worker, share)
        cells = min(BAR, round(total * BAR)) - filled
        bar.append("█" * cells, colour)
        filled += cells
    return bar.append("█" * (BAR - filled), "bright_black")


def _gauge(channel: ChannelLoad, cells: int = 8) -> Text:
    filled = min(cells, -(-cells * channel.depth // max(1, channel.capacity)))
    return Text("▮" * filled, "magenta").append("▯" * (cells - filled), "bright_black")


def _curve(values: Iterable[float]) -> str:
    values = [v for v in values if isfinite(v)]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (v - low) / (high - low or 1)))] for v in values)


def _number(value: int | float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _clock(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"

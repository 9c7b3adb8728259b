"""A forecast on a terminal: the step, what decides it, each worker's time, and what changes would bring."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_pipe.forecast import Forecast, Pace

__all__ = ["duration", "rendered"]


def duration(seconds: float) -> str:
    """Seconds as a person says them: 55.2 ms, 3.01 s, 10.2 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 120.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / (60.0 if unit == 'min' else size):.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def rendered(forecast: Forecast) -> RenderableType:
    """Everything that a forecast says, for `rich.console.Console.print`."""
    parts: list[RenderableType] = [Text(line) for line in _head(forecast)]
    parts += [Text(), _workers(forecast.pace)]
    if forecast.outcomes:
        parts += [Text(), _changes(forecast)]
    if forecast.refusal:
        parts += [Text(), Text(forecast.refusal)]
    return Group(*parts, Text(), Text(forecast.verdict))


def _head(forecast: Forecast) -> list[str]:
    pace = forecast.pace
    how = "exact" if pace.exact else "simulated"
    spread = "" if pace.high - pace.low < 0.01 * pace.step else f", 90 % of the steps {_range(pace)}"
    lines = [f"{forecast.graph}: {duration(pace.step)} a step ({how}; median {duration(pace.median)}{spread})"]
    rate = f"{forecast.messages_per_second:.4g} messages/s"
    if forecast.rows_per_second is not None:
        rate += f", {forecast.rows_per_second:.4g} rows/s"
    if forecast.eta is not None:
        rate += f", all rows in {duration(forecast.eta)}"
    lines += [rate, f"critical cycle: {pace.cycle}"]
    measured, own = duration(forecast.measured), duration(forecast.own)
    lines.append(
        f"the profiled run: measured {measured}, its own forecast {own} ({forecast.own / forecast.measured:.1%})"
    )
    return lines + [f"note: {remark}" for remark in pace.remarks]


def _range(pace: Pace) -> str:
    return f"{duration(pace.low)} to {duration(pace.high)}"


def _workers(pace: Pace) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "busy", "starved", "blocked"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for name, shares in pace.workers.items():
        table.add_row(name, f"{shares.busy:.0%}", f"{shares.starved:.0%}", f"{shares.blocked:.0%}")
    return table


def _changes(forecast: Forecast) -> Table:
    """What was asked first, in that order; then the usual changes, the best first."""
    table = Table(box=None, pad_edge=False)
    for name in ("what if", "step", "speedup", "critical cycle"):
        table.add_column(
            name, justify="right" if name in ("step", "speedup") else "left", no_wrap=name != "critical cycle"
        )
    table.add_column("", overflow="fold")
    asked = forecast.outcomes[: forecast.asked]
    usual = sorted(forecast.outcomes[forecast.asked :], key=lambda outcome: -outcome.speedup)
    now = str(forecast.pace.cycle)
    for outcome in (*asked, *usual):
        remark = "" if outcome.change.same_result else "another result"
        if outcome.pace is None:
            table.add_row(outcome.change.name, "-", "-", "", outcome.refusal)
            continue
        remark = "; ".join(filter(None, (remark, *outcome.pace.remarks)))
        speedup = f"{outcome.speedup:.2f}x"
        cycle = str(outcome.pace.cycle)
        shown = "the same" if cycle == now else cycle
        table.add_row(outcome.change.name, duration(outcome.pace.step), speedup, shown, remark)
    return table

"""A forecast on a terminal: the step, what decides it, each worker's time, and what changes would bring."""

from __future__ import annotations

from math import inf
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_pipe.forecast import Forecast, Pace

__all__ = ["duration", "figure", "rendered", "unit_of"]


# unit, its seconds, and from how many seconds on the next one is taken
_UNITS = (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 3600.0), ("h", 3600.0, 86400.0), ("days", 86400.0, inf))


def duration(seconds: float) -> str:
    """Seconds as a person says them: 55.2 ms, 3.01 s, 10.2 days."""
    unit, size = unit_of(seconds)
    return f"{figure(seconds / size)} {unit}"


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit in which a person says so many seconds, and its own seconds."""
    rounded = float(f"{seconds:.3g}")
    return next(((unit, size) for unit, size, end in _UNITS if rounded < end), ("days", 86400.0))


def figure(value: float, digits: int = 3) -> str:
    """A number to so many digits, 0.0123 or 55.2, and never with an exponent for a large one: 1,234."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


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
    step = f"{duration(pace.step)}{' ' * bool(_off(pace))}{_off(pace)} a step"
    lines = [f"{forecast.graph}: {step} (mean, {how}; median {duration(pace.median)}{spread})"]
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
    return lines + [f"note: {remark}" for remark in (*forecast.doubts, *pace.remarks)]


def _off(pace: Pace) -> str:
    return f"± {pace.off:.0%}" if pace.off >= 0.005 else ""


def _range(pace: Pace) -> str:
    return f"{duration(pace.low)} to {duration(pace.high)}"


def _workers(pace: Pace) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "busy", "starved", "blocked"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for name, shares in pace.workers.items():
        table.add_row(name, f"{shares.busy:.0%}", f"{shares.starved:.0%}", f"{shares.blocked:.0%}")
    return table


def _changes(forecast: Forecast) -> Group:
    """What was asked first, in that order; then the usual changes, the best first. Below it, each note once."""
    table = Table(box=None, pad_edge=False)
    for name in ("what if", "step", "±", "speedup", "", "critical cycle"):
        justify: Literal["left", "right"] = "right" if name in ("step", "±", "speedup") else "left"
        table.add_column(name, justify=justify, no_wrap=name not in ("", "critical cycle"))
    asked = forecast.outcomes[: forecast.asked]
    usual = sorted(forecast.outcomes[forecast.asked :], key=lambda outcome: -outcome.speedup)
    notes: dict[str, int] = {}
    for outcome in (*asked, *usual):
        pace, row = outcome.pace, Text(outcome.change.name)
        if pace is None:
            table.add_row(row, "-", "", "-", "", Text(f"not forecast: {outcome.refusal}"))
            continue
        numbers = "".join(f"[{notes.setdefault(remark, len(notes) + 1)}]" for remark in outcome.remarks)
        said = Text(" ".join(filter(None, ("" if outcome.change.same_result else "another result", numbers))))
        cycle = "the same" if str(pace.cycle) == str(forecast.pace.cycle) else str(pace.cycle)
        speedup, off = f"{outcome.speedup:.2f}x", _off(pace).removeprefix("± ")
        table.add_row(row, duration(pace.step), off, speedup, said, Text(cycle))
    return Group(table, *(Text(f"[{number}] {note}") for note, number in notes.items()))

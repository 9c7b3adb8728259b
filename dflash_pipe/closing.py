"""The last lines of every run: how long a step took, what the forecast says of that, what binds it, and the rates."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from dflash_pipe.errors import BadInput
from dflash_pipe.forecast import Forecast, Options, predict
from dflash_pipe.forecast_table import duration
from dflash_pipe.graph import Graph
from dflash_pipe.profile import Profile

__all__ = ["closing_lines"]

# A dozen changes are forecast at the end of every run: so many firings each, to be done within a second.
_FIRINGS = 2_000
_RATES = {"rows": "rows/s", "tokens": "tokens/s", "supervised": "supervised tokens/s"}


def closing_lines(graph: Graph, profile: Profile | None, unmeasured: str) -> Iterator[str]:
    """What a run of `graph` has measured, one fact a line. unmeasured: why there is no profile."""
    if profile is None:
        yield f"step time: not measured ({unmeasured})"
        return
    steps = profile.steps
    line = f"step: {duration(steps.mean)} measured (mean of {steps.count} after {profile.warm_up} of warm-up, "
    line += f"median {duration(median(steps.seconds))})"
    try:
        own, tried = _forecasts(graph, profile)
    except Exception as error:  # a run that has done its work does not fail for a forecast
        why = error.message if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        yield f"{line}; no forecast: {why}"
    else:
        yield f"{line}, {duration(own.pace.step)} forecast: overlap efficiency {own.pace.step / steps.mean:.1%}"
        yield tried.verdict
        if tried.refusal:
            yield f"no change is forecast: {tried.refusal}"
    trains = any(channel.initial for channel in graph.channels.values())
    if trains:  # only then are its steps alike, and worth a forecast
        yield from profile.doubts()
    yield " · ".join(_rates(profile))


def _forecasts(graph: Graph, profile: Profile) -> tuple[Forecast, Forecast]:
    """Of this run, and, less exactly, of what the usual changes would bring."""
    windows = max(8, min(60, _FIRINGS // (graph.window * len(graph.stages))))
    own = predict(graph, profile, options=Options(changes=False))
    return own, predict(graph, profile, options=Options(windows=windows))


def _rates(profile: Profile) -> Iterator[str]:
    """Messages a second, and what they held, as far as the source counted it."""
    messages = profile.window / profile.steps.mean
    yield f"{messages:,.4g} messages/s"
    held = next((parts["read"].measures for parts in profile.stages.values() if "read" in parts), {})
    for measure, unit in _RATES.items():
        if measure in held:
            yield f"{_rate(fmean(held[measure]) * messages)} {unit}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

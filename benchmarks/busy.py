"""For how much of the steady state each GPU of a run computed, whichever workers share it."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_pipe.plan import Plan
from dflash_pipe.profile import HAND_OFF
from dflash_pipe.trace import Timeline

__all__ = ["device_busy", "steady", "union", "warm", "window_ends"]


def device_busy(timeline: Timeline, plan: Plan) -> dict[str, float]:
    """GPU -> share of the steady state in which work of any worker ran there. Waiting and handing over are no work, nor
    is what a source does, which computes on the host. Nothing where the run was too short for a steady state."""
    places = {
        (worker.name, station.stage): station.device
        for worker in plan.workers
        for station in worker.stations
        if station.device != "cpu" and not plan.graph.stages[station.stage].signature.source
    }
    work: dict[str, list[tuple[float, float]]] = {device: [] for device in places.values()}
    for span in timeline.spans:
        device = places.get((span.worker, span.stage))
        if device is not None and span.work != HAND_OFF:
            work[device].append((span.begin, span.end))
    last = [max(end for _, end in spans) for spans in work.values() if spans]
    begin, end = steady(window_ends(timeline), timeline.warm_up, min(last, default=0.0))
    if end <= begin:
        return {}
    return {device: union(spans, begin, end) / (end - begin) for device, spans in work.items()}


def union(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that lie in at least one of the spans."""
    seconds = 0.0
    for first, last in sorted(spans):
        begin = max(begin, first)
        if (until := min(last, end)) > begin:
            seconds += until - begin
            begin = until
    return seconds


def window_ends(timeline: Timeline) -> dict[int, float]:
    """Window -> when the last work on it ended, in order."""
    ends: dict[int, float] = {}
    for span in timeline.spans:
        ends[span.window] = max(span.end, ends.get(span.window, span.end))
    return dict(sorted(ends.items()))


def warm(ends: dict[int, float], warm_up: int) -> float:
    """The end of the last window of the warm-up, or of the first that the timeline still has."""
    return next(end for window, end in ends.items() if window >= warm_up - 1)


def steady(ends: dict[int, float], warm_up: int, last: float) -> tuple[float, float]:
    """From the end of the warm-up to the last end of a window before any GPU has done its last work, at `last`: whole
    windows, without the end of the stream, where a GPU that is ahead of the others has nothing left to do."""
    begin = warm(ends, warm_up)
    return begin, max((end for end in ends.values() if end <= last), default=begin)

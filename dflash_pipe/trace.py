"""What happened when: the timeline of a run, as a trace for ui.perfetto.dev, and the critical path through it.

The trace is Chrome's trace-event format (JSON object form): a track for each worker with its work and its waits, a flow
of arrows for each message from the source to whoever ends its window, and counters of every channel's messages and
bytes. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_pipe.profile import HAND_OFF

__all__ = ["TRACE_BEGINS", "Depth", "OnPath", "Span", "Timeline", "Wait", "critical", "write_chrome"]

TRACE_BEGINS = '{"traceEvents":'  # what `write_chrome` writes first


@dataclass(frozen=True, slots=True)
class Span:
    """A stage's work on one message (once a window: on its last one); seconds since the run began.

    what: read, process, end_window, or in words a hand-off. On a GPU begin and end are those of the work there.
    """

    worker: str
    stage: str
    what: str
    index: int
    window: int
    begin: float
    end: float

    @property
    def work(self) -> str:
        """What kept the worker: the name of a stage, or HAND_OFF."""
        return HAND_OFF if self.what.startswith(HAND_OFF) else self.stage


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker waited. state: starved (for input, a turn, a credit) or blocked (for room). what: for what, in words."""

    worker: str
    state: str
    what: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Depth:
    """What a channel held from this moment on."""

    channel: str
    at: float
    items: int
    nbytes: int


@dataclass(frozen=True)
class Timeline:
    """The newest spans, waits and depths of a run, each in order of time.

    workers: in the order of the graph. warm_up: the first window that counts; earlier ones are shown, not counted.
    left_out: kind -> how many older ones there were.
    """

    workers: tuple[str, ...]
    spans: tuple[Span, ...]
    waits: tuple[Wait, ...]
    depths: tuple[Depth, ...]
    warm_up: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)


# --- the trace --------------------------------------------------------------------------------------------------------


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write the trace to `path`; it appears whole or not at all. Raises OSError."""
    origin = min(_begins(timeline), default=0.0)
    events = [*_tracks_and_slices(timeline, origin), *_counters(timeline, origin)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"left out": dict(timeline.left_out)}}
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(trace, separators=(",", ":")))
    new.replace(path)


def _begins(timeline: Timeline) -> Iterator[float]:
    yield from (span.begin for span in timeline.spans)
    yield from (wait.begin for wait in timeline.waits)
    yield from (depth.at for depth in timeline.depths)


def _tracks_and_slices(timeline: Timeline, origin: float) -> list[dict[str, Any]]:
    """Slices of one track must not overlap: what a worker does at the same time (on two devices) gets another track."""
    slices: dict[str, list[tuple[float, float, Span | Wait]]] = defaultdict(list)
    everything: list[Span | Wait] = [*timeline.spans, *timeline.waits]
    for each in everything:
        slices[each.worker].append((each.begin, each.end, each))
    events: list[dict[str, Any]] = [_meta("process_name", 0, name="run")]
    places: dict[Span, tuple[int, float]] = {}
    track = 0
    for worker in timeline.workers:
        ends: list[int] = []
        first = track + 1
        for begin, end, each in sorted(slices[worker], key=lambda entry: entry[:2]):
            ts = _ns(begin, origin)
            lane = next((number for number, until in enumerate(ends) if until <= ts), len(ends))
            ends[lane : lane + 1] = [max(_ns(end, origin), ts + 1)]
            event = _slice(each, timeline.warm_up)
            event |= {"ph": "X", "pid": 1, "tid": first + lane, "ts": ts / 1e3, "dur": (ends[lane] - ts) / 1e3}
            events.append(event)
            if isinstance(each, Span):
                places[each] = (first + lane, (ts + (ends[lane] - ts) // 2) / 1e3)
        for lane in range(max(1, len(ends))):
            track += 1
            events.append(_meta("thread_name", track, name=worker if lane == 0 else f"{worker} (at the same time)"))
            events.append(_meta("thread_sort_index", track, sort_index=track))
    return events + list(_flows(timeline.spans, places))


def _ns(at: float, origin: float) -> int:
    return round((at - origin) * 1e9)


def _meta(what: str, track: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": what, "args": arguments}


def _slice(each: Span | Wait, warm_up: int) -> dict[str, Any]:
    if isinstance(each, Wait):
        return {"name": each.state, "cat": "wait", "args": {"for": each.what}}
    kind = "warm-up" if each.window < warm_up else "work"
    name = each.stage if each.what == "process" else f"{each.stage} {each.what}"
    return {"name": name, "cat": kind, "args": {"message": each.index, "window": each.window}}


def _flows(spans: Sequence[Span], places: Mapping[Span, tuple[int, float]]) -> Iterator[dict[str, Any]]:
    """One flow for each message: starts in the first slice that worked on it, steps on, finishes where its window ends.

    A flow event belongs to the slice that encloses it, so it lies in the slice's middle.
    """
    for index, chain in _journeys(spans).items():
        seen = [places[span] for span in chain]
        if any(after[1] < before[1] for before, after in pairwise(seen)):
            continue  # clocks of two devices disagree: an arrow cannot point backwards
        for number, (track, ts) in enumerate(seen):
            phase = "s" if number == 0 else "f" if number == len(seen) - 1 else "t"
            event = {"ph": phase, "pid": 1, "tid": track, "ts": ts, "name": "message", "cat": "flow", "id": index}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _journeys(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Message -> the spans that worked on it, and those that worked on its whole window, in order; at least two."""
    work = [span for span in spans if span.what != "end_window"]
    once = _once_a_window(work)
    journeys: dict[int, list[Span]] = defaultdict(list)
    ends: dict[int, list[Span]] = defaultdict(list)
    for span in work:
        if span.stage in once:
            ends[span.window].append(span)
        else:
            journeys[span.index].append(span)
    for chain in journeys.values():
        chain += ends[chain[0].window]
        chain.sort(key=lambda span: (span.begin, span.end))
    return {index: chain for index, chain in sorted(journeys.items()) if len(chain) > 1}


def _once_a_window(spans: Iterable[Span]) -> set[str]:
    """Stages that fire once a window: in no window on more than one message, where others work on more."""
    messages: dict[tuple[str, int], set[int]] = defaultdict(set)
    for span in spans:
        messages[span.stage, span.window].add(span.index)
    most: dict[str, int] = defaultdict(int)
    for (stage, _), indices in messages.items():
        most[stage] = max(most[stage], len(indices))
    return {stage for stage, count in most.items() if count == 1 < max(most.values())}


def _counters(timeline: Timeline, origin: float) -> Iterator[dict[str, Any]]:
    for depth in timeline.depths:
        at = {"ph": "C", "pid": 1, "tid": 0, "ts": _ns(depth.at, origin) / 1e3}
        yield at | {"name": f"{depth.channel}: messages", "args": {"messages": depth.items}}
        yield at | {"name": f"{depth.channel}: bytes", "args": {"bytes": depth.nbytes}}


# --- the critical path ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnPath:
    """A worker on the critical path. seconds: of its work there. times: how often the path came to it. share: of the
    path's whole time (what the shares lack of 1 is short hand-offs)."""

    worker: str
    seconds: float
    times: int
    share: float


# Whoever lets a waiting worker on has ended its own work just before; clocks are read a little apart.
_SLACK = 2e-5


def critical(timeline: Timeline) -> tuple[OnPath, ...]:
    """Who was on the path that decided when the last recorded work ended, most seconds first; without the warm-up.

    Walked backwards. Work that began without a wait was decided by its worker's previous work; after a wait for input,
    by the work on the same message, or on the window before, that ended last; after any other wait, by whoever ended
    work last before the wait was over.
    """
    spans = sorted(timeline.spans, key=lambda span: span.end)
    path = [span for span in _Path(spans, timeline.waits).walked() if span.window >= timeline.warm_up]
    if not path:
        return ()
    seconds: dict[str, float] = defaultdict(float)
    times: dict[str, int] = defaultdict(int)
    after = ""
    for span in path:
        seconds[span.worker] += span.end - span.begin
        times[span.worker] += span.worker != after
        after = span.worker
    whole = (path[0].end - path[-1].begin) or 1.0
    most = sorted(seconds, key=lambda worker: -seconds[worker])
    return tuple(OnPath(worker, seconds[worker], times[worker], seconds[worker] / whole) for worker in most)


class _Path:
    """spans: by their end."""

    def __init__(self, spans: Sequence[Span], waits: Sequence[Wait]) -> None:
        self._spans = spans
        self._ends = [span.end for span in spans]
        self._previous: list[int | None] = []
        self._of_message: dict[int, list[int]] = defaultdict(list)
        self._of_window: dict[int, list[int]] = defaultdict(list)  # of stages that work once in it
        self._once = _once_a_window(span for span in spans if span.what != "end_window")
        last: dict[str, int] = {}
        for number, span in enumerate(spans):
            self._previous.append(last.get(span.worker))
            last[span.worker] = number
            self._of_message[span.index].append(number)
            if span.stage in self._once:
                self._of_window[span.window].append(number)
        self._waits: dict[str, list[Wait]] = defaultdict(list)
        for wait in sorted(waits, key=lambda wait: wait.end):
            self._waits[wait.worker].append(wait)

    def walked(self) -> list[Span]:
        """The path, last span first."""
        path: list[Span] = []
        number: int | None = len(self._spans) - 1 if self._spans else None
        while number is not None:
            path.append(self._spans[number])
            number = self._cause(number)
        return path

    def _cause(self, number: int) -> int | None:
        """What let this span begin: always one that ended before it did."""
        span, previous = self._spans[number], self._previous[number]
        floor = self._ends[previous] if previous is not None else -math.inf
        related = self._related(number)
        wait = self._wait_before(span, floor)
        since = floor if wait is None else wait.begin if wait.what.startswith("input") else wait.end
        # Without a wait on the host, work on a GPU may still have waited for what another GPU made.
        if related is not None and self._ends[related] > since + (_SLACK if wait is None else 0.0):
            return related
        if wait is None:
            return previous
        released = self._released(span, wait, number)
        return previous if released is None else released

    def _related(self, number: int) -> int | None:
        """The last to end, before this began, of other workers' work on the same message and on the window before."""
        span = self._spans[number]
        numbers = (*self._of_message[span.index], *self._of_window[span.window - 1])
        fits = (n for n in numbers if n < number and self._spans[n].worker != span.worker)
        return max((n for n in fits if self._ends[n] <= span.begin + _SLACK), default=None)

    def _released(self, span: Span, wait: Wait, number: int) -> int | None:
        """Whoever else ended work last before the wait was over."""
        before = min(number, bisect_right(self._ends, wait.end + _SLACK))
        return next((n for n in range(before - 1, -1, -1) if self._spans[n].worker != span.worker), None)

    def _wait_before(self, span: Span, floor: float) -> Wait | None:
        """The worker's last wait after its previous work, which ended at `floor`, and before this."""
        waits = self._waits[span.worker]
        while waits and waits[-1].end > span.begin + _SLACK:
            waits.pop()  # the path only goes back in time
        return waits[-1] if waits and waits[-1].begin >= floor - _SLACK else None

"""What a run records while it lasts: a tape for each worker, from which come the profile and the timeline.

Each worker writes its own tape, without a lock; tapes are bounded and keep the newest. A mark is put before and after
every firing; on a GPU it is read later, once the device has come to it, so that nobody ever waits for a device.
"""

from __future__ import annotations

import os
import platform
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from dflash_pipe.message import Stamp, payload_bytes
from dflash_pipe.plan import Plan
from dflash_pipe.profile import DeviceMemory, Part, Profile, Recorder
from dflash_pipe.stats import WaitEntry
from dflash_pipe.trace import Depth, Span, Timeline, Wait
from dflash_pipe.transport import Transport

__all__ = ["Mark", "Recording", "Tape"]

KEEP = 20_000  # newest spans, waits and depths in a timeline
_SpanEntry = tuple[str, str, int, int, float, float]


class Mark(NamedTuple):
    """A moment in a worker's work: on the host's clock, and as the transport marks it on the device."""

    host: float
    device: Any


class _Firing(NamedTuple):
    stage: str
    part: Part
    stamp: Stamp
    device: str
    begin: Mark
    end: Mark
    measures: Mapping[str, float]


class Tape:
    """What one worker records; written on the worker's own thread."""

    def __init__(self, worker: str, recording: Recording) -> None:
        self.worker = worker
        self.spans: deque[_SpanEntry] = deque(maxlen=KEEP)
        self.waits: deque[WaitEntry] = deque(maxlen=KEEP)
        self.count = 0
        self._recording = recording
        self._record = recording.recorder.record
        self._mark, self._elapsed = recording.transport.mark, recording.transport.elapsed
        self._pending: deque[_Firing] = deque()
        self._known: dict[str, tuple[float, Any]] = {}  # device -> host time of a mark on it

    def mark(self, device: str) -> Mark:
        """Now: before or after a firing."""
        return Mark(perf_counter(), self._mark(device))

    def fired(self, stage: str, part: Part, stamp: Stamp, device: str, begin: Mark, held: Iterable[Any], sent: Any) -> None:
        """A firing is over, as far as the host is concerned. held: payloads it worked on. sent: what it made."""
        self._pending.append(_Firing(stage, part, stamp, device, begin, self.mark(device), _measures(held, sent)))
        self.read()

    def over(self, stamp: Stamp) -> None:
        """A stage at which the stream ends is done with this message."""
        self._recording.over(stamp)

    def read(self) -> None:
        """Take down all firings that the device has ended by now."""
        while self._pending:
            stage, part, stamp, device, begin, end, measures = self._pending[0]
            seconds = self._elapsed(begin.device, end.device)
            if seconds is None:
                return
            self._pending.popleft()
            began = self._began(device, begin, seconds)
            self._known[device] = (began + seconds, end.device)
            self.count += 1
            self.spans.append((stage, part, stamp.index, stamp.window, began, began + seconds))
            self._record(stage, part, stamp.index, seconds, measures)

    def _began(self, device: str, begin: Mark, seconds: float) -> float:
        """When the device came to the mark, on the host's clock: from mark to mark, since the first one was met at once;
        never before the host made it, and its end never later than now."""
        known = self._known.get(device)
        if known is None:
            return begin.host
        at, mark = known
        since = self._elapsed(mark, begin.device)
        chained = begin.host if since is None else max(begin.host, at + since)
        return max(begin.host, min(chained, perf_counter() - seconds))


def _measures(held: Iterable[Any], sent: Any) -> Mapping[str, float]:
    """What the payloads say of their size, and the bytes that are sent."""
    measures: dict[str, float] = {}
    for payload in held:
        if own := getattr(payload, "measures", None):
            measures |= own
    if sent is not None:
        measures["sent_bytes"] = payload_bytes(sent)
    return measures


class Recording:
    """Everything that is recorded of a run of `plan` that starts with window `start`. began: when, on the host's clock.

    depths: channel -> (messages and bytes in it, and since when), written by the channels.
    """

    def __init__(self, plan: Plan, start: int, began: float) -> None:
        self.plan, self._began = plan, began
        self.transport: Transport = plan.graph.transport
        self.recorder = Recorder(plan.graph.window, start=start)
        self.tapes = {worker.name: Tape(worker.name, self) for worker in plan.workers}
        self.depths: dict[str, deque[tuple[float, int, int]]] = {}
        self._lock = threading.Lock()
        self._due = _firings_that_end_a_window(plan)
        self._left: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._next = start

    def over(self, stamp: Stamp) -> None:
        """One of the stages at which the stream ends is done with a message; the last one for a window ends it."""
        with self._lock:
            left = self._left.pop(stamp.window, self._due) - 1
            if left:
                self._left[stamp.window] = left
                return
            self._ended[stamp.window] = perf_counter()
            while self._next in self._ended:
                self.recorder.window_done(self._next, self._ended.pop(self._next))
                self._next += 1

    def profile(self, graph: str) -> Profile:
        """What was measured. graph: the text of the graph. Raises BadInput if no step was measured."""
        for tape in self.tapes.values():
            tape.read()
        devices: dict[str, list[str]] = {}
        for worker in self.plan.workers:
            for station in worker.stations:
                devices.setdefault(station.device, []).append(station.stage)
        words = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, on {', '.join(sorted(devices))}"
        memory = {}
        for device, stages in devices.items():
            if (seen := self.transport.memory(device)) is not None:
                memory[device] = DeviceMemory(*seen, tuple(dict.fromkeys(stages)))
        return self.recorder.profile(graph, words, memory)

    def timeline(self, passed: Mapping[str, int]) -> Timeline:
        """The newest of everything. passed: channel -> how often its depth has changed."""
        began = self._began
        spans, waits = [], []
        for name, tape in self.tapes.items():
            spans += [Span(name, *entry[:4], entry[4] - began, entry[5] - began) for entry in tape.spans]
            waits += [Wait(name, state, what, begin - began, end - began) for state, what, begin, end in tape.waits]
        depths = [
            Depth(name, at - began, items, nbytes) for name, seen in self.depths.items() for at, items, nbytes in seen
        ]
        spans.sort(key=lambda span: span.begin)
        waits.sort(key=lambda wait: wait.begin)
        depths.sort(key=lambda depth: depth.at)
        left_out = {
            "spans": sum(tape.count for tape in self.tapes.values()) - len(spans[-KEEP:]),
            "waits": sum(tape.waits_count for tape in self.tapes.values()) - len(waits[-KEEP:]),
            "depths": sum(passed.values()) - len(depths[-KEEP:]),
        }
        return Timeline(
            workers=tuple(self.tapes),
            spans=tuple(spans[-KEEP:]),
            waits=tuple(waits[-KEEP:]),
            depths=tuple(depths[-KEEP:]),
            warm_up=self.recorder.first,
            left_out={kind: count for kind, count in left_out.items() if count},
        )


def _firings_that_end_a_window(plan: Plan) -> int:
    """How often the stations where the stream ends fire in a window (replicas share the messages)."""
    ends = {(station.stage, station.rate) for worker in plan.workers for station in worker.stations if station.ends}
    return sum(plan.graph.window if rate == "message" else 1 for _, rate in ends)

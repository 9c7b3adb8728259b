"""What a run records while it lasts: a tape for each worker, from which come the profile and the timeline.

Each worker writes its own tape, without a lock; tapes are bounded and keep the newest. A mark is put before and after
every firing and read later, many at a time: on a GPU once the device has come to it, so that nobody waits for a device.
"""

from __future__ import annotations

import math
import os
import platform
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from dflash_pipe.channel import Channel
from dflash_pipe.counted import counted
from dflash_pipe.message import Stamp, payload_bytes
from dflash_pipe.plan import Plan
from dflash_pipe.profile import DeviceMemory, Host, Part, Profile, Recorder, Way, hand_off
from dflash_pipe.stats import Activity, DepthEntry, Newest, WaitEntry
from dflash_pipe.trace import Depth, Span, Timeline, Wait
from dflash_pipe.transport import Transport

__all__ = ["Mark", "Recording", "Tape"]

KEEP = 20_000  # newest spans, waits and depths in a timeline
# Firings are read many at a time, so that what lies between a stage's work and its hand-off stays short.
_AT_A_TIME = 64
_AT_LEAST_EVERY = 1.0  # seconds
_COARSE = 1.0  # seconds of all cores together: the system counts in hundredths
_SEEN = 1e-4  # seconds: shorter hand-offs are measured, but are no spans
_SpanEntry = tuple[str, str, int, int, float, float]
# A moment on the host's clock; and where the transport marks it otherwise, on which device, and how.
Mark = float | tuple[float, str, Any]


class _Firing(NamedTuple):
    stage: str
    part: Part
    stamp: Stamp
    begin: Mark
    end: Mark
    measures: Mapping[str, float]


class _HandOff(NamedTuple):
    """crossing: marks between which the message is on its way."""

    stage: str
    channel: str
    way: Way
    stamp: Stamp
    begin: Mark
    end: Mark
    crossing: tuple[tuple[Any, Any], ...]


class Tape:
    """What one worker records; written on the worker's own thread."""

    def __init__(self, worker: str, recording: Recording) -> None:
        self.worker = worker
        self.spans: Newest[_SpanEntry] = Newest(KEEP)
        self.activity: Activity | None = None
        self._recording = recording
        self._record = recording.recorder.record
        self._mark, self._elapsed = recording.transport.mark, recording.transport.elapsed
        self._pending: deque[_Firing | _HandOff] = deque()
        self._under_way: deque[tuple[_HandOff, float]] = deque()  # and for how long the sender was kept
        self._known: dict[str, tuple[float, Any]] = {}  # device -> host time of a mark on it

    def mark(self, device: str) -> Mark:
        """Now: before or after a firing."""
        there = self._mark(device)
        return there if type(there) is float else (perf_counter(), device, there)

    def fired(self, stage: str, part: Part, stamp: Stamp, begin: Mark, held: Iterable[Any], sent: Any) -> None:
        """A firing is over, as far as the host is concerned. held: payloads, and the stage, that say how large the work
        was, which is told of `process` and `read` only. sent: what was made."""
        held = held if part != "end_window" else ()
        end = self._mark_after(begin)
        self._pending.append(_Firing(stage, part, stamp, begin, end, _measures(held, sent)))
        if len(self._pending) >= _AT_A_TIME or _host(end) - _host(self._pending[0].begin) > _AT_LEAST_EVERY:
            self.read()

    def handed(self, stage: str, channel: str, way: Way, stamp: Stamp, begin: Mark, sent: Any) -> None:
        """A message has been handed over to one receiver, as far as the host is concerned. sent: what the transport
        made of its payload."""
        crossing = tuple(self._recording.transport.crossing(sent))
        self._pending.append(_HandOff(stage, channel, way, stamp, begin, self._mark_after(begin), crossing))

    def _mark_after(self, begin: Mark) -> Mark:
        """Now, on the clock on which `begin` is."""
        return self.mark(begin[1]) if isinstance(begin, tuple) else perf_counter()

    def over(self, stamp: Stamp) -> None:
        """A stage at which the stream ends is done with this message."""
        self._recording.over(stamp)

    def read(self) -> None:
        """Take down all firings and hand-offs that their devices have ended by now."""
        pending = self._pending
        while pending:
            first = pending[0]
            if not (self._took_firing(first) if isinstance(first, _Firing) else self._took_hand_off(first)):
                break
            pending.popleft()
        while self._under_way and self._arrived(*self._under_way[0]):
            self._under_way.popleft()

    def _took_firing(self, fired: _Firing) -> bool:
        idle = self._idle_before(fired.begin)
        moments = self._on_host(fired.begin, fired.end)
        if moments is None:
            return False
        began, ended = moments
        if self.activity is not None and idle:
            # A stage that looks at a result waits on the host: for its inputs on the device, too.
            waited = (_host(fired.end) - _host(fired.begin)) - (ended - began)
            self.activity.idled(max(0.0, min(idle, waited)))
        self.spans.add((fired.stage, fired.part, fired.stamp.index, fired.stamp.window, began, ended))
        self._record(fired.stage, fired.part, fired.stamp.index, ended - began, fired.measures)
        return True

    def _took_hand_off(self, handed: _HandOff) -> bool:
        moments = self._on_host(handed.begin, handed.end)
        if moments is None:
            return False
        began, ended = moments
        self._under_way.append((handed, ended - began))
        if ended - began > _SEEN:
            what = hand_off(handed.channel)
            self.spans.add((handed.stage, what, handed.stamp.index, handed.stamp.window, began, ended))
        return True

    def _arrived(self, handed: _HandOff, held: float) -> bool:
        """Whether what was handed over is there; then it is taken down."""
        crossed = [self._elapsed(*marks) for marks in handed.crossing]
        later = sum(seconds for seconds in crossed if seconds is not None)
        if None not in crossed:
            self._recording.recorder.handed(handed.channel, handed.way, handed.stamp.index, held, later)
        return None not in crossed

    def _idle_before(self, begin: Mark) -> float:
        """Seconds for which the device did nothing for this worker before `begin`, if that mark lies on a device."""
        if isinstance(begin, float):
            return 0.0
        before = self._known.get(begin[1])
        return math.inf if before is None else self._elapsed(before[1], begin[2]) or 0.0

    def _on_host(self, begin: Mark, end: Mark) -> tuple[float, float] | None:
        """Two marks on the host's clock; None if the device has not come to the second one.

        A device's moment is reckoned from the mark before, the first of which is taken to be met at once; it is never
        before the host made the mark, and the end does not lie ahead.
        """
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float) and isinstance(end, float), "two marks of one firing on two clocks"
            return begin, end
        host, device, there = begin
        seconds = self._elapsed(there, end[2])
        if seconds is None:
            return None
        at, mark = self._known.get(device, (host, there))
        since = self._elapsed(mark, there) or 0.0
        began = max(host, min(at + since, perf_counter() - seconds))
        self._known[device] = (began + seconds, end[2])
        return began, began + seconds


def _host(mark: Mark) -> float:
    """When the host made it."""
    return mark if isinstance(mark, float) else mark[0]


def _measures(held: Iterable[Any], sent: Any) -> Mapping[str, float]:
    """What payloads and stage say of the size of the work, and the bytes that are sent."""
    measures: dict[str, float] = {}
    for each in held:
        if own := getattr(each, "measures", None):
            measures |= own
    if sent is not None:
        measures["sent_bytes"] = payload_bytes(sent)
    return measures


class Recording:
    """Everything that is recorded of a run of `plan` that starts with window `start`. began: when, on the host's clock.

    It has every worker's tape, and gives every activity and every channel something to write on.
    """

    def __init__(self, plan: Plan, start: int, began: float) -> None:
        self.plan, self._began = plan, began
        self.transport: Transport = plan.graph.transport
        self.recorder = Recorder(plan.graph.window, start=start)
        self.tapes = {worker.name: Tape(worker.name, self) for worker in plan.workers}
        self._waits: dict[str, Newest[WaitEntry]] = {}
        self._depths: dict[str, Newest[DepthEntry]] = {}
        self._lock = threading.Lock()
        self._due = plan.ends_in_window
        self._left: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._next = start
        self._cpu = _cpu_seconds()

    def join(self, activities: Iterable[Activity], channels: Iterable[Channel]) -> None:
        """Let them record, too."""
        for activity in activities:
            self._waits[activity.worker] = activity.waits = Newest(KEEP)
            self.tapes[activity.worker].activity = activity
        for channel in channels:
            self._depths[channel.name] = Newest(KEEP)
            channel.record(self._depths[channel.name])

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

    def _read(self) -> None:
        for tape in self.tapes.values():
            tape.read()

    def profile(self, graph: str) -> Profile:
        """What was measured. graph: the text of the graph. Raises BadInput if no step was measured."""
        host = self._host()
        self._read()
        devices: dict[str, list[str]] = {}
        for worker in self.plan.workers:
            for station in worker.stations:
                devices.setdefault(station.device, []).append(station.stage)
        cpus = counted(os.cpu_count() or 1, "CPU")
        words = f"{platform.system()} {platform.machine()}, {cpus}, on {', '.join(sorted(devices))}"
        memory = {}
        for device, stages in devices.items():
            if (seen := self.transport.memory(device)) is not None:
                memory[device] = DeviceMemory(*seen, tuple(dict.fromkeys(stages)))
        spans = (entry for tape in self.tapes.values() for entry in tape.spans.entries)
        began = min((entry[4] for entry in spans if entry[2] >= 0), default=None)  # -1: of a first token
        return replace(self.recorder.profile(graph, words, memory, began), host=host)

    def _host(self) -> Host:
        stations = [station for worker in self.plan.workers for station in worker.stations]
        stages = tuple(dict.fromkeys(station.stage for station in stations if station.device == "cpu"))
        others = None
        if self._cpu is not None and (now := _cpu_seconds()) is not None:
            every, busy, own = (after - before for before, after in zip(self._cpu, now, strict=True))
            others = min(1.0, max(0.0, (busy - own) / every)) if every > _COARSE else None
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return Host(usable, stages, others)

    def timeline(self) -> Timeline:
        """The newest of everything."""
        self._read()
        began = self._began
        spans = [
            Span(name, *entry[:4], entry[4] - began, entry[5] - began)
            for name, tape in self.tapes.items()
            for entry in tape.spans.entries
        ]
        waits = [
            Wait(name, state, what, begin - began, end - began)
            for name, own in self._waits.items()
            for state, what, begin, end in own.entries
        ]
        depths = [
            Depth(name, at - began, items, nbytes)
            for name, changes in self._depths.items()
            for at, items, nbytes in changes.entries
        ]
        spans.sort(key=lambda span: span.begin)
        waits.sort(key=lambda wait: wait.begin)
        depths.sort(key=lambda depth: depth.at)
        seen = {
            "spans": sum(tape.spans.seen for tape in self.tapes.values()),
            "waits": sum(own.seen for own in self._waits.values()),
            "depths": sum(own.seen for own in self._depths.values()),
        }
        return Timeline(
            workers=tuple(self.tapes),
            spans=tuple(spans[-KEEP:]),
            waits=tuple(waits[-KEEP:]),
            depths=tuple(depths[-KEEP:]),
            warm_up=self.recorder.first,
            left_out={kind: count - KEEP for kind, count in seen.items() if count > KEEP},
        )


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Seconds of all cores since the machine started: all of them, those that any program used, and, since it started,
    those that this process used. None where the system does not tell (proc(5), /proc/stat)."""
    try:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    except OSError:
        return None
    ticks = [float(count) / os.sysconf("SC_CLK_TCK") for count in fields]
    own = os.times()
    return sum(ticks), sum(ticks) - ticks[3] - ticks[4], own.user + own.system

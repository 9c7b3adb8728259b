"""Simulated time: processes that work and wait, bounded channels and gates between them, and why each one waited.

A process is a generator. It yields seconds while it works, and None once it has queued up for something; whoever
provides that something wakes it. Every piece of work remembers the piece that it had to wait for, so the chain of
pieces that decided when anything happened can be read off backwards from its end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from dflash_pipe.message import Stamp
from dflash_pipe.stats import BLOCKED, BUSY, STARVED

__all__ = ["Channel", "Clock", "Gate", "Parcel", "Place", "Process", "Steps", "Work"]

Steps = Generator[float | None, None, Any]


class Parcel(NamedTuple):
    """A message on a simulated channel. real: False where it was dealt to another replica; then it takes no room."""

    stamp: Stamp
    real: bool
    nbytes: int


class Work(NamedTuple):
    """A piece of work: seconds `start` to `end`. before: the work whose end let it start; via: through what ("" where
    both are the same worker's and it did not wait). part "" is no work: the worker only passed something on."""

    worker: str
    stage: str
    part: str
    start: float
    end: float
    before: Work | None
    via: str


class Process:
    """A worker replica in simulated time."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.last: Work | None = None
        self.via = ""
        self.handed: Any = None
        self.body: Steps
        self.waits_for = ""
        self._clock = clock
        self._state, self._since = BUSY, 0.0
        self._spent = {BUSY: 0.0, STARVED: 0.0, BLOCKED: 0.0}

    def work(self, stage: str, part: str, seconds: float) -> Steps:
        """Compute for so long."""
        start = self._clock.now
        yield seconds
        self.last, self.via = Work(self.name, stage, part, start, self._clock.now, self.last, self.via), ""

    def turn_to(self, state: str, waits_for: str = "") -> None:
        """From now on busy, starved or blocked."""
        self._spent[self._state] += self._clock.now - self._since
        self._state, self._since, self.waits_for = state, self._clock.now, waits_for

    def spent(self) -> dict[str, float]:
        """Seconds in each state until now."""
        return {**self._spent, self._state: self._spent[self._state] + self._clock.now - self._since}


class Clock:
    """What happens next, in order of time; at equal times in order of cause."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Process]] = []
        self._number = 0
        self._running: Process | None = None

    def start(self, process: Process, body: Steps) -> None:
        """Let a process begin now."""
        process.body = body
        self._schedule(process, 0.0)

    def wake(self, process: Process, via: str) -> None:
        """`process` has what it waited for, by an act of the process that runs now."""
        giver = self._running
        assert giver is not None
        if giver.via:  # it has waited itself and not worked since: it appears on the chain as one that passes on
            giver.last, giver.via = Work(giver.name, "", "", self.now, self.now, giver.last, giver.via), ""
        process.last, process.via = giver.last, via
        process.turn_to(BUSY)
        self._schedule(process, 0.0)

    def run(self, ended: Callable[[], bool]) -> None:
        """Go on until `ended()`, or until nobody can move any more."""
        while self._due and not ended():
            self.now, _, process = heapq.heappop(self._due)
            self._running = process
            pause = next(process.body, None)
            if pause is not None:
                self._schedule(process, pause)

    def _schedule(self, process: Process, seconds: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (self.now + seconds, self._number, process))


class Channel:
    """Bounded like `dflash_pipe.channel.Channel`: a parcel takes room until it is received."""

    def __init__(self, clock: Clock, name: str, items: int, nbytes: int | None) -> None:
        self._clock, self._name = clock, name
        self._max_items, self._max_bytes = items, nbytes
        self._items = self._nbytes = 0
        self._queue: deque[Parcel] = deque()
        self._senders: deque[tuple[Process, Parcel]] = deque()
        self._receivers: deque[Process] = deque()

    def send(self, me: Process, parcel: Parcel) -> Steps:
        """Put it in; wait while there is no room."""
        if self._fits(parcel):
            self._put(parcel)
        else:
            self._senders.append((me, parcel))
            me.turn_to(BLOCKED, f"room in {self._name!r}")
            yield None

    def receive(self, me: Process) -> Steps:
        """Take the first one out (the generator's value); wait while there is none."""
        if self._queue:
            return self._take()
        self._receivers.append(me)
        me.turn_to(STARVED, f"input from {self._name!r}")
        yield None
        return me.handed

    def _fits(self, parcel: Parcel) -> bool:
        if not parcel.real or self._items == 0:
            return True
        fits = self._max_bytes is None or self._nbytes + parcel.nbytes <= self._max_bytes
        return fits and self._items < self._max_items

    def _put(self, parcel: Parcel) -> None:
        self._items += parcel.real
        self._nbytes += parcel.nbytes
        self._queue.append(parcel)
        if self._receivers:
            receiver = self._receivers.popleft()
            receiver.handed = self._take()
            self._clock.wake(receiver, self._name)

    def _take(self) -> Parcel:
        parcel = self._queue.popleft()
        self._items -= parcel.real
        self._nbytes -= parcel.nbytes
        while self._senders and self._fits(self._senders[0][1]):
            sender, waiting = self._senders.popleft()
            self._clock.wake(sender, f"room in {self._name}")
            self._put(waiting)
        return parcel


class Gate:
    """Processes pass with a key when `admits(key)` says so, which also takes the place."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name
        self._waiting: list[tuple[Process, Any]] = []

    def admits(self, key: Any) -> bool:
        raise NotImplementedError

    def wait(self, me: Process, key: Any = None) -> Steps:
        """Pass, as soon as that is allowed."""
        if not self.admits(key):
            self._waiting.append((me, key))
            me.turn_to(STARVED, self._name)
            yield None

    def settle(self) -> None:
        """The state has changed: let in whoever may pass now, first come, first served."""
        progress = True
        while progress:
            progress = False
            for waiting in list(self._waiting):
                if self.admits(waiting[1]):
                    self._waiting.remove(waiting)
                    self._clock.wake(waiting[0], self._name)
                    progress = True


class Place(Gate):
    """Held by `room` processes at a time: a device that several workers compute on."""

    def __init__(self, clock: Clock, name: str, room: int) -> None:
        super().__init__(clock, name)
        self._free = room

    def admits(self, key: Any) -> bool:
        if self._free == 0:
            return False
        self._free -= 1
        return True

    def leave(self) -> None:
        self._free += 1
        self.settle()

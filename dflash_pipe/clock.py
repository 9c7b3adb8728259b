"""Simulated time: processes that work and wait, bounded channels between them, and why each one waited.

A process is a coroutine. It suspends with the seconds that it works, or with None once it has queued up for something;
whoever provides that something wakes it. Every piece of work remembers the piece that it had to wait for, so the chain
of pieces that decided when anything happened can be read off backwards from its end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, NamedTuple

from dflash_pipe.gate import Gate
from dflash_pipe.message import ELSEWHERE, Message
from dflash_pipe.stats import BLOCKED, STARVED, Activity

__all__ = ["Channel", "Clock", "HandOff", "Parcel", "Place", "Process", "Work"]

_ELSEWHERE = -1  # instead of its bytes: the message was dealt elsewhere and takes no room


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


class HandOff(NamedTuple):
    """What handing a message over takes, and what it is called; via: through which channel. held: seconds that it keeps
    the sender. later: seconds until the message is there after that, in a lane of the sender's, in which one goes after
    the other."""

    name: str
    via: str
    lane: str
    held: float
    later: float


class Parcel(NamedTuple):
    """A payload in simulated time. crossing: its way to the receiver, if that takes time."""

    nbytes: int = 0
    hand_off: HandOff | None = None
    crossing: Work | None = None


@coroutine
def _suspend(seconds: float | None) -> Generator[float | None, None, None]:
    yield seconds


class Process(Activity):
    """A worker replica in simulated time: what it does, and how it waits (`dflash_pipe.route.Waits`)."""

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name, lambda: clock.now)
        self.last: Work | None = None
        self.via = ""
        self.handed: Message
        self.body: Coroutine[float | None, None, None]
        self._lanes: dict[str, Work] = {}  # the last that is on its way
        self._time = clock

    async def work(self, stage: str, part: str, seconds: float) -> None:
        """Compute for so long."""
        start = self._time.now
        await _suspend(seconds)
        self.last, self.via = Work(self.worker, stage, part, start, self._time.now, self.last, self.via), ""

    def receive(self, receiver: Channel) -> Coroutine[Any, Any, Message]:
        """The next message."""
        return receiver.receive(self)

    async def send(self, sender: Channel, message: Message) -> None:
        """Hand the message over and give it away."""
        if message.payload is not ELSEWHERE and message.payload.hand_off is not None:
            message = message.carrying(await self._handed(message.payload, message.payload.hand_off))
        await sender.send(self, message)

    async def _handed(self, parcel: Parcel, hand_off: HandOff) -> Parcel:
        if hand_off.held:
            await self.work(hand_off.name, "", hand_off.held)
        if not hand_off.later:
            return parcel
        start, before, via = self._time.now, self.last, self.via
        ahead = self._lanes.get(hand_off.lane)
        if ahead is not None and ahead.end > start:
            start, before, via = ahead.end, ahead, ""
        crossing = Work(self.worker, hand_off.name, "", start, start + hand_off.later, before, via)
        self._lanes[hand_off.lane] = crossing
        return parcel._replace(crossing=crossing)

    async def there(self, message: Message) -> None:
        """Wait until what was received is there: of several replicas, all of it."""
        payload = message.payload
        for parcel in payload if type(payload) is tuple else (payload,):
            if parcel is not ELSEWHERE and parcel.crossing is not None and parcel.crossing.end > self._time.now:
                self.wait(STARVED, f"input from {parcel.hand_off.via!r}")
                await _suspend(parcel.crossing.end - self._time.now)
                self.resume()
                self.last, self.via = parcel.crossing, parcel.hand_off.via

    async def at(self, gate: Gate, key: Any) -> None:
        """Pass the gate."""
        if gate.queue_up(key, partial(self._time.wake, self, gate.via), self):
            await _suspend(None)


class Clock:
    """What happens next, in order of time; at equal times in order of cause."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Process]] = []
        self._number = 0
        self._running: Process | None = None

    def start(self, process: Process, body: Coroutine[float | None, None, None]) -> None:
        """Let a process begin now."""
        process.body = body
        self._schedule(process, 0.0)

    def wake(self, process: Process, via: str) -> None:
        """`process` has what it waited for, by an act of the process that runs now."""
        giver = self._running
        assert giver is not None
        if giver.via:  # it has waited itself and not worked since: it appears on the chain as one that passes on
            giver.last, giver.via = Work(giver.worker, "", "", self.now, self.now, giver.last, giver.via), ""
        process.last, process.via = giver.last, via
        process.resume()
        self._schedule(process, 0.0)

    def run(self, ended: Callable[[], bool]) -> None:
        """Go on until `ended()`, or until nobody can move any more."""
        while self._due and not ended():
            self.now, _, process = heapq.heappop(self._due)
            self._running = process
            pause = process.body.send(None)
            if pause is not None:
                self._schedule(process, pause)

    def _schedule(self, process: Process, seconds: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (self.now + seconds, self._number, process))


class Channel:
    """Bounded like `dflash_pipe.channel.Channel`: a message takes room until it is received. Payloads are parcels."""

    def __init__(self, clock: Clock, name: str, items: int, nbytes: int | None) -> None:
        self._clock, self._name = clock, name.partition("[")[0]  # on a path all queues of a route are one
        self._max_items, self._max_bytes = items, nbytes
        self._items = self._nbytes = 0
        self._queue: deque[tuple[Message, int]] = deque()
        self._senders: deque[tuple[Process, Message, int]] = deque()
        self._receivers: deque[Process] = deque()

    def sender(self) -> Channel:
        """It is its own ends."""
        return self

    receiver = sender

    def close(self) -> None:
        """Nobody ever leaves."""

    async def send(self, me: Process, message: Message) -> None:
        """Put it in; wait while there is no room."""
        nbytes = _ELSEWHERE if message.payload is ELSEWHERE else message.payload.nbytes
        if self._fits(nbytes):
            self._put(message, nbytes)
        else:
            self._senders.append((me, message, nbytes))
            me.wait(BLOCKED, f"room in {self._name!r}")
            await _suspend(None)

    async def receive(self, me: Process) -> Message:
        """Take the first one out; wait while there is none."""
        if self._queue:
            return self._take()
        self._receivers.append(me)
        me.wait(STARVED, f"input from {self._name!r}")
        await _suspend(None)
        return me.handed

    def _fits(self, nbytes: int) -> bool:
        if nbytes == _ELSEWHERE or self._items == 0:
            return True
        fits = self._max_bytes is None or self._nbytes + nbytes <= self._max_bytes
        return fits and self._items < self._max_items

    def _put(self, message: Message, nbytes: int) -> None:
        if nbytes != _ELSEWHERE:
            self._items, self._nbytes = self._items + 1, self._nbytes + nbytes
        self._queue.append((message, nbytes))
        if self._receivers:
            receiver = self._receivers.popleft()
            receiver.handed = self._take()
            self._clock.wake(receiver, self._name)

    def _take(self) -> Message:
        message, nbytes = self._queue.popleft()
        if nbytes != _ELSEWHERE:
            self._items, self._nbytes = self._items - 1, self._nbytes - nbytes
        while self._senders and self._fits(self._senders[0][2]):
            sender, waiting, held = self._senders.popleft()
            self._clock.wake(sender, f"room in {self._name}")
            self._put(waiting, held)
        return message


class Place(Gate):
    """Held by `room` processes at a time: a device that several workers compute on."""

    def __init__(self, name: str, room: int) -> None:
        super().__init__(name, name)
        self._free = room

    def _attempt(self, key: Any) -> bool:
        if self._free == 0:
            return False
        self._free -= 1
        return True

    def leave(self) -> None:
        """One of them has computed."""
        with self._lock:
            self._free += 1
            self._settle()

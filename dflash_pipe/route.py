"""How messages find their way between replicas: gates to wait at, inlets that receive, outlets that send.

A gate holds a worker until a condition is met; it counts as waiting for input. An inlet reads one route for one worker
replica: plain, merged into input order, gathered over the sending replicas, or handed over inside the worker. An outlet
sends along one route: to a shared queue, dealt by slot, to everybody, or inside the worker.

Inlets and outlets are written once, with `await`; `Blocking` serves a thread (its awaits never suspend), `Suspending`
a coroutine.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dflash_pipe.channel import Receiver, Sender
from dflash_pipe.errors import BrokenChannel, Cancelled
from dflash_pipe.message import ELSEWHERE, Message
from dflash_pipe.stats import STARVED, Activity, activity_here

__all__ = [
    "Blocking",
    "CreditGate",
    "Gate",
    "GroupGate",
    "Inlet",
    "Local",
    "Outlet",
    "ReorderGate",
    "Suspending",
    "TurnGate",
    "Waits",
]


# --- gates ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Waiter:
    key: Any
    wake: Callable[[], object]
    activity: Activity
    admitted: bool = False


class Gate:
    """Workers pass with a key; `_attempt(key)` says under the lock whether that key may pass now, and takes its place.

    Whoever changes the state calls `_settle`, which lets in everybody who may pass by now.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._cancelled = False

    def _attempt(self, key: Any) -> bool:
        raise NotImplementedError

    def wait(self, key: Any) -> None:
        """Block the calling thread until `key` may pass. Raises Cancelled."""
        event = threading.Event()
        waiter = self._queue_up(key, event.set)
        if not waiter.admitted:
            event.wait()
            self._admitted(waiter)

    async def await_(self, key: Any) -> None:
        """`wait` for a coroutine."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        waiter = self._queue_up(key, lambda: loop.call_soon_threadsafe(event.set))
        if not waiter.admitted:
            await event.wait()
            self._admitted(waiter)

    def cancel(self) -> None:
        """Wake everybody with Cancelled."""
        with self._lock:
            self._cancelled = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    def _queue_up(self, key: Any, wake: Callable[[], object]) -> _Waiter:
        activity = activity_here()
        waiter = _Waiter(key, wake, activity)
        with self._lock:
            if self._cancelled:
                raise Cancelled(self.name)
            if self._attempt(key):
                waiter.admitted = True
            else:
                activity.wait(STARVED, self.name)
                self._waiters.append(waiter)
        return waiter

    def _admitted(self, waiter: _Waiter) -> None:
        if not waiter.admitted:
            waiter.activity.resume()
            raise Cancelled(self.name)

    def _settle(self) -> None:
        """Let in whoever may pass (the caller holds the lock). A place taken may make room for nobody or for others."""
        progress = True
        while progress:
            progress = False
            for waiter in list(self._waiters):
                if self._attempt(waiter.key):
                    self._waiters.remove(waiter)
                    waiter.admitted = progress = True
                    waiter.activity.resume()
                    waiter.wake()


class ReorderGate(Gate):
    """Keeps replicas at most `size` messages ahead of the merge behind them, which bounds what the merge holds back.

    The next message in order is always admitted, so that the merge can go on.
    """

    def __init__(self, worker: str, size: int, merges: int, start: int) -> None:
        super().__init__(f"the merge behind {worker!r}")
        self._size = size
        self._next = [start] * merges

    def _attempt(self, key: int) -> bool:
        return key < min(self._next) + self._size

    def delivered(self, merge: int, index: int) -> None:
        """Merge number `merge` has handed on message `index`."""
        with self._lock:
            self._next[merge] = index + 1
            self._settle()


class GroupGate(Gate):
    """Hands messages on in complete groups only: nobody starts on one before all `size` of its group have arrived."""

    def __init__(self, channel: str, size: int, senders: int, start: int) -> None:
        super().__init__(f"the rest of its group on {channel!r}")
        self._size, self._senders, self._start = size, senders, start
        self._arrived: dict[int, int] = {}
        self._ended = False

    def _group(self, index: int) -> int:
        return (index - self._start) // self._size

    def _attempt(self, key: int) -> bool:
        return self._ended or self._arrived.get(self._group(key), 0) >= self._size

    def arrived(self, index: int) -> None:
        """Message `index` lies in the channel."""
        with self._lock:
            group = self._group(index)
            self._arrived[group] = self._arrived.get(group, 0) + 1
            self._arrived.pop(group - 64, None)  # groups long gone
            self._settle()

    def sender_left(self) -> None:
        """With the last sender gone, the last group is complete as it is."""
        with self._lock:
            self._senders -= 1
            self._ended = self._senders == 0
            self._settle()


class CreditGate(Gate):
    """At most `limit` messages (or windows) are between the source and the `enders` that finish them."""

    def __init__(self, what: str, limit: int, enders: int) -> None:
        super().__init__(f"a credit ({what})")
        self._free, self._enders = limit, enders
        self._ended: dict[int, int] = {}

    def _attempt(self, key: int) -> bool:
        if self._free == 0:
            return False
        self._free -= 1
        return True

    def give_back(self, key: int) -> None:
        """One of the enders is done with message (or window) `key`."""
        with self._lock:
            self._ended[key] = self._ended.get(key, 0) + 1
            if self._ended[key] == self._enders:
                del self._ended[key]
                self._free += 1
                self._settle()


@dataclass(frozen=True)
class Lane:
    """Who asks for a turn: a stage, and the place in its input order (None where a stage has one replica only)."""

    stage: str
    index: int | None


class TurnGate(Gate):
    """Of all workers that share it only one computes at a time; replicas of one stage get it in input order."""

    def __init__(self, name: str, start: int) -> None:
        super().__init__(f"its turn ({name})")
        self._taken = False
        self._start = start
        self._next: dict[str, int] = {}
        self._skipped: dict[str, set[int]] = {}

    def _attempt(self, key: Lane) -> bool:
        if self._taken or (key.index is not None and key.index != self._next.get(key.stage, self._start)):
            return False
        self._taken = True
        return True

    def give_back(self, lane: Lane) -> None:
        """The computation is over."""
        with self._lock:
            self._taken = False
            self._done(lane)

    def skip(self, lane: Lane) -> None:
        """This place in the order has nothing to compute."""
        with self._lock:
            self._done(lane)

    def _done(self, lane: Lane) -> None:
        if lane.index is not None:
            skipped = self._skipped.setdefault(lane.stage, set())
            skipped.add(lane.index)
            following = self._next.get(lane.stage, self._start)
            while following in skipped:
                skipped.remove(following)
                following += 1
            self._next[lane.stage] = following
        self._settle()


# --- how a worker waits -----------------------------------------------------------------------------------------------


class Waits(Protocol):
    async def receive(self, receiver: Receiver) -> Message: ...
    async def send(self, sender: Sender, message: Message) -> None: ...
    async def at(self, gate: Gate, key: Any) -> None: ...


class Blocking:
    """For a worker on a thread of its own: every wait blocks the thread, so no await ever suspends."""

    async def receive(self, receiver: Receiver) -> Message:
        return receiver.receive()

    async def send(self, sender: Sender, message: Message) -> None:
        sender.send(message)

    async def at(self, gate: Gate, key: Any) -> None:
        gate.wait(key)


class Suspending:
    """For a worker that is a coroutine."""

    async def receive(self, receiver: Receiver) -> Message:
        return await receiver.areceive()

    async def send(self, sender: Sender, message: Message) -> None:
        await sender.asend(message)

    async def at(self, gate: Gate, key: Any) -> None:
        await gate.await_(key)


# --- inlets -----------------------------------------------------------------------------------------------------------


class Inlet:
    """Receives one route for one worker replica."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self.receivers = receivers
        self.group: GroupGate | None = None
        self.reorder: ReorderGate | None = None

    async def receive(self, waits: Waits) -> Message:
        """The next message. Raises EndOfChannel, Cancelled."""
        message = await self._next(waits)
        if self.group is not None and message.payload is not ELSEWHERE:
            await waits.at(self.group, message.stamp.index)
        if self.reorder is not None:
            await waits.at(self.reorder, message.stamp.index)
        return message

    async def _next(self, waits: Waits) -> Message:
        return await waits.receive(self.receivers[0])

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


class Merge(Inlet):
    """Restores input order over the sending replicas."""

    def __init__(self, receiver: Receiver, start: int) -> None:
        super().__init__([receiver])
        self._next_index = start
        self._early: dict[int, Message] = {}
        self.behind: tuple[ReorderGate, int] | None = None  # the gate this merge moves on, and its number there

    async def _next(self, waits: Waits) -> Message:
        while self._next_index not in self._early:
            message = await waits.receive(self.receivers[0])
            self._early[message.stamp.index] = message
        message = self._early.pop(self._next_index)
        if self.behind is not None:
            gate, number = self.behind
            gate.delivered(number, self._next_index)
        self._next_index += 1
        return message


class Gather(Inlet):
    """Makes one message of the next message of every sending replica, in replica order."""

    async def _next(self, waits: Waits) -> Message:
        messages = [await waits.receive(receiver) for receiver in self.receivers]
        payloads = tuple(m.payload for m in messages if not m.empty)
        return messages[0].carrying(payloads or None)


class Restamp(Inlet):
    """Numbers messages anew in the order of their arrival (`order: completion`). A partial last window is not ended."""

    def __init__(self, receiver: Receiver, window: int, start: int) -> None:
        super().__init__([receiver])
        self._window, self._count, self._first = window, 0, start

    async def _next(self, waits: Waits) -> Message:
        message = await waits.receive(self.receivers[0])
        window, slot = divmod(self._count, self._window)
        self._count += 1
        stamp = replace(message.stamp, index=self._first + self._count - 1, slot=slot, last=slot == self._window - 1)
        return replace(message, stamp=replace(stamp, window=self._first // self._window + window))


class Local(Inlet):
    """Both ends on one worker: handed over without a queue. It is its own outlet. gather: the port takes a tuple."""

    def __init__(self, *, gather: bool = False) -> None:
        super().__init__([])
        self._messages: deque[Message] = deque()
        self._gather = gather

    async def _next(self, waits: Waits) -> Message:
        message = self._messages.popleft()
        return message.carrying((message.payload,)) if self._gather and not message.empty else message

    async def send(self, waits: Waits, message: Message) -> None:
        self._messages.append(message)


# --- outlets ----------------------------------------------------------------------------------------------------------


class Outlet:
    """Sends along one route for one worker replica; several senders mean one for each receiving replica.

    deal: only the replica that the slot says gets the payload, the others learn that it went elsewhere.
    feedback: receivers that have left already are no failure; what they would have got is counted in `unsent`.
    """

    def __init__(self, senders: Sequence[Sender], *, deal: bool = False, feedback: bool = False) -> None:
        self.senders = senders
        self.group: GroupGate | None = None
        self.unsent = 0
        self._deal, self._feedback = deal, feedback

    async def send(self, waits: Waits, message: Message) -> None:
        """Give the message away. Raises BrokenChannel (not on feedback), Cancelled."""
        owner = message.stamp.slot % len(self.senders) if self._deal else None
        for number, sender in enumerate(self.senders):
            mine = owner is None or owner == number
            try:
                await waits.send(sender, message if mine else Message(message.stamp, message.cursor, ELSEWHERE))
            except BrokenChannel:
                if not self._feedback:
                    raise
                self.unsent += 1
        if self.group is not None:
            self.group.arrived(message.stamp.index)

    def close(self) -> None:
        if self.group is not None:
            self.group.sender_left()
        for sender in self.senders:
            sender.close()

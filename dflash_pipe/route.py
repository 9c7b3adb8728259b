"""How messages find their way between replicas: inlets that receive, outlets that send.

An inlet reads one route for one worker replica: plain, merged into input order, gathered over the sending replicas, or
handed over inside the worker. An outlet sends along one route: to a shared queue, dealt by slot, to everybody, or
inside the worker.

Both are written once, with `await`; `Blocking` serves a thread (its awaits never suspend), `Suspending` a coroutine,
`dflash_pipe.clock.Process` a worker in simulated time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dflash_pipe.channel import Receiver, Sender
from dflash_pipe.errors import BrokenChannel, EndOfChannel
from dflash_pipe.gate import Gate, GroupGate, ReorderGate
from dflash_pipe.message import ELSEWHERE, Message, Stamp

__all__ = ["Blocking", "End", "Gather", "Inlet", "Local", "Merge", "Outlet", "Restamp", "Suspending", "Waits"]


# --- how a worker waits -----------------------------------------------------------------------------------------------


class End(Protocol):
    """A worker's end of a channel."""

    def close(self) -> None: ...


class Waits(Protocol):
    """Receiving, sending and passing a gate, in the way that suits the worker and the ends that it is given."""

    async def receive(self, receiver: Any) -> Message: ...
    async def send(self, sender: Any, message: Message) -> None: ...
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

    def __init__(self, receivers: Sequence[End]) -> None:
        self.receivers = receivers
        self.group: GroupGate | None = None
        self.reorder: ReorderGate | None = None

    async def receive(self, waits: Waits) -> Message:
        """The next message. Raises EndOfChannel, Cancelled."""
        message = await self._next(waits)
        if message.payload is not ELSEWHERE:
            if self.group is not None:
                await waits.at(self.group, message.stamp.index)
            if self.reorder is not None:
                await waits.at(self.reorder, message.stamp.index)
        return message

    async def _next(self, waits: Waits) -> Message:
        return await waits.receive(self.receivers[0])

    def close(self) -> None:
        """Nothing more will be received here."""
        for receiver in self.receivers:
            receiver.close()


class Merge(Inlet):
    """Restores input order over the sending replicas; of each `group` messages, hands on none before all have come."""

    def __init__(self, receiver: End, start: int, group: int = 1) -> None:
        super().__init__([receiver])
        self._start, self._group = start, group
        self._next_index = start
        self._early: dict[int, Message] = {}
        self.behind: tuple[ReorderGate, int] | None = None  # the gate this merge moves on, and its number there

    async def _next(self, waits: Waits) -> Message:
        index, early = self._next_index, self._early
        begins = (index - self._start) % self._group == 0
        due = range(index, index + self._group) if begins else (index,)
        while not all(i in early for i in due):
            try:
                message = await waits.receive(self.receivers[0])
            except EndOfChannel:
                if index not in early:
                    raise
                break  # the last group is complete as it is
            early[message.stamp.index] = message
        self._next_index += 1
        if self.behind is not None:
            gate, number = self.behind
            gate.delivered(number, index)
        return early.pop(index)

    def close(self) -> None:
        super().close()
        if self.behind is not None:
            gate, number = self.behind
            gate.merge_left(number)


class Gather(Inlet):
    """Makes one message of the next message of every sending replica, in replica order."""

    async def _next(self, waits: Waits) -> Message:
        messages = [await waits.receive(receiver) for receiver in self.receivers]
        payloads = tuple(m.payload for m in messages if not m.empty)
        return messages[0].carrying(payloads or None)


class Restamp(Inlet):
    """Numbers messages anew in the order of their arrival (`order: completion`); groups them as `Merge` does.

    start: (index, window) of the first message. size: messages in a window.
    """

    def __init__(self, receiver: End, start: tuple[int, int], size: int, group: int = 1) -> None:
        super().__init__([receiver])
        self._start, self._size, self._group = start, size, group
        self._count = 0
        self._total: int | None = None  # known once the message that ends a partial last window has come
        self._held: deque[Message] = deque()

    async def _next(self, waits: Waits) -> Message:
        while not self._held or (self._count % self._group == 0 and len(self._held) < self._group):
            try:
                message = await waits.receive(self.receivers[0])
            except EndOfChannel:
                if not self._held:
                    raise
                break
            if message.stamp.last and message.stamp.slot < self._size - 1:
                self._total = message.stamp.index + 1 - self._start[0]
            self._held.append(message)
        message = self._held.popleft()
        window, slot = divmod(self._count, self._size)
        self._count += 1
        last = slot == self._size - 1 or self._count == self._total
        stamp = Stamp(self._start[0] + self._count - 1, self._start[1] + window, slot, last)
        return Message(stamp, message.cursor, message.payload)


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
        """Give the message away."""
        self._messages.append(message)


# --- outlets ----------------------------------------------------------------------------------------------------------


class Outlet:
    """Sends along one route for one worker replica; several senders mean one for each receiving replica.

    ways: for each sender, what makes of a message that which enters its channel (none: all stay as they are).
    deal: only the replica that the slot says gets the payload, the others learn that it went elsewhere.
    feedback: receivers that have left already are a normal end. unsent: what those who had left would have got.
    """

    def __init__(
        self,
        senders: Sequence[End],
        ways: Sequence[Callable[[Message], Message]] = (),
        *,
        deal: bool = False,
        feedback: bool = False,
    ) -> None:
        self.senders = senders
        self._ways = ways or [_as_it_is] * len(senders)
        self.group: GroupGate | None = None
        self.unsent = 0
        self._deal, self._feedback = deal, feedback

    async def send(self, waits: Waits, message: Message) -> None:
        """Give the message away. Raises BrokenChannel (not on feedback), once it has reached all who are there."""
        if message.payload is ELSEWHERE:  # the replica that has the payload sends it
            return
        owner = message.stamp.slot % len(self.senders) if self._deal else None
        broken: BrokenChannel | None = None
        for number, (sender, way) in enumerate(zip(self.senders, self._ways, strict=True)):
            if owner not in (None, number):
                sent = Message(message.stamp, message.cursor, ELSEWHERE)
            else:
                sent = message if message.empty else way(message)
            try:
                await waits.send(sender, sent)
            except BrokenChannel as error:
                self.unsent += 1
                broken = error
        if self.group is not None:
            self.group.arrived(message.stamp.index)
        if broken is not None and not self._feedback:
            raise broken

    def close(self) -> None:
        """Nothing more will be sent from here."""
        for sender in self.senders:
            sender.close()
        if self.group is not None:
            self.group.sender_left()


def _as_it_is(message: Message) -> Message:
    return message

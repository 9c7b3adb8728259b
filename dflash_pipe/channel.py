"""A bounded channel with counted ends, over a janus queue, so that threads and coroutines can share it.

- A channel ends by state, never by a value in band. When the last sender has closed, receivers drain what is left and
  then get `EndOfChannel`. When the last receiver has closed, senders get `BrokenChannel`. After `cancel` everybody,
  also who waits already, gets `Cancelled`.
- `send` gives the message away and waits while the channel is full: in messages, or in bytes if it has a byte limit.
  A message larger than the whole limit is admitted when the channel is empty.
- `receive` is atomic: a message is either delivered or still there.
- Always: sent == received + dropped + depth.

Cancel the channel, never a task that waits at one: until Python 3.13 asyncio may lose the wake-up meant for another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import janus

from dflash_pipe.errors import BrokenChannel, Cancelled, EndOfChannel
from dflash_pipe.message import ELSEWHERE, Message, payload_bytes
from dflash_pipe.stats import BLOCKED, BUSY, STARVED, Activity, ChannelLoad, DepthEntry, Newest, activity_here

__all__ = ["Channel", "Receiver", "Sender"]

_EMPTY, _ROOM, _FULL = 0, 1, 2
_ELSEWHERE = -1  # instead of its bytes: the message was dealt elsewhere and takes no room
_Parcel = tuple[Message, int]  # a message and its bytes


class _Store(janus.Queue[_Parcel | None]):
    """janus with room counted in messages and bytes, and with who waits for it.

    janus runs these documented hooks under its lock, and asks `_qsize` just before it lets a caller wait: the one
    place where a worker's state can be flipped together with the queue's. What lies here is counted only where it
    matters, so that a hand-off costs no more than the deque's own methods. is_dealt: some of it may take no room.
    is_cut: nothing is delivered any more.
    """

    def __init__(self, name: str, items: int, nbytes: int | None) -> None:
        self.max_items, self.max_bytes = items, nbytes
        self._plain_room = items if nbytes is None else 0  # while it holds fewer, any message fits
        self.dropped = 0
        self.is_dealt = self.is_cut = False
        self._rest: list[_Parcel] = []
        self._input, self._room = f"input from {name!r}", f"room in {name!r}"
        super().__init__(_FULL)

    def _init(self, maxsize: int) -> None:
        self._parcels: deque[Any] = deque()
        self._put = self._parcels.append  # type: ignore[method-assign, assignment]
        self._get = self._parcels.popleft  # type: ignore[method-assign]

    def load(self) -> tuple[int, int]:
        """Messages that take room, and their bytes."""
        sizes = [nbytes for _, nbytes in self._parcels.copy() if nbytes != _ELSEWHERE]
        return len(sizes), sum(sizes)

    def record(self, depths: Newest[DepthEntry]) -> None:
        """From now on write down what lies here, whenever that changes."""
        put, get = self._put, self._get
        items = held = 0

        def recorded_put(parcel: Any) -> None:
            nonlocal items, held
            put(parcel)
            if parcel[1] != _ELSEWHERE:
                items, held = items + 1, held + parcel[1]
                depths.add((perf_counter(), items, held))

        def recorded_get() -> Any:
            nonlocal items, held
            parcel: Any = get()
            if parcel[1] != _ELSEWHERE:
                items, held = items - 1, held - parcel[1]
                depths.add((perf_counter(), items, held))
            return parcel

        self._put, self._get = recorded_put, recorded_get  # type: ignore[method-assign, assignment]

    def _qsize(self) -> int:
        """For a caller that offers a parcel, whether it has room; for one that offers none, whether there is any."""
        if 0 < len(self._parcels) < self._plain_room:
            return _ROOM
        activity = activity_here()
        if not self._parcels:
            if activity.offer is None and not self.is_cut:
                activity.wait(STARVED, self._input)
            return _EMPTY
        if activity.offer is None or self._fits(activity.offer[1]):
            return _ROOM
        activity.wait(BLOCKED, self._room)
        return _FULL

    def _fits(self, offered: int) -> bool:
        if self.max_bytes is None and not self.is_dealt:
            return len(self._parcels) < self.max_items
        items, nbytes = self.load()
        if offered == _ELSEWHERE or items == 0:
            return True
        return items < self.max_items and (self.max_bytes is None or nbytes + offered <= self.max_bytes)

    def cut(self) -> None:
        """From now on nothing is delivered: whoever takes a parcel gets None. What lies here is dropped."""
        self.is_cut = True
        self._get = self._lay_aside  # type: ignore[method-assign]
        self.shutdown(immediate=True)
        self._rest.clear()  # outside the lock: what a payload does when it is deleted is its own affair

    def _lay_aside(self) -> None:
        self.dropped += 1
        self._rest.append(self._parcels.popleft())


class Channel:
    """`capacity` messages (at least 1) and, if given, `nbytes` bytes; opened with `sender()` and `receiver()`.

    All ends are opened before the first message. Raises ValueError for a capacity under 1.
    """

    def __init__(self, name: str, capacity: int = 2, nbytes: int | None = None) -> None:
        if capacity < 1 or (nbytes is not None and nbytes < 1):
            raise ValueError(f"channel {name!r}: capacity must be at least 1, got {capacity} messages, {nbytes} bytes")
        self.name = name
        self._store = _Store(name, capacity, nbytes)
        self._ends = threading.Lock()
        self._senders: list[Sender] = []
        self._receivers: list[Receiver] = []
        self._ending: type[BaseException] | None = None

    def sender(self) -> Sender:
        """Open one more sending end; the channel ends when all of them are closed."""
        self._senders.append(Sender(self))
        return self._senders[-1]

    def receiver(self) -> Receiver:
        """Open one more receiving end; the channel breaks when all of them are closed."""
        self._receivers.append(Receiver(self))
        return self._receivers[-1]

    def record(self, depths: Newest[DepthEntry]) -> None:
        """Before the first message: write down in `depths` what it holds, whenever that changes."""
        self._store.record(depths)

    def cancel(self) -> None:
        """Drop what is in it and wake everybody with `Cancelled`."""
        self._shut(Cancelled)

    @property
    def load(self) -> ChannelLoad:
        """What lies in it now, and how many messages were sent."""
        items, nbytes = self._store.load()
        return ChannelLoad(self.name, items, self._store.max_items, nbytes, sum(s.count for s in self._senders))

    @property
    def counts(self) -> tuple[int, int, int]:
        """(sent, received, dropped) messages, tombstones included; each end counts what passed it."""
        received = sum(r.count for r in self._receivers)
        return sum(s.count for s in self._senders), received, self._store.dropped

    def _shut(self, ending: type[BaseException]) -> None:
        """End it; a harder ending overrides: EndOfChannel < BrokenChannel < Cancelled."""
        with self._ends:
            if self._ending is not Cancelled and (self._ending is not BrokenChannel or ending is Cancelled):
                self._ending = ending
        if ending is EndOfChannel:
            self._store.shutdown(immediate=False)
        else:
            self._store.cut()

    def _left(self, end: Sender | Receiver) -> None:
        """An end was closed; the last one of its side ends the channel."""
        with self._ends:
            end.open = False
            ends: Sequence[Sender | Receiver] = self._senders if isinstance(end, Sender) else self._receivers
            last = not any(e.open for e in ends)
        if last:
            self._shut(EndOfChannel if isinstance(end, Sender) else BrokenChannel)

    def _why(self) -> BaseException:
        ending = self._ending or Cancelled
        said = {
            EndOfChannel: f"channel {self.name!r} has ended",
            BrokenChannel: f"channel {self.name!r}: every receiver has left",
            Cancelled: f"channel {self.name!r} was cancelled",
        }
        return ending(said[ending])


class Sender:
    """A sending end. One worker owns it: whoever uses it first. count: messages sent."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.open = True
        self.count = 0
        self._activity: Activity | None = None
        self._put = channel._store.sync_q.put

    def send(self, message: Message) -> None:
        """Give `message` away; blocks the calling thread while the channel is full.

        Raises BrokenChannel if every receiver has left, Cancelled if the run is torn down.
        """
        activity = self._activity or self._owned()
        payload = message.payload
        if payload is ELSEWHERE or type(payload) is tuple:
            parcel = self._parcel(message)
        else:  # what `_parcel` does with it: on the hot path a call counts
            parcel = message, getattr(payload, "nbytes", 0)
        activity.offer = parcel
        try:
            self._put(parcel)
            self.count += 1
        except janus.SyncQueueShutDown:
            raise self.channel._why() from None
        finally:
            activity.offer = None
            if activity.state is not BUSY:
                activity.resume()

    async def asend(self, message: Message) -> None:
        """`send` for a coroutine: suspends it instead of blocking the thread."""
        activity = self._activity or self._owned()
        parcel = activity.offer = self._parcel(message)
        try:
            await self.channel._store.async_q.put(parcel)
            self.count += 1
        except janus.AsyncQueueShutDown:
            raise self.channel._why() from None
        finally:
            activity.offer = None
            activity.resume()

    def close(self) -> None:
        """Nothing more will be sent from here. Closing twice is allowed."""
        if self.open:
            self._activity = None
            self.channel._left(self)

    def _parcel(self, message: Message) -> _Parcel:
        payload = message.payload
        if payload is ELSEWHERE:
            self.channel._store.is_dealt = True
            return message, _ELSEWHERE
        return message, payload_bytes(payload) if type(payload) is tuple else getattr(payload, "nbytes", 0)

    def _owned(self) -> Activity:
        if not self.open:
            raise ValueError(f"channel {self.channel.name!r}: send after close")
        self._activity = activity_here()
        return self._activity


class Receiver:
    """A receiving end. One worker owns it: whoever uses it first. count: messages received."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.open = True
        self.count = 0
        self._activity: Activity | None = None
        self._get = channel._store.sync_q.get

    def receive(self) -> Message:
        """The next message; blocks the calling thread while there is none.

        Raises EndOfChannel after the last message, BrokenChannel if another receiver has cut the channel, Cancelled if
        the run is torn down.
        """
        activity = self._activity or self._owned()
        try:
            parcel = self._get()
        except janus.SyncQueueShutDown:
            raise self.channel._why() from None
        finally:
            if activity.state is not BUSY:
                activity.resume()
        if parcel is None:
            raise self.channel._why()
        self.count += 1
        return parcel[0]

    async def areceive(self) -> Message:
        """`receive` for a coroutine."""
        activity = self._activity or self._owned()
        try:
            parcel = await self.channel._store.async_q.get()
        except janus.AsyncQueueShutDown:
            raise self.channel._why() from None
        finally:
            activity.resume()
        if parcel is None:
            raise self.channel._why()
        self.count += 1
        return parcel[0]

    def close(self) -> None:
        """Nothing more will be received here. Closing twice is allowed."""
        if self.open:
            self._activity = None
            self.channel._left(self)

    def _owned(self) -> Activity:
        if not self.open:
            raise ValueError(f"channel {self.channel.name!r}: receive after close")
        self._activity = activity_here()
        return self._activity

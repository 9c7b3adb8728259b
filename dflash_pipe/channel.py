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
from typing import Any

import janus

from dflash_pipe.errors import BrokenChannel, Cancelled, EndOfChannel
from dflash_pipe.message import ELSEWHERE, Message, payload_bytes
from dflash_pipe.stats import BLOCKED, BUSY, STARVED, Activity, ChannelLoad, activity_here

__all__ = ["Channel", "Receiver", "Sender"]

_EMPTY, _ROOM, _FULL = 0, 1, 2
_ELSEWHERE = -1  # instead of its bytes: the message was dealt elsewhere and takes no room
_Parcel = tuple[Message, int]  # a message and its bytes


class _Store(janus.Queue[_Parcel | None]):
    """janus with room counted in messages and bytes, and with who waits for it.

    janus runs these documented hooks under its lock, and asks `_qsize` just before it lets a caller wait: the one
    place where a worker's state can be flipped together with the queue's. `cut`: nothing is delivered any more.
    """

    def __init__(self, name: str, items: int, nbytes: int | None) -> None:
        self.max_items, self.max_bytes = items, nbytes
        self._plain_room = items if nbytes is None else 0  # while it holds fewer, any message fits
        self.nbytes = self._roomless = 0
        self.sent = self.received = self.dropped = 0
        self.cut = False
        self.rest: list[_Parcel] = []
        self._input, self._room = f"input from {name!r}", f"room in {name!r}"
        super().__init__(_FULL)

    def _init(self, maxsize: int) -> None:
        self._parcels: deque[_Parcel] = deque()

    @property
    def items(self) -> int:
        """Messages that take room."""
        return len(self._parcels) - self._roomless

    def _qsize(self) -> int:
        """For a caller that offers a parcel, whether it has room; for one that offers none, whether there is any."""
        if 0 < len(self._parcels) < self._plain_room:
            return _ROOM
        if not self._parcels:
            if not self.cut and (activity := activity_here()).offer is None:
                activity.wait(STARVED, self._input)
            return _EMPTY
        activity = activity_here()
        if activity.offer is None or self._fits(activity.offer[1]):
            return _ROOM
        activity.wait(BLOCKED, self._room)
        return _FULL

    def _fits(self, nbytes: int) -> bool:
        items = self.items
        if nbytes == _ELSEWHERE or items == 0:
            return True
        return items < self.max_items and (self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes)

    def _put(self, item: Any) -> None:
        nbytes = item[1]
        if nbytes > 0:
            self.nbytes += nbytes
        elif nbytes:
            self._roomless += 1
        self.sent += 1
        self._parcels.append(item)

    def _get(self) -> _Parcel | None:
        """The next parcel, or None if the channel was cut: then it is only laid aside."""
        parcel = self._parcels.popleft()
        nbytes = parcel[1]
        if nbytes > 0:
            self.nbytes -= nbytes
        elif nbytes:
            self._roomless -= 1
        if self.cut:
            self.dropped += 1
            self.rest.append(parcel)
            return None
        self.received += 1
        return parcel


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
        self._senders = self._receivers = 0
        self._ending: type[BaseException] | None = None

    def sender(self) -> Sender:
        """Open one more sending end; the channel ends when all of them are closed."""
        with self._ends:
            self._senders += 1
        return Sender(self)

    def receiver(self) -> Receiver:
        """Open one more receiving end; the channel breaks when all of them are closed."""
        with self._ends:
            self._receivers += 1
        return Receiver(self)

    def cancel(self) -> None:
        """Drop what is in it and wake everybody with `Cancelled`."""
        self._shut(Cancelled)

    @property
    def load(self) -> ChannelLoad:
        store = self._store
        return ChannelLoad(self.name, store.items, store.max_items, store.nbytes, store.sent)

    @property
    def counts(self) -> tuple[int, int, int]:
        """(sent, received, dropped) messages, tombstones included."""
        return self._store.sent, self._store.received, self._store.dropped

    def _shut(self, ending: type[BaseException]) -> None:
        """End it; a harder ending overrides: EndOfChannel < BrokenChannel < Cancelled."""
        with self._ends:
            if self._ending is not Cancelled and (self._ending is not BrokenChannel or ending is Cancelled):
                self._ending = ending
        if ending is EndOfChannel:
            self._store.shutdown(immediate=False)
            return
        self._store.cut = True
        self._store.shutdown(immediate=True)
        self._store.rest.clear()  # outside the lock: what a payload does when it is deleted is its own affair

    def _sender_left(self) -> None:
        with self._ends:
            self._senders -= 1
            last = self._senders == 0
        if last:
            self._shut(EndOfChannel)

    def _receiver_left(self) -> None:
        with self._ends:
            self._receivers -= 1
            last = self._receivers == 0
        if last:
            self._shut(BrokenChannel)

    def _why(self) -> BaseException:
        ending = self._ending or Cancelled
        said = {
            EndOfChannel: f"channel {self.name!r} has ended",
            BrokenChannel: f"channel {self.name!r}: every receiver has left",
            Cancelled: f"channel {self.name!r} was cancelled",
        }
        return ending(said[ending])


class Sender:
    """A sending end. One worker owns it: whoever uses it first."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._open = True
        self._activity: Activity | None = None
        self._put = channel._store.sync_q.put

    def send(self, message: Message) -> None:
        """Give `message` away; blocks the calling thread while the channel is full.

        Raises BrokenChannel if every receiver has left, Cancelled if the run is torn down.
        """
        activity = self._activity or self._owned()
        payload = message.payload
        if payload is ELSEWHERE or type(payload) is tuple:
            parcel = _parcel(message)
        else:  # what `_parcel` does with it: on the hot path a call counts
            parcel = message, getattr(payload, "nbytes", 0)
        activity.offer = parcel
        try:
            self._put(parcel)
        except janus.SyncQueueShutDown:
            raise self.channel._why() from None
        finally:
            activity.offer = None
            if activity.state is not BUSY:
                activity.resume()

    async def asend(self, message: Message) -> None:
        """`send` for a coroutine: suspends it instead of blocking the thread."""
        activity = self._activity or self._owned()
        parcel = activity.offer = _parcel(message)
        try:
            await self.channel._store.async_q.put(parcel)
        except janus.AsyncQueueShutDown:
            raise self.channel._why() from None
        finally:
            activity.offer = None
            activity.resume()

    def close(self) -> None:
        """Nothing more will be sent from here. Closing twice is allowed."""
        if self._open:
            self._open, self._activity = False, None
            self.channel._sender_left()

    def _owned(self) -> Activity:
        if not self._open:
            raise ValueError(f"channel {self.channel.name!r}: send after close")
        self._activity = activity_here()
        return self._activity


def _parcel(message: Message) -> _Parcel:
    payload = message.payload
    if payload is ELSEWHERE:
        return message, _ELSEWHERE
    return message, payload_bytes(payload) if type(payload) is tuple else getattr(payload, "nbytes", 0)


class Receiver:
    """A receiving end. One worker owns it: whoever uses it first."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._open = True
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
        return parcel[0]

    def close(self) -> None:
        """Nothing more will be received here. Closing twice is allowed."""
        if self._open:
            self._open, self._activity = False, None
            self.channel._receiver_left()

    def _owned(self) -> Activity:
        if not self._open:
            raise ValueError(f"channel {self.channel.name!r}: receive after close")
        self._activity = activity_here()
        return self._activity

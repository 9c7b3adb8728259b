"""The gates, inlets and outlets of `dflash_pipe.route` in simulated time: the same rules, without threads or payloads.

A rule that changes there changes here; runs of waiting stages are compared with the simulation in the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dflash_pipe.clock import Channel, Clock, Gate, Parcel, Process, Steps
from dflash_pipe.message import Stamp

__all__ = [
    "CreditGate",
    "Gather",
    "GroupGate",
    "Inlet",
    "Local",
    "Merge",
    "Outlet",
    "ReorderGate",
    "Restamp",
    "TurnGate",
]


# --- gates ------------------------------------------------------------------------------------------------------------


class ReorderGate(Gate):
    """Replicas start on nothing that lies `size` or more messages ahead of the merges behind them."""

    def __init__(self, clock: Clock, worker: str, size: int, merges: int) -> None:
        super().__init__(clock, f"merge behind {worker}")
        self._size = size
        self._next = [0] * merges

    def admits(self, key: int) -> bool:
        return key < min(self._next) + self._size

    def delivered(self, merge: int, index: int) -> None:
        self._next[merge] = index + 1
        self.settle()


class GroupGate(Gate):
    """Nobody starts on a message before all of its group lie in the channel, in which they arrive in order."""

    def __init__(self, clock: Clock, channel: str, size: int) -> None:
        super().__init__(clock, f"group on {channel}")
        self._size, self._complete = size, 0

    def admits(self, key: int) -> bool:
        return key < self._complete

    def arrived(self, index: int) -> None:
        self._complete = index + 1 - (index + 1) % self._size
        self.settle()


class CreditGate(Gate):
    """At most `limit` messages (or windows) are between the source and the stages at which the stream ends.

    per: "messages" or "windows". enders: stages that end it per message, and per window. window: messages in one.
    """

    def __init__(self, clock: Clock, per: str, limit: int, enders: tuple[int, int], window: int) -> None:
        super().__init__(clock, f"credit ({per})")
        self._per_message, self._free = per == "messages", limit
        self._enders, self._window = enders, window
        self._done: dict[int, int] = {}

    def admits(self, key: int) -> bool:
        if self._free == 0:
            return False
        self._free -= 1
        return True

    def done(self, stamp: Stamp) -> None:
        message_enders, window_enders = self._enders
        if self._per_message:
            key, due = stamp.index, message_enders + (window_enders if stamp.last else 0)
        else:
            key, due = stamp.window, message_enders * self._window + window_enders
        self._done[key] = self._done.get(key, 0) + 1
        if self._done[key] == due:
            del self._done[key]
            self._free += 1
            self.settle()


class TurnGate(Gate):
    """One computes at a time. A key is (stage, index); replicas of a stage pass in input order, None has no order."""

    def __init__(self, clock: Clock, name: str) -> None:
        super().__init__(clock, f"turn {name}")
        self._taken = False
        self._next: dict[str, int] = {}

    def admits(self, key: tuple[str, int | None]) -> bool:
        stage, index = key
        if self._taken or (index is not None and index != self._next.get(stage, 0)):
            return False
        self._taken = True
        return True

    def give_back(self, key: tuple[str, int | None]) -> None:
        stage, index = key
        self._taken = False
        if index is not None:
            self._next[stage] = index + 1
        self.settle()


# --- inlets -----------------------------------------------------------------------------------------------------------


class Inlet:
    """Receives one route for one worker replica."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels = channels
        self.group: GroupGate | None = None
        self.reorder: ReorderGate | None = None

    def receive(self, me: Process) -> Steps:
        """The next parcel (the generator's value)."""
        parcel: Parcel = yield from self._next(me)
        if self.group is not None and parcel.real:
            yield from self.group.wait(me, parcel.stamp.index)
        if self.reorder is not None and parcel.real:
            yield from self.reorder.wait(me, parcel.stamp.index)
        return parcel

    def _next(self, me: Process) -> Steps:
        return (yield from self.channels[0].receive(me))


class Merge(Inlet):
    """Restores input order over the sending replicas; hands on none of a group before all of it have come.

    behind: the gate that it moves on, and its number there.
    """

    def __init__(self, channel: Channel, group: int) -> None:
        super().__init__([channel])
        self.behind: tuple[ReorderGate, int] | None = None
        self._due, self._group = 0, group
        self._early: dict[int, Parcel] = {}

    def _next(self, me: Process) -> Steps:
        index = self._due
        due = range(index, index + self._group) if index % self._group == 0 else (index,)
        while not all(i in self._early for i in due):
            parcel = yield from self.channels[0].receive(me)
            self._early[parcel.stamp.index] = parcel
        self._due += 1
        if self.behind is not None:
            gate, number = self.behind
            gate.delivered(number, index)
        return self._early.pop(index)


class Gather(Inlet):
    """The next parcel of every sending replica, as one."""

    def _next(self, me: Process) -> Steps:
        parcels: list[Parcel] = []
        for channel in self.channels:
            parcels.append((yield from channel.receive(me)))
        return parcels[0]


class Restamp(Inlet):
    """Numbers parcels anew in the order of their arrival; groups them as `Merge` does. window: messages in one."""

    def __init__(self, channel: Channel, window: int, group: int) -> None:
        super().__init__([channel])
        self._window, self._group, self._count = window, group, 0
        self._held: deque[Parcel] = deque()

    def _next(self, me: Process) -> Steps:
        while not self._held or (self._count % self._group == 0 and len(self._held) < self._group):
            self._held.append((yield from self.channels[0].receive(me)))
        index, self._count = self._count, self._count + 1
        window, slot = divmod(index, self._window)
        parcel = self._held.popleft()
        return Parcel(Stamp(index, window, slot, slot == self._window - 1), parcel.real, parcel.nbytes)


class Local(Inlet):
    """Both ends on one worker; it is its own outlet."""

    def __init__(self) -> None:
        super().__init__([])
        self._parcels: deque[Parcel] = deque()

    def _next(self, me: Process) -> Steps:
        return self._parcels.popleft()
        yield None  # what makes this a generator: it never waits

    def send(self, me: Process, parcel: Parcel) -> Steps:
        self._parcels.append(parcel)
        return
        yield None


class Outlet:
    """Sends along one route; several channels mean one for each receiving replica. deal: only the slot's gets it."""

    def __init__(self, channels: Sequence[Channel], *, deal: bool) -> None:
        self.channels = channels
        self.group: GroupGate | None = None
        self._deal = deal

    def send(self, me: Process, parcel: Parcel) -> Steps:
        owner = parcel.stamp.slot % len(self.channels) if self._deal else None
        for number, channel in enumerate(self.channels):
            mine = owner is None or owner == number
            yield from channel.send(me, parcel if mine else Parcel(parcel.stamp, False, 0))
        if self.group is not None:
            self.group.arrived(parcel.stamp.index)

"""Who does what, who waits on whom since when, and how much passed: the numbers that every run measures.

An `Activity` is one worker's clock. Its three shares sum to 1: busy, starved (waits for input, a turn or a credit),
blocked (waits for room). It is flipped to waiting under the lock of what it waits for, and back to busy as it goes on;
`changes` counts that, so that a watchdog that looks several times can tell whether anything has moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Generic, TypeVar

__all__ = [
    "BLOCKED",
    "BUSY",
    "STARVED",
    "Activity",
    "ChannelLoad",
    "DepthEntry",
    "Newest",
    "View",
    "WaitEntry",
    "WorkerShares",
    "activity_here",
    "be",
    "shares",
]

BUSY, STARVED, BLOCKED = "busy", "starved", "blocked"
WaitEntry = tuple[str, str, float, float]  # state, for what, begin and end on the host's clock
DepthEntry = tuple[float, int, int]  # since when on the host's clock, messages that take room, their bytes
T = TypeVar("T")


class Newest(Generic[T]):
    """The newest `keep` of what is added, and how many there were. One writer at a time."""

    def __init__(self, keep: int) -> None:
        self.entries: deque[T] = deque(maxlen=keep)
        self.seen = 0

    def add(self, entry: T) -> None:
        """Take it down."""
        self.entries.append(entry)
        self.seen += 1


class Activity:
    """What one worker does now, and how its time was spent so far. clock: tells what time it is, in seconds."""

    def __init__(self, worker: str, clock: Callable[[], float] = perf_counter) -> None:
        self.worker = worker
        self.clock = clock
        self.state = BUSY
        self.waits_for = ""
        self.since = self.clock()
        self.changes = 0
        self.items = 0
        self.done = False
        self.place = "opening"
        self.offer: Any = None  # the parcel that it is sending
        self.waits: Newest[WaitEntry] | None = None  # if the run is recorded
        self._spent = {BUSY: 0.0, STARVED: 0.0, BLOCKED: 0.0}

    def wait(self, state: str, waits_for: str) -> None:
        """From now on the worker waits; `waits_for` says for what ("input of 'features'")."""
        if self.state is state and self.waits_for == waits_for:  # woken for nothing: it waits on
            return
        now = self.clock()
        self._spent[self.state] += now - self.since
        if self.state is not BUSY and self.waits is not None:
            self.waits.add((self.state, self.waits_for, self.since, now))
        self.since, self.state, self.waits_for = now, state, waits_for

    def resume(self) -> None:
        """The worker has what it waited for."""
        if self.state is not BUSY:
            now = self.clock()
            self._spent[self.state] += now - self.since
            if self.waits is not None:
                self.waits.add((self.state, self.waits_for, self.since, now))
            self.since, self.state = now, BUSY
            self.changes += 1

    def idled(self, seconds: float) -> None:
        """So much of what was counted as busy it only waited for others' work, on its device."""
        self._spent[BUSY] -= seconds
        self._spent[STARVED] += seconds

    def restart_clock(self) -> None:
        """Forget the time spent so far (opening is not work)."""
        self.since = self.clock()
        self._spent = dict.fromkeys(self._spent, 0.0)

    def end(self) -> None:
        """The worker has left; its clock stops."""
        self._spent = self.spent()
        self.state, self.done = BUSY, True

    def spent(self) -> dict[str, float]:
        """Seconds in each state until now."""
        seconds = dict(self._spent)
        if not self.done:
            seconds[self.state] += self.clock() - self.since
        return seconds


_current: ContextVar[Activity] = ContextVar("activity")


def activity_here() -> Activity:
    """The activity of the worker that runs here (thread or coroutine); code outside any worker gets one of its own."""
    try:
        return _current.get()
    except LookupError:
        return be(Activity("outside"))


def be(activity: Activity) -> Activity:
    """From now on this thread or coroutine is that worker."""
    _current.set(activity)
    return activity


@dataclass(frozen=True)
class WorkerShares:
    """One worker replica: shares of its time since it opened (they sum to 1), what it does now and since when."""

    name: str
    stages: tuple[str, ...]
    busy: float
    starved: float
    blocked: float
    items: int
    seconds: float
    now: str


@dataclass(frozen=True)
class ChannelLoad:
    """A channel's depth in messages and bytes, its capacity, and how many messages have passed."""

    name: str
    depth: int
    capacity: int
    nbytes: int
    sent: int


@dataclass(frozen=True)
class View:
    """A whole run at one moment: what the live view draws and what the closing table prints."""

    run: str
    elapsed: float
    window: int
    workers: tuple[WorkerShares, ...]
    channels: tuple[ChannelLoad, ...]
    metrics: dict[str, Any] = field(default_factory=dict)


def shares(activity: Activity, stages: tuple[str, ...]) -> WorkerShares:
    """The activity as shares of its time."""
    spent = activity.spent()
    total = sum(spent.values()) or 1.0
    if activity.done:
        now = "done"
    elif activity.state is BUSY:
        now = activity.place
    else:
        now = f"waits for {activity.waits_for}"
    return WorkerShares(
        name=activity.worker,
        stages=stages,
        busy=spent[BUSY] / total if sum(spent.values()) else 1.0,
        starved=spent[STARVED] / total,
        blocked=spent[BLOCKED] / total,
        items=activity.items,
        seconds=total,
        now=now,
    )

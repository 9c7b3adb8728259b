"""Gates: places where a worker waits until a condition is met. Waiting at one counts as waiting for input.

Workers pass with a key. Whoever changes the condition lets in everybody who may pass by now; nothing is polled. Whoever
leaves before the stream has ended opens the gates that wait for it, so that the others meet the end of their channels.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dflash_pipe.errors import Cancelled
from dflash_pipe.message import Stamp
from dflash_pipe.stats import STARVED, Activity, activity_here

__all__ = ["CreditGate", "Gate", "GroupGate", "Lane", "ReorderGate", "TurnGate"]


@dataclass(eq=False)
class _Waiter:
    key: Any
    wake: Callable[[], object]
    activity: Activity
    admitted: bool = False


class Gate:
    """Workers pass with a key; `_attempt(key)` says under the lock whether that key may pass now, and takes its place.

    Whoever changes the state calls `_settle`, which lets in everybody who may pass by now.
    name: what a worker waits for. via: what let it on, on a critical path.
    """

    def __init__(self, name: str, via: str) -> None:
        self.name, self.via = name, via
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._cancelled = False

    def _attempt(self, key: Any) -> bool:
        raise NotImplementedError

    def wait(self, key: Any) -> None:
        """Block the calling thread until `key` may pass. Raises Cancelled."""
        event = threading.Event()
        if waiter := self.queue_up(key, event.set, activity_here()):
            event.wait()
            self._admitted(waiter)

    async def await_(self, key: Any) -> None:
        """`wait` for a coroutine."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        if waiter := self.queue_up(key, lambda: loop.call_soon_threadsafe(event.set), activity_here()):
            await event.wait()
            self._admitted(waiter)

    def cancel(self) -> None:
        """Wake everybody with Cancelled."""
        with self._lock:
            self._cancelled = True
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.wake()

    def queue_up(self, key: Any, wake: Callable[[], object], activity: Activity) -> _Waiter | None:
        """Pass at once (None), or wait from now on: `wake` is called when it may pass. Raises Cancelled."""
        with self._lock:
            if self._cancelled:
                raise Cancelled(self.name)
            if self._attempt(key):
                return None
            activity.wait(STARVED, self.name)
            waiter = _Waiter(key, wake, activity)
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
    """Bounds what the merges behind replicas hold back: nobody starts on a message `size` ahead of the slowest merge.

    It stands where messages still come in input order. The next message in order is always admitted, so that the merges
    can go on; once admitted, a message meets no other gate of this kind before its merge.
    """

    def __init__(self, worker: str, size: int, merges: int, start: int) -> None:
        super().__init__(f"the merge behind {worker!r}", f"merge behind {worker}")
        self._size = size
        self._next: list[float] = [start] * merges

    def _attempt(self, key: int) -> bool:
        return key < min(self._next) + self._size

    def delivered(self, merge: int, index: int) -> None:
        """Merge number `merge` has handed on message `index`."""
        with self._lock:
            self._next[merge] = index + 1
            self._settle()

    def merge_left(self, merge: int) -> None:
        """Nobody reads merge number `merge` any more: it holds nobody back."""
        with self._lock:
            self._next[merge] = math.inf
            self._settle()


class GroupGate(Gate):
    """Hands messages on in complete groups only: nobody starts on one before all `size` of its group have arrived.

    For messages that arrive in input order; a merge completes its groups itself.
    """

    def __init__(self, channel: str, size: int, start: int) -> None:
        super().__init__(f"the rest of its group on {channel!r}", f"group on {channel}")
        self._size, self._start = size, start
        self._complete: float = start  # the first message that is not in a complete group

    def _attempt(self, key: int) -> bool:
        return key < self._complete

    def arrived(self, index: int) -> None:
        """Message `index` lies in the channel."""
        with self._lock:
            self._complete = index + 1 - (index + 1 - self._start) % self._size
            self._settle()

    def sender_left(self) -> None:
        """The last group is complete as it is."""
        with self._lock:
            self._complete = math.inf
            self._settle()


class CreditGate(Gate):
    """At most `limit` messages (or windows) are between the source and the stages at which the stream ends.

    A message is over when every stage that ends the stream per message is done with it; the last one of a window, when
    those that end it per window are done, too. A window is over when all its messages are.
    per: what is counted. message_enders: stages. window_enders: stages. window: messages in a window.
    """

    def __init__(
        self, per: Literal["message", "window"], limit: int, message_enders: int, window_enders: int, window: int
    ) -> None:
        super().__init__(f"a credit ({per}s)", f"credit ({per}s)")
        self._per, self._free = per, limit
        self._message_enders, self._window_enders, self._window = message_enders, window_enders, window
        self._done: dict[int, int] = {}
        self._open = False

    def _attempt(self, key: int) -> bool:
        if self._open:
            return True
        if self._free == 0:
            return False
        self._free -= 1
        return True

    def done(self, stamp: Stamp) -> None:
        """One of the stages that end the stream is done with this message (or with the window that it ends)."""
        if self._per == "message":
            key, due = stamp.index, self._message_enders + (self._window_enders if stamp.last else 0)
        else:
            # A window that is not full is the last one: nobody waits for its credit.
            key, due = stamp.window, self._message_enders * self._window + self._window_enders
        with self._lock:
            done = self._done.pop(key, 0) + 1
            if done < due:
                self._done[key] = done
            else:
                self._free += 1
                self._settle()

    def ender_left(self) -> None:
        """What it has not finished, it never will: nobody waits for credits any more."""
        with self._lock:
            self._open = True
            self._settle()


@dataclass(frozen=True)
class Lane:
    """Who asks for a turn: a stage, and the place in its input order; None where there is no order to keep: a stage has
    one replica, or its replicas take from replicas."""

    stage: str
    index: int | None


class TurnGate(Gate):
    """Of all workers that share it only one computes at a time; replicas of one stage get it in input order."""

    def __init__(self, name: str, start: int) -> None:
        super().__init__(f"its turn ({name})", f"turn {name}")
        self._taken = False
        self._start = start
        self._next: dict[str, int] = {}
        self._passed: dict[str, set[int]] = {}
        self._left: set[str] = set()

    def _attempt(self, key: Lane) -> bool:
        if self._taken or not (key.index is None or key.stage in self._left or key.index == self._due(key.stage)):
            return False
        self._taken = True
        return True

    def _due(self, stage: str) -> int:
        return self._next.get(stage, self._start)

    def give_back(self, lane: Lane) -> None:
        """The computation is over."""
        with self._lock:
            self._taken = False
            self._pass(lane)

    def skip(self, lane: Lane) -> None:
        """This place in the order has nothing to compute."""
        with self._lock:
            self._pass(lane)

    def replica_left(self, stage: str) -> None:
        """A replica of `stage` has left early: its places in the order stay empty, so order binds nobody any more."""
        with self._lock:
            self._left.add(stage)
            self._settle()

    def _pass(self, lane: Lane) -> None:
        if lane.index is not None:
            passed = self._passed.setdefault(lane.stage, set())
            passed.add(lane.index)
            following = self._due(lane.stage)
            while following in passed:
                passed.remove(following)
                following += 1
            self._next[lane.stage] = following
        self._settle()

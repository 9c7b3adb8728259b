"""The watchdog: tells that nothing moves any more, and who waits on what since when."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dflash_pipe.stats import BUSY, Activity

__all__ = ["Watchdog"]

# A stall is reported after so many looks that found everybody waiting for the same: then a process that was suspended,
# and whose workers have not run either, does not look stalled.
_LOOKS = 4


class Watchdog:
    """Looks at every worker each `every` seconds; a stall is that for `stall_after` seconds all wait and none moves."""

    def __init__(self, activities: Sequence[Activity], stall_after: float) -> None:
        self.every = min(stall_after / _LOOKS, 1.0)
        self._activities = activities
        self._stall_after = stall_after
        self._looks, self._seen = 0, -1

    def look(self) -> str | None:
        """Who waits for what, if that has not changed for too long."""
        changes = self._changes_if_all_wait()
        self._looks = self._looks + 1 if changes is not None and changes == self._seen else 0
        self._seen = -1 if changes is None else changes
        if self._looks < _LOOKS or self._looks * self.every < self._stall_after:
            return None
        return "nothing moves: " + "; ".join(self._waits())

    def _changes_if_all_wait(self) -> int | None:
        """A count that stands still while nobody gets what it waits for; None if anybody is busy."""
        left = [a for a in self._activities if not a.done]
        if not left or any(a.state is BUSY for a in left):
            return None
        return sum(a.changes for a in left)

    def _waits(self) -> list[str]:
        now = time.perf_counter()
        return [
            f"{a.worker} waits for {a.waits_for} since {now - a.since:.1f} s" for a in self._activities if not a.done
        ]

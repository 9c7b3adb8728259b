"""What travels on a channel: a payload, its place in the stream, and the source's cursor after it.

The cursor rides with the message so that whoever finishes a window knows exactly where the source has to go on.
A message without a payload is a tombstone: it keeps merges, groups, windows and credits whole where a stage had
nothing to send (`NOTHING`) or where the payload went to another replica (`ELSEWHERE`). Stages never see one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

__all__ = ["ELSEWHERE", "NOTHING", "Message", "Stamp", "Tombstone", "payload_bytes"]


class Tombstone(enum.Enum):
    NOTHING = "nothing this time"
    ELSEWHERE = "dealt to another replica"


NOTHING = Tombstone.NOTHING
ELSEWHERE = Tombstone.ELSEWHERE


@dataclass(frozen=True, slots=True)
class Stamp:
    """A message's place in the stream, given once by the source's worker.

    index: position in the whole stream, from 0. window: the optimizer step it belongs to, from 0.
    slot: position inside the window, from 0. last: whether it ends its window.
    """

    index: int
    window: int
    slot: int
    last: bool

    def __str__(self) -> str:
        return f"message {self.index} of window {self.window}" if self.index >= 0 else "a first token"


@dataclass(frozen=True, slots=True)
class Message:
    stamp: Stamp
    cursor: Any
    payload: Any

    @property
    def empty(self) -> bool:
        return isinstance(self.payload, Tombstone)

    def carrying(self, payload: Any) -> Message:
        """The same place in the stream, another payload; None becomes a tombstone."""
        return Message(self.stamp, self.cursor, NOTHING if payload is None else payload)


def payload_bytes(payload: Any) -> int:
    """Bytes a payload holds: its `nbytes` if it says so, the sum over a tuple, otherwise 0."""
    if isinstance(payload, tuple):
        return sum(map(payload_bytes, payload))
    return int(getattr(payload, "nbytes", 0))

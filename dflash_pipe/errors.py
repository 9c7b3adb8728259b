"""The exceptions of dflash_pipe.

Exception
├── BadInput          YAML, data, checkpoint or command line: one line, exit code 2
│   └── Missing       a file or a model that is not here, at least not now
├── EndOfChannel      normal end: every sender closed and the channel is drained
├── BrokenChannel     the peer is gone: nobody will ever receive what is sent
├── Stalled           every worker waits on a channel and nothing moves
└── WorkerKilled      a child process died without a word (signal, out of memory)
BaseException
└── Cancelled         the run is being torn down; never caught by a stage
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["BadInput", "BrokenChannel", "Cancelled", "EndOfChannel", "Missing", "Stalled", "nearest", "nearest_file"]


class BadInput(Exception):
    """Something the user gave is wrong. `str()` is one line: where, what is wrong, what was expected.

    `where` is `file:line`, `file: row N`, or `command line`; empty where no place is known yet (the caller that
    knows it adds it with `at`).
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message, where)
        self.message = message
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def at(self, where: str, prefix: str = "") -> BadInput:
        """The same complaint with its place, unless it has one already."""
        if self.where:
            return self
        return type(self)(f"{prefix}: {self.message}" if prefix else self.message, where)


class Missing(BadInput):
    """What is named may be right, but is not here: data that is not prepared, a model that cannot be fetched now."""


class EndOfChannel(Exception):
    """No more messages will come: the senders have closed and everything they sent was received."""


class BrokenChannel(Exception):
    """The receivers have left; what is sent can reach nobody."""


class Stalled(Exception):
    """Every worker waits on a channel, a gate or a turn, and nothing has moved for `stall_after` seconds."""


class Cancelled(BaseException):
    """Raised from a channel operation when another worker failed or the run was cancelled.

    A BaseException, so that `except Exception` in a stage cannot swallow it.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'layers'?)` for the closest known name, or the list of known names, or nothing."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(names)})" if names else ""


def nearest_file(path: Path) -> str:
    """` (did you mean 'train.arrow'?)` for the closest name beside a file that is not there, or nothing."""
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

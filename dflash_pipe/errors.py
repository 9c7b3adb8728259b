"""The exceptions of dflash_pipe.

Exception
├── BadInput          YAML, data, checkpoint or command line: one line, exit code 2
│   ├── Missing       a file or a model that is not here, at least not now
│   └── BadSnapshot   a cursor or a state in a snapshot that is none of its stage's
├── EndOfChannel      normal end: every sender closed and the channel is drained
├── BrokenChannel     the peer is gone: nobody will ever receive what is sent
├── Stalled           every worker waits on a channel and nothing moves
└── WorkerKilled      a child process died without a word (signal, out of memory)
BaseException
└── Cancelled         the run is being torn down; never caught by a stage
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "BadInput",
    "BadSnapshot",
    "BrokenChannel",
    "Cancelled",
    "EndOfChannel",
    "Missing",
    "Stalled",
    "cut_off",
    "nearest",
    "nearest_file",
    "noted",
]


class BadInput(Exception):
    """Something the user gave is wrong. `str()` is one line: where, what is wrong, what was expected, who met it.

    `where` is `file:line`, `file: row N`, or `command line`; empty where no place is known yet (the caller that
    knows it adds it with `at`). `met_by` is the stage that it came from at work, with its worker and message, or empty.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message, where)
        self.message = message
        self.where = where
        self.met_by = ""

    def __str__(self) -> str:
        line = f"{self.where}: {self.message}" if self.where else self.message
        return f"{line}; in {self.met_by}" if self.met_by else line

    def at(self, where: str, prefix: str = "") -> BadInput:
        """The same complaint with its place, unless it has one already."""
        if self.where:
            return self
        return type(self)(f"{prefix}: {self.message}" if prefix else self.message, where)


class Missing(BadInput):
    """What is named may be right, but is not here: data that is not prepared, a model that cannot be fetched now."""


class BadSnapshot(BadInput):
    """A cursor or a state that is none of its stage's, because it is damaged or of other data. Raised by the stage; the
    run adds where the snapshot is."""


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


def cut_off(text: str) -> str:
    """A value as a complaint shows it: at most 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def noted(place: str) -> Iterator[None]:
    """What fails inside gets a note that says where: for a stage that is asked outside of any worker."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {place}")
        raise

"""The signals that ask a run to stop, and a terminal that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["listening"]


@contextmanager
def listening(asked: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand SIGINT, SIGTERM and SIGHUP to `asked`, from within the signal handler (main thread only).

    A SIGHUP that is ignored stays so (`nohup`). What is written to a terminal that has hung up goes nowhere.
    """
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handler(number: int, frame: FrameType | None) -> None:
        for descriptor in terminals if number == signal.SIGHUP else []:
            if not os.isatty(descriptor):  # any more: to write there is an error
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
        asked(signal.Signals(number))

    taken = [signal.SIGINT, signal.SIGTERM]
    taken += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

"""The signals that ask a run to stop, and a terminal that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["listening"]

_HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not every system has it


@contextmanager
def listening(asked: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand SIGINT, SIGTERM and SIGHUP to `asked`, from within the signal handler (main thread only).

    A SIGHUP that is ignored stays so (`nohup`). What is written to a terminal that has hung up goes nowhere.
    """
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handler(number: int, frame: FrameType | None) -> None:
        for descriptor in terminals if number == _HANG_UP else []:
            if not os.isatty(descriptor):  # any more: to write there is an error
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
        asked(signal.Signals(number))

    taken = [signal.SIGINT, signal.SIGTERM]
    taken += [_HANG_UP] if _HANG_UP and signal.getsignal(_HANG_UP) != signal.SIG_IGN else []
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

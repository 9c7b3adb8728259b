"""The signals that ask a run or a command to stop, and a terminal that is gone."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["HANG_UP", "leaving", "let_go", "listening"]

HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not every system has it
_OUTPUTS = (1, 2)


@contextmanager
def leaving() -> Iterator[None]:
    """Ctrl-C ends the process at once, without a word: while a command imports modules, of which some swallow a
    KeyboardInterrupt, turn it into another exception, or abort. Not where somebody else handles or ignores it."""
    unhandled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours = unhandled and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGINT) is _leave:  # a module may have set its own
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


@contextmanager
def listening(asked: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand SIGINT, SIGTERM and SIGHUP to `asked`, from within the signal handler (main thread only).

    A SIGHUP that is ignored stays so (`nohup`). When the terminal hangs up, what is still written to it goes nowhere,
    and so does what is written to a pipe: who reads it was started from that terminal, too.
    """
    from_terminal = os.isatty(0)

    def handler(number: int, frame: FrameType | None) -> None:
        asked(signal.Signals(number))
        if number == HANG_UP:
            let_go(pipes=from_terminal and not os.isatty(0))

    taken = [signal.SIGINT, signal.SIGTERM]
    taken += [HANG_UP] if HANG_UP and signal.getsignal(HANG_UP) != signal.SIG_IGN else []
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def let_go(*, pipes: bool = False) -> None:
    """From now on what is written to a terminal that has hung up goes nowhere: to write there is an error."""
    for descriptor in _OUTPUTS:
        mode = os.fstat(descriptor).st_mode
        if (stat.S_ISCHR(mode) and not os.isatty(descriptor)) or (pipes and stat.S_ISFIFO(mode)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)

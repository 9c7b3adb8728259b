"""Shows a run while it lasts: a live picture on a terminal, plain progress lines elsewhere, a table at the end.

`Display` only reads: it calls `view()` from a thread of its own and draws what it gets. An error in drawing ends the
drawing, not the run; it is raised when the display is left, unless it is only that the terminal is gone.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live

from dflash_pipe.picture import closing_table, live_view, plain_line, scalars, unpadded
from dflash_pipe.signals import let_go
from dflash_pipe.stats import View

__all__ = ["Display"]

PLAIN_EVERY = 5.0  # seconds between two plain lines
HISTORY = 48  # windows in a metric's curve


class Display:
    """Shows a run while the `with` block lasts; prints the closing table when it ends.

    view: the run as it is now; called from another thread. every: seconds between two pictures on a terminal (plain
    lines come every 5 s, and only while something moves).
    """

    def __init__(self, view: Callable[[], View], console: Console, every: float = 0.25) -> None:
        self._view = view
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._every = every if self._live else max(every, PLAIN_EVERY)
        self._curves: dict[str, deque[float]] = {}
        self._seen: Any = None
        self._failure: Exception | None = None
        self._stop = Event()
        self._thread = Thread(target=self._refresh, name="display")

    def __enter__(self) -> Self:
        if self._live:
            self._written(self._live.start)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._live:
            self._written(self._live.stop)
        if self._failure is None:
            self._written(self._print_table)
        elif error is None:
            raise self._failure
        else:
            error.add_note(f"the live view had failed before: {self._failure!r}")

    def _print_table(self) -> None:
        table = closing_table(self._view())
        if self._console.is_terminal:
            self._console.print(table)
        else:
            self._console.out(unpadded(table, self._console.width), highlight=False)

    def _refresh(self) -> None:
        try:
            if self._live:  # a plain line would say nothing yet
                self._written(self._draw)
            while not self._stop.wait(self._every):
                self._written(self._draw)
        except Exception as failure:  # kept for __exit__: the run goes on without a picture
            self._failure = failure

    @staticmethod
    def _written(write: Callable[[], None]) -> None:
        """Write; if the terminal turns out to be gone, that and all that follows goes nowhere."""
        try:
            write()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            let_go()

    def _draw(self) -> None:
        view = self._view()
        if self._live:
            if view.window != self._seen:
                self._seen = view.window
                for name, value in scalars(view):
                    self._curves.setdefault(name, deque(maxlen=HISTORY)).append(value)
            self._live.update(live_view(view, self._curves), refresh=True)
        elif (moved := (view.window, [c.sent for c in view.channels], [w.items for w in view.workers])) != self._seen:
            self._seen = moved
            self._console.print(plain_line(view), soft_wrap=True, markup=False, highlight=False)

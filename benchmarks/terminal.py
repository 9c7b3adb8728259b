"""Where benchmarks print: a terminal as it is; into a pipe or file tables as wide as they are, or as COLUMNS says."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.markup import escape

__all__ = ["output", "progress"]

_AS_IT_IS = 10_000  # columns: no table is so wide


class _Piped(io.StringIO):
    """Standard output without the blanks with which a table's cells are filled up to the end of a line."""

    encoding = ""

    def __init__(self) -> None:
        super().__init__()
        self.encoding = sys.stdout.encoding or "utf-8"

    def write(self, text: str) -> int:
        sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def output() -> Console:
    """What a benchmark prints on."""
    if Console().is_terminal:
        return Console()
    told = os.environ.get("COLUMNS", "").isdigit()
    return Console(file=_Piped(), width=None if told else _AS_IT_IS)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """How to tell what is going on: one line that changes on a terminal, else a line each on stderr."""
    if not console.is_terminal:
        began = perf_counter()
        yield lambda said: print(f"{perf_counter() - began:7.1f} s: {said}", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield lambda said: status.update(escape(said))

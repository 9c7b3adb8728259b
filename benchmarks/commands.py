"""Measurements and comparisons of this project's parts and of graphs.

Exit codes: 0 good, 1 a difference or a missed target, 2 bad input (one line says what), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import wraps

import typer

from benchmarks.autotune import autotune
from benchmarks.drafter import drafter
from benchmarks.handoff import handoff
from benchmarks.ladder import ladder
from benchmarks.loop import loop
from benchmarks.parity import parity
from benchmarks.recording import recording
from benchmarks.rows import rows
from benchmarks.sync import sync
from benchmarks.target import target
from benchmarks.targets import targets
from benchmarks.topologies import topologies
from benchmarks.verdicts import verdicts
from dflash_pipe.cli import failures_to_exit_codes


def _stoppable(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a word on Ctrl-C where it has nothing to show by then."""

    @wraps(command)
    def called(*words: object, **options: object) -> None:
        try:
            command(*words, **options)
        except KeyboardInterrupt:
            print("stopped before there was anything to show", file=sys.stderr)
            raise typer.Exit(128 + signal.SIGINT) from None

    return called


app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
COMMANDS = (
    topologies, ladder, target, targets, drafter, sync, rows, handoff, recording, loop, verdicts, autotune, parity,
)  # fmt: skip
for command in COMMANDS:
    app.command(short_help=(command.__doc__ or "").partition("\n")[0])(_stoppable(command))


def main() -> None:
    """Entry point: failures become exit codes, as in `dflash-pipe`."""
    arguments = sys.argv[1:] or ["--help"]
    with failures_to_exit_codes():
        sys.exit(app(arguments, prog_name="python -m benchmarks", standalone_mode=False))

"""`python -m benchmarks COMMAND`: 0 is good, 1 is a difference or a missed target, 2 is bad input, said in one line."""

from __future__ import annotations

import sys

import typer

from benchmarks.autotune import autotune
from benchmarks.handoff import handoff
from benchmarks.ladder import ladder
from benchmarks.loop import loop
from benchmarks.parity import parity
from benchmarks.rows import rows
from benchmarks.sync import sync
from benchmarks.topologies import topologies
from benchmarks.verdicts import verdicts
from dflash_pipe import BadInput

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (topologies, ladder, sync, rows, handoff, loop, verdicts, autotune, parity):
    app.command()(command)


def main() -> None:
    try:
        app()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

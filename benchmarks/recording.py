"""What it costs that a run records itself: the same graph with and without, in turns.

Every run records service times, waits and depths of channels, from which come its profile and its timeline. Here the
recording is switched off in every other run; the order of a pair changes from pair to pair.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.graphs import loaded
from benchmarks.interval import estimate
from benchmarks.machine import Out, described, keep
from benchmarks.terminal import output, progress
from dflash_pipe import BadInput
from dflash_pipe.forecast_table import duration
from dflash_pipe.graph import Graph
from dflash_pipe.plan import plan
from dflash_pipe.runtime import Run

__all__ = ["GOAL", "recording", "step_seconds"]

GOAL = 1.01  # with / without
_TOY = "graphs/toy/overlapped.yaml"
_WARM_UP = 2  # steps


def recording(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[GRAPH] [OVERLAY]... [KEY=VALUE]...", help=f"(as it is: {_TOY})")
    ] = None,
    steps: Annotated[int, typer.Option(help=f"steps of each run, the first {_WARM_UP} left out", min=4)] = 24,
    repeat: Annotated[int, typer.Option(help="runs with and runs without, in turns", min=2)] = 10,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if the goal is missed")] = False,
    out: Out = None,
) -> None:
    """What it costs that a run records itself.

    One graph with recording and without, in turns.
    """
    (graph, *others) = loaded(arguments or [_TOY], steps)
    if others:
        raise BadInput(f"one graph is measured, here are {1 + len(others)}", "command line")
    console = output()
    with progress(console) as told:
        pairs = _in_turns(graph, repeat, told)
    ratio = estimate([on / off for on, off in pairs])
    met = "met" if ratio.median <= GOAL else "missed"
    on, off = (statistics.median(side) for side in zip(*pairs, strict=True))
    console.print(
        described(),
        f"{graph.name}, {steps} steps, {repeat} pairs: {duration(on)} a step with recording, {duration(off)} without",
        f"with / without: {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f}, goal ≤ {GOAL}: {met})",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    if out:
        figures: dict[str, Any] = {"graph": graph.files, "steps": steps, "seconds": pairs, "ratio": vars(ratio)}
        console.print(f"results: {keep(out, 'recording', figures)}", highlight=False, soft_wrap=True)
    if check and ratio.median > GOAL:
        raise typer.Exit(1)


def _in_turns(graph: Graph, repeat: int, told: Callable[[str], None]) -> list[tuple[float, float]]:
    """Seconds a step (with, without) of each pair, after one run of which nothing is kept."""
    told("warm-up")
    step_seconds(graph, record=True)
    pairs = []
    for number in range(repeat):
        told(f"pair {number + 1} of {repeat}")
        order = (True, False) if number % 2 else (False, True)
        seconds = {record: step_seconds(graph, record=record) for record in order}
        pairs.append((seconds[True], seconds[False]))
    return pairs


def step_seconds(graph: Graph, *, record: bool) -> float:
    """Mean seconds a step of a run, from the moments at which it reports its steps. Raises BadInput if it does not."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = Run(plan(graph), Path(folder), record=record)
        run.on_report = lambda metrics: ends.append(time.perf_counter()) if "step" in metrics else None
        run.execute()
    counted = ends[_WARM_UP - 1 :]
    if len(counted) < 2:
        raise BadInput(f"{graph.name}: no stage reports its steps, so none can be timed", "command line")
    return (counted[-1] - counted[0]) / (len(counted) - 1)

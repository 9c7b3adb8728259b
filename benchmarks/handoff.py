"""What a hand-off costs: a channel against `queue.Queue`, and a pipeline of four stages against a bare loop.

A channel keeps account of what passes and of who waits, counts its ends and serves coroutines, too; `queue.Queue` does
none of that. Both are measured in turns in one run, so that what else the machine does hits both.
"""

from __future__ import annotations

import importlib.metadata
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import janus
import typer
from rich.table import Table

from benchmarks.machine import described
from benchmarks.terminal import output
from dflash_pipe.channel import Channel
from dflash_pipe.check import check as check_graph
from dflash_pipe.graph import load
from dflash_pipe.message import Message, Stamp
from dflash_pipe.plan import plan
from dflash_pipe.runtime import Run
from stages.toy import Number

__all__ = ["CAPACITIES", "RATIO", "STAGES_OVER", "Ratio", "handoff"]

CAPACITIES = (1, 2, 8, 64)
RATIO = 1.5  # a channel's time may be so many times that of queue.Queue
STAGES_OVER = 0.005  # a pipeline may take so much longer than its slowest stage in a bare loop
LINE = Path(__file__).with_name("line.yaml")
Ends = tuple[Callable[[Any], None], Callable[[], Any]]


@dataclass(frozen=True)
class Ratio:
    """Microseconds a hand-off of each kind (the best of all repeats), and of each repeat, kind / queue.Queue."""

    capacity: int
    best: dict[str, float]
    ratios: dict[str, list[float]]

    def median(self, kind: str) -> float:
        """The middle one of the repeats."""
        return statistics.median(self.ratios[kind])

    def spread(self, kind: str) -> str:
        """First and third quartile."""
        low, _, high = statistics.quantiles(self.ratios[kind], n=4)
        return f"{low:.2f} - {high:.2f}"


def _queue(capacity: int) -> Ends:
    made: queue.Queue[Any] = queue.Queue(capacity)
    return made.put, made.get


def _janus(capacity: int) -> Ends:
    made: janus.Queue[Any] = janus.Queue(capacity)
    return made.sync_q.put, made.sync_q.get


def _channel(capacity: int) -> Ends:
    made = Channel("handoff", capacity)
    return made.sender().send, made.receiver().receive


KINDS: dict[str, Callable[[int], Ends]] = {"queue.Queue": _queue, "janus": _janus, "channel": _channel}


def _once(make: Callable[[int], Ends], capacity: int, messages: list[Message]) -> float:
    """Microseconds a message, from one thread to another."""
    put, get = make(capacity)

    def send() -> None:
        for message in messages:
            put(message)

    sender = threading.Thread(target=send)
    began = time.perf_counter()
    sender.start()
    for _ in messages:
        get()
    took = time.perf_counter() - began
    sender.join()
    return took / len(messages) * 1e6


def measure(capacity: int, count: int, repeats: int) -> Ratio:
    """`repeats` times each kind in turn, `count` messages each."""
    messages = [Message(Stamp(i, i, 0, True), i, Number(i)) for i in range(count)]
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind, make in KINDS.items():
            times[kind].append(_once(make, capacity, messages))
    bare = times["queue.Queue"]
    ratios = {kind: [a / b for a, b in zip(times[kind], bare, strict=True)] for kind in KINDS}
    return Ratio(capacity, {kind: min(each) for kind, each in times.items()}, ratios)


def rest(number: Number, *, seconds: float) -> Number:
    """A stage that takes its time and hands on what it got."""
    time.sleep(seconds)
    return number


def four_stages(repeats: int) -> list[float]:
    """How much longer the line takes from one message to the next than a bare loop of one stage's waits.

    From the end of the first message to the end of the last, so without the run's start and its closing account. A
    share of the loop's time, for each repeat.
    """
    graph = load([LINE])
    check_graph(graph)
    seconds = graph.stages["first"].parameters["seconds"]
    over = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            timeline = Run(plan(graph), Path(folder)).execute().timeline
        assert timeline is not None
        ends = [span.end for span in timeline.spans if span.stage == "fourth"]
        began = time.perf_counter()
        for _ in ends[1:]:
            time.sleep(seconds)
        over.append((ends[-1] - ends[0]) / (time.perf_counter() - began) - 1)
    return over


def handoff(
    count: Annotated[int, typer.Option(help="messages in a repeat", min=100)] = 5000,
    repeats: Annotated[int, typer.Option(help="repeats of each kind, in turns", min=3)] = 25,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if a goal is missed")] = False,
) -> None:
    """What a hand-off between two threads costs.

    A channel against queue.Queue, and a line of four stages against a bare loop.
    """
    ratios = [measure(capacity, count, repeats) for capacity in CAPACITIES]
    over = statistics.median(four_stages(3))
    heads = ("capacity", *(f"{kind} µs" for kind in KINDS), "janus ratio", "channel ratio", "quartiles", "goal")
    table = Table(*heads, box=None)
    for r in ratios:
        good = "met" if r.median("channel") <= RATIO else "missed"
        times = (f"{r.best[kind]:.2f}" for kind in KINDS)
        medians = (f"{r.median(kind):.2f}" for kind in ("janus", "channel"))
        table.add_row(str(r.capacity), *times, *medians, r.spread("channel"), f"≤ {RATIO} {good}")
    console = output()
    console.print(
        f"{described()}; janus {importlib.metadata.version('janus')}",
        f"command: python -m benchmarks {' '.join(sys.argv[1:])}",
        sep="\n",
        highlight=False,
    )
    console.print(table)
    good = "met" if over <= STAGES_OVER else "missed"
    goal = f"(goal ≤ {STAGES_OVER:.1%}: {good})"
    console.print(f"four stages of 50 ms ({LINE.name}): {over:+.2%} over the bare loop {goal}", highlight=False)
    if check and (over > STAGES_OVER or any(r.median("channel") > RATIO for r in ratios)):
        raise typer.Exit(1)

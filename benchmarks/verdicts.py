"""Whether the verdict is right: of all changes that a run could make, does the one it names help most when it is made?

Random graphs of waiting stages are run and forecast from their own profile, and every change of the graph that the
forecast looked at is run too. The verdict is right if what it names is within 2 % of the best of them.
"""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.machine import Out, described, keep
from benchmarks.terminal import output, progress
from dflash_pipe.check import check as check_graph
from dflash_pipe.forecast import predict
from dflash_pipe.graph import Graph, load
from dflash_pipe.plan import plan
from dflash_pipe.profile import Profile
from dflash_pipe.runtime import Run

__all__ = ["GOAL", "Verdict", "verdict_of", "verdicts"]

GOAL = 0.95  # share of the verdicts that are right
_NEAR = 1.02
_WINDOWS = 14


@dataclass(frozen=True)
class Verdict:
    """seconds: measured for a step, as it is and with each change. named: the change that the forecast puts first."""

    graph: str
    before: float
    seconds: dict[str, float]
    named: str

    @property
    def best(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def right(self) -> bool:
        """Within 2 % of the best; where the best gains less than that, there is nothing to name wrongly."""
        return min(self.seconds[self.named], self.before) <= _NEAR * self.seconds[self.best]


def verdicts(
    graphs: Annotated[int, typer.Option(help="how many random graphs", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="of the first graph", min=0)] = 0,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if the goal is missed")] = False,
    out: Out = None,
) -> None:
    """Whether the change that a forecast names helps most.

    Random graphs of waiting stages run, and so does every change of them that the forecast considers.
    """
    console = output()
    found: list[Verdict] = []
    with progress(console) as told, contextlib.suppress(KeyboardInterrupt):
        for number in range(seed, seed + graphs):
            told(f"graph {len(found) + 1} of {graphs}")
            found.append(verdict_of(number))
    if not found:
        raise KeyboardInterrupt
    stopped = len(found) < graphs
    share = statistics.mean(verdict.right for verdict in found)
    console.print(described(), highlight=False, soft_wrap=True)
    table = Table("graph", "ms a step", "named", "ms", "best of all", "ms", "right", box=None, pad_edge=False)
    for v in found:
        named, best = f"{1e3 * v.seconds[v.named]:.1f}", f"{1e3 * v.seconds[v.best]:.1f}"
        table.add_row(v.graph, f"{1e3 * v.before:.1f}", v.named, named, v.best, best, "yes" if v.right else "no")
    console.print(table)
    good = "met" if share >= GOAL else "missed"
    if stopped:
        console.print(f"Stopped after {len(found)} of {graphs} graphs.", highlight=False)
    console.print(f"{share:.0%} of the verdicts name what helps most (goal ≥ {GOAL:.0%}: {good})", highlight=False)
    if out is not None:
        each = [vars(v) | {"right": v.right} for v in found]
        kept = keep(out, "verdicts", {"share": share, "stopped": stopped, "graphs": each})
        console.print(f"results: {kept}", highlight=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(128 + signal.SIGINT)
    if check and share < GOAL:
        raise typer.Exit(1)


def verdict_of(seed: int) -> Verdict:
    """Run a random graph and each of its changes."""
    name, graph = _random(seed)
    profile = _run(graph)
    outcomes = [
        outcome
        for outcome in predict(graph, profile).outcomes
        if outcome.pace is not None and outcome.change.same_result and not outcome.change.times
    ]
    if not outcomes:
        raise RuntimeError(f"{name}: the forecast has no change to name")
    named = max(outcomes, key=lambda outcome: outcome.speedup)
    seconds = {outcome.change.name: _run(outcome.change.graph).steps.mean for outcome in outcomes}
    return Verdict(name, profile.steps.mean, seconds, named.change.name)


def _random(seed: int) -> tuple[str, Graph]:
    """The toy dataflow with random waits, room and replicas."""
    draw = random.Random(seed)
    target, drafter, optimizer = (draw.uniform(low, high) / 1e3 for low, high in ((6, 30), (6, 20), (2, 20)))
    replicas, room = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 4))
    settings = (f"target.seconds={target:.4f}", f"drafter.seconds={drafter:.4f}", f"optimizer.seconds={optimizer:.4f}")
    shape = (f"target.replicas={replicas}", f"features.capacity={room}", f"data.count={4 * _WINDOWS}")
    graph = load(["graphs/toy/overlapped.yaml"], [*settings, *shape])
    check_graph(graph)
    sizes = f"{1e3 * target:.0f} / {1e3 * drafter:.0f} / {1e3 * optimizer:.0f} ms"
    return f"{seed}: {sizes}, {replicas} target, room {room}", graph


def _run(graph: Graph) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        result = Run(plan(graph), Path(folder)).execute()
    if result.profile is None:
        raise RuntimeError(f"{graph.name}: {result.unmeasured}")
    return result.profile

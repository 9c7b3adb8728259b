"""One frozen target on each GPU, all at once: how many times as many forwards as one of them alone.

Every target has a thread of its own in one process, as the workers of a graph have. Where the host is what bounds a
forward (few tokens), threads take its time from each other, which CUDA graphs spare. Every way runs by itself until the
cards have settled at the clocks that they can keep.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.autotuned_launches import at_once
from benchmarks.machine import Out, described, keep
from benchmarks.target import FUSED, GRAPH, Shape, load, random_batch
from benchmarks.terminal import output
from dflash_pipe import BadInput, Context
from dflash_pipe.counted import counted
from stages.truncated_target import TruncatedTarget
from stages.tuning import prepare_kernels

__all__ = ["GOAL", "Case", "rate", "targets"]

_SHAPES = ("3x2000", "1x512")
_ALIKE = 1.05
GOAL = 1.96 / 2  # of what each does alone, with CUDA graphs


@dataclass(frozen=True)
class Case:
    """One way at one shape. alone: forwards a second of each GPU while the others idle. at_once: of all together."""

    alone: list[float]
    at_once: float

    @property
    def times(self) -> float:
        """How many times the mean of one alone."""
        return self.at_once / statistics.mean(self.alone)

    @property
    def missed(self) -> bool:
        return self.times < GOAL * len(self.alone)

    @property
    def unsettled(self) -> bool:
        """Whether one alone was so much faster than another that cards of one kind had not settled."""
        return max(self.alone) > _ALIKE * min(self.alone)


def rate(acts: Sequence[Callable[[], Any]], seconds: float) -> float:
    """Calls a second of all `acts` together, each in a thread of its own for so long, after as long to warm up."""
    rates = [0.0] * len(acts)

    def body(number: int) -> None:
        rates[number] = _calls(acts[number], seconds)

    for _ in range(2):
        at_once([partial(body, number) for number in range(len(acts))])
    return sum(rates)


def _calls(act: Callable[[], Any], seconds: float) -> float:
    """Calls a second, for so long."""
    began, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        act()
        calls += 1
    return calls / passed


def _forward(target: TruncatedTarget, shape: Shape, device: str) -> Callable[[], Any]:
    """A forward on a stream of its own. A call returns when that of the call before is done, as a worker does."""
    batch = random_batch(shape, target.vocab_size, device)
    stream, launched = torch.cuda.Stream(device), list[torch.cuda.Event]()

    def act() -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            target(*batch)
            event = torch.cuda.Event(blocking=True)
            event.record()
        launched.append(event)
        if len(launched) == 2:
            launched.pop(0).synchronize()

    return act


def measure(models: Sequence[TruncatedTarget], shape: Shape, seconds: float) -> dict[str, Case]:
    """Eager and as CUDA graphs."""
    devices = [f"cuda:{number}" for number in range(len(models))]
    found = {}
    for way in (FUSED, GRAPH):
        chosen = []
        for model, device in zip(models, devices, strict=True):
            target = TruncatedTarget(model.decoder, model.layers)
            if way == GRAPH:
                with torch.cuda.device(device):
                    target.prepare([(shape.rows, shape.tokens)])
            chosen.append(_forward(target, shape, device))
        found[way] = Case([rate([act], seconds) for act in chosen], rate(chosen, seconds))
    return found


def targets(
    shapes: Annotated[
        list[str] | None, typer.Argument(help=f"ROWSxTOKENS, ... ({', '.join(_SHAPES)})", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="whose sizes to take")] = "sizes:qwen3_6_27b",
    layers: Annotated[int, typer.Option(help="layers that are computed", min=6)] = 62,
    seconds: Annotated[float, typer.Option(help="how long each runs before, and while it is timed", min=0.1)] = 3.0,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if the goal is missed")] = False,
    out: Out = None,
) -> None:
    """A target on each GPU at once, against one alone."""
    chosen = [Shape.parse(text) for text in shapes or _SHAPES]
    count = torch.cuda.device_count()
    if count < 2:
        have = counted(count, "GPU")
        raise BadInput(f"this machine has {have}, and one target is set against several", "command line")
    console = output()
    console.print(described(), highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        prepare_kernels(Context(device="cuda:0", folder=Path(folder)))
        models = [load(model, layers, f"cuda:{number}") for number in range(count)]
        cases = {shape: measure(models, shape, seconds) for shape in chosen}
    table = Table("shape", "way", "one alone, forwards/s", f"{count} at once", "times one", box=None, pad_edge=False)
    for shape, ways in cases.items():
        for way, case in ways.items():
            alone = ", ".join(f"{each:.2f}" for each in case.alone)
            table.add_row(str(shape), way, alone, f"{case.at_once:.2f}", f"{case.times:.3f}")
    console.print(table)
    missed = [f"{shape}: missed: {c[GRAPH].times:.3f} times one" for shape, c in cases.items() if c[GRAPH].missed]
    for line in missed:
        console.print(f"{line} (goal {GOAL * count:.2f})", highlight=False)
    for shape, ways in cases.items():
        for way in (way for way, case in ways.items() if case.unsettled):
            console.print(f"{shape}, {way}: the GPUs alone differ: not settled (longer --seconds)", highlight=False)
    if out:
        figures = {
            str(shape): {way: {**dataclasses.asdict(case), "times": case.times} for way, case in ways.items()}
            for shape, ways in cases.items()
        }
        kept = keep(out, "targets", {"model": model, "layers": layers, "cases": figures})
        console.print(f"results: {kept}", highlight=False)
    if check and missed:
        raise typer.Exit(1)

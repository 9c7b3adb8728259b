"""What the pipeline itself costs: sequential.yaml against a hand-written loop over the same stages, step by step.

The loop is what a training script would do: read a micro-batch, run the target, the drafter, and once a window the
optimizer. Both train the same drafter on the same rows in turns, in one process; the first step of each is left out.
The peak memory of the whole process is told too.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks.interval import Estimate, estimate
from benchmarks.machine import Out, described, keep
from benchmarks.terminal import output
from dflash_pipe.check import check as check_graph
from dflash_pipe.graph import Graph, load
from dflash_pipe.message import Stamp
from dflash_pipe.plan import plan
from dflash_pipe.runtime import Run
from dflash_pipe.stage import Context
from stages.arrow_shards import assemble, write_shard

__all__ = ["loop"]

OVER = 0.02  # the pipeline may take so much longer than the loop
MEMORY = 4 * 2**30  # bytes that training SmolLM2 may hold
_ROWS, _LENGTH, _VOCABULARY = 64, 96, 49_000


def loop(
    steps: Annotated[int, typer.Option(help="steps of each run, the first left out", min=2)] = 6,
    repeat: Annotated[int, typer.Option(help="runs of each side, in turns", min=1)] = 6,
    out: Out = None,
    check: Annotated[bool, typer.Option("--check", help="exit 1 where a goal is missed")] = False,
) -> None:
    """A sequential graph against a hand-written loop.

    Both make the same torch calls: SmolLM2 on the CPU.
    """
    console = output()
    with tempfile.TemporaryDirectory() as folder:
        graph = _graph(Path(folder), steps)
        pairs = []
        for number in range(repeat):
            sides = [("loop", by_hand), ("pipeline", by_graph)]
            measured = {
                name: _in_a_thread(run, graph, Path(folder)) for name, run in (sides if number % 2 else reversed(sides))
            }
            pairs.append((measured["loop"], measured["pipeline"]))
            console.print(f"loop {pairs[-1][0]:.3f} s a step, pipeline {pairs[-1][1]:.3f} s", highlight=False)
    ratio = estimate([pipeline / loop for loop, pipeline in pairs])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(_table(pairs, ratio, peak))
    if out is not None:
        keep(out, "loop", {"seconds": pairs, "ratio": ratio.median, "interval": [ratio.low, ratio.high], "peak": peak})
    if check and (ratio.median > 1 + OVER or peak > MEMORY):
        raise typer.Exit(1)


def _graph(folder: Path, steps: int) -> Graph:
    """SmolLM2's target and drafter, sequential, on random rows."""
    draw = np.random.default_rng(1)
    supervised = (np.arange(_LENGTH) >= 8).astype(np.uint8)
    rows = [
        (draw.integers(20, _VOCABULARY, _LENGTH, dtype=np.int32), supervised, f"row {number}")
        for number in range(_ROWS)
    ]
    write_shard(folder / "rows.shard", rows)
    assemble([folder / "rows.shard"], folder / "train.arrow", {})
    sizes = ("window=2", "data.max_tokens=384", "drafter.num_anchors=16", "drafter.partials=1", "snapshot=null")
    graph = load(
        ["graphs/sequential.yaml", "graphs/targets/smollm2_135m.yaml"],
        [*sizes, f"data.path={folder / 'train.arrow'}", f"data.steps={steps}"],
    )
    check_graph(graph)
    return graph


def _in_a_thread(run: Callable[[Graph, Path], float], graph: Graph, folder: Path) -> float:
    """Run one side on a thread that ends with it.

    OpenMP keeps a team for each thread that has ever computed, and as soon as these are more than the cores all wait
    less eagerly: a loop on the main thread would slow down what follows.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, graph, folder).result()


def by_graph(graph: Graph, folder: Path) -> float:
    """Seconds a step of the pipeline (median)."""
    run = Run(plan(graph), Path(tempfile.mkdtemp(dir=folder)))
    ends: list[float] = []
    run.on_report = lambda metrics: ends.append(time.perf_counter()) if "loss" in metrics else None
    run.execute()
    return _median_step(ends)


def by_hand(graph: Graph, folder: Path) -> float:
    """Seconds a step of the same stages called one after the other (median)."""
    torch.set_num_threads(graph.threads or 1)
    stages: dict[str, Any] = {name: spec.build() for name, spec in graph.stages.items()}
    ends: list[float] = []

    def report(metrics: dict[str, Any]) -> None:
        if "loss" in metrics:
            ends.append(time.perf_counter())

    for name in ("data", "target", "drafter", "optimizer", "track"):
        stages[name].open(Context(stage=name, seed=graph.seed, window=graph.window, folder=folder, report=report))
    parameters = stages["optimizer"].initial()
    for index, (_, batch) in enumerate(stages["data"].read(None)):
        window, slot = divmod(index, graph.window)
        last = slot == graph.window - 1
        features = stages["target"].process(batch)
        stages["drafter"].process(features, parameters, Stamp(index, window, slot, last))
        if last:
            parameters = stages["optimizer"].process((stages["drafter"].end_window(),))
            stages["track"].process(parameters)
    for stage in stages.values():
        stage.close()
    return _median_step(ends)


def _median_step(ends: list[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _table(pairs: list[tuple[float, float]], ratio: Estimate, peak: float) -> Table:
    table = Table(title=f"SmolLM2-135M on the CPU\n{described()}", title_justify="left", show_header=False)
    loop, pipeline = (statistics.median(side) for side in zip(*pairs, strict=True))
    table.add_row("hand-written loop", f"{loop:.3f} s a step")
    table.add_row("sequential.yaml", f"{pipeline:.3f} s a step")
    table.add_row("pipeline / loop, paired", f"{ratio.median:.4f} (95 %: {ratio.range(digits=4)}), goal {1 + OVER}")
    table.add_row("peak memory of the process", f"{peak / 2**30:.2f} GiB, goal {MEMORY / 2**30:.0f}")
    return table

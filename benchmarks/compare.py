"""Run several graphs in turns, and keep of each run how long a step took and what it computed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.interval import Estimate, estimate
from dflash_pipe import BadInput
from dflash_pipe.check import check
from dflash_pipe.graph import Graph, StageSpec, load
from dflash_pipe.plan import plan
from dflash_pipe.profile import Profile
from dflash_pipe.runtime import Run
from dflash_pipe.snapshot import read as read_snapshot
from dflash_pipe.stats import View
from dflash_pipe.trace import Timeline
from dflash_pipe.what_if import is_whole

__all__ = [
    "Findings",
    "Topology",
    "Trial",
    "difference",
    "loaded",
    "on_devices_of",
    "ratio",
    "run",
    "run_in_turns",
    "source",
]


@dataclass(frozen=True)
class Trial:
    """One run. digests: step -> digest of what it computed. weights: digest of the state that the run ended with, or ''
    if no stage has one."""

    profile: Profile
    timeline: Timeline
    view: View
    digests: dict[int, str]
    weights: str

    @property
    def step(self) -> float:
        """Mean seconds a step, the warm-up left out."""
        return self.profile.steps.mean


@dataclass
class Topology:
    """A graph and its runs."""

    graph: Graph
    trials: list[Trial]

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def step(self) -> Estimate:
        """Seconds a step, over the repeats."""
        return estimate([trial.step for trial in self.trials])

    @property
    def middle(self) -> Trial:
        """The repeat whose step time is the median (of an even number: the faster of the two)."""
        return sorted(self.trials, key=lambda trial: trial.step)[(len(self.trials) - 1) // 2]

    @property
    def gpus(self) -> int:
        """How many GPUs it computes on."""
        return len({name for worker in self.graph.workers.values() for name in _devices(worker.device)} - {"cpu"})

    @property
    def ahead(self) -> int:
        """How many messages may have been worked on, beyond reading them, ahead of the work that ends a step."""
        first = source(self.graph).name
        rooms = [c for c in self.graph.channels.values() if c.per == "message" and c.sender != first]
        spread = {r.channel.name for r in plan(self.graph).routes if r.kind != "local"}
        busy = sum(worker.replicas for worker in self.graph.workers.values() if first not in worker.stages)
        return sum(c.capacity.items for c in rooms if c.name in spread) + (busy if spread else 0)


@dataclass(frozen=True)
class Findings:
    """What a comparison found, in words. headline: who is fastest. sameness: whether all computed alike. differences:
    what was computed differently. heads, rows: the table; a cell is (text, small print). verdicts: of each topology.
    remarks: what makes a figure doubtful. alone: each stage by itself, heads first; empty if that was not measured."""

    headline: str
    sameness: str
    differences: Sequence[str]
    heads: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str]]]
    verdicts: dict[str, str]
    remarks: Sequence[str]
    alone: Sequence[Sequence[str]] = ()


# --- reading ----------------------------------------------------------------------------------------------------------


def loaded(arguments: Sequence[str], steps: int | None) -> list[Graph]:
    """The graphs that are named. A file that extends another or says what stages use is a topology; any other file, and
    key=value, is laid over each of them. steps: how many optimizer steps the source is told to make.

    Raises BadInput.
    """
    overrides = [a for a in arguments if "=" in a and not Path(a).is_file()]
    files = [a for a in arguments if a not in overrides]
    whole = [file for file in files if is_whole(file)]
    overlays = [file for file in files if file not in whole]
    if not whole:
        raise BadInput("no topology given (for example graphs/sequential.yaml graphs/overlapped.yaml)", "command line")
    graphs = []
    for file in whole:
        first = load([file, *overlays], overrides)
        graph = load([file, *overlays], [*overrides, "snapshot=null", *_digests(first), *_length(first, steps)])
        check(graph)
        graphs.append(graph)
    names = [graph.name for graph in graphs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:  # files of one name in two folders
        graphs = [replace(graph, name=file) for graph, file in zip(graphs, whole, strict=True)]
    return graphs


def source(graph: Graph) -> StageSpec:
    """The graph's source."""
    return next(stage for stage in graph.stages.values() if stage.signature.source)


def _length(graph: Graph, steps: int | None) -> list[str]:
    if steps is None:
        return []
    stage = source(graph)
    lengths = {"steps": steps, "count": steps * graph.window}
    known = [key for key in lengths if key in stage.signature.parameters]
    if not known:
        raise BadInput(f"--steps: stage {stage.name} has neither 'steps' nor 'count': give its length as key=value")
    return [f"stages.{stage.name}.with.{known[0]}={lengths[known[0]]}"]


def _digests(graph: Graph) -> list[str]:
    """Stages that report digests only when asked are asked."""
    asks = [
        name for name, stage in graph.stages.items() if stage.signature.parameters.get("digest", (None,))[0] is bool
    ]
    return [f"stages.{name}.with.digest=true" for name in asks]


def on_devices_of(first: Graph, graph: Graph) -> Graph:
    """The graph on the devices that `first` uses: its own devices are mapped onto them, one after the other."""
    pool = list(dict.fromkeys(name for worker in first.workers.values() for name in _devices(worker.device)))
    own = list(dict.fromkeys(name for worker in graph.workers.values() for name in _devices(worker.device)))
    place = {name: pool[number % len(pool)] for number, name in enumerate(own)}
    workers = {
        name: replace(worker, device={stage: tuple(place[d] for d in used) for stage, used in worker.device.items()})
        for name, worker in graph.workers.items()
    }
    return replace(graph, workers=workers)


def _devices(placed: dict[str, tuple[str, ...]]) -> list[str]:
    return [name for names in placed.values() for name in names]


# --- running ----------------------------------------------------------------------------------------------------------


def run(graph: Graph) -> Trial:
    """Run a checked graph to its end in a folder that is gone afterwards."""
    digests: dict[int, str] = {}

    def keep(metrics: dict[str, Any]) -> None:
        if "digest" in metrics:
            digests[int(metrics["step"])] = str(metrics["digest"])

    with tempfile.TemporaryDirectory() as folder:
        running = Run(plan(graph), Path(folder))
        running.on_report = keep
        with contextlib.redirect_stdout(io.StringIO()):  # stages tell how to use what lies in the folder
            result = running.execute()
        weights = _digest(read_snapshot(result.snapshot).state) if result.snapshot else ""
    if result.profile is None or result.timeline is None:
        raise BadInput(f"{graph.name}: {result.unmeasured}")
    return Trial(result.profile, result.timeline, result.view, digests, weights)


def run_in_turns(graphs: Sequence[Graph], repeats: int, told: Callable[[str], None]) -> list[Topology]:
    """Each graph once, then each again: what else the machine does, and how warm it is, hits all alike."""
    topologies = [Topology(graph, []) for graph in graphs]
    for repeat in range(repeats):
        for topology in topologies:
            told(f"{topology.name}, {repeat + 1} of {repeats}")
            topology.trials.append(run(topology.graph))
    return topologies


def _digest(state: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        array = isinstance(value, np.ndarray)
        digest.update(np.ascontiguousarray(value).tobytes() if array else json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()


# --- comparing --------------------------------------------------------------------------------------------------------


def ratio(topology: Topology, first: Topology) -> Estimate:
    """How many times faster than `first`: of each pair of runs that followed each other."""
    pairs = zip(first.trials, topology.trials, strict=True)
    return estimate([before.step / after.step for before, after in pairs])


def difference(expected: Trial, got: Trial) -> str | None:
    """The first thing that two runs computed differently, in words; None if there is none."""
    for step in sorted({*expected.digests, *got.digests}):
        there, here = expected.digests.get(step), got.digests.get(step)
        if there != here:
            return f"window {step - 1}: digest {_short(here)}, expected {_short(there)}"
    if expected.weights != got.weights:
        return f"the final weights: {_short(got.weights)}, expected {_short(expected.weights)}"
    return None


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"

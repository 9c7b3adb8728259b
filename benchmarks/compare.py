"""Run several graphs in turns, and keep of each run how long a step took and what it computed."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.interval import Estimate, estimate
from dflash_pipe import BadInput
from dflash_pipe.check import check
from dflash_pipe.graph import Graph, StageSpec, dataflow, load
from dflash_pipe.graph import difference as dataflow_difference
from dflash_pipe.plan import plan
from dflash_pipe.profile import Profile
from dflash_pipe.runtime import Run
from dflash_pipe.snapshot import read as read_snapshot
from dflash_pipe.stats import View
from dflash_pipe.trace import Timeline
from dflash_pipe.what_if import is_whole

__all__ = [
    "ALL",
    "VARIANT",
    "Topology",
    "Trial",
    "clear",
    "difference",
    "is_control",
    "loaded",
    "on_devices_of",
    "ratio",
    "run",
    "run_in_turns",
    "source",
    "with_digests",
]

ALL = "key=value and overlay files are laid over every graph"
VARIANT = f"{ALL}; a variant of one is a file that extends it"


_PIECE = 1 << 26  # bytes that are hashed at once


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
    """A graph and its runs. checked: one before all others, whose time does not count."""

    graph: Graph
    trials: list[Trial] = field(default_factory=list)
    checked: Trial | None = None

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
        return len(_gpus(self.graph))

    @property
    def memory(self) -> dict[str, int]:
        """device -> the most bytes that any repeat held on it at once, where that is known."""
        peaks: dict[str, int] = {}
        for trial in self.trials:
            for device, seen in trial.profile.memory.items():
                peaks[device] = max(seen.peak, peaks.get(device, 0))
        return peaks

    @property
    def ahead(self) -> int:
        """How many messages may have been worked on, beyond reading them, ahead of the work that ends a step."""
        first = source(self.graph).name
        rooms = [c for c in self.graph.channels.values() if c.per == "message" and c.sender != first]
        spread = {r.channel.name for r in plan(self.graph).routes if r.kind != "local"}
        busy = sum(worker.replicas for worker in self.graph.workers.values() if first not in worker.stages)
        return sum(c.capacity.items for c in rooms if c.name in spread) + (busy if spread else 0)


# --- reading ----------------------------------------------------------------------------------------------------------


def loaded(arguments: Sequence[str], steps: int | None) -> list[Graph]:
    """The graphs that are named, all of one dataflow. A file that extends another or says what stages use is a
    topology; any other file, and key=value, is laid over each of them. steps: how many optimizer steps the source is
    told to make.

    Raises BadInput.
    """
    overrides = [a for a in arguments if "=" in a and not Path(a).is_file()]
    files = [a for a in arguments if a not in overrides]
    whole = [file for file in files if is_whole(file)]
    overlays = [file for file in files if file not in whole]
    if not whole:
        raise BadInput("no topology given (for example graphs/sequential.yaml graphs/overlapped.yaml)", "command line")
    graphs, refused = [], {}
    for file in whole:
        try:
            graphs.append(_loaded([file, *overlays], overrides, steps))
        except BadInput as error:
            refused[file] = error
    for file, bad in refused.items():
        if graphs and bad.where == "command line":  # it fits some, and was perhaps meant for these only
            raise BadInput(f"{file}: {bad.message} ({VARIANT})", bad.where)
        raise bad
    _refuse_other_dataflows(whole, graphs)
    return _with_own_names(whole, graphs)


def _loaded(files: Sequence[str], overrides: Sequence[str], steps: int | None) -> Graph:
    length = _length(load(files, overrides), steps)
    graph = load(files, [*overrides, "snapshot=null", *length])
    check(graph)
    return graph


def _length(graph: Graph, steps: int | None) -> list[str]:
    if steps is None:
        return []
    stage = source(graph)
    lengths = {"steps": steps, "count": steps * graph.window}
    known = [key for key in lengths if key in stage.signature.parameters]
    if not known:
        raise BadInput(f"--steps: stage {stage.name} has neither 'steps' nor 'count': give its length as key=value")
    return [f"stages.{stage.name}.with.{known[0]}={lengths[known[0]]}"]


def _refuse_other_dataflows(files: Sequence[str], graphs: Sequence[Graph]) -> None:
    first = dataflow(graphs[0])
    for file, graph in zip(files, graphs, strict=True):
        if said := dataflow_difference(first, dataflow(graph), (f"in {files[0]}", f"in {file}")):
            raise BadInput(f"different dataflows, so nothing was run: {said} ({ALL})", "command line")


def _with_own_names(files: Sequence[str], graphs: Sequence[Graph]) -> list[Graph]:
    """Each graph under a name of its own: of two files with one name their paths, of a file again which time it is."""
    names = [graph.name for graph in graphs]
    if len(set(zip(names, files, strict=True))) > len(set(names)):
        names = list(files)
    times = [names[:number].count(name) + 1 for number, name in enumerate(names)]
    named = (name if time == 1 else f"{name} #{time}" for name, time in zip(names, times, strict=True))
    return [replace(graph, name=name) for graph, name in zip(graphs, named, strict=True)]


def is_control(graph: Graph, first: Graph) -> bool:
    """Whether it is the same graph again, whatever it is called: running both shows what the machine alone does."""
    return replace(graph, name=first.name, resolved=first.resolved) == first


def source(graph: Graph) -> StageSpec:
    """The graph's source."""
    return next(stage for stage in graph.stages.values() if stage.signature.source)


def with_digests(graph: Graph) -> Graph:
    """The graph with stages that report digests only when asked, which takes time, asked for them."""
    asked = {
        name: replace(stage, parameters={**stage.parameters, "digest": True})
        for name, stage in graph.stages.items()
        if stage.signature.parameters.get("digest", (None,))[0] is bool
    }
    return replace(graph, stages={**graph.stages, **asked})


def on_devices_of(first: Graph, graph: Graph) -> Graph:
    """The graph on the GPUs that `first` uses: its own are mapped onto them, one after the other; on none, the CPU."""
    pool, own = _gpus(first) or ["cpu"], _gpus(graph)
    place = {"cpu": "cpu"} | {name: pool[number % len(pool)] for number, name in enumerate(own)}
    workers = {
        name: replace(
            worker, device={stage: tuple(place.get(d, pool[0]) for d in used) for stage, used in worker.device.items()}
        )
        for name, worker in graph.workers.items()
    }
    return replace(graph, workers=workers)


def _gpus(graph: Graph) -> list[str]:
    """In the order in which the graph names them; a source computes on the host, wherever it is said to be."""
    placed = (item for worker in graph.workers.values() for item in worker.device.items())
    places = (names for stage, names in placed if not graph.stages[stage].signature.source)
    return [name for name in dict.fromkeys(itertools.chain(*places)) if name != "cpu"]


# --- running ----------------------------------------------------------------------------------------------------------


def run(graph: Graph) -> Trial:
    """Run a checked graph to its end in a folder that is gone afterwards."""
    clear()
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
    if not result.profile.warm_up:
        raise BadInput(
            f"{graph.name}: all of its {result.profile.steps.count + 1} steps are warm-up: give more --steps"
        )
    return Trial(result.profile, result.timeline, result.view, digests, weights)


def clear() -> None:
    """Free what earlier runs held, and let the peaks of GPU memory begin anew, so that no run is told another's."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)


def run_in_turns(
    graphs: Sequence[Graph], repeats: int, told: Callable[[str], None], checked: bool = False
) -> list[Topology]:
    """Each graph once, then each again: what else the machine does, and how warm it is, hits all alike.

    checked: before that, each graph once with digests. Its time does not count, so what has to be compiled or tuned
    first, and the digests themselves, are in no time that does.
    """

    def made(graph: Graph, which: str) -> Trial:
        told(f"{graph.name}, {which}")
        trial = run(graph)
        if checked and not (trial.digests or trial.weights):
            raise BadInput("no stage reports a digest or holds a state: nothing tells whether results are the same")
        return trial

    topologies = [Topology(graph) for graph in graphs]
    for topology in topologies if checked else ():
        topology.checked = made(with_digests(topology.graph), "not timed")
    for repeat in range(repeats):
        for topology in topologies:
            topology.trials.append(made(topology.graph, f"{repeat + 1} of {repeats}"))
    return topologies


def _digest(state: dict[str, Any]) -> str:
    """Of names and values; large arrays in pieces, on all cores, because a state may have tens of GB."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for name, value in sorted(state.items()):
            plain = not isinstance(value, np.ndarray)
            raw: Any = json.dumps(value, sort_keys=True).encode() if plain else np.ascontiguousarray(value).reshape(-1)
            flat = memoryview(raw).cast("B")
            pieces = (flat[at : at + _PIECE] for at in range(0, len(flat), _PIECE))
            digest.update(name.encode())
            for part in pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces):
                digest.update(part)
    return digest.hexdigest()


# --- comparing --------------------------------------------------------------------------------------------------------


def ratio(topology: Topology, other: Topology) -> Estimate:
    """How many times as fast as the other: of each pair of runs that followed each other."""
    pairs = zip(other.trials, topology.trials, strict=True)
    return estimate([before.step / after.step for before, after in pairs])


def difference(expected: Trial, got: Trial) -> str | None:
    """The first thing that two runs computed differently, in words; None if there is none. A run without digests is
    compared by what it ended with."""
    for step in sorted({*expected.digests, *got.digests} if got.digests else ()):
        there, here = expected.digests.get(step), got.digests.get(step)
        if there != here:
            return f"window {step - 1}: digest {_short(here)}, expected {_short(there)}"
    if expected.weights != got.weights:
        return f"the final weights: {_short(got.weights)}, expected {_short(expected.weights)}"
    return None


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"

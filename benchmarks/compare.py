"""Run several graphs in turns, and keep of each run how long a step took and what it computed."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.graphs import gpus, source, with_digests
from benchmarks.interval import Estimate, estimate
from dflash_pipe import BadInput, Stage
from dflash_pipe.graph import Graph
from dflash_pipe.plan import plan
from dflash_pipe.profile import Profile
from dflash_pipe.runtime import Run
from dflash_pipe.stats import View
from dflash_pipe.trace import Timeline

__all__ = [
    "Interrupted",
    "Topology",
    "Trial",
    "clear",
    "difference",
    "ratio",
    "run",
    "run_in_turns",
]

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
        return len(gpus(self.graph))

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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a run that failed (failure). topologies: those that had a timed run by then, with as many runs as all
    of these have."""

    def __init__(self, topologies: list[Topology], failure: BaseExceptionGroup[BaseException] | None) -> None:
        super().__init__()
        self.topologies, self.failure = topologies, failure


# --- running ----------------------------------------------------------------------------------------------------------


def run(graph: Graph) -> Trial:
    """Run a checked graph to its end in a folder that is gone afterwards."""
    clear()
    digests: dict[int, str] = {}
    weights: list[str] = []

    def keep(metrics: dict[str, Any]) -> None:
        if "digest" in metrics:
            digests[int(metrics["step"])] = str(metrics["digest"])

    with tempfile.TemporaryDirectory() as folder:
        # A real drafter's state is tens of GB, which nobody would read again.
        running = Run(plan(graph), Path(folder), on_state=lambda stage: weights.append(_state_digest(stage)))
        running.on_report = keep
        with contextlib.redirect_stdout(io.StringIO()):  # stages tell how to use what lies in the folder
            result = running.execute()
    if result.profile is None or result.timeline is None:
        raise BadInput(f"{graph.name}: {result.unmeasured}")
    if not result.profile.warm_up:
        raise BadInput(f"{graph.name}: all of its steps are warm-up: give more --steps")
    return Trial(result.profile, result.timeline, result.view, digests, "".join(weights[-1:]))


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
    first, and the digests themselves, are in no time that does; unless there are no repeats, and it is all there is.
    Raises Interrupted for a Ctrl-C, and for a run that fails, as soon as there is something to compare.
    """

    def made(graph: Graph, which: str) -> Trial:
        told(f"{graph.name}, {which}")
        trial = run(graph)
        if checked and not (trial.digests or trial.weights):
            raise BadInput("no stage reports a digest or holds a state: nothing tells whether results are the same")
        return trial

    topologies = [Topology(graph) for graph in graphs]
    try:
        for topology in topologies if checked else ():
            if repeats:
                topology.checked = made(with_digests(topology.graph), "not timed")
            else:
                topology.trials.append(made(with_digests(topology.graph), "its only run"))
        for repeat in range(repeats):
            for topology in topologies:
                topology.trials.append(made(topology.graph, f"{repeat + 1} of {repeats}"))
    except (KeyboardInterrupt, BaseExceptionGroup) as stop:
        timed = [topology for topology in topologies if topology.trials]
        if not timed:
            raise
        for topology in timed:
            del topology.trials[min(len(other.trials) for other in timed) :]
        raise Interrupted(timed, stop if isinstance(stop, BaseExceptionGroup) else None) from None
    return topologies


def _state_digest(stage: Stage) -> str:
    return stage.state_digest() if hasattr(stage, "state_digest") else _digest(stage.state())


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
            return f"step {step}: digest {_short(here)}, expected {_short(there)}"
    if expected.weights != got.weights:
        return f"the final weights: {_short(got.weights)}, expected {_short(expected.weights)}"
    return None


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"

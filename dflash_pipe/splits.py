"""Every way to split a number of GPUs among the workers of a graph, forecast and ranked; the best one as a graph file.

A worker gets GPUs of its own, one for each replica, if it works on every message and is not the source. The source
stays on the CPU; whoever works once a window (the optimizer) shares the first GPU of the worker that it talks to.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_pipe.check import rate
from dflash_pipe.counted import counted
from dflash_pipe.errors import BadInput
from dflash_pipe.forecast import Forecast, Options, predict
from dflash_pipe.forecast_table import duration
from dflash_pipe.graph import Graph, WorkerSpec
from dflash_pipe.located import dumps, plain, read
from dflash_pipe.memory import Need, estimate, refuse
from dflash_pipe.plan import plan
from dflash_pipe.profile import Profile
from dflash_pipe.transport import Transport
from dflash_pipe.what_if import TAKES, check_laws, is_lawful

__all__ = ["SPLIT_BEGINS", "Split", "ranked", "splits_table", "written"]

SPLIT_BEGINS = "# GPUs shared out as the forecast found best"
_IMPOSSIBLE = 5  # splits of which it is told why they are not possible

_GIB = 2**30
_MOST = 1024  # GPUs, and ways to split them
_AS_FAST = 1.005


@dataclass(frozen=True)
class Split:
    """replicas: of each worker that has GPUs of its own. memory: bytes that the fullest GPU needs at most, None if that
    is not known. forecast: None if it cannot be; the refusal says why. doubt: about the memory."""

    replicas: dict[str, int]
    graph: Graph
    memory: int | None
    forecast: Forecast | None
    refusal: str = ""
    doubt: str = ""

    @property
    def step(self) -> float:
        """Seconds, as forecast; infinite if it cannot be."""
        return self.forecast.pace.step if self.forecast else math.inf

    def __str__(self) -> str:
        return ", ".join(f"{worker} x{count}" for worker, count in self.replicas.items())


def ranked(graph: Graph, profile: Profile, gpus: int, options: Options) -> list[Split]:
    """All splits of `gpus` GPUs, the fastest first, those that cannot be at the end. Before them, if fewer GPUs are as
    fast as the fastest, a split of the fewest.

    Raises BadInput if the graph has no workers to split them among, or the profile does not fit.
    """
    if not 1 <= gpus <= _MOST:
        raise BadInput(f"--gpus is {gpus}, expected 1 to {_MOST}", "command line")
    options, workers = replace(options, changes=False), _on_gpus(graph)
    if (ways := math.comb(gpus - 1, len(workers) - 1)) > _MOST:
        said = f"{ways:,} ways to split them among {', '.join(workers)}, expected at most {_MOST}: fewer GPUs"
        raise BadInput(f"--gpus is {gpus}: {said}", "command line")
    if refusal := predict(graph, profile, options=options).refusal:
        raise BadInput(refusal)
    splits = [_forecast(graph, counts, gpus, profile, options) for counts in _counts(workers, gpus)]
    splits.sort(key=lambda split: split.step)
    least = _least(splits[0], graph, profile, options)
    return splits if least is splits[0] else [least, *splits]


def _forecast(graph: Graph, counts: dict[str, int], gpus: int, profile: Profile, options: Options) -> Split:
    laid_out = graph
    try:
        laid_out = _placed(graph, counts, gpus)
        memory, doubt = _memory(laid_out, profile)
        forecast = predict(laid_out, profile, options=options)
    except (BadInput, ValueError) as error:
        return Split(counts, laid_out, None, None, getattr(error, "message", str(error)))
    most = max((need.total for need in memory), default=None)
    return Split(counts, laid_out, most, forecast, doubt=doubt)


def _least(best: Split, graph: Graph, profile: Profile, options: Options) -> Split:
    """The split with the fewest replicas of each worker that is as fast: no fewer than those that were busy."""
    least = best
    shares = best.forecast.pace.workers if best.forecast else {}
    for worker, count in best.replicas.items():
        busy = sum(each.busy for name, each in shares.items() if name.partition("[")[0] == worker)
        for fewer in range(max(1, math.floor(busy)), count):
            counts = {**least.replicas, worker: fewer}
            split = _forecast(graph, counts, sum(counts.values()), profile, options)
            if split.step <= _AS_FAST * best.step:
                least = split
                break
    return least


def written(split: Split, files: Sequence[str], beside: Path) -> str:
    """The split as the YAML text of a file in the folder `beside`: it extends `files`, of which the graph was made, and
    says what differs from them."""
    graph, tree = split.graph, deepcopy(split.graph.resolved)
    for worker in graph.workers.values():
        keys = tree["workers"][worker.name]
        names = [_named(devices) for devices in worker.device.values()]
        alike = all(name == names[0] for name in names)
        for key, value, default in (("replicas", worker.replicas, 1), ("take", worker.take, "first_free")):
            if value != keys.get(key, default):
                keys[key] = value
        keys["device"] = names[0] if alike else dict(zip(worker.device, names, strict=True))
    defaults = {"name": Path(files[0]).stem, "seed": 0, "window": 1, "threads": None}
    shown = [os.path.relpath(file, beside) if Path(file).exists() else file for file in files]
    said = {"extends": shown if len(shown) > 1 else shown[0], **_beyond(defaults | plain(read(files)[0]), tree)}
    return f"{SPLIT_BEGINS}: {split}.\n{dumps(said, flow=True)}"


def _named(devices: Sequence[str]) -> str | list[str]:
    """Device names that any machine knows, one where all replicas have the same."""
    names = [name.replace("cuda:", "auto:") for name in devices]
    return names[0] if len(set(names)) == 1 else names


def _beyond(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What an overlay has to say to make `after` of `before`."""
    said: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key not in before or before[key] != value:
            inside = isinstance(value, dict) and isinstance(before.get(key), dict)
            said[key] = _beyond(before[key], value) if inside else value
    return said


# --- laying out -------------------------------------------------------------------------------------------------------


def _on_gpus(graph: Graph) -> list[str]:
    """Workers that get GPUs of their own."""
    found = []
    for worker in graph.workers.values():
        source = any(graph.stages[stage].signature.source for stage in worker.stages)
        if not source and any(rate(graph, stage) == "message" for stage in worker.stages):
            found.append(worker.name)
    if not found:
        raise BadInput(
            "no worker to split GPUs among: every stage shares a worker with the source "
            "(expected a graph with workers of their own, such as graphs/overlapped.yaml)",
            "command line",
        )
    return found


def _counts(workers: Sequence[str], gpus: int) -> Iterator[dict[str, int]]:
    """Every way to give each worker at least one GPU; a single GPU is shared by all."""
    if gpus == 1:
        yield dict.fromkeys(workers, 1)
    elif gpus < len(workers):
        raise BadInput(
            f"--gpus is {gpus}, expected 1 or at least {len(workers)} ({', '.join(workers)})", "command line"
        )
    else:
        yield from _parts(workers, gpus)


def _parts(workers: Sequence[str], gpus: int) -> Iterator[dict[str, int]]:
    first, *rest = workers
    if not rest:
        yield {first: gpus}
        return
    for count in range(gpus - len(rest), 0, -1):
        yield from ({first: count, **others} for others in _parts(rest, gpus - count))


def _placed(graph: Graph, counts: Mapping[str, int], gpus: int) -> Graph:
    """The graph with so many replicas, on GPUs in order. Raises BadInput or ValueError if its laws refuse that."""
    names = [f"cuda:{number}" for number in range(gpus)]
    given: dict[str, list[str]] = {}
    for name, count in counts.items():
        given[name] = names[:count] if gpus == 1 else [names.pop(0) for _ in range(count)]
    workers = {}
    for worker in graph.workers.values():
        if worker.name in given:
            workers[worker.name] = _laid_out(graph, worker, given[worker.name])
        else:
            source = any(graph.stages[stage].signature.source for stage in worker.stages)
            device = "cpu" if source else given[_partner(graph, worker, given)][0]
            workers[worker.name] = replace(worker, device=dict.fromkeys(worker.stages, (device,) * worker.replicas))
    placed = replace(graph, workers=workers)
    check_laws(placed, ())
    return placed


def _laid_out(graph: Graph, worker: WorkerSpec, on: Sequence[str]) -> WorkerSpec:
    """A replica on each device; takes as the graph says, or else as its laws allow."""
    for stage in worker.stages:
        graph.stages[stage].check(len(on))
    device = dict.fromkeys(worker.stages, tuple(on))
    ways = [replace(worker, replicas=len(on), device=device, take=take) for take in (worker.take, *TAKES)]
    graphs = [replace(graph, workers={**graph.workers, worker.name: way}) for way in ways]
    return next((way for way, made in zip(ways, graphs, strict=True) if is_lawful(made, ())), ways[0])


def _partner(graph: Graph, worker: WorkerSpec, given: Mapping[str, Sequence[str]]) -> str:
    """The last worker with GPUs that it has a channel with, or the last one at all."""
    place = {stage: w.name for w in graph.workers.values() for stage in w.stages}
    partner = list(given)[-1]
    for channel in graph.channels.values():
        ends = {place[channel.sender], *(place[to.stage] for to in channel.receivers)}
        if worker.name in ends:
            partner = next((name for name in reversed(list(given)) if name in ends), partner)
    return partner


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory(graph: Graph, profile: Profile) -> tuple[list[Need], str]:
    """What each GPU needs at most, as its stages say; where they do not, what the GPUs held on which they ran in the
    profile, and why. The GPUs need not be here: how large they are is taken from the profile, or from those that are.

    Nothing where neither is known. Raises BadInput if a GPU cannot hold what it needs.
    """
    needs, doubt = list[Need](), "no stage says what memory it needs"
    try:
        needs = [need for need in estimate(plan(replace(graph, transport=Transport()))) if need.device != "cpu"]
    except BadInput as error:
        doubt = str(error)
    here = (graph.transport.memory(name) for name in graph.transport.accelerators())
    rooms = [memory.total for memory in profile.memory.values()] or [seen[1] for seen in here if seen]
    found = [replace(need, has=min(rooms, default=None)) for need in needs or _measured(graph, profile)]
    refuse(found)
    return found, "" if needs else f"memory is {'as the profile measured it' if found else 'not known'}: {doubt}"


def _measured(graph: Graph, profile: Profile) -> list[Need]:
    """For each GPU what those held on which its stages ran in the profile; nothing if it does not know one of them."""
    ran = {stage: [d for d, held in profile.memory.items() if stage in held.stages] for stage in graph.stages}
    held: dict[str, dict[str, int]] = {}
    for worker in graph.workers.values():
        for stage, devices in worker.device.items():
            for device in set(devices) - {"cpu"}:
                if not ran[stage]:
                    return []
                held.setdefault(device, {}).update({f"what {d} held": profile.memory[d].peak for d in ran[stage]})
    return [Need(d, tuple(sorted(parts.items(), key=lambda part: -part[1])), None) for d, parts in held.items()]


# --- on a terminal ----------------------------------------------------------------------------------------------------


def splits_table(splits: Sequence[Split]) -> RenderableType:
    """The ranking, for `rich.console.Console.print`."""
    table = Table(box=None, pad_edge=False)
    for name in ("split", "step", "rate", "memory", "critical cycle"):
        table.add_column(name, justify="right" if name in ("step", "rate", "memory") else "left", overflow="fold")
    impossible = [split for split in splits if split.forecast is None]
    for split in splits:
        if split.forecast is None:
            continue
        rows, messages = split.forecast.rows_per_second, split.forecast.messages_per_second
        rate_shown = f"{messages:.4g} messages/s" if rows is None else f"{rows:.4g} rows/s"
        memory = "?" if split.memory is None else f"{split.memory / _GIB:.1f} GiB"
        pace = split.forecast.pace
        table.add_row(str(split), duration(pace.step), rate_shown, memory, str(pace.cycle))
    for split in impossible[:_IMPOSSIBLE]:
        table.add_row(str(split), "-", "-", "-", split.refusal)
    parts: list[RenderableType] = [table]
    if more := len(impossible[_IMPOSSIBLE:]):
        parts.append(Text(f"and {counted(more, 'more split')}, not possible for reasons like these"))
    fewest, given = (sum(split.replicas.values()) for split in (splits[0], splits[-1]))
    if fewest < given:
        parts.append(Text(f"as fast with {counted(fewest, 'GPU')} as with {given}"))
    doubts = dict[str, None]()
    for split in splits:
        if split.forecast:
            doubts |= dict.fromkeys([split.doubt] if split.doubt else [])
            doubts |= dict.fromkeys((*split.forecast.doubts, *split.forecast.pace.remarks))
    parts += [Text(f"note: {doubt}") for doubt in doubts]
    if etas := [split.forecast.eta for split in splits if split.forecast and split.forecast.eta]:
        parts.append(Text(f"all rows in {duration(etas[0])} with the first"))
    return Group(*parts)

"""How much memory each device of a plan needs, estimated before anything is loaded, and whether that can fit.

Stages say what they need (`Stage.footprint`); messages on their way are added to it (`dflash_pipe.in_flight`). The sum
is an upper bound, but for stages that are named as not known. Of stages that never compute at the same time only what
needs most is counted: of those of one worker, and of a stage that fires once a window against those that it waits for
around a feedback channel with one token. What no stage speaks of (the driver, a library's workspace, allocator waste)
is not in it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_pipe.counted import counted
from dflash_pipe.errors import BadInput, noted
from dflash_pipe.graph import Graph
from dflash_pipe.in_flight import around, downstream, messages, upstream
from dflash_pipe.plan import Plan, WorkerPlan, stage_order
from dflash_pipe.stage import Context, Footprint

__all__ = ["Need", "estimate", "memory_table", "refuse", "too_much"]

# The CPU's memory is shared with everybody and can be swapped: only what is clearly too much for it is refused.
_CLEARLY = 1.5


@dataclass(frozen=True)
class Need:
    """What a device needs at most, largest part first, in bytes. has: all that there is of it; None if not known.
    unknown: stages that may need more, because they, or those whose messages they take, do not say what."""

    device: str
    parts: tuple[tuple[str, int], ...]
    has: int | None
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def __str__(self) -> str:
        has = f" of {amount(self.has)}" if self.has is not None else ""
        largest = "".join(f", the largest part is {name} ({amount(size)})" for name, size in self.parts[:1])
        unknown = f"; not known: what else is needed by {', '.join(self.unknown)}" if self.unknown else ""
        return f"{self.device} needs about {amount(self.total)}{has}{largest}{unknown}"


def estimate(plan: Plan) -> list[Need]:
    """One for each device that a stage with a footprint speaks of, in the plan's order. Nothing is opened.

    Raises `BadInput` where a stage cannot say what it needs, because of what it was given.
    """
    stations = [(worker, station) for worker in plan.workers for station in worker.stations]
    prints, untold = _footprints(plan)
    parts: dict[str, list[tuple[str, int]]] = defaultdict(list)
    working: dict[str, list[_Work]] = defaultdict(list)
    unknown: dict[str, list[str]] = defaultdict(list)
    for worker, station in stations:
        own = prints[station.stage, worker.replica]
        name = station.stage if worker.spec.replicas == 1 else f"{station.stage}[{worker.replica}]"
        parts[station.device] += [(f"{name}: {part}", size) for part, size in own.held.items()]
        parts["cpu"] += [(f"{name}: {part}, on the host", size) for part, size in own.host.items()]
        at_work = tuple((f"{name}: {part}, at work", size) for part, size in own.working.items())
        working[station.device].append(_Work(station.stage, worker.name, at_work))
        if station.stage in untold:
            unknown[station.device].append(name)
    for device, name, count, size in messages(plan, prints):
        parts[device].append((f"{name}: {counted(count, 'message')} of {amount(size)}", count * size))
    turns = _turns(plan)
    needs = []
    for device in dict.fromkeys((*(station.device for _, station in stations), "cpu")):
        together = _most_at_once(working[device], turns)
        listed = [part for part in (*parts[device], *(p for work in together for p in work.parts)) if part[1]]
        listed.sort(key=lambda part: -part[1])
        needs.append(Need(device, tuple(listed), _has(plan, device), tuple(unknown[device])))
    said = any(need.parts for need in needs)
    return [need for need in needs if need.parts or (said and need.unknown)]


def refuse(needs: Sequence[Need]) -> None:
    """Raise `BadInput` for the first device that cannot hold what it needs."""
    if line := next(filter(None, map(too_much, needs)), ""):
        raise BadInput(line)


def too_much(need: Need) -> str:
    """Why a device cannot hold what it needs; "" if it can, or if that is not known."""
    if need.has is None or need.total <= need.has * (_CLEARLY if need.device == "cpu" else 1):
        return ""
    name, size = need.parts[0]
    return (
        f"{need.device} needs about {amount(need.total)}, has {amount(need.has)}: the largest part is {name} "
        f"({amount(size)}); expected less of it, or a part of the stages on another device"
    )


def memory_table(needs: Sequence[Need]) -> str:
    """All parts, device by device."""
    lines = ["memory at most, estimated:"]
    for need in needs:
        has = f" of {amount(need.has)}" if need.has is not None else ""
        lines.append(f"  {need.device}  {amount(need.total)}{has}")
        lines += [f"    {amount(size):>9}  {name}" for name, size in need.parts]
        lines += [f"    not known  what else is needed by {name}" for name in need.unknown]
    return "\n".join(lines)


def amount(count: int) -> str:
    """A number of bytes for a reader: 2.5 MiB."""
    power = min(3, max(0, count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _has(plan: Plan, device: str) -> int | None:
    known = plan.graph.transport.memory(device)
    if known is not None:
        return known[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device == "cpu" else None


# --- stages -----------------------------------------------------------------------------------------------------------


def _footprints(plan: Plan) -> tuple[dict[tuple[str, int], Footprint], set[str]]:
    """(stage, replica) -> what it says, senders before receivers; and the stages of which that need not be all: they
    say nothing, or nobody tells them what comes in with each message."""
    graph = plan.graph
    prints: dict[tuple[str, int], Footprint] = {}
    untold: set[str] = set()
    for stage in stage_order(graph):
        feeding = [(c, to.port) for c in graph.channels.values() for to in c.receivers if to.stage == stage]
        told = {port: prints[c.sender, 0].told for c, port in feeding if c.initial == 0}
        blind = any(c.sender in untold or told[port] is None for c, port in feeding if c.per == "message")
        if blind or not hasattr(graph.stages[stage].make, "footprint"):
            untold.add(stage)
        for worker in plan.workers:
            for station in worker.stations:
                if station.stage == stage:
                    prints[stage, worker.replica] = _footprint(graph, worker, station.device, stage, told)
    return prints, untold


def _footprint(graph: Graph, worker: WorkerPlan, device: str, stage: str, told: dict[str, Any]) -> Footprint:
    built = graph.stages[stage].build()
    if not hasattr(built, "footprint"):
        return Footprint()
    context = Context(
        stage=stage,
        worker=worker.name,
        device=device,
        replica=worker.replica,
        replicas=worker.spec.replicas,
        seed=graph.seed,
        window=graph.window,
    )
    try:
        with noted(f"worker {worker.name}: {stage} footprint"):
            said: Footprint = built.footprint(context, told)
    except BadInput as error:
        if error.where:  # which need not be a place in the graph
            error.met_by = f"stage {stage} (worker {worker.name}, footprint)"
        raise error.at(graph.places.of_stage(stage, error.message), f"stages.{stage}") from error
    return said


@dataclass(frozen=True)
class _Work:
    """The working memory of one stage on one worker."""

    stage: str
    worker: str
    parts: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)


def _most_at_once(works: Sequence[_Work], turns: Sequence[tuple[set[str], set[str]]]) -> list[_Work]:
    """Those of `works` that can compute at the same time and need the most together: the largest of each worker.

    Of a cycle with one token (`_turns`) either a stage that computes alone does, or the others.
    """
    bounds = [_largest(works)]
    for alone, cycle in turns:
        ways = [_largest([work for work in works if work.stage not in alone])]
        ways += [
            _largest([work for work in works if work.stage == one or work.stage not in cycle]) for one in sorted(alone)
        ]
        bounds.append(max(ways, key=_total))
    return min(bounds, key=_total)


def _largest(works: Sequence[_Work]) -> list[_Work]:
    """One of each worker."""
    largest: dict[str, _Work] = {}
    for work in works:
        if work.worker not in largest or work.size > largest[work.worker].size:
            largest[work.worker] = work
    return list(largest.values())


def _total(works: Sequence[_Work]) -> int:
    return sum(work.size for work in works)


def _turns(plan: Plan) -> list[tuple[set[str], set[str]]]:
    """(stages that compute alone, all stages) of each cycle that is closed by a feedback channel with one token.

    A stage that fires once a window is alone if every other stage of the cycle has to wait for it, or it for them.
    Stages that fire once a message are not: within a window they take different messages.
    """
    graph = plan.graph
    once = {station.stage for worker in plan.workers for station in worker.stations if station.rate == "window"}
    turns = []
    for feedback in graph.channels.values():
        if feedback.initial == 1 and feedback.per == "window":
            cycle = around(graph, feedback)
            alone = {stage for stage in cycle & once if cycle <= upstream(graph, stage) | downstream(graph, {stage})}
            turns.append((alone, cycle))
    return turns

"""How much memory each device of a plan needs, estimated before anything is loaded, and whether that can fit.

Stages say what they need (`Stage.footprint`); what is added here are the messages on their way. Those towards another
device lie there from the moment they are sent. The sum is an upper bound, where stages that cannot compute at the same
time count their working memory once: those of one worker, and those that wait for each other on a feedback channel with
one token. What no stage speaks of (the driver, a library's workspace, allocator waste) is not in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_pipe.errors import BadInput
from dflash_pipe.graph import ChannelSpec, Graph
from dflash_pipe.plan import Plan, RoutePlan, WorkerPlan, stage_order
from dflash_pipe.stage import Context, Footprint

__all__ = ["Need", "estimate", "memory_table", "refuse"]

_GIB = 2**30
# The CPU's memory is shared with everybody and can be swapped: only what is clearly too much for it is refused.
_CLEARLY = 1.5


@dataclass(frozen=True)
class Need:
    """What a device needs at most, largest part first, in bytes. has: all that there is of it; None if not known."""

    device: str
    parts: tuple[tuple[str, int], ...]
    has: int | None

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def __str__(self) -> str:
        name, size = self.parts[0]
        has = f" of {amount(self.has)}" if self.has is not None else ""
        return f"{self.device} needs about {amount(self.total)}{has}, the largest part is {name} ({amount(size)})"


def estimate(plan: Plan) -> list[Need]:
    """One for each device that a stage with a footprint speaks of, in the plan's order. Nothing is opened.

    Raises `BadInput` where a stage cannot say what it needs, because of what it was given.
    """
    stations = [(worker, station) for worker in plan.workers for station in worker.stations]
    prints = _footprints(plan)
    parts: dict[str, list[tuple[str, int]]] = {station.device: [] for _, station in stations}
    working: dict[str, list[_Work]] = {device: [] for device in parts}
    for worker, station in stations:
        own = prints[station.stage, worker.replica]
        name = station.stage if worker.spec.replicas == 1 else f"{station.stage}[{worker.replica}]"
        parts[station.device] += [(f"{name}: {part}", size) for part, size in own.held.items()]
        at_work = tuple((f"{name}: {part}, at work", size) for part, size in own.working.items())
        working[station.device].append(_Work(station.stage, worker, at_work))
    for device, name, size in _messages(plan, prints):
        parts[device].append((name, size))
    apart = _never_together(plan.graph)
    needs = []
    for device, fixed in parts.items():
        together = _most_at_once(working[device], apart)
        listed = [part for part in (*fixed, *(p for work in together for p in work.parts)) if part[1]]
        if listed:
            listed.sort(key=lambda part: -part[1])
            needs.append(Need(device, tuple(listed), _has(plan, device)))
    return needs


def refuse(needs: Sequence[Need]) -> None:
    """Raise `BadInput` for the first device that cannot hold what it needs."""
    for need in needs:
        if need.has is not None and need.total > need.has * (_CLEARLY if need.device == "cpu" else 1):
            name, size = need.parts[0]
            raise BadInput(
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


def _footprints(plan: Plan) -> dict[tuple[str, int], Footprint]:
    """(stage, replica) -> what it says, senders before receivers; nothing from a stage that says nothing."""
    graph = plan.graph
    prints: dict[tuple[str, int], Footprint] = {}
    for stage in stage_order(graph):
        feeding = [(c, to.port) for c in graph.channels.values() for to in c.receivers if to.stage == stage]
        told = {port: prints[c.sender, 0].told for c, port in feeding if c.initial == 0}
        for worker in plan.workers:
            for station in worker.stations:
                if station.stage == stage:
                    prints[stage, worker.replica] = _footprint(graph, worker, station.device, stage, told)
    return prints


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
    said: Footprint = built.footprint(context, told)
    return said


@dataclass(frozen=True)
class _Work:
    """The working memory of one stage on one worker."""

    stage: str
    worker: WorkerPlan
    parts: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)


def _most_at_once(works: Sequence[_Work], apart: Callable[[_Work, _Work], bool]) -> tuple[_Work, ...]:
    """Those of `works` that can compute at the same time and need the most together."""
    works = [work for work in works if work.size]
    if not works:
        return ()
    first, rest = works[0], works[1:]
    without = _most_at_once(rest, apart)
    beside = [work for work in rest if not apart(first, work)]
    with_first = (first, *_most_at_once(beside, apart))
    return max(with_first, without, key=lambda chosen: sum(work.size for work in chosen))


def _never_together(graph: Graph) -> Callable[[_Work, _Work], bool]:
    single = [(channel, _cycle(graph, channel)) for channel in graph.channels.values() if channel.initial == 1]

    def apart(one: _Work, other: _Work) -> bool:
        if one.worker is other.worker:
            return True
        if one.stage == other.stage or not {"window"} & {_rate(one), _rate(other)}:
            return False  # within a window they take different messages
        return any({one.stage, other.stage} <= cycle for channel, cycle in single if channel.per == "window")

    return apart


def _rate(work: _Work) -> str:
    return next(station.rate for station in work.worker.stations if station.stage == work.stage)


def _cycle(graph: Graph, feedback: ChannelSpec) -> set[str]:
    """The stages on the cycles that a feedback channel closes."""
    steps = [(c.sender, to.stage) for c in graph.channels.values() if c.initial == 0 for to in c.receivers]
    behind = _reached(steps, {to.stage for to in feedback.receivers})
    return behind & _reached([(to, sender) for sender, to in steps], {feedback.sender})


def _reached(steps: Sequence[tuple[str, str]], begin: set[str]) -> set[str]:
    reached, before = set(begin), set[str]()
    while reached != before:
        before = set(reached)
        reached |= {to for sender, to in steps if sender in before}
    return reached


# --- messages ---------------------------------------------------------------------------------------------------------


def _messages(plan: Plan, prints: Mapping[tuple[str, int], Footprint]) -> Iterator[tuple[str, str, int]]:
    """(device, name, bytes) of what is on its way, or in the hands of those at the ends.

    A payload that goes to several receivers is there once on each device.
    """
    counts: dict[tuple[str, str, str], dict[str, tuple[int, int]]] = {}
    for route in plan.routes:
        channel = route.channel
        own = prints[channel.sender, 0]
        end_window = channel.per == "window" and plan.graph.stages[channel.sender].signature.window_output is not None
        size = own.window_sent if end_window else own.sent
        for device, count in _on_their_way(plan, route, size):
            found = counts.setdefault((device, channel.sender, channel.per), {})
            found[channel.name] = (found.get(channel.name, (0, 0))[0] + count, size)
    for (device, _, _), by_channel in counts.items():
        name, (count, size) = max(by_channel.items(), key=lambda item: item[1])
        if count and size:
            yield device, f"{name}: {count} message{'s' if count > 1 else ''} of {amount(size)}", count * size


def _on_their_way(plan: Plan, route: RoutePlan, size: int) -> Iterator[tuple[str, int]]:
    """(device, how many payloads of a route lie there at most): one is being made, some wait, one is in use."""
    if not size:
        return
    senders = _devices(plan, route.channel.sender)
    tokens = _tokens(plan.graph, route.channel)
    for receiver in _devices(plan, route.to.stage):
        gathered = len(senders) if route.kind == "gathered" else 1
        count = (_waiting(plan, route, size) + 1) * gathered
        if tokens is not None:  # around a cycle, never more; the receiver keeps its last one until the next is there
            count = min(count, (tokens + (1 if route.feedback else 0)) * gathered)
        yield receiver, count
    if route.kind == "local":
        return  # what is being made is what will be in use
    for sender in senders:
        if tokens is None or sender not in _devices(plan, route.to.stage):
            yield sender, 1


def _waiting(plan: Plan, route: RoutePlan, size: int) -> int:
    """Payloads between the ends of a route, at most."""
    if route.kind == "local":
        return 0
    room = route.channel.capacity
    items = room.items if room.bytes is None else max(1, min(room.items, room.bytes // size))
    items += 1  # the one that its sender is about to put in
    if route.merge:
        behind = [worker.reorder for worker in plan.workers if route.channel.sender in worker.spec.stages]
        items = max(items, *(each or 0 for each in behind))
    if route.channel.per == "message" and plan.graph.credits.messages is not None:
        items = min(items, plan.graph.credits.messages)
    return items


def _tokens(graph: Graph, channel: ChannelSpec) -> int | None:
    """How many messages can be around the cycle that a per-window channel lies on; None if it lies on none."""
    if channel.per != "window":
        return None
    for feedback in graph.channels.values():
        cycle = _cycle(graph, feedback) if feedback.initial and feedback.per == "window" else set()
        if channel.sender in cycle and (channel is feedback or any(to.stage in cycle for to in channel.receivers)):
            return feedback.initial
    return None


def _devices(plan: Plan, stage: str) -> list[str]:
    """The device of each replica of a stage."""
    return [s.device for worker in plan.workers for s in worker.stations if s.stage == stage]

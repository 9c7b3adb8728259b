"""How much memory each device of a plan needs, estimated before anything is loaded, and whether that can fit.

Stages say what they need (`Stage.footprint`); what is added here are the messages on their way. Those towards another
device lie there from the moment they are sent. The sum is an upper bound. Of stages that never compute at the same time
only what needs most is counted: of those of one worker, and of a stage that fires once a window against those that
it waits for around a feedback channel with one token. What no stage speaks of (the driver, a library's workspace,
allocator waste) is not in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_pipe.errors import BadInput
from dflash_pipe.graph import ChannelSpec, Graph
from dflash_pipe.plan import Plan, RoutePlan, WorkerPlan, stage_order
from dflash_pipe.stage import Context, Footprint

__all__ = ["Need", "estimate", "memory_table", "refuse"]

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
        working[station.device].append(_Work(station.stage, worker.name, at_work))
    for device, name, size in _messages(plan, prints):
        parts[device].append((name, size))
    turns = _turns(plan)
    needs = []
    for device, fixed in parts.items():
        together = _most_at_once(working[device], turns)
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
    steps = _steps(graph)
    once = {station.stage for worker in plan.workers for station in worker.stations if station.rate == "window"}
    turns = []
    for feedback in graph.channels.values():
        if feedback.initial == 1 and feedback.per == "window":
            cycle = _cycle(graph, feedback)
            alone = {stage for stage in cycle & once if cycle <= _before(steps, stage) | _reached(steps, {stage})}
            turns.append((alone, cycle))
    return turns


def _cycle(graph: Graph, feedback: ChannelSpec) -> set[str]:
    """The stages on the cycles that a feedback channel closes."""
    steps = _steps(graph)
    return _reached(steps, {to.stage for to in feedback.receivers}) & _before(steps, feedback.sender)


def _steps(graph: Graph) -> list[tuple[str, str]]:
    """(sender, receiver) of what is no feedback."""
    return [(c.sender, to.stage) for c in graph.channels.values() if c.initial == 0 for to in c.receivers]


def _before(steps: Sequence[tuple[str, str]], stage: str) -> set[str]:
    return _reached([(to, sender) for sender, to in steps], {stage})


def _reached(steps: Sequence[tuple[str, str]], begin: set[str]) -> set[str]:
    reached, before = set(begin), set[str]()
    while reached != before:
        before = set(reached)
        reached |= {to for sender, to in steps if sender in before}
    return reached


# --- messages ---------------------------------------------------------------------------------------------------------


def _messages(plan: Plan, prints: Mapping[tuple[str, int], Footprint]) -> Iterator[tuple[str, str, int]]:
    """(device, name, bytes) of what is on its way, or in the hands of those at the ends.

    A payload that goes into several channels lies there once on its sender's device; towards another one each channel
    copies it by itself.
    """
    shared: dict[tuple[str, str, str], list[tuple[int, int, str]]] = {}
    for (device, name), (channel, count, size) in _counted(plan, prints).items():
        if {device} == set(_devices(plan, channel.sender)):
            shared.setdefault((device, channel.sender, channel.per), []).append((count * size, count, name))
        else:
            yield device, _messages_of(name, count, size), count * size
    for (device, _, _), found in shared.items():
        total, count, name = max(found)
        yield device, _messages_of(name, count, total // count), total


def _messages_of(name: str, count: int, size: int) -> str:
    return f"{name}: {count} message{'s' if count > 1 else ''} of {amount(size)}"


def _counted(
    plan: Plan, prints: Mapping[tuple[str, int], Footprint]
) -> dict[tuple[str, str], tuple[ChannelSpec, int, int]]:
    """(device, channel's name) -> the channel, how many of its payloads lie there at most, and the bytes of one."""
    found: dict[tuple[str, str], tuple[ChannelSpec, int, int]] = {}
    for route in plan.routes:
        channel = route.channel
        own = prints[channel.sender, 0]
        end_window = channel.per == "window" and plan.graph.stages[channel.sender].signature.window_output is not None
        size = own.window_sent if end_window else own.sent
        for device, count in _on_their_way(plan, route, size):
            before = found[device, channel.name][1] if (device, channel.name) in found else 0
            found[device, channel.name] = channel, before + count, size
    return found


def _on_their_way(plan: Plan, route: RoutePlan, size: int) -> Iterator[tuple[str, int]]:
    """(device, how many payloads of a route lie there at most): one is being made, some wait, one is in use."""
    if not size:
        return
    senders, receivers = _devices(plan, route.channel.sender), _devices(plan, route.to.stage)
    tokens, waiting = _tokens(plan.graph, route.channel), _waiting(plan, route, size)
    for receiver in receivers:
        gathered = len(senders) if route.kind == "gathered" else 1
        count = (waiting + 1) * gathered
        if tokens is not None:  # around a cycle, never more; the receiver keeps its last one until the next is there
            count = min(count, (tokens + (1 if route.feedback else 0)) * gathered)
        yield receiver, count
    if route.kind == "local":
        return  # what is being made is what will be in use
    for sender in senders:
        if {sender} == set(receivers) or (tokens is not None and sender in receivers):
            continue  # the one that is about to be put in is the one that was made
        made = 2  # one is being made while the last is copied
        if route.kind == "shared" and len(set(receivers)) > 1:
            made = waiting + 1  # where it goes is known when it is taken
        yield sender, made if tokens is None else min(made, tokens)


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

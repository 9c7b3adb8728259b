"""Graph -> Plan: which worker replicas there are, what each runs, and how every message gets from end to end.

Pure: nothing is opened. `Plan.table()` and `Plan.mermaid()` show it to a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_pipe.counted import counted
from dflash_pipe.graph import ChannelSpec, Graph, PortRef, WorkerSpec
from dflash_pipe.laws import bad, each, owner, rate

__all__ = ["Plan", "RoutePlan", "StationPlan", "WorkerPlan", "plan", "stage_order"]

Rate = Literal["message", "window"]
# A merge that may hold back 3 messages a replica keeps replicas busy when their times vary; with 1 a replica, restoring
# order can cost as much again as the work itself.
REORDER = 3


@dataclass(frozen=True)
class RoutePlan:
    """One channel towards one of its receiving ports.

    kind: `local` (both stages on one worker: no queue), `shared` (one queue, first free takes), `dealt` (a queue for
    each receiving replica, by slot), `broadcast` (every replica gets every message), `gathered` (one message from each
    sending replica makes one). senders, receivers: replicas at its ends. merge: input order is restored on receipt.
    restamp: messages are numbered anew in the order of arrival.
    """

    name: str
    channel: ChannelSpec
    to: PortRef
    kind: Literal["local", "shared", "dealt", "broadcast", "gathered"]
    senders: int
    receivers: int
    merge: bool
    restamp: bool

    @property
    def feedback(self) -> bool:
        """It closes a cycle; the receiver's side of it is empty of meaning once the receiver has left."""
        return self.channel.initial > 0

    @property
    def unordered(self) -> bool:
        """Replicas take from it what other replicas sent in whatever order; a merge further on restores it."""
        return self.kind == "shared" and self.senders > 1 and self.receivers > 1


@dataclass(frozen=True)
class StationPlan:
    """A stage in its place. rate: fires once a message, or once a window. ends: the stream ends here (at this rate)."""

    stage: str
    rate: Rate
    device: str
    ends: bool


@dataclass(frozen=True)
class WorkerPlan:
    """One replica of a worker. reorder: how far ahead of the merges behind it it may start on a message; None: any."""

    spec: WorkerSpec
    replica: int
    stations: tuple[StationPlan, ...]
    reorder: int | None

    @property
    def name(self) -> str:
        return f"{self.spec.name}[{self.replica}]" if self.spec.replicas > 1 else self.spec.name


@dataclass(frozen=True)
class Plan:
    graph: Graph
    workers: tuple[WorkerPlan, ...]
    routes: tuple[RoutePlan, ...]

    def merges_behind(self, worker: WorkerSpec) -> list[RoutePlan]:
        """The merges that bound how far ahead the replicas of `worker` may run: those that restore their order."""
        place = {stage: w for w in self.graph.workers.values() for stage in w.stages}
        reached = _reached(worker, self.routes, place)
        return [r for r in self.routes if r.merge and place[r.channel.sender] in reached]

    def towards(self, route: RoutePlan, replica: int) -> tuple[str, list[set[str]]]:
        """The device of a sending replica, and for each of its senders those on which whoever reads behind it may be:
        several where the first who is free takes it."""
        devices = {(s.stage, worker.replica): s.device for worker in self.workers for s in worker.stations}
        there = [{devices[route.to.stage, receiver]} for receiver in range(route.receivers)]
        if route.kind == "shared":
            there = [set().union(*there)]
        return devices[route.channel.sender, replica], there

    def in_order(self, worker: WorkerPlan) -> bool:
        """Whether the worker's replicas get a turn in input order. Where they take messages in none, whoever waited for
        an earlier one might wait for ever."""
        unordered = any(route.unordered and route.to.stage in worker.spec.stages for route in self.routes)
        return worker.spec.replicas > 1 and not unordered

    @property
    def enders(self) -> tuple[int, int]:
        """Stages at which the stream ends: per message, and per window."""
        rates = list({s.stage: s.rate for w in self.workers for s in w.stations if s.ends}.values())
        return rates.count("message"), rates.count("window")

    @property
    def ends_in_window(self) -> int:
        """How often the stations where the stream ends fire until a window is over (replicas share the messages)."""
        per_message, per_window = self.enders
        return per_message * self.graph.window + per_window

    def table(self) -> str:
        """Two aligned text tables: workers and channels."""
        workers: list[tuple[str, ...]] = [("worker", "kind", "stages", "device", "takes", "notes")]
        for w in self.workers:
            stages = ", ".join(s.stage for s in w.stations)
            devices = ", ".join(dict.fromkeys(s.device for s in w.stations))
            takes = f"{w.spec.take}, {w.spec.order} order" if w.spec.replicas > 1 else ""
            notes = [f"turn {w.spec.turn}"] if w.spec.turn else []
            notes += [f"at most {w.reorder} ahead of the merge"] if w.reorder else []
            workers.append((w.name, w.spec.kind, stages, devices, takes, "; ".join(notes)))
        channels: list[tuple[str, ...]] = [("channel", "from", "to", "per", "how", "capacity", "notes")]
        for r in self.routes:
            capacity = str(r.channel.capacity.items) if r.kind != "local" else "-"
            if r.channel.capacity.bytes and r.kind != "local":
                capacity += f", {counted(r.channel.capacity.bytes, 'byte')}"
            channels.append((r.name, r.channel.sender, str(r.to), r.channel.per, _how(r), capacity, _notes(r)))
        limits = self.graph.credits
        credit = [counted(n, what) for n, what in ((limits.messages, "message"), (limits.windows, "window")) if n]
        head = f"graph {self.graph.name}: window of {self.graph.window}, seed {self.graph.seed}"
        head += f", credits {' and '.join(credit)}" if credit else ""
        return "\n".join([head, "", *_aligned(workers), "", *_aligned(channels)])

    def mermaid(self) -> str:
        """A flowchart: a box for each worker with its stages, an arrow for each channel (dotted: feedback)."""
        lines = ["flowchart LR"]
        for spec in self.graph.workers.values():
            title = spec.name if spec.replicas == 1 else f"{spec.name} x{spec.replicas}"
            lines.append(f'  subgraph w_{spec.name}["{title}"]')
            lines += [f'    {stage}["{stage}"]' for stage in spec.stages]
            lines.append("  end")
        for r in self.routes:
            per = "" if r.channel.per == "message" else " / window"
            arrow = "-." if r.feedback else "--"
            lines.append(f'  {r.channel.sender} {arrow} "{r.channel.name}{per}" {arrow[::-1]}> {r.to.stage}')
        return "\n".join(lines)


def stage_order(graph: Graph) -> tuple[str, ...]:
    """All stages so that each comes after those that feed it (feedback aside); otherwise as the file lists them."""
    before = {name: set[str]() for name in graph.stages}
    for channel in graph.channels.values():
        if channel.initial == 0:
            for to in channel.receivers:
                before[to.stage].add(channel.sender)
    ordered: list[str] = []
    while len(ordered) < len(before):
        ready = [name for name in before if name not in ordered and before[name] <= set(ordered)]
        if not ready:
            raise ValueError(f"a cycle without a token among {sorted(set(before) - set(ordered))}")
        ordered.append(ready[0])
    return tuple(ordered)


def plan(graph: Graph) -> Plan:
    """Lay out a checked graph. Raises `BadInput` for a layout in which workers would wait for ever."""
    place = {stage: worker for worker in graph.workers.values() for stage in worker.stages}
    routes = tuple(_route(graph, channel, to, place) for channel in graph.channels.values() for to in channel.receivers)
    for route in routes:
        _check_progress(graph, route)
    # A stage that fires once a window works after those of its worker that fire per message, in the window's last tick.
    order = sorted(stage_order(graph), key=lambda stage: rate(graph, stage) == "window")
    workers = []
    for spec in graph.workers.values():
        reorder = _reorder(spec, routes, place)
        for replica in range(spec.replicas):
            stations = tuple(
                StationPlan(stage, rate(graph, stage), spec.device[stage][replica], _ends(graph, stage))
                for stage in order
                if stage in spec.stages
            )
            workers.append(WorkerPlan(spec, replica, stations, reorder))
    return Plan(graph, tuple(workers), routes)


def _reached(spec: WorkerSpec, routes: Sequence[RoutePlan], place: Mapping[str, WorkerSpec]) -> list[WorkerSpec]:
    """The worker and those behind it that its messages reach before a merge has restored their order."""
    reached = [spec]
    for worker in reached:
        for r in routes:
            if r.unordered and place[r.channel.sender] is worker and place[r.to.stage] not in reached:
                reached.append(place[r.to.stage])
    return reached


def _reorder(spec: WorkerSpec, routes: tuple[RoutePlan, ...], place: dict[str, WorkerSpec]) -> int | None:
    """The bound on disorder stands where messages still come in order: further on, those that are waited for could
    be kept out by those that wait."""
    if any(r.unordered and place[r.to.stage] is spec for r in routes):
        return None
    reached = _reached(spec, routes, place)
    merges = [r for r in routes if r.merge and place[r.channel.sender] in reached]
    if not merges or all(w.take == "round_robin" for w in reached):
        return None
    return max(REORDER * sum(w.replicas for w in reached), *(r.channel.group for r in merges))


def _check_progress(graph: Graph, route: RoutePlan) -> None:
    c = route.channel
    if route.unordered and c.group > 1:
        ends = each("workers", [owner(graph, stage).name for stage in (c.sender, route.to.stage)], "replicas")
        line = "groups need their order, which is not restored between replicas and replicas"
        raise bad(graph, c, f"{line} (take: round_robin restores it)", "group", *ends)
    if route.kind == "local" and c.per == "window" and not route.feedback and rate(graph, route.to.stage) == "message":
        line = f"{route.to.stage} needs before a window what {c.sender} sends after it"
        lists = each("workers", [owner(graph, c.sender).name], "stages")
        raise bad(graph, c, f"{line}: they cannot share a worker", *lists, "from", "to")


def _route(graph: Graph, channel: ChannelSpec, to: PortRef, place: dict[str, WorkerSpec]) -> RoutePlan:
    sender, receiver = place[channel.sender], place[to.stage]
    kind: Literal["local", "shared", "dealt", "broadcast", "gathered"] = "shared"
    merge = restamp = False
    if sender is receiver:
        kind = "local"
    elif channel.per == "window" and sender.replicas > 1:
        kind = "gathered"
    elif receiver.replicas > 1 and channel.broadcast:
        kind = "broadcast"
    elif receiver.replicas > 1 and receiver.take == "round_robin":
        kind = "dealt"
    if kind not in ("local", "gathered") and sender.replicas > 1:
        single = receiver.replicas == 1 or kind in ("dealt", "broadcast")
        merge = sender.order == "input" and single
        restamp = sender.order == "completion"
    name = channel.name if len(channel.receivers) == 1 else f"{channel.name}->{to.stage}"
    return RoutePlan(name, channel, to, kind, sender.replicas, receiver.replicas, merge, restamp)


def _ends(graph: Graph, stage: str) -> bool:
    """Whether nothing of the stage's own rate goes on from it, feedback aside."""
    own = rate(graph, stage)
    return not any(c.sender == stage and c.per == own and c.initial == 0 for c in graph.channels.values())


def _how(route: RoutePlan) -> str:
    ends = "" if route.senders == route.receivers == 1 else f" {route.senders}:{route.receivers}"
    return f"{route.kind}{ends}{', merged' if route.merge else ''}{', by completion' if route.restamp else ''}"


def _notes(route: RoutePlan) -> str:
    notes = []
    if route.feedback:
        notes.append(f"feedback, staleness {route.channel.initial - 1}")
    if route.channel.group > 1:
        notes.append(f"groups of {route.channel.group}")
    return "; ".join(notes)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

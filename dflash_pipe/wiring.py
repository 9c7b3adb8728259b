"""Plan -> workers joined by channels and gates: the one place where routes become objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_pipe.channel import Channel
from dflash_pipe.graph import StageSpec
from dflash_pipe.plan import Plan, RoutePlan, StationPlan, WorkerPlan
from dflash_pipe.route import (
    Blocking,
    CreditGate,
    Gate,
    Gather,
    GroupGate,
    Inlet,
    Local,
    Merge,
    Outlet,
    ReorderGate,
    Restamp,
    Suspending,
    TurnGate,
)
from dflash_pipe.snapshot import Snapshot, Snapshots
from dflash_pipe.stage import Context
from dflash_pipe.worker import Feed, Port, Station, Worker

__all__ = ["Origin", "Wiring", "wire"]


@dataclass(frozen=True)
class Origin:
    """What a run starts from and where it writes.

    restored: the snapshot that is resumed. stopping: whether the source should end at the next window.
    """

    folder: Path
    restored: Snapshot | None = None
    report: Callable[[dict[str, Any]], None] = lambda metrics: None
    stopping: Callable[[], bool] = lambda: False

    @property
    def start(self) -> tuple[int, int]:
        """(index, window) of the first message."""
        return (self.restored.index, self.restored.window) if self.restored else (0, 0)


@dataclass
class Wiring:
    """Everything of a run that can wait or be waited for. feedback: per worker, (station, outlet, tokens)."""

    workers: list[Worker] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    feedback: dict[str, list[tuple[Station, Outlet | Local, int]]] = field(default_factory=dict)
    snapshots: Snapshots | None = None
    kinds: dict[str, str] = field(default_factory=dict)

    def cancel(self) -> None:
        """Wake everybody who waits, and who will wait, with Cancelled."""
        for channel in self.channels:
            channel.cancel()
        for gate in self.gates:
            gate.cancel()


def wire(plan: Plan, origin: Origin, fingerprint: str) -> Wiring:
    """Build the stages and join them. Nothing is opened yet."""
    return _Wirer(plan, origin, fingerprint).wire()


class _Wirer:
    def __init__(self, plan: Plan, origin: Origin, fingerprint: str) -> None:
        self.plan, self.graph, self.origin = plan, plan.graph, origin
        self.fingerprint = fingerprint
        self.wiring = Wiring()
        self.turns: dict[str, TurnGate] = {}
        self.stations: dict[tuple[str, int], Station] = {}

    def wire(self) -> Wiring:
        credits = self._credits()
        for worker_plan in self.plan.workers:
            stations = [self._station(worker_plan, s, credits) for s in worker_plan.stations]
            waits = Suspending() if worker_plan.spec.kind == "async" else Blocking()
            worker = Worker(worker_plan.name, stations, waits, self.graph.transport)
            worker.turn = self._turn(worker_plan.spec.turn)
            self.wiring.workers.append(worker)
            self.wiring.kinds[worker.name] = worker_plan.spec.kind
            self.wiring.feedback[worker.name] = []
        inlets = [(route, self._join(route)) for route in self.plan.routes]
        for station in self.stations.values():  # ports are read in the order of the stage's parameters
            order = list(self.graph.stages[station.plan.stage].signature.inputs)
            station.inputs = dict(sorted(station.inputs.items(), key=lambda item: order.index(item[0])))
        self._reorder(inlets)
        return self.wiring

    def _station(self, worker: WorkerPlan, station: StationPlan, credits: dict[str, CreditGate]) -> Station:
        spec = self.graph.stages[station.stage]
        context = Context(
            stage=station.stage,
            worker=worker.name,
            device=station.device,
            replica=worker.replica,
            replicas=worker.spec.replicas,
            seed=self.graph.seed,
            window=self.graph.window,
            folder=self.origin.folder,
            report=self.origin.report,
        )
        joined = Station(station, spec.build(), context)
        joined.stamp_port = spec.signature.stamp
        joined.ends_window = spec.signature.window_output is not None
        joined.feed = self._feed(credits) if spec.signature.source else None
        joined.snapshots = self._snapshots(spec)
        if station.ends:
            joined.returns = credits.get("messages") if station.rate == "message" else None
            joined.returns_window = credits.get("windows") if station.rate == self._ending_rate() else None
        self.stations[station.stage, worker.replica] = joined
        return joined

    def _feed(self, credits: dict[str, CreditGate]) -> Feed:
        restored = self.origin.restored
        return Feed(
            cursor=restored.cursor if restored else None,
            start=self.origin.start,
            window=self.graph.window,
            keep_partial=self.graph.partial_window == "keep",
            stopping=self.origin.stopping,
            credits=credits.get("messages"),
            window_credits=credits.get("windows"),
        )

    def _snapshots(self, spec: StageSpec) -> Snapshots | None:
        if not spec.signature.stateful or spec.signature.source:
            return None
        self.wiring.snapshots = Snapshots(self.origin.folder / "snapshots", self.fingerprint, self.graph.snapshot)
        return self.wiring.snapshots

    def _ending_rate(self) -> str:
        """A window is over when the last window-rate stage is done with it; where there is none, the last message."""
        ends = {station.rate for worker in self.plan.workers for station in worker.stations if station.ends}
        return "window" if "window" in ends else "message"

    def _credits(self) -> dict[str, CreditGate]:
        limits = {"messages": self.graph.credits.messages, "windows": self.graph.credits.windows}
        gates = {}
        for what, limit in limits.items():
            if limit is not None:
                ending = "message" if what == "messages" else self._ending_rate()
                enders = [(w, s) for w in self.plan.workers for s in w.stations if s.ends and s.rate == ending]
                count = len({s.stage for _, s in enders}) if what == "messages" else len(enders)
                gates[what] = CreditGate(what, limit, count)
        self.wiring.gates += gates.values()
        return gates

    def _turn(self, name: str | None) -> TurnGate | None:
        if name is None:
            return None
        if name not in self.turns:
            self.turns[name] = TurnGate(name, self.origin.start[0])
            self.wiring.gates.append(self.turns[name])
        return self.turns[name]

    # --- routes

    def _join(self, route: RoutePlan) -> list[Inlet]:
        """Make the route's queues and hang an outlet on every sending station and an inlet on every receiving port."""
        queues = self._queues(route)
        group = self._group(route)
        gathers = self._gathers(route)
        inlets: list[Inlet] = []
        for replica in range(route.senders):
            outlet: Outlet | Local
            if route.kind == "local":
                outlet = Local(gather=gathers)
                inlets.append(outlet)
            else:
                queue = queues[replica : replica + 1] if route.kind == "gathered" else queues
                senders = [channel.sender() for channel in queue]
                outlet = Outlet(senders, deal=route.kind == "dealt", feedback=route.feedback)
                outlet.group = group
            self._attach_outlet(route, replica, outlet)
        for replica in range(route.receivers):
            if route.kind != "local":
                inlets.append(self._inlet(route, queues, replica))
                inlets[-1].group = group
            port = Port(inlets[replica], per_window=route.channel.per == "window")
            self.stations[route.to.stage, replica].inputs[route.to.port] = port
        return inlets

    def _queues(self, route: RoutePlan) -> list[Channel]:
        counts = {"local": 0, "shared": 1, "gathered": route.senders}
        count = counts.get(route.kind, route.receivers)
        names = [route.name] if count == 1 else [f"{route.name}[{i}]" for i in range(count)]
        capacity = route.channel.capacity
        queues = [Channel(name, capacity.items, capacity.bytes) for name in names]
        self.wiring.channels += queues
        return queues

    def _group(self, route: RoutePlan) -> GroupGate | None:
        if route.channel.group == 1 or route.kind == "local":
            return None
        gate = GroupGate(route.name, route.channel.group, route.senders, self.origin.start[0])
        self.wiring.gates.append(gate)
        return gate

    def _attach_outlet(self, route: RoutePlan, replica: int, outlet: Outlet | Local) -> None:
        station = self.stations[route.channel.sender, replica]
        per_window_of_message_stage = route.channel.per == "window" and station.plan.rate == "message"
        (station.window_outputs if per_window_of_message_stage else station.outputs).append(outlet)
        if route.feedback:
            self.wiring.feedback[station.context.worker].append((station, outlet, route.channel.initial))

    def _inlet(self, route: RoutePlan, queues: list[Channel], replica: int) -> Inlet:
        if route.kind == "gathered":
            return Gather([channel.receiver() for channel in queues])
        receiver = queues[0 if route.kind == "shared" else replica].receiver()
        if route.merge:
            return Merge(receiver, self.origin.start[0])
        if route.restamp:
            return Restamp(receiver, self.graph.window, self.origin.start[0])
        return Gather([receiver]) if self._gathers(route) else Inlet([receiver])

    def _gathers(self, route: RoutePlan) -> bool:
        return self.graph.stages[route.to.stage].signature.inputs[route.to.port].gather

    def _reorder(self, joined: list[tuple[RoutePlan, list[Inlet]]]) -> None:
        """Bound each merge: its replicas may start on nothing that lies too far ahead of it."""
        for first in self.plan.workers:
            if first.reorder is None or first.replica != 0:
                continue
            stages = first.spec.stages
            merges = [
                inlet
                for route, inlets in joined
                if route.channel.sender in stages and route.kind != "local"
                for inlet in inlets
                if isinstance(inlet, Merge)
            ]
            gate = ReorderGate(first.spec.name, first.reorder, len(merges), self.origin.start[0])
            self.wiring.gates.append(gate)
            for number, merge in enumerate(merges):
                merge.behind = (gate, number)
            for route, inlets in joined:
                if route.to.stage in stages and route.kind == "shared" and route.channel.per == "message":
                    for inlet in inlets:
                        inlet.reorder = gate

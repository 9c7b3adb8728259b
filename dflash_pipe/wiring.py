"""Plan -> workers joined by channels and gates: the one place where routes become objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dflash_pipe.channel import Channel
from dflash_pipe.gate import CreditGate, Gate, GroupGate, ReorderGate, TurnGate
from dflash_pipe.graph import StageSpec
from dflash_pipe.plan import Plan, RoutePlan, StationPlan, WorkerPlan
from dflash_pipe.route import Blocking, Gather, Inlet, Local, Merge, Outlet, Restamp, Suspending
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


def wire(plan: Plan, origin: Origin, dataflow: dict[str, Any]) -> Wiring:
    """Build the stages and join them. Nothing is opened yet."""
    return _Wirer(plan, origin, dataflow).wire()


class _Wirer:
    def __init__(self, plan: Plan, origin: Origin, dataflow: dict[str, Any]) -> None:
        self.plan, self.graph, self.origin = plan, plan.graph, origin
        self.dataflow = dataflow
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
            worker.in_order = worker_plan.spec.replicas > 1 and not self._unordered(worker_plan)
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
            restored=self.origin.restored.state if self.origin.restored else None,
            report=self.origin.report,
        )
        joined = Station(station, spec.build(), context)
        joined.stamp_port = spec.signature.stamp
        joined.ends_window = spec.signature.window_output is not None
        joined.feed = self._feed(credits) if spec.signature.source else None
        joined.snapshots = self._snapshots(spec)
        joined.credits = tuple(credits.values()) if station.ends else ()
        groups = any(r.channel.group > 1 for r in self.plan.routes if r.channel.sender == station.stage)
        joined.awaited = bool(worker.spec.turn or joined.credits or groups)
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
        self.wiring.snapshots = Snapshots(self.origin.folder / "snapshots", self.dataflow, self.graph.snapshot)
        return self.wiring.snapshots

    def _credits(self) -> dict[str, CreditGate]:
        ends = {(s.stage, s.rate) for w in self.plan.workers for s in w.stations if s.ends}
        rates = [rate for _, rate in ends]
        enders = (rates.count("message"), rates.count("window"))
        limits = self.graph.credits
        gates = {}
        if limits.messages is not None:
            gates["messages"] = CreditGate("message", limits.messages, *enders, self.graph.window)
        if limits.windows is not None:
            gates["windows"] = CreditGate("window", limits.windows, *enders, self.graph.window)
        self.wiring.gates += gates.values()
        return gates

    def _unordered(self, worker: WorkerPlan) -> bool:
        """Whether its replicas take messages in no order: whoever waited for an earlier one might wait for ever."""
        return any(route.unordered and route.to.stage in worker.spec.stages for route in self.plan.routes)

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
                ways = self._ways(route, replica, len(senders))
                outlet = Outlet(senders, ways, deal=route.kind == "dealt", feedback=route.feedback)
                outlet.group = group
            self._attach_outlet(route, replica, outlet)
        for replica in range(route.receivers):
            if route.kind != "local":
                inlets.append(self._inlet(route, queues, replica))
                inlets[-1].group = group
            port = Port(inlets[replica], per_window=route.channel.per == "window", feedback=route.feedback)
            self.stations[route.to.stage, replica].inputs[route.to.port] = port
        return inlets

    def _ways(self, route: RoutePlan, replica: int, senders: int) -> list[Callable[[Any], Any]]:
        """How payloads enter each sender's channel: towards the device of the replica behind it, if that is one."""
        here = self.stations[route.channel.sender, replica].plan.device
        there: list[str | None] = [self.stations[route.to.stage, r].plan.device for r in range(route.receivers)]
        if senders < route.receivers:  # whoever is free takes it
            there = [there[0] if len(set(there)) == 1 else None] * senders
        return [partial(self.graph.transport.on_send, device=here, to=to) for to in there]

    def _queues(self, route: RoutePlan) -> list[Channel]:
        counts = {"local": 0, "shared": 1, "gathered": route.senders}
        count = counts.get(route.kind, route.receivers)
        names = [route.name] if count == 1 else [f"{route.name}[{i}]" for i in range(count)]
        capacity = route.channel.capacity
        queues = [Channel(name, capacity.items, capacity.bytes) for name in names]
        self.wiring.channels += queues
        return queues

    def _group(self, route: RoutePlan) -> GroupGate | None:
        """For messages that arrive in order; what several replicas send is grouped where its order is restored."""
        if route.channel.group == 1 or route.kind == "local" or route.senders > 1:
            return None
        gate = GroupGate(route.name, route.channel.group, self.origin.start[0])
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
            return Merge(receiver, self.origin.start[0], route.channel.group)
        if route.restamp:
            return Restamp(receiver, self.origin.start, self.graph.window, route.channel.group)
        return Gather([receiver]) if self._gathers(route) else Inlet([receiver])

    def _gathers(self, route: RoutePlan) -> bool:
        return self.graph.stages[route.to.stage].signature.inputs[route.to.port].gather

    def _reorder(self, joined: list[tuple[RoutePlan, list[Inlet]]]) -> None:
        """Bound each merge: its replicas may start on nothing that lies too far ahead of it."""
        for first in self.plan.workers:
            if first.reorder is None or first.replica != 0:
                continue
            behind = self.plan.merges_behind(first.spec)
            merges = [inlet for route, inlets in joined if route in behind for inlet in inlets]
            gate = ReorderGate(first.spec.name, first.reorder, len(merges), self.origin.start[0])
            self.wiring.gates.append(gate)
            for number, merge in enumerate(merges):
                assert isinstance(merge, Merge)
                merge.behind = (gate, number)
            for route, inlets in joined:
                if route.to.stage in first.spec.stages and route.kind != "local" and route.channel.per == "message":
                    for inlet in inlets:
                        inlet.reorder = gate

"""Plan -> stations joined by channels and gates in simulated time: the counterpart of `dflash_pipe.wiring`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dflash_pipe.clock import Channel, Clock, Place
from dflash_pipe.plan import Plan, RoutePlan, StationPlan, WorkerPlan
from dflash_pipe.simulated_route import (
    CreditGate,
    Gather,
    GroupGate,
    Inlet,
    Local,
    Merge,
    Outlet,
    ReorderGate,
    Restamp,
    TurnGate,
)

__all__ = ["Exclusive", "Resource", "Station", "Wiring", "ends_in_window", "shared_cores", "shared_devices"]


class Resource(NamedTuple):
    """What stages compute on, `room` of them at a time."""

    name: str
    room: int = 1


Exclusive = Mapping[tuple[str, int], Resource]


def shared_devices(plan: Plan) -> dict[tuple[str, int], Resource]:
    """(stage, replica) -> device, for devices that stages of several workers compute on. The CPU is not one device."""
    users: dict[str, set[str]] = {}
    for worker in plan.workers:
        for station in worker.stations:
            users.setdefault(station.device, set()).add(worker.name)
    return {
        (station.stage, worker.replica): Resource(f"device {station.device}")
        for worker in plan.workers
        for station in worker.stations
        if station.device != "cpu" and len(users[station.device]) > 1
    }


def shared_cores(plan: Plan, cores: int, stages: Collection[str]) -> dict[tuple[str, int], Resource]:
    """(stage, replica) -> the CPU, for those of `stages` that compute there, if they sit on more workers than can
    compute at a time; each takes so many cores as the graph has `threads`. Nothing where that is not known."""
    if plan.graph.threads is None:
        return {}
    room = max(1, cores // plan.graph.threads)
    mine = [(w, s) for w in plan.workers for s in w.stations if s.stage in stages and s.device == "cpu"]
    if len({worker.name for worker, _ in mine}) <= room:
        return {}
    return {(station.stage, worker.replica): Resource("the CPU's cores", room) for worker, station in mine}


def ends_in_window(plan: Plan) -> int:
    """How often the stations where the stream ends fire until a window is over (replicas share the messages)."""
    ends = {(station.stage, station.rate) for worker in plan.workers for station in worker.stations if station.ends}
    return sum(plan.graph.window if rate == "message" else 1 for _, rate in ends)


@dataclass(eq=False)
class Station:
    """A stage in its place, joined. holds: it has read its per-window ports once."""

    plan: StationPlan
    source: bool
    ends_window: bool
    replica: int
    replicas: int
    inputs: dict[str, tuple[Inlet, bool]] = field(default_factory=dict)  # port -> inlet, whether per window
    outputs: list[Outlet | Local] = field(default_factory=list)
    window_outputs: list[Outlet | Local] = field(default_factory=list)
    first_tokens: list[tuple[Outlet | Local, int]] = field(default_factory=list)
    turn: TurnGate | None = None
    place: Place | None = None
    credits: tuple[CreditGate, ...] = ()
    holds: bool = False


class Wiring:
    """All stations of a plan, joined. credits: by what they limit."""

    def __init__(self, plan: Plan, clock: Clock, exclusive: Exclusive) -> None:
        self.plan, self.graph, self.clock = plan, plan.graph, clock
        self.credits = self._credit_gates()
        self._turns = {w.spec.turn: TurnGate(clock, w.spec.turn) for w in plan.workers if w.spec.turn}
        self._places = {resource: Place(clock, *resource) for resource in exclusive.values()}
        self.stations = {
            (station.stage, worker.replica): self._station(worker, station, exclusive)
            for worker in plan.workers
            for station in worker.stations
        }
        self._reorder([(route, self._join(route)) for route in plan.routes])

    def _credit_gates(self) -> dict[str, CreditGate]:
        ends = {(s.stage, s.rate) for w in self.plan.workers for s in w.stations if s.ends}
        rates = [rate for _, rate in ends]
        limits = {"messages": self.graph.credits.messages, "windows": self.graph.credits.windows}
        enders = (rates.count("message"), rates.count("window"))
        return {
            what: CreditGate(self.clock, what, limit, enders, self.graph.window)
            for what, limit in limits.items()
            if limit is not None
        }

    def _station(self, worker: WorkerPlan, station: StationPlan, exclusive: Exclusive) -> Station:
        signature = self.graph.stages[station.stage].signature
        joined = Station(
            station, signature.source, signature.window_output is not None, worker.replica, worker.spec.replicas
        )
        joined.turn = self._turns[worker.spec.turn] if worker.spec.turn else None
        held = exclusive.get((station.stage, worker.replica))
        joined.place = self._places[held] if held else None
        joined.credits = tuple(self.credits.values()) if station.ends else ()
        return joined

    def _join(self, route: RoutePlan) -> list[Inlet]:
        count = {"local": 0, "shared": 1, "gathered": route.senders}.get(route.kind, route.receivers)
        capacity = route.channel.capacity
        queues = [Channel(self.clock, route.name, capacity.items, capacity.bytes) for _ in range(count)]
        grouped = route.channel.group > 1 and route.kind != "local" and route.senders == 1
        group = GroupGate(self.clock, route.name, route.channel.group) if grouped else None
        inlets: list[Inlet] = []
        for replica in range(route.senders):
            if route.kind == "local":
                local = Local()
                inlets.append(local)
                self._attach(route, replica, local)
            else:
                own = queues[replica : replica + 1] if route.kind == "gathered" else queues
                outlet = Outlet(own, deal=route.kind == "dealt")
                outlet.group = group
                self._attach(route, replica, outlet)
        for replica in range(route.receivers):
            if route.kind != "local":
                inlets.append(self._inlet(route, queues, replica))
                inlets[-1].group = group
            ports = self.stations[route.to.stage, replica].inputs
            ports[route.to.port] = (inlets[replica], route.channel.per == "window")
            order = list(self.graph.stages[route.to.stage].signature.inputs)
            self.stations[route.to.stage, replica].inputs = {port: ports[port] for port in order if port in ports}
        return inlets

    def _attach(self, route: RoutePlan, replica: int, outlet: Outlet | Local) -> None:
        station = self.stations[route.channel.sender, replica]
        at_end = route.channel.per == "window" and station.plan.rate == "message"
        (station.window_outputs if at_end else station.outputs).append(outlet)
        if route.feedback:
            station.first_tokens.append((outlet, route.channel.initial))

    def _inlet(self, route: RoutePlan, queues: Sequence[Channel], replica: int) -> Inlet:
        if route.kind == "gathered":
            return Gather(queues)
        queue = queues[0 if route.kind == "shared" else replica]
        if route.merge:
            return Merge(queue, route.channel.group)
        return Restamp(queue, self.graph.window, route.channel.group) if route.restamp else Inlet([queue])

    def _reorder(self, joined: list[tuple[RoutePlan, list[Inlet]]]) -> None:
        for worker in self.plan.workers:
            if worker.reorder is None or worker.replica:
                continue
            routes = self.plan.merges_behind(worker.spec)
            behind = [i for route, inlets in joined if route in routes for i in inlets if isinstance(i, Merge)]
            gate = ReorderGate(self.clock, worker.spec.name, worker.reorder, len(behind))
            for number, merge in enumerate(behind):
                merge.behind = (gate, number)
            for route, inlets in joined:
                if route.to.stage in worker.spec.stages and route.kind != "local" and route.channel.per == "message":
                    for inlet in inlets:
                        inlet.reorder = gate

"""Plan -> the channels, inlets, outlets and gates that join its stations: the one place where routes become objects.

A real run and a simulation are joined by the same rules; they differ in the channels that they bring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from dflash_pipe.gate import CreditGate, Gate, GroupGate, ReorderGate, TurnGate
from dflash_pipe.message import Message
from dflash_pipe.plan import Plan, RoutePlan, StationPlan
from dflash_pipe.route import End, Gather, Inlet, Local, Merge, Outlet, Restamp
from dflash_pipe.station import Port

__all__ = ["Joins", "credit_gates", "turn_gates"]


class Queue(Protocol):
    """What a route's messages lie in."""

    def sender(self) -> End: ...
    def receiver(self) -> End: ...


class Joined(Protocol):
    """A stage in its place, as far as it is joined."""

    plan: StationPlan
    inputs: dict[str, Port]
    outputs: list[Outlet | Local]
    window_outputs: list[Outlet | Local]


Q = TypeVar("Q", bound=Queue)
S = TypeVar("S", bound=Joined)
Ways = Callable[[RoutePlan, int], Sequence[Callable[[Message], Message]]]


def credit_gates(plan: Plan) -> dict[str, CreditGate]:
    """By what they limit: messages, windows."""
    limits, gates = plan.graph.credits, {}
    if limits.messages is not None:
        gates["messages"] = CreditGate("message", limits.messages, *plan.enders, plan.graph.window)
    if limits.windows is not None:
        gates["windows"] = CreditGate("window", limits.windows, *plan.enders, plan.graph.window)
    return gates


def turn_gates(plan: Plan, start: int = 0) -> dict[str | None, TurnGate]:
    """By name. start: index of the first message."""
    return {turn: TurnGate(turn, start) for worker in plan.workers if (turn := worker.spec.turn)}


class Joins(Generic[Q, S]):
    """Joins stations along all routes of a plan.

    stations: by stage and replica. queue: makes a channel of a name, messages and bytes. start: (index, window) of the
    first message. ways: of a route and a sending replica: see `Outlet`.
    feedback: per worker, (station, outlet, tokens).
    """

    def __init__(
        self,
        plan: Plan,
        stations: Mapping[tuple[str, int], S],
        queue: Callable[[str, int, int | None], Q],
        start: tuple[int, int] = (0, 0),
        ways: Ways = lambda route, replica: (),
    ) -> None:
        self.plan, self.graph, self.stations, self.start = plan, plan.graph, stations, start
        self.queues: list[Q] = []
        self.gates: list[Gate] = []
        self.feedback: dict[str, list[tuple[S, Outlet | Local, int]]] = {worker.name: [] for worker in plan.workers}
        self._queue, self._ways = queue, ways
        self._names = {(s.stage, worker.replica): worker.name for worker in plan.workers for s in worker.stations}
        joined = [(route, self._join(route)) for route in plan.routes]
        for station in stations.values():  # ports are read in the order of the stage's parameters
            order = list(self.graph.stages[station.plan.stage].signature.inputs)
            station.inputs = dict(sorted(station.inputs.items(), key=lambda item: order.index(item[0])))
        self._reorder(joined)

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
                outlet = Outlet(
                    senders, self._ways(route, replica), deal=route.kind == "dealt", feedback=route.feedback
                )
                outlet.group = group
            self._attach_outlet(route, replica, outlet)
        for replica in range(route.receivers):
            if route.kind != "local":
                inlets.append(self._inlet(route, queues, replica))
                inlets[-1].group = group
            port = Port(inlets[replica], per_window=route.channel.per == "window", feedback=route.feedback)
            self.stations[route.to.stage, replica].inputs[route.to.port] = port
        return inlets

    def _queues(self, route: RoutePlan) -> list[Q]:
        counts = {"local": 0, "shared": 1, "gathered": route.senders}
        count = counts.get(route.kind, route.receivers)
        names = [route.name] if count == 1 else [f"{route.name}[{i}]" for i in range(count)]
        capacity = route.channel.capacity
        queues = [self._queue(name, capacity.items, capacity.bytes) for name in names]
        self.queues += queues
        return queues

    def _group(self, route: RoutePlan) -> GroupGate | None:
        """For messages that arrive in order; what several replicas send is grouped where its order is restored."""
        if route.channel.group == 1 or route.kind == "local" or route.senders > 1:
            return None
        gate = GroupGate(route.name, route.channel.group, self.start[0])
        self.gates.append(gate)
        return gate

    def _attach_outlet(self, route: RoutePlan, replica: int, outlet: Outlet | Local) -> None:
        sender = route.channel.sender, replica
        station = self.stations[sender]
        per_window_of_message_stage = route.channel.per == "window" and station.plan.rate == "message"
        (station.window_outputs if per_window_of_message_stage else station.outputs).append(outlet)
        if route.feedback:
            self.feedback[self._names[sender]].append((station, outlet, route.channel.initial))

    def _inlet(self, route: RoutePlan, queues: list[Q], replica: int) -> Inlet:
        if route.kind == "gathered":
            return Gather([channel.receiver() for channel in queues])
        receiver = queues[0 if route.kind == "shared" else replica].receiver()
        if route.merge:
            return Merge(receiver, self.start[0], route.channel.group)
        if route.restamp:
            return Restamp(receiver, self.start, self.graph.window, route.channel.group)
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
            gate = ReorderGate(first.spec.name, first.reorder, len(merges), self.start[0])
            self.gates.append(gate)
            for number, merge in enumerate(merges):
                assert isinstance(merge, Merge)
                merge.behind = (gate, number)
            for route, inlets in joined:
                if route.to.stage in first.spec.stages and route.kind != "local" and route.channel.per == "message":
                    for inlet in inlets:
                        inlet.reorder = gate

"""The exact step time of a plan with constant service times: the maximum cycle ratio of its timed event graph.

A plan is a marked graph if nobody ever chooses: every queue has one sender and one receiver, or one for each replica,
and there is no turn, no merge and no shared device. Then each operation happens as soon as those before it have, a
fixed number of steps ago, and the step time is the largest, over all cycles, of work on the cycle / steps it spans.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from dflash_pipe.clock import HandOff, Work
from dflash_pipe.plan import Plan, RoutePlan, WorkerPlan
from dflash_pipe.simulate import Times

__all__ = ["Arc", "Operation", "events", "is_marked", "maximum_ratio"]


@dataclass(frozen=True)
class Operation:
    """One thing a worker does in every period; it lasts `seconds`."""

    worker: str
    stage: str
    part: str
    seconds: float


@dataclass(frozen=True)
class Arc:
    """Operation `after` waits for the end of `before`, `lag` periods earlier. via: "" inside one worker."""

    before: int
    after: int
    lag: int
    via: str


def is_marked(plan: Plan) -> bool:
    """Whether nothing in the plan depends on who comes first."""
    chooses = any(
        route.merge
        or route.restamp
        or (route.kind == "shared" and (route.senders > 1 or route.receivers > 1))
        or (route.kind != "local" and route.channel.capacity.bytes is not None)
        or (route.kind == "local" and route.senders > 1 and route.channel.per == "message")
        for route in plan.routes
    )
    turns = any(worker.spec.turn for worker in plan.workers)
    limits = plan.graph.credits
    ends = [(station, worker) for worker in plan.workers for station in worker.stations if station.ends]
    dealt = any(worker.spec.replicas > 1 for _, worker in ends)
    both = len({station.rate for station, _ in ends}) > 1
    unordered = (limits.messages is not None and (both or dealt)) or (limits.windows is not None and dealt)
    return not (chooses or turns or unordered)


def events(plan: Plan, times: Times) -> tuple[list[Operation], list[Arc], int]:
    """The timed event graph of a marked plan with constant times, and the windows in one of its periods."""
    return _Unrolled(plan, times).graph()


class _Unrolled:
    """One period of every worker written out: operations, what each channel end does in order, and what gates wait for.

    A period is as many windows as make whole groups.
    """

    def __init__(self, plan: Plan, times: Times) -> None:
        self.plan, self.graph_spec, self.times = plan, plan.graph, times
        window = plan.graph.window
        self.windows = math.lcm(window, *(c.group for c in plan.graph.channels.values())) // window
        self.operations: list[Operation] = []
        self.arcs: list[Arc] = []
        self.sequence: list[int] = []  # what the worker that is being written out does, in order
        self.sends: dict[tuple[str, int], list[tuple[int, bool]]] = defaultdict(list)
        self.receives: dict[tuple[str, int], list[tuple[int, bool]]] = defaultdict(list)
        self.sent: dict[tuple[str, int], list[int]] = defaultdict(list)  # after which what was sent is there
        self.there: dict[tuple[str, int], list[int]] = defaultdict(list)  # which wait for that
        self.lanes: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.arrivals: dict[str, dict[int, int]] = defaultdict(dict)  # route -> message -> who completes its arrival
        self.starts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.admissions: dict[str, list[int]] = defaultdict(list)
        self.endings: dict[str, list[list[int]]] = defaultdict(list)
        self.hand_offs = {(r.name, n): times.hand_offs(plan, r, n) for r in plan.routes for n in range(r.senders)}

    def graph(self) -> tuple[list[Operation], list[Arc], int]:
        for worker in self.plan.workers:
            self._worker(worker)
        for route in self.plan.routes:
            self._channel(route)
        for crossings in self.lanes.values():
            self._in_turn(crossings)
        self._credits()
        return self.operations, self.arcs, self.windows

    def _worker(self, worker: WorkerPlan) -> None:
        self.sequence = []
        for index in range(self.windows * self.graph_spec.window):
            self._tick(worker, index)
        self._in_turn(self.sequence)

    def _in_turn(self, operations: list[int]) -> None:
        """Each waits for the one before, and the first for the last of the period before."""
        self.arcs += [Arc(before, after, 0, "") for before, after in pairwise(operations)]
        self.arcs.append(Arc(operations[-1], operations[0], 1, ""))

    def _tick(self, worker: WorkerPlan, index: int) -> None:
        window, slot = divmod(index, self.graph_spec.window)
        last = slot == self.graph_spec.window - 1
        for station in worker.stations:
            stage, once = station.stage, station.rate == "window"
            if once and not last:
                continue
            real = True
            if self.graph_spec.stages[stage].signature.source:
                self._do(worker, stage, "read")
                if slot == 0:
                    self.admissions["windows"].append(self._do(worker, stage, ""))
                self.admissions["messages"].append(self._do(worker, stage, ""))
            else:
                real = self._receive(worker, stage, index, per_window=once)
                if not once and slot == 0:
                    self._receive(worker, stage, index, per_window=True)
                if real:
                    self._do(worker, stage, "process")
            if real:
                self._send(worker, stage, index, at_end=False)
            if last and self.graph_spec.stages[stage].signature.window_output is not None:
                self._do(worker, stage, "end_window")
                self._send(worker, stage, index, at_end=True)
            if station.ends:
                done = self._do(worker, stage, "")
                if last:
                    self._note(self.endings["windows"], window, done)
                self._note(self.endings["messages"], index, done)

    @staticmethod
    def _note(endings: list[list[int]], place: int, operation: int) -> None:
        while len(endings) <= place:
            endings.append([])
        endings[place].append(operation)

    def _do(self, worker: WorkerPlan, stage: str, part: str) -> int:
        seconds = self.times.seconds.get((stage, part), (0.0,))[0] if part else 0.0
        self.sequence.append(self._add(Operation(worker.name, stage if part else "", part, seconds)))
        return self.sequence[-1]

    def _add(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def _receive(self, worker: WorkerPlan, stage: str, index: int, *, per_window: bool) -> bool:
        """Receive on the stage's ports of that rate, in order; whether the message was this replica's."""
        real = True
        ports = list(self.graph_spec.stages[stage].signature.inputs)
        routes = [r for r in self.plan.routes if r.to.stage == stage and (r.channel.per == "window") == per_window]
        for route in sorted(routes, key=lambda r: ports.index(r.to.port)):
            if route.kind == "local":
                continue
            own = route.kind != "dealt" or index % self.graph_spec.window % route.receivers == worker.replica
            real = real and own
            queues = (
                range(route.senders) if route.kind == "gathered" else [0 if route.kind == "shared" else worker.replica]
            )
            for queue in queues:
                self.receives[route.name, queue].append((self._do(worker, stage, ""), own))
            if route.channel.group > 1 and own:
                self.starts[route.name][index].append(self._do(worker, stage, ""))
            there = self._do(worker, stage, "")
            for queue in queues:
                self.there[route.name, queue].append(there)
        return real

    def _send(self, worker: WorkerPlan, stage: str, index: int, *, at_end: bool) -> None:
        for route in self.plan.routes:
            window_end = route.channel.per == "window" and self._rate(stage) == "message"
            if route.channel.sender != stage or route.kind == "local" or window_end != at_end:
                continue
            queues = {"gathered": [worker.replica], "shared": [0]}.get(route.kind, list(range(route.receivers)))
            for queue, hand_offs in zip(queues, self.hand_offs[route.name, worker.replica], strict=True):
                own = route.kind != "dealt" or index % self.graph_spec.window % route.receivers == queue
                crossing = self._hand_over(worker, hand_offs[0]) if own and hand_offs else None
                send = self._do(worker, stage, "")
                self.sends[route.name, queue].append((send, own))
                self.sent[route.name, queue].append(send if crossing is None else crossing)
            self.arrivals[route.name][index] = send

    def _hand_over(self, worker: WorkerPlan, hand_off: HandOff) -> int | None:
        """What it takes of the sender; the message's way, which begins before there is room for it."""
        offer = self._add(Operation(worker.name, hand_off.name, "", hand_off.held))
        self.sequence.append(offer)
        if not hand_off.later:
            return None
        crossing = self._add(Operation(worker.name, hand_off.name, "", hand_off.later))
        self.arcs.append(Arc(offer, crossing, 0, ""))
        self.lanes[worker.name, hand_off.lane].append(crossing)
        return crossing

    def _rate(self, stage: str) -> str:
        return next(s.rate for w in self.plan.workers for s in w.stations if s.stage == stage)

    def _channel(self, route: RoutePlan) -> None:
        """A receive waits for its send; a send waits for the receive that makes room for it."""
        capacity, initial = route.channel.capacity.items, route.channel.initial
        for (name, queue), sends in self.sends.items():
            if name != route.name:
                continue
            receives = self.receives[name, queue]
            for place, ((receive, _), there) in enumerate(zip(receives, self.there[name, queue], strict=True)):
                self._arc([send for send, _ in sends], place - initial, receive, name)
                self._arc(self.sent[name, queue], place - initial, there, name)
            freeing = [receive for receive, own in receives if own]
            for place, send in enumerate([send for send, own in sends if own]):
                self._arc(freeing, place + initial - capacity, send, f"room in {name}")
        size = route.channel.group
        for index, waiting in self.starts[route.name].items():
            for member in range(index // size * size, index // size * size + size):
                for start in waiting:
                    self.arcs.append(Arc(self.arrivals[route.name][member], start, 0, f"group on {route.name}"))

    def _credits(self) -> None:
        limits = {"messages": self.graph_spec.credits.messages, "windows": self.graph_spec.credits.windows}
        for what, limit in limits.items():
            if limit is not None:
                for place, admission in enumerate(self.admissions[what]):
                    for ender in range(len(self.endings[what][0])):
                        ends = [each[ender] for each in self.endings[what]]
                        self._arc(ends, place - limit, admission, f"credit ({what})")

    def _arc(self, befores: list[int], place: int, after: int, via: str) -> None:
        """`after` waits for the operation at `place`, counted through all periods."""
        period, inside = divmod(place, len(befores))
        self.arcs.append(Arc(befores[inside], after, -period, via))


# --- the maximum cycle ratio ------------------------------------------------------------------------------------------


def maximum_ratio(operations: list[Operation], arcs: list[Arc]) -> tuple[float, list[Work]]:
    """The largest seconds / lag over all cycles, and one turn of that cycle as a chain of work from time 0.

    Lawler's method: as long as some cycle takes longer than the ratio allows, that cycle's own ratio is the next guess.
    Raises ValueError if a cycle has no lag (nothing could ever move).
    """
    into: list[list[Arc]] = [[] for _ in operations]
    for arc in arcs:
        into[arc.after].append(arc)
    order = _without_lag(operations, arcs)
    ratio, best = 0.0, [arcs[0]]
    while True:
        cycle = _longer_cycle(operations, into, order, ratio)
        if cycle is None:
            return ratio, _chain(operations, best)
        best = cycle
        ratio = sum(operations[arc.after].seconds for arc in cycle) / sum(arc.lag for arc in cycle)


def _without_lag(operations: list[Operation], arcs: list[Arc]) -> list[int]:
    """The operations of one period in an order in which each comes after what it waits for in that period."""
    waiting, following = [0] * len(operations), defaultdict(list)
    for arc in arcs:
        if arc.lag == 0:
            waiting[arc.after] += 1
            following[arc.before].append(arc.after)
    order = [place for place, count in enumerate(waiting) if count == 0]
    for place in order:
        for after in following[place]:
            waiting[after] -= 1
            if waiting[after] == 0:
                order.append(after)
    if len(order) < len(operations):
        raise ValueError("a cycle without a token: nothing could ever move")
    return order


def _longer_cycle(
    operations: list[Operation], into: list[list[Arc]], order: list[int], ratio: float
) -> list[Arc] | None:
    """A cycle whose seconds exceed `ratio` x its lag, found where longest paths keep growing; None if there is none."""
    length = [0.0] * len(operations)
    parent: list[Arc | None] = [None] * len(operations)
    least = 1e-12 * (1.0 + sum(operation.seconds for operation in operations))
    growing = True
    while growing:
        growing = False
        for place in order:
            for arc in into[place]:
                longer = length[arc.before] + operations[place].seconds - ratio * arc.lag
                if longer > length[place] + least:
                    length[place], parent[place], growing = longer, arc, True
        cycle = _cycle_of(parent)
        if cycle:
            return cycle
    return None


def _cycle_of(parent: list[Arc | None]) -> list[Arc]:
    """A cycle among the arcs that each operation's longest path came in on."""
    seen = [-1] * len(parent)
    for start in range(len(parent)):
        place, walked = start, list[Arc]()
        while seen[place] == -1:
            seen[place] = start
            arc = parent[place]
            if arc is None:
                break
            walked.append(arc)
            place = arc.before
        else:
            if seen[place] == start:  # back at where this walk has been
                around = next(i for i, arc in enumerate(walked) if arc.after == place)
                return walked[around:][::-1]
    return []


def _chain(operations: list[Operation], cycle: list[Arc]) -> list[Work]:
    chain: list[Work] = []
    now = 0.0
    for arc in cycle:
        done = operations[arc.after]
        before = chain[-1] if chain else None
        chain.append(Work(done.worker, done.stage, done.part, now, now + done.seconds, before, arc.via))
        now += done.seconds
    return chain

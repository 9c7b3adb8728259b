"""What a plan would do with given service times: its workers in simulated time.

Channels apart, they are joined by what joins those of a real run (`dflash_pipe.joins`): the same inlets, outlets and
gates. What a worker does between them is written again here: ports read in order, turns, window ends, first tokens.
Work on a device that several workers share can be made to exclude each other.

Left out: opening, messages that stages leave empty, hand-offs where it depends on who is free whether they leave the
device, and the end of the stream: the source never ends, and reads one message ahead, across windows too. That work on
a shared device interleaves: here it is whole firings that take turns, so a short one waits for a long one. And that a
worker is ahead of its GPU: it takes the next message while its device works on the last, which acts as one message more
of room around it; with little room a real run may be faster. (What its copy to another device puts in a channel is the
message that a sender waits with here, too.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from dflash_pipe.clock import Channel, Clock, HandOff, Parcel, Place, Process, Work
from dflash_pipe.errors import Stalled
from dflash_pipe.exclusive import Exclusive
from dflash_pipe.gate import CreditGate, Lane, TurnGate
from dflash_pipe.joins import Joins, credit_gates, turn_gates
from dflash_pipe.message import ELSEWHERE, Message, Stamp
from dflash_pipe.plan import Plan, RoutePlan, StationPlan, WorkerPlan
from dflash_pipe.profile import Way, hand_off
from dflash_pipe.route import Local, Outlet
from dflash_pipe.station import Port
from dflash_pipe.stats import WorkerShares, shares

__all__ = ["Simulated", "Times", "simulate", "ways"]


@dataclass(frozen=True)
class Times:
    """Service times. A sequence that is shorter than the simulation starts again.

    seconds: (stage, part) -> one for each message; for what a stage does once a window, one for each window
    (`end_window` of r replicas: r for each window). Parts: `read` of a source, `process`, `end_window`.
    nbytes: stage -> bytes of each message it sends; only channels with a byte limit ask.
    handed: (channel, way) -> what handing each message over to one receiver takes: how long the sender is kept, and how
    long after that the message is there.
    """

    seconds: Mapping[tuple[str, str], Sequence[float]]
    nbytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    handed: Mapping[tuple[str, Way], Sequence[tuple[float, float]]] = field(default_factory=dict)

    def hand_offs(self, plan: Plan, route: RoutePlan, replica: int) -> list[list[HandOff]]:
        """For each sender that a replica has on a route, its hand-offs in turn; none that take time: an empty list."""
        here, there = plan.towards(route, replica)
        name, found = hand_off(route.channel.name), []
        for way, devices in zip(ways(plan, route, replica), there, strict=True):
            lane = f"{here} to {', '.join(sorted(devices))}"
            taken = self.handed.get((route.channel.name, way), ()) if way else ()
            found.append([HandOff(name, route.name, lane, *each) for each in taken] if any(map(any, taken)) else [])
        return found


def ways(plan: Plan, route: RoutePlan, replica: int) -> list[Way | None]:
    """Of each sender that a replica has on a route; None where that depends on who is free."""
    here, there = plan.towards(route, replica)
    return ["within" if devices == {here} else None if here in devices else "between" for devices in there]


@dataclass(frozen=True)
class Simulated:
    """finished: when each window was done, in seconds. skip: the first windows, which fill the pipeline and do not
    count. workers: shares of the time after that. last: the work that ended the last window."""

    finished: tuple[float, ...]
    skip: int
    workers: dict[str, WorkerShares]
    last: Work

    @property
    def step_seconds(self) -> float:
        """Mean seconds for a window."""
        return (self.finished[-1] - self.finished[self.skip - 1]) / (len(self.finished) - self.skip)

    def steps(self) -> list[float]:
        """Seconds between the ends of consecutive windows."""
        return [after - before for before, after in pairwise(self.finished[self.skip - 1 :])]

    def path(self) -> list[Work]:
        """The chain of work that decided when the last window ended, first to last, without the skipped windows."""
        chain, begin = [], self.finished[self.skip - 1]
        work: Work | None = self.last
        while work is not None and work.end > begin:
            chain.append(work)
            work = work.before
        return chain[::-1]


def simulate(plan: Plan, times: Times, *, windows: int, skip: int, exclusive: Exclusive | None = None) -> Simulated:
    """Simulate until `windows` windows are done; the first `skip` (at least 1) do not count.

    exclusive: (stage, replica) -> what it computes on and shares with others (`shared_devices`, `shared_cores`).
    Raises Stalled if the plan comes to a stand.
    """
    return _Simulation(plan, times, exclusive or {}).run(windows, skip)


@dataclass(eq=False)
class _Station:
    """A stage in its place, joined. in_order: whether its turns are. place: what it computes on, where others do, too.
    holds: it has read its per-window ports once."""

    plan: StationPlan
    source: bool
    ends_window: bool
    credits: Sequence[CreditGate]
    turn: TurnGate | None
    in_order: bool
    place: Place | None
    replica: int
    replicas: int
    inputs: dict[str, Port] = field(default_factory=dict)
    outputs: list[Outlet | Local] = field(default_factory=list)
    window_outputs: list[Outlet | Local] = field(default_factory=list)
    holds: bool = False


class _Simulation:
    def __init__(self, plan: Plan, times: Times, exclusive: Exclusive) -> None:
        self.plan, self.graph, self.times = plan, plan.graph, times
        self.clock = Clock()
        self.finished: list[float] = []
        self.last: Work | None = None
        self.processes = {worker.name: Process(worker.name, self.clock) for worker in plan.workers}
        self._credits = credit_gates(plan)
        self.stations = self._stations(exclusive)
        self._first_tokens = Joins(plan, self.stations, partial(Channel, self.clock), ways=self._ways).feedback
        self._left: dict[int, int] = {}

    def _stations(self, exclusive: Exclusive) -> dict[tuple[str, int], _Station]:
        turns = turn_gates(self.plan)
        places = {resource: Place(*resource) for resource in exclusive.values()}
        stations = {}
        for worker in self.plan.workers:
            for station in worker.stations:
                signature = self.graph.stages[station.stage].signature
                shared = exclusive.get((station.stage, worker.replica))
                stations[station.stage, worker.replica] = _Station(
                    plan=station,
                    source=signature.source,
                    ends_window=signature.window_output is not None,
                    credits=tuple(self._credits.values()) if station.ends else (),
                    turn=turns.get(worker.spec.turn),
                    in_order=self.plan.in_order(worker),
                    place=places[shared] if shared else None,
                    replica=worker.replica,
                    replicas=worker.spec.replicas,
                )
        return stations

    def _ways(self, route: RoutePlan, replica: int) -> list[Callable[[Message], Message]]:
        hand_offs = self.times.hand_offs(self.plan, route, replica)
        once = route.channel.per == "window"
        return [partial(_offered, each, once) for each in hand_offs] if any(hand_offs) else []

    def run(self, windows: int, skip: int) -> Simulated:
        for worker in self.plan.workers:
            self.clock.start(self.processes[worker.name], self._live(worker))
        self.clock.run(lambda: len(self.finished) >= skip)
        for process in self.processes.values():
            process.restart_clock()
        self.clock.run(lambda: len(self.finished) >= windows)
        if len(self.finished) < windows or self.last is None:
            waits = "; ".join(f"{name} waits for {process.waits_for}" for name, process in self.processes.items())
            raise Stalled(f"in window {len(self.finished)} nothing can move any more: {waits}")
        spent = {name: shares(process, ()) for name, process in self.processes.items()}
        return Simulated(tuple(self.finished[:windows]), skip, spent, self.last)

    # --- what a worker does

    async def _live(self, worker: WorkerPlan) -> None:
        me = self.processes[worker.name]
        stations = [self.stations[s.stage, worker.replica] for s in worker.stations]
        before = Message(Stamp(-1, -1, self.graph.window - 1, True), None, Parcel())
        for _, outlet, tokens in self._first_tokens[worker.name]:
            for _ in range(tokens):
                await outlet.send(me, before)
        if stations[0].source:
            await self._work(me, stations[0], "read", 0, None)
        count = 0
        while True:
            stamp: Stamp | None = None
            for station in stations:
                if station.plan.rate == "window" and stamp is not None and not stamp.last:
                    continue
                if station.source:
                    stamp = await self._read(me, station, count)
                    count += 1
                else:
                    stamp = await self._fire(me, station)

    async def _read(self, me: Process, station: _Station, index: int) -> Stamp:
        """Send message `index`, which has been read already; the next one is read first, to know that there is one."""
        window, slot = divmod(index, self.graph.window)
        await self._work(me, station, "read", index + 1, None)
        if slot == 0 and "windows" in self._credits:
            await me.at(self._credits["windows"], window)
        if "messages" in self._credits:
            await me.at(self._credits["messages"], index)
        stamp = Stamp(index, window, slot, slot == self.graph.window - 1)
        await self._send(me, station, station.outputs, stamp)
        self._done(me, station, stamp)
        return stamp

    async def _fire(self, me: Process, station: _Station) -> Stamp:
        leading: Message | None = None
        once = station.plan.rate == "window"
        for port in station.inputs.values():
            if once or not port.per_window:
                received = await self._receive(me, port)
                leading = leading or received
        assert leading is not None
        stamp, real = leading.stamp, leading.payload is not ELSEWHERE
        if not once and (stamp.slot == 0 or not station.holds):
            station.holds = True
            for port in station.inputs.values():
                if port.per_window:
                    await self._receive(me, port)
        if real:
            index = stamp.index if station.in_order else None
            await self._work(me, station, "process", stamp.window if once else stamp.index, index)
            await self._send(me, station, station.outputs, stamp)
        else:
            for outlet in station.outputs:
                await outlet.send(me, leading)
        if station.ends_window and stamp.last:
            number = stamp.window * station.replicas + station.replica
            await self._work(me, station, "end_window", number, None)
            await self._send(me, station, station.window_outputs, stamp)
        if real:
            self._done(me, station, stamp)
        return stamp

    @staticmethod
    async def _receive(me: Process, port: Port) -> Message:
        message = await port.inlet.receive(me)
        await me.there(message)
        return message

    async def _work(self, me: Process, station: _Station, part: str, number: int, index: int | None) -> None:
        seconds = self.times.seconds.get((station.plan.stage, part), _NONE)
        turn = station.turn if part != "read" else None
        if turn is not None:
            lane = Lane(station.plan.stage, index)
            await me.at(turn, lane)
        if station.place is not None:
            await me.at(station.place, None)
        await me.work(station.plan.stage, part, seconds[number % len(seconds)])
        if station.place is not None:
            station.place.leave()
        if turn is not None:
            turn.give_back(lane)

    async def _send(self, me: Process, station: _Station, outlets: Sequence[Outlet | Local], stamp: Stamp) -> None:
        if not outlets:
            return
        nbytes = self.times.nbytes.get(station.plan.stage, _NOTHING)
        message = Message(stamp, None, Parcel(nbytes[stamp.index % len(nbytes)]))
        for outlet in outlets:
            await outlet.send(me, message)

    def _done(self, me: Process, station: _Station, stamp: Stamp) -> None:
        if station.plan.ends:
            for gate in station.credits:
                gate.done(stamp)
            left = self._left.pop(stamp.window, self.plan.ends_in_window) - 1
            if left:
                self._left[stamp.window] = left
            else:
                self.finished.append(self.clock.now)
                self.last = me.last


def _offered(hand_offs: Sequence[HandOff], once: bool, message: Message) -> Message:
    """The message with its hand-off; once: a window has one."""
    if not hand_offs:
        return message
    number = message.stamp.window if once else message.stamp.index
    return message.carrying(message.payload._replace(hand_off=hand_offs[number % len(hand_offs)]))


_NONE = (0.0,)
_NOTHING = (0,)

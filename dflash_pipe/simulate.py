"""What a plan would do with given service times: its workers, channels and gates run in simulated time.

Every rule of a real run counts: ports read in order, room, merges, groups, turns, credits, window ends, first tokens,
the source that reads one message ahead. Work on a device that several workers share can be made to exclude each other.
Opening, hand-off costs and the end of the stream are left out: the source never ends, so no window is the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dflash_pipe.clock import Clock, Parcel, Process, Steps, Work
from dflash_pipe.errors import Stalled
from dflash_pipe.message import Stamp
from dflash_pipe.plan import Plan, WorkerPlan
from dflash_pipe.simulated_route import Local, Outlet
from dflash_pipe.simulated_wiring import Exclusive, Station, Wiring, ends_in_window
from dflash_pipe.stats import BLOCKED, BUSY, STARVED

__all__ = ["Shares", "Simulated", "Times", "simulate"]


@dataclass(frozen=True)
class Times:
    """Service times. A sequence that is shorter than the simulation starts again.

    seconds: (stage, part) -> one for each message; for what a stage does once a window, one for each window
    (`end_window` of r replicas: r for each window). Parts: `read` of a source, `process`, `end_window`.
    nbytes: stage -> bytes of each message it sends; only channels with a byte limit ask.
    """

    seconds: Mapping[tuple[str, str], Sequence[float]]
    nbytes: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shares:
    """How one worker replica spends its time; they sum to 1."""

    busy: float
    starved: float
    blocked: float


@dataclass(frozen=True)
class Simulated:
    """finished: when each window was done, in seconds. skip: the first windows, which fill the pipeline and do not
    count. workers: shares of the time after that. last: the work that ended the last window."""

    finished: tuple[float, ...]
    skip: int
    workers: dict[str, Shares]
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


class _Simulation:
    def __init__(self, plan: Plan, times: Times, exclusive: Exclusive) -> None:
        self.plan, self.graph, self.times = plan, plan.graph, times
        self.clock = Clock()
        self.finished: list[float] = []
        self.last: Work | None = None
        self.processes = {worker.name: Process(worker.name, self.clock) for worker in plan.workers}
        wiring = Wiring(plan, self.clock, exclusive)
        self.stations, self._credits = wiring.stations, wiring.credits
        self._per_window = ends_in_window(plan)
        self._left: dict[int, int] = {}

    def run(self, windows: int, skip: int) -> Simulated:
        for worker in self.plan.workers:
            self.clock.start(self.processes[worker.name], self._live(worker))
        before: dict[str, dict[str, float]] = {}

        def ended() -> bool:
            if not before and len(self.finished) >= skip:
                before.update({name: process.spent() for name, process in self.processes.items()})
            return len(self.finished) >= windows

        self.clock.run(ended)
        if len(self.finished) < windows or self.last is None:
            waits = "; ".join(f"{p.name} waits for {p.waits_for}" for p in self.processes.values())
            raise Stalled(f"in window {len(self.finished)} nothing can move any more: {waits}")
        shares = {name: _shares(before[name], process.spent()) for name, process in self.processes.items()}
        return Simulated(tuple(self.finished[:windows]), skip, shares, self.last)

    # --- what a worker does

    def _live(self, worker: WorkerPlan) -> Steps:
        me = self.processes[worker.name]
        stations = [self.stations[s.stage, worker.replica] for s in worker.stations]
        before = Parcel(Stamp(-1, -1, self.graph.window - 1, True), True, 0)
        for station in stations:
            for outlet, tokens in station.first_tokens:
                for _ in range(tokens):
                    yield from outlet.send(me, before)
        if stations[0].source:
            yield from self._work(me, stations[0], "read", 0, None)
        count = 0
        while True:
            stamp: Stamp | None = None
            for station in stations:
                if station.plan.rate == "window" and stamp is not None and not stamp.last:
                    continue
                if station.source:
                    stamp = yield from self._read(me, station, count)
                    count += 1
                else:
                    stamp = yield from self._fire(me, station)

    def _read(self, me: Process, station: Station, index: int) -> Steps:
        """Send message `index`, which has been read already; the next one is read first, to know that there is one."""
        window, slot = divmod(index, self.graph.window)
        yield from self._work(me, station, "read", index + 1, None)
        if slot == 0 and "windows" in self._credits:
            yield from self._credits["windows"].wait(me, window)
        if "messages" in self._credits:
            yield from self._credits["messages"].wait(me, index)
        stamp = Stamp(index, window, slot, slot == self.graph.window - 1)
        yield from self._send(me, station, station.outputs, stamp)
        self._done(me, station, stamp, True)
        return stamp

    def _fire(self, me: Process, station: Station) -> Steps:
        parcel: Parcel | None = None
        once = station.plan.rate == "window"
        for inlet, per_window in station.inputs.values():
            if once or not per_window:
                received = yield from inlet.receive(me)
                parcel = parcel or received
        assert parcel is not None
        stamp = parcel.stamp
        if not once and (stamp.slot == 0 or not station.holds):
            station.holds = True
            for inlet, per_window in station.inputs.values():
                if per_window:
                    yield from inlet.receive(me)
        if parcel.real:
            index = stamp.index if station.replicas > 1 else None
            yield from self._work(me, station, "process", stamp.window if once else stamp.index, index)
            yield from self._send(me, station, station.outputs, stamp)
        else:
            for outlet in station.outputs:
                if isinstance(outlet, Local):
                    yield from outlet.send(me, parcel)
        if station.ends_window and stamp.last:
            number = stamp.window * station.replicas + station.replica
            yield from self._work(me, station, "end_window", number, None)
            yield from self._send(me, station, station.window_outputs, stamp)
        self._done(me, station, stamp, parcel.real)
        return stamp

    def _work(self, me: Process, station: Station, part: str, number: int, index: int | None) -> Steps:
        seconds = self.times.seconds.get((station.plan.stage, part), _NONE)
        lane = (station.plan.stage, index)
        turn = station.turn if part != "read" else None
        if turn is not None:
            yield from turn.wait(me, lane)
        if station.place is not None:
            yield from station.place.wait(me)
        yield from me.work(station.plan.stage, part, seconds[number % len(seconds)])
        if station.place is not None:
            station.place.leave()
        if turn is not None:
            turn.give_back(lane)

    def _send(self, me: Process, station: Station, outlets: Sequence[Outlet | Local], stamp: Stamp) -> Steps:
        nbytes = self.times.nbytes.get(station.plan.stage, _NOTHING)
        parcel = Parcel(stamp, True, nbytes[stamp.index % len(nbytes)])
        for outlet in outlets:
            yield from outlet.send(me, parcel)

    def _done(self, me: Process, station: Station, stamp: Stamp, real: bool) -> None:
        if station.plan.ends and (real or station.plan.rate == "window"):
            for gate in station.credits:
                gate.done(stamp)
            left = self._left.get(stamp.window, self._per_window) - 1
            self._left[stamp.window] = left
            if left == 0:
                del self._left[stamp.window]
                self.finished.append(self.clock.now)
                self.last = me.last


_NONE = (0.0,)
_NOTHING = (0,)


def _shares(before: dict[str, float], after: dict[str, float]) -> Shares:
    spent = {state: after[state] - before[state] for state in (BUSY, STARVED, BLOCKED)}
    total = sum(spent.values()) or 1.0
    return Shares(spent[BUSY] / total, spent[STARVED] / total, spent[BLOCKED] / total)

"""A plan in simpy, written from the semantics and not from `dflash_pipe.simulate`, to check that one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import simpy

from dflash_pipe.plan import Plan
from dflash_pipe.simulate import Times


def unless_done(event: simpy.Event) -> Any:
    """Wait for an event, not even for an instant if it has happened: who can go on, goes on before who is woken."""
    if not event.triggered:
        yield event
    return event.value


class Queue:
    """Room for real parcels in a container, all parcels in a store without bounds."""

    def __init__(self, env: simpy.Environment, capacity: int) -> None:
        self.room = simpy.Container(env, capacity=capacity, init=capacity)
        self.store = simpy.Store(env)

    def put(self, index: int, real: bool = True, there: float = 0.0) -> Any:
        """there: when it will have arrived."""
        if real:
            yield from unless_done(self.room.get(1))
        yield from unless_done(self.store.put((index, real, there)))

    def get(self) -> Any:
        index, real, there = yield from unless_done(self.store.get())
        if real:
            yield from unless_done(self.room.put(1))
        return index, real, there


class Condition:
    """Whoever waits is let in, first come first served, as soon as its own test holds after a change."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env, self.waiting = env, list[tuple[Callable[[], bool], simpy.Event]]()

    def until(self, test: Callable[[], bool]) -> Any:
        if not test():
            event = self.env.event()
            self.waiting.append((test, event))
            yield event

    def changed(self) -> None:
        still = []
        for test, event in self.waiting:
            if test():
                event.succeed()
            else:
                still.append((test, event))
        self.waiting = still


class Model:
    """window ends are in `ended`; parcels are message indices (of a window's last message, on per-window channels)."""

    def __init__(self, plan: Plan, times: Times) -> None:
        self.env, self.plan, self.times = simpy.Environment(), plan, times
        self.window, self.credits = plan.graph.window, plan.graph.credits
        self.changes = Condition(self.env)
        self.queues: dict[tuple[str, int], Queue] = {}
        self.local: dict[tuple[str, int], list[tuple[int, bool]]] = defaultdict(list)
        self.merged: dict[tuple[str, int], dict[int, tuple[bool, float]]] = defaultdict(dict)
        self.lanes: dict[tuple[str, ...], float] = defaultdict(float)
        self.devices = {(s.stage, worker.replica): s.device for worker in plan.workers for s in worker.stations}
        self.handed_on: dict[tuple[str, int], int] = defaultdict(int)
        self.arrived: dict[str, int] = defaultdict(int)
        self.turn_taken: dict[str, bool] = defaultdict(bool)
        self.turn_next: dict[str, int] = defaultdict(int)
        self.done: dict[int, int] = defaultdict(int)
        self.ended: list[float] = []
        self.messages_done = 0
        self.message_done: dict[int, int] = defaultdict(int)
        ends = {(s.stage, s.rate) for w in plan.workers for s in w.stations if s.ends}
        self.message_ends = sum(rate == "message" for _, rate in ends)
        self.window_ends = len(ends) - self.message_ends
        for route in plan.routes:
            for queue in range(max(route.senders, route.receivers)):
                self.queues[route.name, queue] = Queue(self.env, route.channel.capacity.items)
        for worker in plan.workers:
            self.env.process(self.work(worker))

    def run(self, windows: int) -> list[float]:
        while len(self.ended) < windows:
            self.env.step()
        return self.ended[:windows]

    def seconds(self, stage: str, part: str, number: int) -> float:
        written = self.times.seconds.get((stage, part), [0.0])
        return written[number % len(written)]

    def work(self, worker: Any) -> Any:
        for station in worker.stations:
            for route in self.plan.routes:
                if route.channel.sender == station.stage and route.channel.initial:
                    for _ in range(route.channel.initial):
                        yield from self.send(route, worker, -1)
        tick = 0
        source = worker.stations[0].stage if self.source(worker.stations[0].stage) else None
        if source:
            yield self.env.timeout(self.seconds(source, "read", 0))
        while True:
            index = None
            for station in worker.stations:
                if station.rate == "window" and index is not None and (index + 1) % self.window:
                    continue
                if station.stage == source:
                    index = tick
                    yield from self.emit(worker, source, index)
                    tick += 1
                else:
                    index = yield from self.fire(worker, station)

    def source(self, stage: str) -> bool:
        return self.plan.graph.stages[stage].signature.source

    def emit(self, worker: Any, stage: str, index: int) -> Any:
        yield self.env.timeout(self.seconds(stage, "read", index + 1))
        windows, messages = self.credits.windows, self.credits.messages
        if windows is not None and index % self.window == 0:
            yield from self.changes.until(lambda: len(self.ended) > index // self.window - windows)
        if messages is not None:
            yield from self.changes.until(lambda: self.messages_done > index - messages)
        yield from self.send_all(worker, stage, index, at_end=False)

    def fire(self, worker: Any, station: Any) -> Any:
        stage, once = station.stage, station.rate == "window"
        ports = list(self.plan.graph.stages[stage].signature.inputs)
        routes = sorted((r for r in self.plan.routes if r.to.stage == stage), key=lambda r: ports.index(r.to.port))
        got = []
        for route in routes:
            if once or route.channel.per == "message":
                got.append((yield from self.receive(route, worker)))
        index, real = got[0]
        if not once and index % self.window == 0:
            for route in routes:
                if route.channel.per == "window":
                    yield from self.receive(route, worker)
        if real:
            yield from self.compute(worker, stage, "process", index // self.window if once else index, index)
            yield from self.send_all(worker, stage, index, at_end=False)
        for route in self.plan.routes:
            if route.kind == "local" and route.channel.sender == stage and not real and route.channel.per == "message":
                self.local[route.name, worker.replica].append((index, False))
        if self.plan.graph.stages[stage].signature.window_output is not None and (index + 1) % self.window == 0:
            number = index // self.window * worker.spec.replicas + worker.replica
            yield from self.compute(worker, stage, "end_window", number, None)
            yield from self.send_all(worker, stage, index, at_end=True)
        if station.ends and (real or once):
            self.finish(index)
        return index

    def finish(self, index: int) -> None:
        last = (index + 1) % self.window == 0
        self.message_done[index] += 1
        if self.message_done[index] == self.message_ends + (self.window_ends if last else 0):
            self.messages_done += 1
        window = index // self.window
        self.done[window] += 1
        if self.done[window] == self.message_ends * self.window + self.window_ends:
            self.ended.append(self.env.now)
        self.changes.changed()

    def compute(self, worker: Any, stage: str, part: str, number: int, index: int | None) -> Any:
        turn = worker.spec.turn
        unordered = any(r.unordered and r.to.stage in worker.spec.stages for r in self.plan.routes)
        ordered = index is not None and worker.spec.replicas > 1 and not unordered
        if turn:

            def mine() -> bool:
                if self.turn_taken[turn] or (ordered and self.turn_next[stage] != index):
                    return False
                self.turn_taken[turn] = True
                return True

            yield from self.changes.until(mine)
        yield self.env.timeout(self.seconds(stage, part, number))
        if turn:
            self.turn_taken[turn] = False
            if ordered:
                self.turn_next[stage] += 1
            self.changes.changed()

    def send_all(self, worker: Any, stage: str, index: int, *, at_end: bool) -> Any:
        rate = next(s.rate for s in worker.stations if s.stage == stage)
        for route in self.plan.routes:
            if route.channel.sender == stage and (route.channel.per == "window" and rate == "message") == at_end:
                yield from self.send(route, worker, index)

    def send(self, route: Any, worker: Any, index: int) -> Any:
        if route.kind == "local":
            self.local[route.name, worker.replica].append((index, True))
            return
        queues = {"shared": [0], "gathered": [worker.replica]}.get(route.kind, range(route.receivers))
        for queue in queues:
            real = route.kind != "dealt" or index % self.window % route.receivers == queue
            there = (yield from self.hand_over(route, worker, queue, index)) if real else 0.0
            yield from self.queues[route.name, queue].put(index, real, there)
        self.arrived[route.name] += 1
        self.changes.changed()

    def hand_over(self, route: Any, worker: Any, queue: int, index: int) -> Any:
        """Keeps the sender; gives the time at which the message will be there."""
        here = self.devices[route.channel.sender, worker.replica]
        every = [self.devices[route.to.stage, receiver] for receiver in range(route.receivers)]
        behind = set(every) if route.kind == "shared" else {every[0 if route.kind == "gathered" else queue]}
        if here in behind and len(behind) > 1:  # who takes it decides whether it leaves the device
            return 0.0
        taken = self.times.handed.get((route.channel.name, "within" if here in behind else "between"), [(0.0, 0.0)])
        held, later = taken[(index // self.window if route.channel.per == "window" else index) % len(taken)]
        if held:
            yield self.env.timeout(held)
        if not later:
            return 0.0
        lane = (worker.name, *sorted(behind))
        self.lanes[lane] = max(self.env.now, self.lanes[lane]) + later
        return self.lanes[lane]

    def receive(self, route: Any, worker: Any) -> Any:
        index, real, there = yield from self.taken(route, worker)
        if there > self.env.now:
            yield self.env.timeout(there - self.env.now)
        return index, real

    def taken(self, route: Any, worker: Any) -> Any:
        """The next message: its index, whether it is for this replica, and when it is there."""
        key = (route.name, 0 if route.kind == "shared" else worker.replica)
        if route.kind == "local":
            return (*self.local[route.name, worker.replica].pop(0), 0.0)
        if route.kind == "gathered":
            got = []
            for sender in range(route.senders):
                got.append((yield from self.queues[route.name, sender].get()))
            return (*got[0][:2], max(there for _, _, there in got))
        if route.merge or route.restamp:
            index, real, there = yield from self.ordered(route, key)
        else:
            index, real, there = yield from self.queues[key].get()
            group = route.channel.group
            if group > 1 and real:
                yield from self.changes.until(lambda: self.arrived[route.name] >= index // group * group + group)
        if worker.reorder is not None and route.channel.per == "message" and real:
            behind = [(r.name, n) for r in self.plan.merges_behind(worker.spec) for n in range(r.receivers)]
            behind = [key for key in behind if self.kind(key[0]) != "shared" or key[1] == 0]
            size = worker.reorder
            yield from self.changes.until(lambda: index < min(self.handed_on[key] for key in behind) + size)
        return index, real, there

    def kind(self, name: str) -> str:
        return next(r.kind for r in self.plan.routes if r.name == name)

    def ordered(self, route: Any, key: tuple[str, int]) -> Any:
        """The next message in order (merge) or in a new order (restamp), in whole groups."""
        early, group, due = self.merged[key], route.channel.group, self.handed_on[key]
        wanted = range(due, due + group) if due % group == 0 else [due]
        while not all(index in early for index in wanted):
            index, real, there = yield from self.queues[key].get()
            early[len(early) + due if route.restamp else index] = real, there
        self.handed_on[key] += 1
        real, there = early.pop(due)
        self.changes.changed()
        return due, real, there

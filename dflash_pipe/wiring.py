"""Plan -> the workers of a run: stages built, joined by channels and gates, with what they start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dflash_pipe.channel import Channel
from dflash_pipe.gate import CreditGate, Gate
from dflash_pipe.graph import StageSpec
from dflash_pipe.joins import Joins, credit_gates, turn_gates
from dflash_pipe.message import Message
from dflash_pipe.plan import Plan, RoutePlan, StationPlan, WorkerPlan
from dflash_pipe.route import Blocking, Local, Outlet, Suspending
from dflash_pipe.snapshot import Snapshot, Snapshots
from dflash_pipe.stage import Context, Stage
from dflash_pipe.station import Feed, Station
from dflash_pipe.transport import Transport
from dflash_pipe.worker import Worker

__all__ = ["Origin", "Wiring", "wire"]


@dataclass(frozen=True)
class Origin:
    """What a run starts from and where it writes.

    restored: the snapshot that is resumed. stopping: whether the source should end at the next window. on_state: is
    given the stage with the state, instead of a snapshot of it.
    """

    folder: Path
    restored: Snapshot | None = None
    report: Callable[[dict[str, Any]], None] = lambda metrics: None
    stopping: Callable[[], bool] = lambda: False
    on_state: Callable[[Stage], None] | None = None

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
        self.stations: dict[tuple[str, int], Station] = {}

    def wire(self) -> Wiring:
        credits, turns = credit_gates(self.plan), turn_gates(self.plan, self.origin.start[0])
        for worker_plan in self.plan.workers:
            stations = [self._station(worker_plan, s, credits) for s in worker_plan.stations]
            waits = Suspending() if worker_plan.spec.kind == "async" else Blocking()
            worker = Worker(worker_plan.name, stations, waits, self.graph.transport)
            worker.turn = turns.get(worker_plan.spec.turn)
            worker.in_order = self.plan.in_order(worker_plan)
            self.wiring.workers.append(worker)
            self.wiring.kinds[worker.name] = worker_plan.spec.kind
        joins = Joins(self.plan, self.stations, Channel, self.origin.start, self._ways)
        self.wiring.channels, self.wiring.feedback = joins.queues, joins.feedback
        self.wiring.gates = [*credits.values(), *turns.values(), *joins.gates]
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
        folder, every, on_state = self.origin.folder / "snapshots", self.graph.snapshot, self.origin.on_state
        self.wiring.snapshots = Snapshots(folder, self.dataflow, every, on_state=on_state)
        return self.wiring.snapshots

    def _ways(self, route: RoutePlan, replica: int) -> list[Callable[[Message], Message]]:
        """How messages enter each sender's channel: as the transport has it, if that has a say."""
        if type(self.graph.transport).on_send is Transport.on_send:
            return []
        sender = route.channel.sender
        place = next(n for n, w in enumerate(self.plan.workers) if w.replica == replica and sender in w.spec.stages)
        hand_over, station = self.wiring.workers[place].hand_over, self.stations[sender, replica]
        _, there = self.plan.towards(route, replica)
        known = (next(iter(devices)) if len(devices) == 1 else None for devices in there)
        return [partial(hand_over, station, route.channel.name, to) for to in known]

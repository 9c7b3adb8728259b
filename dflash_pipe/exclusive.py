"""What stages compute on and share with others: devices, and the cores of the CPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from dflash_pipe.plan import Plan

__all__ = ["Exclusive", "Resource", "shared_cores", "shared_devices"]


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

"""What the laws of a graph are written with: how often a stage fires, what it is joined to, and how a law complains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from dflash_pipe.errors import BadInput
from dflash_pipe.graph import ChannelSpec, Graph, PortRef, StageSpec, WorkerSpec

__all__ = ["KeyPath", "bad", "each", "feeding", "in_to", "inputs_of", "listed", "owner", "rate", "reach"]

KeyPath = tuple[str | int, ...]  # a number: an entry of a list
_Spec = ChannelSpec | StageSpec | WorkerSpec


def rate(graph: Graph, stage: str) -> Literal["message", "window"]:
    """How often a stage fires: once a message if it is a source or reads a per-message channel, else once a window."""
    inputs = [channel.per for channel, port in inputs_of(graph, stage)]
    return "message" if graph.stages[stage].signature.source or "message" in inputs else "window"


def inputs_of(graph: Graph, stage: str) -> list[tuple[ChannelSpec, str]]:
    """The channels a stage reads, each with its port."""
    return [(c, to.port) for c in graph.channels.values() for to in c.receivers if to.stage == stage]


def owner(graph: Graph, stage: str) -> WorkerSpec:
    """The worker that a stage is on."""
    return next(worker for worker in graph.workers.values() if stage in worker.stages)


def bad(graph: Graph, what: _Spec, message: str, *keys: str | KeyPath) -> BadInput:
    """The complaint about a channel, stage or worker. keys: those that do not go together, its own or by their full
    path; the likeliest to be wrong first: the place is that of the one which was laid last."""
    kind = {ChannelSpec: "channel", StageSpec: "stage", WorkerSpec: "worker"}[type(what)]
    paths = [(f"{kind}s", what.name, key) if isinstance(key, str) else key for key in keys]
    return BadInput(f"{kind} {what.name!r}: {message}", graph.places.of(*paths, otherwise=what.where))


def each(section: str, names: Iterable[str], key: str) -> list[KeyPath]:
    """The paths of one key in several entries."""
    return [(section, name, key) for name in names]


def listed(worker: WorkerSpec, stage: str) -> KeyPath:
    """The path of a stage among its worker's, the last one if it is there twice."""
    return ("workers", worker.name, "stages", _last(worker.stages, stage))


def in_to(channel: ChannelSpec, to: PortRef) -> list[KeyPath]:
    """The paths of one receiver of a channel, which is an entry of a list or all that is written."""
    path = ("channels", channel.name, "to")
    return [(*path, _last(channel.receivers, to)), path]


def _last(entries: Sequence[object], entry: object) -> int:
    return max(number for number, each in enumerate(entries) if each == entry)


def feeding(graph: Graph, stage: str, key: str) -> list[KeyPath]:
    """The paths of one key in the channels that a stage reads."""
    return each("channels", [channel.name for channel, _ in inputs_of(graph, stage)], key)


def reach(graph: Graph, start: str) -> set[str]:
    """A stage and all that its messages lead to."""
    reached, new = {start}, [start]
    while new:
        here = new.pop()
        after = {to.stage for c in graph.channels.values() if c.sender == here for to in c.receivers} - reached
        reached |= after
        new += after
    return reached

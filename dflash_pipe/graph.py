"""YAML files -> Graph: stages, channels and workers as validated frozen values. Errors carry file:line.

A dataflow file says what is computed (stages, channels, seed, window); a topology file extends it and says where
(workers, capacities, credits). `load` reads and validates each value by itself; whether the graph makes sense as a
whole is `dflash_pipe.check`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic_core

from dflash_pipe.errors import BadInput, nearest, noted
from dflash_pipe.keys import ChannelKeys, CreditsKeys, GraphKeys, WorkerKeys, validate
from dflash_pipe.located import Located, at, dumps, located, overlay, plain, read, under
from dflash_pipe.names import missing, override, resolve, used
from dflash_pipe.places import Places
from dflash_pipe.stage import FunctionStage, Signature, Stage
from dflash_pipe.transport import Elsewhere, Transport
from dflash_pipe.use import load_object, one_line

__all__ = [
    "Capacity",
    "ChannelSpec",
    "Credits",
    "Graph",
    "PortRef",
    "StageSpec",
    "WorkerSpec",
    "dataflow",
    "difference",
    "dump",
    "load",
]


# --- what a graph is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capacity:
    """Room of a channel: messages, and bytes of their payloads (None: only messages are counted)."""

    items: int = 2
    bytes: int | None = None


@dataclass(frozen=True)
class PortRef:
    """An input port of a stage."""

    stage: str
    port: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.port}"


@dataclass(frozen=True)
class StageSpec:
    """use: "module:Name" as written. make: the class or function. parameters: what `with:` gives, validated."""

    name: str
    use: str
    make: type[Stage] | Callable[..., Any]
    parameters: dict[str, Any]
    signature: Signature
    where: str = field(default="", compare=False)

    def build(self) -> Stage:
        """A new stage of its own: no two share a mutable parameter."""
        parameters = copy.deepcopy(self.parameters)
        made = self.make(**parameters) if inspect.isclass(self.make) else FunctionStage(self.make, **parameters)
        assert isinstance(made, Stage)
        return made

    def check(self, replicas: int) -> None:
        """Whether a stage that is built so can work: raises what its own `check` raises."""
        with noted(f"stage {self.name}: check"):
            self.build().check(replicas)


@dataclass(frozen=True)
class ChannelSpec:
    """broadcast: every receiving replica gets every message. initial: tokens on it before the first message.
    group: messages are handed on only in complete groups of so many."""

    name: str
    sender: str
    receivers: tuple[PortRef, ...]
    per: Literal["message", "window"] = "message"
    broadcast: bool = False
    initial: int = 0
    capacity: Capacity = Capacity()
    group: int = 1
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class WorkerSpec:
    """stages: what it owns; they run in the order of the dataflow. device: stage -> a device name for each replica."""

    name: str
    stages: tuple[str, ...]
    kind: Literal["thread", "async"] = "thread"
    replicas: int = 1
    device: dict[str, tuple[str, ...]] = field(default_factory=dict)
    take: Literal["first_free", "round_robin"] = "first_free"
    order: Literal["input", "completion"] = "input"
    turn: str | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Credits:
    """How much may be in flight in the whole graph: messages, or windows (None: no such limit)."""

    messages: int | None = None
    windows: int | None = None


@dataclass(frozen=True)
class Graph:
    """window: messages in one optimizer step. partial_window: whether a last one that is not full is stepped.
    threads: intra-op threads of every worker. stall_after: seconds without any movement before the run is given up.
    snapshot: every so many windows. resolved: the merged YAML with its overrides, before `${}`. files: what it was read
    from, in the order of overlaying. places: of all that is written."""

    name: str
    seed: int
    window: int
    partial_window: Literal["keep", "drop"]
    threads: int | None
    stall_after: float
    snapshot: int | None
    credits: Credits
    transport: Transport = field(compare=False)
    stages: dict[str, StageSpec]
    channels: dict[str, ChannelSpec]
    workers: dict[str, WorkerSpec]
    resolved: dict[str, Any]
    places: Places = field(compare=False, repr=False)
    files: tuple[str, ...] = field(default=(), compare=False)


# --- reading ----------------------------------------------------------------------------------------------------------


def load(files: Sequence[str | Path], overrides: Sequence[str] = (), *, elsewhere: bool = False) -> Graph:
    """Read, overlay, override and validate. Raises `BadInput`: one line with the place.

    files: later ones overlay earlier ones. overrides: `key=value`, the value is YAML, the key `stage.parameter`,
    `worker.key`, `channel.key` or a full path. elsewhere: where this machine has no accelerators, lay the graph out for
    one that has those that it names.
    """
    tree, names = read(files)
    tree = overlay(located({"name": Path(files[0]).stem, "seed": 0, "window": 1, "threads": None}, names[-1]), tree)
    for text in overrides:
        tree = override(tree, text)
    resolved = plain(tree)
    tree = resolve(tree, names)
    places = Places(tree, names)
    keys: GraphKeys = validate(GraphKeys, tree, ())
    transport = _transport(tree, keys)
    if elsewhere and not transport.accelerators():
        transport = Elsewhere(_named_devices(keys))
    workers = {name: _worker(places, name, worker, transport) for name, worker in keys.workers.items()}
    replicas = {stage: worker.replicas for worker in workers.values() for stage in worker.stages}
    stages = {name: _stage(places, name, stage.use, replicas.get(name, 1)) for name, stage in keys.stages.items()}
    limits = keys.credits or CreditsKeys()
    return Graph(
        **keys.model_dump(include={"name", "seed", "window", "partial_window", "threads", "stall_after", "snapshot"}),
        credits=Credits(limits.messages, limits.windows),
        transport=transport,
        stages=stages,
        channels={name: _channel(places, name, channel, stages) for name, channel in keys.channels.items()},
        workers=workers,
        resolved=resolved,
        files=names,
        places=places,
    )


def dump(graph: Graph) -> str:
    """YAML text of the whole graph; it loads to an equal graph from any folder."""
    return dumps(graph.resolved)


def dataflow(graph: Graph) -> dict[str, Any]:
    """What is computed, as `path: JSON value`: equal for every topology of one dataflow, whatever the run is called.

    Parameters left at their default count like written ones. threads counts, because sums on a CPU are split by thread.
    """
    found: dict[str, Any] = {key: getattr(graph, key) for key in ("seed", "window", "partial_window", "threads")}
    for name, spec in graph.stages.items():
        sends = spec.signature.output is not None or spec.signature.window_output is not None
        if not (sends or spec.signature.stateful):
            continue  # what a stage that only receives is told (where to write, say) changes no result
        found[f"stages.{name}.use"] = spec.use
        for key, (_, default) in spec.signature.parameters.items():
            found[f"stages.{name}.with.{key}"] = spec.parameters.get(key, default)
    for c in graph.channels.values():
        if not any(f"stages.{to.stage}.use" in found for to in c.receivers):
            continue
        ends = f"channels.{c.name}"
        found |= {f"{ends}.from": c.sender, f"{ends}.to": sorted(map(str, c.receivers))}
        found |= {f"{ends}.per": c.per, f"{ends}.broadcast": c.broadcast, f"{ends}.initial": c.initial}
    plain_values = pydantic_core.to_jsonable_python(found, fallback=lambda value: type(value).__qualname__)
    return dict(json.loads(json.dumps(plain_values)))


def transport_of(graph: Graph) -> str | None:
    """The `transport:` that is written, None if none is."""
    return graph.resolved.get("transport")


def difference(there: dict[str, Any], here: dict[str, Any], places: tuple[str, str] = ("there", "here")) -> str | None:
    """The first key in which two dataflows differ, in words; None if they are equal. places: what each is called."""
    for key in {**here, **there}:
        if key not in here or key not in there:
            return f"{key} is only {places[key in here]}"
        if there[key] != here[key]:
            return f"{key} is {json.dumps(there[key])} {places[0]}, {json.dumps(here[key])} {places[1]}"
    return None


# --- from keys to specs -----------------------------------------------------------------------------------------------


def _transport(tree: Located, keys: GraphKeys) -> Transport:
    where, _ = at(tree, ("transport",))
    try:
        made = load_object(keys.transport)
        if not (inspect.isclass(made) and issubclass(made, Transport)):
            raise BadInput(f"{keys.transport} is not a Transport")
        return made(keys.threads)
    except BadInput as error:
        raise error.at(where, "transport") from error
    except Exception as error:  # whatever a constructor of the user's own does
        line = f"transport: {keys.transport} cannot be built with threads={keys.threads}: {one_line(error)}"
        raise BadInput(line, where) from error


def _named_devices(keys: GraphKeys) -> Iterator[str]:
    for worker in keys.workers.values():
        for stage in worker.stages:
            written = worker.device.get(stage, worker.device.get("*", "auto"))
            yield from [written] if isinstance(written, str) else written


def _worker(places: Places, name: str, keys: WorkerKeys, transport: Transport) -> WorkerSpec:
    path = ("workers", name)

    def resolved(device: str, *where: str | int) -> str:
        try:
            return transport.resolve(device)
        except BadInput as error:
            raise error.at(*at(places.tree, (*path, "device", *where))) from error

    def devices(stage: str) -> tuple[str, ...]:
        written = keys.device.get(stage, keys.device.get("*", "auto"))
        if isinstance(written, str):
            return (resolved(written, stage),) * keys.replicas
        return tuple(resolved(device, stage, number) for number, device in enumerate(written))

    for stage in keys.device:
        if stage != "*" and stage not in keys.stages:
            shown, where = f"workers.{name}.device.{stage}", places.of((*path, "device", stage), (*path, "stages"))
            raise BadInput(f"{shown}: worker {name} has no stage {stage!r}{nearest(stage, keys.stages)}", where)
    return WorkerSpec(
        name=name,
        stages=tuple(keys.stages),
        device={stage: devices(stage) for stage in keys.stages},
        where=places.of((*path, "stages")),
        **keys.model_dump(include={"kind", "replicas", "take", "order", "turn"}),
    )


def _stage(places: Places, name: str, use: str, replicas: int) -> StageSpec:
    tree = places.tree
    where, _ = at(tree, ("stages", name, "use"))
    made, sig = used(tree, name)
    parameters, written = {}, under(tree, "stages", name, "with")
    for key, entry in written.items():
        if key not in sig.parameters:
            own, known = made.__name__, nearest(key, sig.parameters)
            later = places.later(where, entry.where)
            if later != where:  # an overlay, perhaps for another graph
                own = f"the graph's {name} is {use} ({where}), which"
            elif places.later(entry.where, where) != entry.where:
                own, known = use, f", which {entry.where} gives: a new `use:` needs a `with:` of its own"
            raise BadInput(f"stages.{name}.with.{key}: {own} has no parameter {key!r}{known}", later)
        parameters[key] = validate(sig.parameters[key][0], tree, ("stages", name, "with", key))
    absent = [k for k, (_, value) in sig.parameters.items() if value is dataclasses.MISSING and k not in parameters]
    if absent:
        raise missing(tree, name, absent)
    spec = StageSpec(name, use, made, parameters, sig, where)
    try:
        spec.check(replicas)
    except (BadInput, ValueError) as error:
        said = " ".join(str(error).split())
        raise BadInput(f"stages.{name}: {said}", places.of_stage(name, said)) from error
    return spec


def _channel(places: Places, name: str, keys: ChannelKeys, stages: dict[str, StageSpec]) -> ChannelSpec:
    path = ("channels", name)
    if keys.from_ not in stages:
        where = places.of((*path, "from"), ("stages",))
        raise BadInput(f"channels.{name}.from: no stage {keys.from_!r}{nearest(keys.from_, stages)}", where)

    def port(number: int, written: str) -> PortRef:
        where, shown = at(places.tree, (*path, "to", number))
        stage, dot, name = written.partition(".")
        if stage not in stages:
            line = f"{shown}: no stage {stage!r}{nearest(stage, stages)}"
            raise BadInput(line, places.of((*path, "to", number), (*path, "to"), ("stages",)))
        ports = stages[stage].signature.inputs
        later = places.later(where, stages[stage].where)
        if not ports:
            raise BadInput(f"{shown}: {stage} is a source and receives nothing", later)
        if dot and name not in ports:
            raise BadInput(f"{shown}: {stage} has no port {name!r}{nearest(name, ports)}", later)
        if not dot and len(ports) > 1:
            raise BadInput(f"{shown}: {stage} has several ports: {', '.join(f'{stage}.{p}' for p in ports)}", later)
        return PortRef(stage, name or next(iter(ports)))

    return ChannelSpec(
        name=name,
        sender=keys.from_,
        receivers=tuple(port(number, written) for number, written in enumerate(keys.to)),
        capacity=Capacity(keys.capacity.items, keys.capacity.bytes),
        where=places.of((*path, "to")),
        **keys.model_dump(include={"per", "broadcast", "initial", "group"}),
    )

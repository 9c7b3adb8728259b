"""Does the graph make sense as a whole? Everything that can be refused before anything runs.

Each law is a function of the graph that raises `BadInput`; they run in the order in which one relies on the others:
connections, rates, types, cycles, placement, replicas, state, and what would stall.
"""

from __future__ import annotations

import inspect
import itertools
import typing
from collections import Counter
from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import Any, Literal

from dflash_pipe.errors import BadInput, nearest
from dflash_pipe.graph import ChannelSpec, Graph, StageSpec, WorkerSpec

__all__ = ["check", "rate"]


def check(graph: Graph) -> None:
    """Raise `BadInput` for the first law that the graph breaks."""
    for law in _LAWS:
        law(graph)


def rate(graph: Graph, stage: str) -> Literal["message", "window"]:
    """How often a stage fires: once a message if it is a source or reads a per-message channel, else once a window."""
    inputs = [channel.per for channel, port in _inputs(graph, stage)]
    return "message" if graph.stages[stage].signature.source or "message" in inputs else "window"


def _inputs(graph: Graph, stage: str) -> list[tuple[ChannelSpec, str]]:
    """The channels a stage reads, each with its port."""
    return [(c, to.port) for c in graph.channels.values() for to in c.receivers if to.stage == stage]


def _worker(graph: Graph, stage: str) -> WorkerSpec:
    return next(worker for worker in graph.workers.values() if stage in worker.stages)


def _bad(what: ChannelSpec | StageSpec | WorkerSpec, message: str) -> BadInput:
    kind = {ChannelSpec: "channel", StageSpec: "stage", WorkerSpec: "worker"}[type(what)]
    return BadInput(f"{kind} {what.name!r}: {message}", what.where)


# --- connections ------------------------------------------------------------------------------------------------------


def _every_port_is_fed_once(graph: Graph) -> None:
    fed: dict[str, str] = {}
    for channel in graph.channels.values():
        for to in map(str, channel.receivers):
            if to in fed:
                raise _bad(channel, f"port {to} is fed by channel {fed[to]!r} already")
            fed[to] = channel.name
    for stage in graph.stages.values():
        for port in stage.signature.inputs:
            if f"{stage.name}.{port}" not in fed:
                raise _bad(stage, f"no channel feeds its port {port!r}")


def _one_source_reaches_all(graph: Graph) -> None:
    for stage in graph.stages.values():
        if not stage.signature.inputs and not stage.signature.source:
            raise _bad(stage, "it has no input port, so it must be a Source")
    sources = [stage for stage in graph.stages.values() if stage.signature.source]
    if not sources:
        raise BadInput("no stage is a source: nothing would ever flow", graph.files[-1] if graph.files else "")
    if len(sources) > 1:
        raise _bad(sources[1], f"a second source beside {sources[0].name!r}: a graph has one, and one cursor")
    reached = _reach(graph, sources[0].name)
    for stage in graph.stages.values():
        if stage.name not in reached:
            raise _bad(stage, f"source {sources[0].name!r} does not reach it")


def _reach(graph: Graph, start: str) -> set[str]:
    reached, new = {start}, [start]
    while new:
        here = new.pop()
        after = {to.stage for c in graph.channels.values() if c.sender == here for to in c.receivers} - reached
        reached |= after
        new += after
    return reached


# --- rates and types --------------------------------------------------------------------------------------------------


def _rates_agree(graph: Graph) -> None:
    """Both ends of a channel work at its rate, so every cycle balances."""
    for c in graph.channels.values():
        sender, fires = graph.stages[c.sender].signature, rate(graph, c.sender)
        if c.per == "window" and fires == "message" and sender.window_output is None:
            raise _bad(c, f"it is per window, but {c.sender} works per message and has no end_window that returns one")
        if c.per == "message" and fires == "window":
            raise _bad(c, f"it is per message, but {c.sender} reads only per-window channels: it sends once a window")
        if _sent(graph, c) is None:
            raise _bad(c, f"{c.sender} sends nothing per message (its process returns None)")
        for to in c.receivers:
            if c.per == "message" and graph.stages[to.stage].signature.inputs[to.port].gather:
                raise _bad(c, f"{to} gathers one payload from each replica, so the channel must be per: window")
        if c.broadcast and c.per == "message":
            raise _bad(c, "broadcast is for per: window channels (every replica would compute every message)")


def _sent(graph: Graph, channel: ChannelSpec) -> Any:
    """The type that travels on a channel."""
    sender = graph.stages[channel.sender].signature
    return sender.window_output if channel.per == "window" and sender.window_output is not None else sender.output


def _types_agree(graph: Graph) -> None:
    for c in graph.channels.values():
        for to in c.receivers:
            port, sent = graph.stages[to.stage].signature.inputs[to.port].type, _sent(graph, c)
            if not _accepts(port, sent):
                raise _bad(c, f"{c.sender} sends {_named(sent)}, but {to} receives {_named(port)}")


def _accepts(port: Any, sent: Any) -> bool:
    if Any in (port, sent) or isinstance(port, typing.TypeVar) or isinstance(sent, typing.TypeVar):
        return True
    if _members(sent) != [sent]:
        return all(_accepts(port, member) for member in _members(sent))
    if _members(port) != [port]:
        return any(_accepts(member, sent) for member in _members(port))
    outer, inner = typing.get_origin(port) or port, typing.get_origin(sent) or sent
    if not (inspect.isclass(outer) and inspect.isclass(inner) and issubclass(inner, outer)):
        return bool(port == sent)
    return outer is not inner or not typing.get_args(port) or typing.get_args(port) == typing.get_args(sent)


def _members(kind: Any) -> list[Any]:
    """The types of a union, None aside (it is never sent)."""
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return [member for member in typing.get_args(kind) if member is not NoneType]
    return [kind]


def _named(kind: Any) -> str:
    return " | ".join(m.__name__ if inspect.isclass(m) and not typing.get_args(m) else str(m) for m in _members(kind))


# --- cycles -----------------------------------------------------------------------------------------------------------


def _cycles_have_tokens(graph: Graph) -> None:
    cycle = _cycle([c for c in graph.channels.values() if c.initial == 0])
    if cycle:
        on_it = [c for c in graph.channels.values() for a, b in itertools.pairwise(cycle) if _joins(c, a, b)]
        names = " or ".join(repr(c.name) for c in on_it)
        raise BadInput(f"a cycle without a token: {' → '.join(cycle)}; give {names} an `initial:`", on_it[-1].where)
    for c in graph.channels.values():
        if c.initial == 0:
            continue
        if not any(c.sender in _reach(graph, to.stage) for to in c.receivers):
            raise _bad(c, "initial is for feedback, but this channel closes no cycle")
        if not graph.stages[c.sender].signature.has_initial:
            raise _bad(c, f"initial: {c.initial}, but {c.sender} has no initial() to make the first token")
        if c.initial > c.capacity.items:
            raise _bad(c, f"initial: {c.initial} tokens do not fit into a capacity of {c.capacity.items}")


def _joins(channel: ChannelSpec, sender: str, receiver: str) -> bool:
    return channel.sender == sender and any(to.stage == receiver for to in channel.receivers)


def _cycle(channels: list[ChannelSpec]) -> list[str]:
    """Stages around a cycle, the first one also last; empty if there is none."""
    after: dict[str, list[str]] = {}
    for c in channels:
        after.setdefault(c.sender, []).extend(to.stage for to in c.receivers)
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for stage in after.get(path[-1], []):
            if stage in path:
                return [*path[path.index(stage) :], stage]
            found = search([*path, stage]) if stage not in done else []
            if found:
                return found
        done.add(path[-1])
        return []

    return next((found for start in after if start not in done and (found := search([start]))), [])


# --- placement and replicas -------------------------------------------------------------------------------------------


def _every_stage_has_a_worker(graph: Graph) -> None:
    if not graph.workers:
        line = "no workers: take a topology file that extends this one (as graphs/sequential.yaml or "
        line += "graphs/overlapped.yaml extend graphs/dataflow.yaml), or write `workers:`"
        raise BadInput(line, graph.files[-1] if graph.files else "")
    place: dict[str, WorkerSpec] = {}
    for worker in graph.workers.values():
        for stage in worker.stages:
            if stage not in graph.stages:
                raise _bad(worker, f"no stage {stage!r}{nearest(stage, graph.stages)}")
            if stage in place:
                raise _bad(worker, f"stage {stage!r} is on worker {place[stage].name!r} already")
            place[stage] = worker
    for spec in graph.stages.values():
        if spec.name not in place:
            raise _bad(spec, f"it is on no worker (workers: {', '.join(graph.workers)})")


def _workers_suit_their_stages(graph: Graph) -> None:
    for w in graph.workers.values():
        for name in w.stages:
            if graph.stages[name].signature.is_async and w.kind != "async":
                raise _bad(w, f"{name} is `async def`, so the worker needs kind: async")
            if w.kind == "async" and not graph.stages[name].signature.is_async:
                raise _bad(w, f"kind: async, but {name} is not `async def`: it would hold up the event loop")
            if len(w.device[name]) != w.replicas:
                raise _bad(w, f"{len(w.device[name])} devices for {w.replicas} replicas of {name}")
    turns = Counter(w.turn for w in graph.workers.values() if w.turn is not None for _ in range(w.replicas))
    for w in graph.workers.values():
        if w.turn is not None and turns[w.turn] == 1:
            raise _bad(w, f"turn {w.turn!r} is shared with nobody{nearest(w.turn, [t for t in turns if t != w.turn])}")


def _coroutines_share_a_device(graph: Graph) -> None:
    """They share a thread, and what is computed on is a matter of the thread."""
    first: tuple[str, str] | None = None
    for w in graph.workers.values():
        for device in [d for name in w.stages for d in w.device[name]] if w.kind == "async" else []:
            first = first or (w.name, device)
            if device != first[1]:
                raise _bad(w, f"kind: async, on {device}, but {first[0]!r} is on {first[1]}: they share a thread")


def _replicas_keep_the_result(graph: Graph) -> None:
    for w in graph.workers.values():
        if w.replicas == 1:
            if w.order == "completion":
                raise _bad(w, "order: completion needs replicas: one alone completes in input order")
            continue
        for name in w.stages:
            inputs, signature = _inputs(graph, name), graph.stages[name].signature
            windowed = signature.window_output is not None or any(c.per == "window" for c, _ in inputs)
            if signature.source:
                raise _bad(w, f"source {name} cannot be replicated: there is one stream")
            if signature.stateful:
                raise _bad(w, f"{name} has state(), so it cannot be replicated")
            if rate(graph, name) == "window":
                raise _bad(w, f"{name} fires once a window, so there is nothing to deal to its replicas")
            if w.take != "round_robin" and windowed:
                raise _bad(w, f"{name} works in windows: its replicas need take: round_robin")
            if w.take != "round_robin" and sum(c.per == "message" for c, _ in inputs) > 1:
                raise _bad(w, f"{name} joins two per-message ports: its replicas need take: round_robin")
            if windowed and graph.window % w.replicas:
                raise _bad(w, f"window: {graph.window} cannot be dealt evenly to {w.replicas} replicas of {name}")
            if windowed and w.order == "completion":
                raise _bad(w, f"order: completion, but what {name} sends once a window is gathered in replica order")


def _replicas_meet_at_ports(graph: Graph) -> None:
    for c in graph.channels.values():
        sender = _worker(graph, c.sender)
        for to in c.receivers:
            receiver, gather = _worker(graph, to.stage), graph.stages[to.stage].signature.inputs[to.port].gather
            if c.per == "window" and sender.replicas > 1 and not gather:
                raise _bad(c, f"{c.sender} has {sender.replicas} replicas, but {to} does not gather (tuple[X, ...])")
            if c.per == "window" and receiver.replicas > 1 and not c.broadcast:
                raise _bad(c, f"{to.stage} has {receiver.replicas} replicas that all need it: broadcast: true")
            if sender.order == "completion" and sender is not receiver and receiver.replicas > 1:
                raise _bad(c, f"{c.sender} sends in order: completion, which several replicas cannot receive")
    for w in graph.workers.values():
        if w.order == "completion":
            for name in set().union(*(_reach(graph, stage) for stage in w.stages)):
                if sum(c.per == "message" for c, _ in _inputs(graph, name)) > 1:
                    raise _bad(w, f"order: completion would mix up the ports that {name} joins")


# --- state, and what would stall --------------------------------------------------------------------------------------


def _one_stage_has_state(graph: Graph) -> None:
    stateful = [stage for stage in graph.stages.values() if stage.signature.stateful]
    for stage in stateful:
        if stage is not stateful[0]:
            raise _bad(stage, f"it has state(), and so has {stateful[0].name!r}; a snapshot holds one stage's")
        if stage.signature.source:
            raise _bad(stage, "a source has no state(): its cursor is its state")
        sends = any(c.sender == stage.name for c in graph.channels.values())
        if rate(graph, stage.name) == "message" and sends:
            raise _bad(stage, "it has state(), so it must fire once a window, or be the last (others have run ahead)")
    if graph.snapshot is not None and not stateful:
        raise BadInput("snapshot: no stage has state() to save", graph.files[-1] if graph.files else "")


def _nothing_waits_for_ever(graph: Graph) -> None:
    groups = [c for c in graph.channels.values() if c.group > 1]
    for c in groups:
        if c.per == "window":
            raise _bad(c, "group counts messages, but the channel is per window")
        if c.group > c.capacity.items:
            raise _bad(c, f"a group of {c.group} never gathers in a capacity of {c.capacity.items}")
        for to in c.receivers:
            worker = _worker(graph, to.stage)
            feeds = [s for s in worker.stages if s != to.stage and c.sender in _reach(graph, s)]
            if feeds and _worker(graph, c.sender) is not worker:
                message = f"worker {worker.name!r} waits for a group of {c.group} that its own stage {feeds[0]!r} feeds"
                raise _bad(c, message)
    messages, windows = graph.credits.messages, graph.credits.windows
    for c in graph.channels.values():
        waits = any(rate(graph, to.stage) == "message" for to in c.receivers)
        whole_window = c.per == "window" and c.initial == 0 and waits
        if messages is not None and messages < max(c.group, graph.window if whole_window else 1):
            need = f"a group of {c.group}" if c.group > 1 else f"a window of {graph.window}"
            raise _bad(c, f"credits: {messages} messages never make {need}")
        # The last window's messages must be in a whole group with `windows` windows admitted.
        if windows is not None and graph.window % c.group and (windows - 1) * graph.window < c.group - 1:
            raise _bad(c, f"credits: {windows} windows of {graph.window} never complete the last group of {c.group}")


_LAWS: Iterable[Callable[[Graph], None]] = (
    _every_port_is_fed_once,
    _one_source_reaches_all,
    _rates_agree,
    _types_agree,
    _cycles_have_tokens,
    _every_stage_has_a_worker,
    _workers_suit_their_stages,
    _coroutines_share_a_device,
    _replicas_keep_the_result,
    _replicas_meet_at_ports,
    _one_stage_has_state,
    _nothing_waits_for_ever,
)

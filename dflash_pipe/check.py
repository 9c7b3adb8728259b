"""Does the graph make sense as a whole? Everything that can be refused before anything runs.

Each law is a function of the graph that raises `BadInput`; they run in the order in which one relies on the others:
connections, rates, types, cycles, placement, replicas, state, and what would stall.
"""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import Any

from dflash_pipe.counted import counted
from dflash_pipe.errors import BadInput
from dflash_pipe.graph import ChannelSpec, Graph, PortRef
from dflash_pipe.laws import bad, each, feeding, in_to, owner, rate, reach
from dflash_pipe.placement import PLACEMENT

__all__ = ["check", "rate"]


def check(graph: Graph) -> None:
    """Raise `BadInput` for the first law that the graph breaks."""
    for law in _LAWS:
        law(graph)


# --- connections ------------------------------------------------------------------------------------------------------


def _every_port_is_fed_once(graph: Graph) -> None:
    fed: dict[PortRef, ChannelSpec] = {}
    for channel in graph.channels.values():
        for to in channel.receivers:
            if to in fed:
                line = f"port {to} is fed by channel {fed[to].name!r} already"
                raise bad(graph, channel, line, *in_to(channel, to), *in_to(fed[to], to))
            fed[to] = channel
    for stage in graph.stages.values():
        for port in stage.signature.inputs:
            if PortRef(stage.name, port) not in fed:
                ends = each("channels", graph.channels, "to")
                raise bad(graph, stage, f"no channel feeds its port {port!r}", "use", ("channels",), *ends)


def _one_source_reaches_all(graph: Graph) -> None:
    for stage in graph.stages.values():
        if not stage.signature.inputs and not stage.signature.source:
            raise bad(graph, stage, "it has no input port, so it must be a Source", "use")
    sources = [stage for stage in graph.stages.values() if stage.signature.source]
    if not sources:
        where = graph.places.of(*each("stages", graph.stages, "use"), ("stages",))
        raise BadInput("no stage is a source: nothing would ever flow", where)
    if len(sources) > 1:
        line = f"a second source beside {sources[0].name!r}: a graph has one, and one cursor"
        raise bad(graph, sources[1], line, "use", ("stages", sources[0].name, "use"))
    reached = reach(graph, sources[0].name)
    for stage in graph.stages.values():
        if stage.name not in reached:
            ends = [*each("channels", graph.channels, "from"), *each("channels", graph.channels, "to")]
            raise bad(graph, stage, f"source {sources[0].name!r} does not reach it", "use", ("channels",), *ends)


# --- rates and types --------------------------------------------------------------------------------------------------


def _rates_agree(graph: Graph) -> None:
    """Both ends of a channel work at its rate, so every cycle balances."""
    for c in graph.channels.values():
        sender, fires = graph.stages[c.sender].signature, rate(graph, c.sender)
        keys = ("per", "from", ("stages", c.sender, "use"))
        if c.per == "window" and fires == "message" and sender.window_output is None:
            line = f"it is per window, but {c.sender} works per message and has no end_window that returns one"
            raise bad(graph, c, line, *keys)
        if c.per == "message" and fires == "window":
            line = f"it is per message, but {c.sender} reads only per-window channels: it sends once a window"
            raise bad(graph, c, line, *keys, *feeding(graph, c.sender, "per"))
        if _sent(graph, c) is None:
            raise bad(graph, c, f"{c.sender} sends nothing per message (its process returns None)", *keys)
        for to in c.receivers:
            if c.per == "message" and graph.stages[to.stage].signature.inputs[to.port].gather:
                line = f"{to} gathers one payload from each replica, so the channel must be per: window"
                raise bad(graph, c, line, "per", *in_to(c, to), ("stages", to.stage, "use"))
        if c.broadcast and c.per == "message":
            line = "broadcast is for per: window channels (every replica would compute every message)"
            raise bad(graph, c, line, "broadcast", "per")


def _sent(graph: Graph, channel: ChannelSpec) -> Any:
    """The type that travels on a channel."""
    sender = graph.stages[channel.sender].signature
    return sender.window_output if channel.per == "window" and sender.window_output is not None else sender.output


def _types_agree(graph: Graph) -> None:
    for c in graph.channels.values():
        for to in c.receivers:
            port, sent = graph.stages[to.stage].signature.inputs[to.port].type, _sent(graph, c)
            if not _accepts(port, sent):
                line = f"{c.sender} sends {_named(sent)}, but {to} receives {_named(port)}"
                raise bad(graph, c, line, *in_to(c, to), "from", "per", *each("stages", (c.sender, to.stage), "use"))


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
        keys = [("channels", c.name, key) for key in ("initial", "to", "from") for c in reversed(on_it)]
        line = f"a cycle without a token: {' → '.join(cycle)}; give {names} an `initial:`"
        raise BadInput(line, graph.places.of(*keys))
    for c in graph.channels.values():
        if c.initial == 0:
            continue
        if not any(c.sender in reach(graph, to.stage) for to in c.receivers):
            raise bad(graph, c, "initial is for feedback, but this channel closes no cycle", "initial", "from", "to")
        if not graph.stages[c.sender].signature.has_initial:
            line = f"initial: {c.initial}, but {c.sender} has no initial() to make the first token"
            raise bad(graph, c, line, "initial", "from", ("stages", c.sender, "use"))
        if c.initial > c.capacity.items:
            line = f"initial: {c.initial} tokens do not fit into a capacity of {c.capacity.items}"
            raise bad(graph, c, line, "initial", "capacity")


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


# --- state, and what would stall --------------------------------------------------------------------------------------


def _one_stage_has_state(graph: Graph) -> None:
    stateful = [stage for stage in graph.stages.values() if stage.signature.stateful]
    for stage in stateful:
        if stage is not stateful[0]:
            line = f"it has state(), and so has {stateful[0].name!r}; a snapshot holds one stage's"
            raise bad(graph, stage, line, "use", ("stages", stateful[0].name, "use"))
        if stage.signature.source:
            raise bad(graph, stage, "a source has no state(): its cursor is its state", "use")
        sends = [c.name for c in graph.channels.values() if c.sender == stage.name]
        if rate(graph, stage.name) == "message" and sends:
            line = "it has state(), so it must fire once a window, or be the last (others have run ahead)"
            raise bad(graph, stage, line, "use", *each("channels", sends, "from"))
    if graph.snapshot is not None and not stateful:
        raise BadInput("snapshot: no stage has state() to save", graph.places.of(("snapshot",), ("stages",)))


def _nothing_waits_for_ever(graph: Graph) -> None:
    groups = [c for c in graph.channels.values() if c.group > 1]
    for c in groups:
        if c.per == "window":
            raise bad(graph, c, "group counts messages, but the channel is per window", "group", "per")
        if c.group > c.capacity.items:
            line = f"a group of {c.group} never gathers in a capacity of {c.capacity.items}"
            raise bad(graph, c, line, "group", "capacity")
        for to in c.receivers:
            worker = owner(graph, to.stage)
            feeds = [s for s in worker.stages if s != to.stage and c.sender in reach(graph, s)]
            if feeds and owner(graph, c.sender) is not worker:
                message = f"worker {worker.name!r} waits for a group of {c.group} that its own stage {feeds[0]!r} feeds"
                raise bad(graph, c, message, "group", *each("workers", (worker.name,), "stages"))
    messages, windows = graph.credits.messages, graph.credits.windows
    for c in graph.channels.values():
        waits = any(rate(graph, to.stage) == "message" for to in c.receivers)
        whole_window = c.per == "window" and c.initial == 0 and waits
        if messages is not None and messages < max(c.group, graph.window if whole_window else 1):
            need = f"a group of {c.group}" if c.group > 1 else f"a window of {graph.window}"
            line = f"credits: {counted(messages, 'message')} cannot make {need}"
            raise bad(graph, c, line, ("credits", "messages"), "group", ("window",), "per")
        # The last window's messages must be in a whole group with `windows` windows admitted.
        if windows is not None and graph.window % c.group and (windows - 1) * graph.window < c.group - 1:
            admitted = f"{counted(windows, 'window')} of {graph.window}"
            line = f"credits: {admitted} cannot complete the last group of {c.group}"
            raise bad(graph, c, line, ("credits", "windows"), "group", ("window",))


_LAWS: Iterable[Callable[[Graph], None]] = (
    _every_port_is_fed_once,
    _one_source_reaches_all,
    _rates_agree,
    _types_agree,
    _cycles_have_tokens,
    *PLACEMENT,
    _one_stage_has_state,
    _nothing_waits_for_ever,
)

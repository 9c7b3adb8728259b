"""How many payloads lie on each device at most: those on their way between stages, and in the hands of either end.

They lie on the receiver's device from the moment they are sent. That no run has more is tested with real workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from dflash_pipe.graph import ChannelSpec, Graph
from dflash_pipe.plan import Plan, RoutePlan, StationPlan
from dflash_pipe.stage import Footprint

__all__ = ["around", "downstream", "messages", "upstream"]


def messages(plan: Plan, prints: Mapping[tuple[str, int], Footprint]) -> Iterator[tuple[str, str, int, int]]:
    """(device, channel, how many, bytes of each) of what is on its way, or in the hands of those at the ends, at most.

    A payload that goes into several channels lies there once on its sender's device; towards another one each channel
    copies it by itself.
    """
    shared: dict[tuple[str, str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for (device, name), (channel, count, size) in _counted(plan, prints).items():
        if {device} == set(_devices(plan, channel.sender)) and _in_step(plan, channel):
            shared[device, channel.sender, channel.per].append((count, size, name))
        else:
            yield device, name, count, size
    for (device, _, _), found in shared.items():
        count, size, name = max(found)
        yield device, name, count, size


def _in_step(plan: Plan, channel: ChannelSpec) -> bool:
    """Whether what lies in the channel are the sender's newest payloads: as many of them lie in any other."""
    ends = [channel.sender, *(to.stage for to in channel.receivers)]
    return _tokens(plan.graph, channel) is not None or all(len(_devices(plan, stage)) == 1 for stage in ends)


def _counted(
    plan: Plan, prints: Mapping[tuple[str, int], Footprint]
) -> dict[tuple[str, str], tuple[ChannelSpec, int, int]]:
    """(device, channel's name) -> the channel, how many of its payloads lie there at most, and the bytes of one."""
    found: dict[tuple[str, str], tuple[ChannelSpec, int, int]] = {}
    for route in plan.routes:
        channel = route.channel
        own = prints[channel.sender, 0]
        end_window = channel.per == "window" and plan.graph.stages[channel.sender].signature.window_output is not None
        size = own.window_sent if end_window else own.sent
        for device, count in (*_received(plan, route, size), *_made(plan, route)) if size else ():
            before = found[device, channel.name][1] if (device, channel.name) in found else 0
            found[device, channel.name] = channel, before + count, size
    return found


def _received(plan: Plan, route: RoutePlan, size: int) -> Iterator[tuple[str, int]]:
    """(device, how many payloads lie there at most) where a route leads to, and on the host in between.

    A sender brings its next payload there before it waits for room. Where several replicas take whatever comes first,
    and not all on one device, payloads stay where they were made until they are taken.
    """
    senders, receivers = _devices(plan, route.channel.sender), _devices(plan, route.to.stage)
    waiting, tokens = _waiting(plan, route, size), _tokens(plan.graph, route.channel)
    # A stage that fires per message keeps the last one of a window until the next is there.
    kept = route.channel.per == "window" and _stations(plan, route.to.stage)[0].rate == "message"
    if route.kind == "shared" and len(receivers) > 1:
        lies = [(receivers[0], waiting + len(receivers))]
        if len(set(receivers)) > 1:
            lies = [(device, waiting + len(receivers)) for device in dict.fromkeys(senders)]
            lies += [(device, 1) for device in receivers]
    else:
        count = waiting + 1 + kept
        if tokens is not None:  # around a cycle, never more
            count = min(count, tokens + (route.feedback or kept))
        lies = [(device, count * (len(senders) if route.kind == "gathered" else 1)) for device in receivers]
    for device, count in lies:
        yield device, count
        if any(plan.graph.transport.through_host(sender, device) for sender in senders):
            yield "cpu", count


def _made(plan: Plan, route: RoutePlan) -> Iterator[tuple[str, int]]:
    """(device, payloads) of senders on other devices than the receivers: one is being made while the last is copied.

    Not within a worker, which has finished on one device before it turns to another. A source is read one ahead if a
    last window may be partial, and a worker keeps what its source gave last until the next is read.
    """
    receivers, tokens = _devices(plan, route.to.stage), _tokens(plan.graph, route.channel)
    local = route.kind == "local"
    if plan.graph.stages[route.channel.sender].signature.source:
        yield _devices(plan, route.channel.sender)[0], (plan.graph.partial_window == "keep") + local
    if route.kind == "shared" and len(set(receivers)) > 1:
        return  # all are waiting there
    for number, sender in enumerate(_devices(plan, route.channel.sender)):
        towards = {receivers[number]} if local else set(receivers)
        # Around a cycle, the one that is about to be put in is the one that was made.
        if towards != {sender} and not (tokens is not None and sender in towards):
            made = 1 + route.channel.initial if local else 2
            yield sender, made if tokens is None else min(made, tokens)


def _waiting(plan: Plan, route: RoutePlan, size: int) -> int:
    """Payloads of `size` bytes between the ends of a route, at most; for each of its queues."""
    if route.kind == "local":
        return route.channel.initial
    room, graph = route.channel.capacity, plan.graph
    items = room.items if room.bytes is None else max(1, min(room.items, -(-room.bytes // size)))
    items += 1 if route.kind == "gathered" else route.senders  # each is about to put one in
    if route.restamp:
        items += route.channel.group - 1  # the rest of a group, in the receiver's hands
    if route.merge:
        bounds = [w.reorder for w in plan.workers if w.reorder and route in plan.merges_behind(w.spec)]
        items = min(bounds) if bounds else items + _ahead(plan, route)
    if route.channel.per == "message" and graph.credits.messages is not None:
        items = min(items, graph.credits.messages)
    return items


def _ahead(plan: Plan, route: RoutePlan) -> int:
    """What a merge holds at most behind replicas that messages are dealt to: what all of them were dealt while one
    works on a message and its queue fills."""
    stages = next(w.spec.stages for w in plan.workers if route.channel.sender in w.spec.stages)
    before = upstream(plan.graph, route.channel.sender)
    dealt = [r for r in plan.routes if r.kind == "dealt" and r.to.stage in stages and r.channel.sender in before]
    even = plan.graph.window % route.senders == 0  # otherwise a replica may be passed over for nearly twice as long
    return min(_waiting(plan, r, 1) + 1 for r in dealt) * (route.senders if even else 2 * route.senders - 1)


def _tokens(graph: Graph, channel: ChannelSpec) -> int | None:
    """How many messages can be around the cycle that a per-window channel lies on; None if it lies on none."""
    if channel.per != "window":
        return None
    for feedback in graph.channels.values():
        cycle = around(graph, feedback) if feedback.initial and feedback.per == "window" else set()
        if channel.sender in cycle and (channel is feedback or any(to.stage in cycle for to in channel.receivers)):
            return feedback.initial
    return None


def _stations(plan: Plan, stage: str) -> list[StationPlan]:
    """Of each replica of a stage."""
    return [station for worker in plan.workers for station in worker.stations if station.stage == stage]


def _devices(plan: Plan, stage: str) -> list[str]:
    return [station.device for station in _stations(plan, stage)]


# --- ways through the dataflow, feedback aside ------------------------------------------------------------------------


def around(graph: Graph, feedback: ChannelSpec) -> set[str]:
    """The stages on the cycles that a feedback channel closes."""
    return downstream(graph, {to.stage for to in feedback.receivers}) & upstream(graph, feedback.sender)


def upstream(graph: Graph, stage: str) -> set[str]:
    """The stage and all whose messages it depends on."""
    return _reached([(to, sender) for sender, to in _steps(graph)], {stage})


def downstream(graph: Graph, stages: set[str]) -> set[str]:
    """The stages and all that depend on their messages."""
    return _reached(_steps(graph), stages)


def _steps(graph: Graph) -> list[tuple[str, str]]:
    return [(c.sender, to.stage) for c in graph.channels.values() if c.initial == 0 for to in c.receivers]


def _reached(steps: Sequence[tuple[str, str]], begin: set[str]) -> set[str]:
    reached, before = set(begin), set[str]()
    while reached != before:
        before = set(reached)
        reached |= {to for sender, to in steps if sender in before}
    return reached

"""What a profile tells of handing messages over, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from dflash_pipe.critical import Cycle
from dflash_pipe.graph import Graph, transport_of
from dflash_pipe.plan import Plan, RoutePlan
from dflash_pipe.profile import LATER, Profile, Samples, Way
from dflash_pipe.simulate import ways

__all__ = ["in_no_time", "samples_of", "sized", "slow", "taken", "unknown"]

# Hand-offs of less than this share of a step are not worth a word.
_WORTH = 0.01


def samples_of(profile: Profile) -> dict[tuple[str, Way], Samples]:
    """By channel and way."""
    return {(channel, way): samples for channel, each in profile.handed.items() for way, samples in each.items()}


def taken(profile: Profile) -> dict[tuple[str, Way], list[tuple[float, float]]]:
    """Every hand-off at its mean: seconds that it keeps the sender, and until the message is there after that."""
    return {key: [(samples.mean, fmean(samples.measures[LATER]))] for key, samples in samples_of(profile).items()}


def in_no_time(profile: Profile, channel: str) -> Profile:
    """The profile as if a channel's hand-offs took no time."""
    at_once = {way: Samples(1, 0.0, (0,), (0.0,), {LATER: (0.0,)}) for way in profile.handed.get(channel, ())}
    return replace(profile, handed=profile.handed | {channel: at_once}) if at_once else profile


def slow(graph: Graph, profile: Profile, step: float) -> list[str]:
    """Channels between workers of which a window's hand-offs take longer than a hundredth of a step."""
    placed = {stage: worker.name for worker in graph.workers.values() for stage in worker.stages}
    known, found = taken(profile), []
    for channel in graph.channels.values():
        longest = max((sum(each[0]) for (name, _), each in known.items() if name == channel.name), default=0.0)
        in_window = graph.window if channel.per == "message" else 1
        between = any(placed[to.stage] != placed[channel.sender] for to in channel.receivers)
        found += [channel.name] * (between and longest * in_window > _WORTH * step)
    return found


def sized(graph: Graph, profile: Profile, step: float) -> Iterator[str]:
    """In words, which hand-offs matter and grow with the messages: a forecast takes them as they were."""
    if names := [name for name in slow(graph, profile, step) if graph.channels[name].per == "message"]:
        yield f"handing {', '.join(names)} over is forecast as it was measured, whatever the size"


def unknown(plan: Plan, profile: Profile, cycle: Cycle) -> Iterator[str]:
    """In words, what the workers on the critical cycle hand over in a way that the profile has no time for."""
    if transport_of(plan.graph) is None:  # then it takes none
        return
    on_cycle = {leg.worker for leg in cycle.legs}
    senders = {station.stage for w in plan.workers if w.name in on_cycle for station in w.stations}
    routes = [route for route in plan.routes if route.kind != "local" and route.channel.sender in senders]
    known = taken(profile)
    found = [r.name for r in routes if any((r.channel.name, way) not in known for way in _ways(plan, r))]
    if found:
        yield f"what it takes to hand over {', '.join(found)} is not in the profile"


def _ways(plan: Plan, route: RoutePlan) -> set[Way | None]:
    return {way for replica in range(route.senders) for way in ways(plan, route, replica)}

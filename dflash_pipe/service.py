"""Service times for a simulation, from a profile: as constants, or drawn again from the samples.

Draws are keyed by seed and message, not by stage: a message that was long is long for every stage, and two plans that
are compared see the same messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dflash_pipe.exclusive import shared_cores
from dflash_pipe.hand_offs import samples_of, taken
from dflash_pipe.plan import Plan
from dflash_pipe.profile import LATER, Part, Profile, Samples, Way
from dflash_pipe.simulate import Times
from dflash_pipe.sizes import SENT

__all__ = ["constant_times", "drawn_times", "replicas_busy", "sped_up", "uncontended", "varies"]

# A part whose times spread less than this share of their mean is constant for the forecast.
_STEADY = 0.01


def replicas_busy(profile: Profile, plan: Plan, stage: str) -> float:
    """How many replicas of a stage were busy at a time, on average. plan: that was profiled."""
    worker = next(worker for worker in plan.workers if stage in worker.spec.stages)
    rate = next(station.rate for station in worker.stations if station.stage == stage)
    seconds = 0.0  # for a step
    for part, samples in profile.stages[stage].items():
        firings = worker.spec.replicas if part == "end_window" else 1 if rate == "window" else profile.window
        seconds += samples.mean * firings
    for channel, ways in profile.handed.items():
        if plan.graph.channels[channel].sender == stage:
            seconds += sum(samples.total for samples in ways.values()) / profile.steps.count
    return seconds / profile.steps.mean


def uncontended(profile: Profile, plan: Plan) -> Profile:
    """The profile without what its stages cost each other on devices that they shared, and what its CPU stages waited
    for cores. plan: that was profiled.

    Where more of them were busy at a time than the cores have room for, each got its share only.
    """
    profile = _alone_on_devices(profile)
    host = profile.host
    shared = shared_cores(plan, host.cores, host.stages) if host is not None else {}
    if not shared:
        return profile
    room = next(iter(shared.values())).room
    stages = {stage for stage, _ in shared if stage in profile.stages}
    busy = sum(replicas_busy(profile, plan, stage) for stage in stages)
    for stage in stages if busy > room else ():
        profile = sped_up(profile, stage, room / busy)
    return profile


def _alone_on_devices(profile: Profile) -> Profile:
    stages: dict[str, dict[Part, Samples]] = {
        stage: {part: _own(samples) if sum(samples.own) else samples for part, samples in parts.items()}
        for stage, parts in profile.stages.items()
    }
    return replace(profile, stages=stages)


def _own(samples: Samples) -> Samples:
    total = samples.total * sum(samples.own) / sum(samples.seconds)
    return replace(samples, total=total, seconds=samples.own, own=())


def sped_up(profile: Profile, stage: str, factor: float) -> Profile:
    """The profile as if everything the stage does took `factor` times as long."""
    parts = {
        part: replace(s, total=s.total * factor, seconds=tuple(x * factor for x in s.seconds))
        for part, s in profile.stages[stage].items()
    }
    return replace(profile, stages={**profile.stages, stage: parts})


# --- times for a simulation -------------------------------------------------------------------------------------------


def varies(profile: Profile) -> bool:
    """Whether any part that matters (1 % of all work) takes a different time every time."""
    parts = [samples for stage in profile.stages.values() for samples in stage.values()]
    total = sum(samples.total for samples in parts)
    spent = [(samples.count, np.array(samples.seconds)) for samples in parts]
    spent += [(s.count, np.add(s.seconds, s.measures[LATER])) for s in samples_of(profile).values()]
    matter = (seconds for count, seconds in spent if count * np.mean(seconds) > 0.01 * total)
    return any(np.std(seconds) > _STEADY * np.mean(seconds) for seconds in matter)


def constant_times(profile: Profile) -> Times:
    """Every part at its mean."""
    seconds: dict[tuple[str, str], Sequence[float]] = {
        (stage, part): (s.mean,) for stage, parts in profile.stages.items() for part, s in parts.items()
    }
    sent = {stage: samples for stage, samples in _messages(profile) if SENT in samples.measures}
    nbytes = {stage: (round(float(np.mean(s.measures[SENT]))),) for stage, s in sent.items()}
    return Times(seconds, nbytes, taken(profile))


def drawn_times(profile: Profile, plan: Plan, *, windows: int, seed: int) -> Times:
    """Times for `windows` windows, each message drawn from those in the profile."""
    messages = windows * plan.graph.window
    replicas = {stage: worker.spec.replicas for worker in plan.workers for stage in worker.spec.stages}
    rates = {station.stage: station.rate for worker in plan.workers for station in worker.stations}
    seconds: dict[tuple[str, str], Sequence[float]] = {}
    nbytes: dict[str, Sequence[int]] = {}
    draws = _Draws(profile, {stage for stage, rate in rates.items() if rate == "window"}, seed)
    for stage, parts in profile.stages.items():
        for part, samples in parts.items():
            if stage not in rates:
                continue
            once = part == "end_window" or rates[stage] == "window"
            size = windows * replicas[stage] if once else messages
            chosen = draws.of(stage, part, size)
            seconds[stage, part] = _kept(samples)[chosen].tolist()
            if SENT in samples.measures and part != "end_window":
                nbytes[stage] = np.array(samples.measures[SENT])[chosen].astype(int).tolist()
    return Times(seconds, nbytes, _drawn_hand_offs(profile, messages, seed))


def _drawn_hand_offs(profile: Profile, size: int, seed: int) -> dict[tuple[str, Way], list[tuple[float, float]]]:
    drawn = {}
    for (channel, way), samples in samples_of(profile).items():
        own = zlib.crc32(f"{channel}/{way}".encode())
        chosen = _shuffled(np.random.default_rng([seed, own]), len(samples.seconds), size)
        held, later = _kept(samples)[chosen].tolist(), np.array(samples.measures[LATER])[chosen].tolist()
        drawn[channel, way] = list(zip(held, later, strict=True))
    return drawn


def _kept(samples: Samples) -> NDArray[np.float64]:
    """The seconds that were kept; what was measured and not kept counts in their mean."""
    kept = np.array(samples.seconds)
    return kept * (samples.mean / kept.mean() if kept.mean() else 1.0)


def _messages(profile: Profile) -> list[tuple[str, Samples]]:
    """What each stage does for a message (or, of one that fires once a window, for a window)."""
    return [(stage, s) for stage, parts in profile.stages.items() for part, s in parts.items() if part != "end_window"]


class _Draws:
    """Which sample stands for which message: one drawn message for all stages that kept it, else each by itself."""

    def __init__(self, profile: Profile, once: set[str], seed: int) -> None:
        self._profile, self._seed = profile, seed
        per_message = [set(samples.index) for stage, samples in _messages(profile) if stage not in once]
        common = set.intersection(*per_message) if per_message else set()
        fewest = min(map(len, per_message), default=0)
        self._common = np.array(sorted(common)) if 2 * len(common) >= fewest else np.array([], dtype=int)
        self._once = once

    def of(self, stage: str, part: Part, size: int) -> NDArray[np.int64]:
        """Positions in the part's samples, `size` of them."""
        index = self._profile.stages[stage][part].index
        if part == "end_window" or stage in self._once or not len(self._common):
            own = zlib.crc32(f"{stage}/{part}".encode())
            return _shuffled(np.random.default_rng([self._seed, own]), len(index), size)
        chosen = _shuffled(np.random.default_rng(self._seed), len(self._common), size)
        places: NDArray[np.int64] = np.searchsorted(index, self._common)
        return places[chosen]


def _shuffled(draw: np.random.Generator, count: int, size: int) -> NDArray[np.int64]:
    """`size` of `count` places, each as often as the others: a plain draw would have a mean of its own."""
    shuffled = np.concatenate([draw.permutation(count) for _ in range(-(-size // count))])
    return np.resize(shuffled, size)

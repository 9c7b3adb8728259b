"""Service times for a simulation, from a profile: as constants, drawn again from the samples, or fitted to other sizes.

Draws are keyed by seed and message, not by stage: a message that was long is long for every stage, and two plans that
are compared see the same messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash_pipe.plan import Plan
from dflash_pipe.profile import Part, Profile, Samples
from dflash_pipe.simulate import Times

__all__ = ["Fit", "constant_times", "drawn_times", "fit", "resized", "sped_up", "varies"]

_SENT = "sent_bytes"
# A part whose times spread less than this share of their mean is constant for the forecast.
_STEADY = 0.01


# --- fitting to measures ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """seconds = at_zero + sum of slope x measure. No slope is negative: more work never takes less time."""

    at_zero: float
    slopes: dict[str, float]


def fit(samples: Samples) -> Fit:
    """Least squares over the measures that vary; what lowers the time is left out and the rest fitted again."""
    seconds = np.array(samples.seconds)
    names = [name for name, values in samples.measures.items() if name != _SENT and np.ptp(values) > 0]
    while names:
        columns = np.array([samples.measures[name] for name in names]).T
        scale = columns.max(axis=0)
        table = np.column_stack([np.ones(len(seconds)), columns / scale])
        solved = np.linalg.lstsq(table, seconds, rcond=1e-9)[0]
        slopes = dict(zip(names, (solved[1:] / scale).tolist(), strict=True))
        worst = min(names, key=lambda name: slopes[name] * samples.measures[name][0])
        if slopes[worst] >= 0:
            return Fit(float(solved[0]), slopes)
        names.remove(worst)
    return Fit(float(seconds.mean()), {})


def resized(samples: Samples, factors: Mapping[str, float]) -> tuple[Samples, str]:
    """The samples as if each measure had been `factor` times as much; and a remark if that was never measured.

    Every sample keeps its own deviation from the fit. Raises ValueError if a measure never varied: no slope is known.
    """
    factors = {name: factor for name, factor in factors.items() if name in samples.measures and factor != 1.0}
    slopes = fit(samples).slopes
    seconds, outside = np.array(samples.seconds), []
    for name, factor in factors.items():
        values = np.array(samples.measures[name])
        if np.ptp(values) == 0 and name != _SENT:
            raise ValueError(f"{name} was always {values[0]:g} in the profile, so its effect is not known")
        seconds += slopes.get(name, 0.0) * values * (factor - 1.0)
        if values.min() * factor < values.min() or values.max() * factor > values.max():
            outside.append(f"{name} {values.min():g} to {values.max():g} was measured")
    times = np.maximum(seconds, 0.0)
    total = samples.total * float(times.sum()) / (sum(samples.seconds) or 1.0)
    measures = {n: tuple(v * factors.get(n, 1.0) for v in values) for n, values in samples.measures.items()}
    changed = replace(samples, seconds=tuple(times.tolist()), total=total, measures=measures)
    return changed, f"extrapolated ({', '.join(outside)})" if outside else ""


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
    return any(s.total > 0.01 * total and np.std(s.seconds) > _STEADY * np.mean(s.seconds) for s in parts)


def constant_times(profile: Profile) -> Times:
    """Every part at its mean."""
    seconds: dict[tuple[str, str], Sequence[float]] = {
        (stage, part): (s.mean,) for stage, parts in profile.stages.items() for part, s in parts.items()
    }
    sent = {stage: samples for stage, samples in _messages(profile) if _SENT in samples.measures}
    return Times(seconds, {stage: (round(float(np.mean(s.measures[_SENT]))),) for stage, s in sent.items()})


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
            kept = np.array(samples.seconds)
            # What was measured and not kept counts in the mean.
            kept *= samples.mean / kept.mean() if kept.mean() else 1.0
            seconds[stage, part] = kept[chosen].tolist()
            if _SENT in samples.measures and part != "end_window":
                nbytes[stage] = np.array(samples.measures[_SENT])[chosen].astype(int).tolist()
    return Times(seconds, nbytes)


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

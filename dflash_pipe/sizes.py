"""What changed keys do to the size of messages, and so to the service times: fitted to the sizes that a profile knows.

Payloads and stages say how large a piece of work was: `measures`, name -> amount (tokens, anchors). A key `max_NAME` or
`num_NAME` is about the measure NAME. The source's scales whole messages, and with them every measure of every stage, if
it is the only limit there or all of them scale alike: which of several limits binds, a profile cannot tell. Another
stage's allows so many in a row. What any other key does to the time, a profile cannot tell either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipe.errors import BadInput
from dflash_pipe.graph import Graph
from dflash_pipe.profile import Part, Profile, Samples

__all__ = ["SENT", "Fit", "Sizes", "fit", "resized", "sizes", "telling_keys"]

SENT = "sent_bytes"
# Measures that count without being work; they stand for it where there is no other.
_COUNTS = {"rows", "supervised"}
# Parts with less of all work than this are taken as they are.
_SLIGHT = 0.01
# A change is doubtful where the fit leaves more than this share of all work open.
_OPEN = 0.02
Floats = NDArray[np.float64]


# --- from keys to sizes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What changed keys make of messages. everywhere: factor on every measure of every stage. limits: stage ->
    measure -> (was, is) so many in a row at most. unknown: changed keys of which a profile tells nothing, in words."""

    everywhere: float
    limits: dict[str, dict[str, tuple[float, float]]]
    unknown: tuple[str, ...]


def sizes(before: Graph, after: Graph, profile: Profile) -> Sizes:
    """What keys that differ do to the sizes that are in the profile. Keys that only refer to another are not told."""
    growth, limits, unknown = dict[str, float](), dict[str, dict[str, tuple[float, float]]](), list[str]()
    for key in ("threads", "snapshot"):
        if (was := getattr(before, key)) != (now := getattr(after, key)):
            unknown.append(f"{key} ({was} -> {now})")
    for stage, key, was, now in _changed(before, after):
        old, new = _size_keys(before, profile, stage), _size_keys(after, profile, stage)
        source = after.stages[stage].signature.source
        if key not in old or key not in new or (source and not _scale_alike(old, new)):
            unknown.append(f"{stage}.{key} ({was!r} -> {now!r})")
        elif source:
            growth[stage] = now / was
        else:
            limits.setdefault(stage, {})[_measure(key)] = (was, now)
    return Sizes(math.prod(growth.values()), limits, tuple(unknown))


def telling_keys(graph: Graph, profile: Profile) -> Iterator[tuple[str, str, int]]:
    """Keys of which the profile may tell what they do by themselves: stage, key and what it is now."""
    for name, stage in graph.stages.items():
        keys = _size_keys(graph, profile, name)
        if not stage.signature.source or len(keys) == 1:
            yield from ((name, key, value) for key, value in keys.items() if isinstance(value, int))


def _changed(before: Graph, after: Graph) -> Iterator[tuple[str, str, Any, Any]]:
    for name in sorted(before.stages.keys() & after.stages.keys()):
        old, new = before.stages[name], after.stages[name]
        written = [graph.resolved["stages"][name].get("with") or {} for graph in (before, after)]
        for key, (_, default) in new.signature.parameters.items():
            was, now = old.parameters.get(key, default), new.parameters.get(key, default)
            alike = key in written[0] and written[0][key] == written[1].get(key)
            if was != now and not alike:
                yield name, key, was, now


def _size_keys(graph: Graph, profile: Profile, stage: str) -> dict[str, float]:
    """What a stage's keys are that limit a measure which the profile has of it."""
    spec = graph.stages[stage]
    known = {measure for samples in profile.stages.get(stage, {}).values() for measure in samples.measures}
    values = {key: spec.parameters.get(key, default) for key, (_, default) in spec.signature.parameters.items()}
    return {key: value for key, value in values.items() if _measure(key) in known and _is_size(value)}


def _scale_alike(old: Mapping[str, float], new: Mapping[str, float]) -> bool:
    return old.keys() == new.keys() and len({new[key] / old[key] for key in old}) == 1


def _measure(key: str) -> str:
    """The measure that a key is about by its name; "" if it is about none."""
    prefix, _, measure = key.partition("_")
    return measure if prefix in ("max", "num") else ""


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


# --- from sizes to times ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """seconds = at_zero + sum of slope x measure. None of them is negative: no work takes less time than none."""

    at_zero: float
    slopes: dict[str, float]


def fit(samples: Samples) -> Fit:
    """Least squares over the measures that vary; what comes out negative is left out and the rest fitted again."""
    seconds = np.array(samples.seconds)
    columns = {name: np.array(samples.measures[name]) for name in _work(samples)}
    columns = {"": np.ones(len(seconds))} | {name: held for name, held in columns.items() if np.ptp(held) > 0}
    while columns:
        scale = np.array([held.max() for held in columns.values()])
        table = np.column_stack(list(columns.values())) / scale
        solved = np.linalg.lstsq(table, seconds, rcond=1e-9)[0]
        if solved.min() >= 0:
            slopes = dict(zip(columns, (solved / scale).tolist(), strict=True))
            return Fit(slopes.pop("", 0.0), slopes)
        del columns[list(columns)[int(solved.argmin())]]
    return Fit(0.0, {})


def resized(profile: Profile, change: Sizes) -> tuple[Profile, list[str]]:
    """The profile as a run with such messages would have left it, and what makes that doubtful, in words.

    Every sample keeps its own deviation from the fit. Raises BadInput where the profile does not tell what the change
    does: a measure that never varied, or went along with the others, or times that vary for other reasons.
    """
    all_work = sum(samples.total for parts in profile.stages.values() for samples in parts.values())
    stages, outside, squares = dict(profile.stages), dict[str, None](), 0.0
    for stage, parts in profile.stages.items():
        new: dict[Part, Samples] = {}
        for part, samples in parts.items():
            amounts = _amounts(samples, change.everywhere, change.limits.get(stage, {}))
            try:
                new[part], beyond, left = _resized(samples, amounts, samples.total < _SLIGHT * all_work)
            except ValueError as error:
                raise BadInput(f"{stage}: {error}") from None
            outside |= dict.fromkeys(beyond)
            squares += (left * samples.count) ** 2
        stages[stage] = new
    share = math.sqrt(squares) / (all_work or 1.0)
    effect = abs(sum(s.total for parts in stages.values() for s in parts.values()) / (all_work or 1.0) - 1.0)
    if share > max(_OPEN, effect):
        raise BadInput(
            "the measured times do not tell its effect from noise "
            "(a longer run, on a quiet machine, of messages that differ more, may)"
        )
    remarks = [f"extrapolated: measured were {', '.join(outside)}"] if outside else []
    if share > _OPEN:
        remarks.append(f"± {share:.0%}, by the fit to sizes")
    return replace(profile, stages=stages), remarks


def _work(samples: Samples) -> list[str]:
    """Measures that the time may depend on."""
    names = [name for name in samples.measures if name != SENT]
    return [name for name in names if name not in _COUNTS] or names


def _amounts(samples: Samples, everywhere: float, limits: Mapping[str, tuple[float, float]]) -> dict[str, Floats]:
    """measure -> how much of it each sample would have had."""
    amounts = {name: np.array(values) for name, values in samples.measures.items()}
    for name, (was, now) in limits.items():
        if name in amounts and "rows" in amounts:
            held, rows = amounts[name], amounts["rows"]
            full = held >= was * rows * (1 - 1e-9)  # rows that had less are not filled by a higher limit
            amounts[name] = np.where(full, now * rows, np.minimum(held, now * rows))
        elif name in amounts:
            amounts[name] = amounts[name] * (now / was)
    return {name: held * everywhere for name, held in amounts.items()}


def _resized(samples: Samples, amounts: Mapping[str, Floats], slight: bool) -> tuple[Samples, list[str], float]:
    """The samples with these amounts; what lies outside of what was measured; how far off the mean may be (95 %)."""
    measures = {name: tuple(held.tolist()) for name, held in amounts.items()}
    changed = [name for name in _work(samples) if measures[name] != samples.measures[name]]
    if not changed or slight:
        return replace(samples, measures=measures), [], 0.0
    left = _uncertainty(samples, changed, amounts)
    slopes, seconds, outside = fit(samples).slopes, np.array(samples.seconds), []
    for name in changed:
        old, new = np.array(samples.measures[name]), amounts[name]
        seconds += slopes.get(name, 0.0) * (new - old)
        if new.min() < old.min() or new.max() > old.max():
            outside.append(f"{name} {old.min():g} to {old.max():g}")
    times = np.maximum(seconds, 0.0)
    total = samples.total * float(times.sum()) / (sum(samples.seconds) or 1.0)
    return replace(samples, seconds=tuple(times.tolist()), total=total, measures=measures), outside, left


def _uncertainty(samples: Samples, changed: list[str], amounts: Mapping[str, Floats]) -> float:
    """Two standard errors of the mean change that least squares over all measures gives, in seconds.

    Raises ValueError where the change goes in a direction in which the measures did not vary.
    """
    for name in changed:
        if min(samples.measures[name]) == max(samples.measures[name]):
            value = samples.measures[name][0]
            raise ValueError(f"{name} was always {value:g} in the profile, so its effect is not known")
    names = _work(samples)
    columns = np.array([samples.measures[name] for name in names]).T
    mean, scale = columns.mean(axis=0), np.maximum(columns.max(axis=0), 1e-30)
    table, seconds = (columns - mean) / scale, np.array(samples.seconds)
    free = len(seconds) - len(names) - 1
    if free < 1:
        raise ValueError(f"{len(seconds)} messages are too few to tell the effect of {', '.join(changed)}")
    _, spread, axes = np.linalg.svd(table, full_matrices=False)
    along = axes @ ((np.array([amounts[name].mean() for name in names]) - mean) / scale)
    varied = spread > 1e-6 * spread[0]
    if np.abs(along[~varied]).sum() > 1e-6 * np.abs(along).sum():
        raise ValueError(f"{', '.join(changed)} only varied together with others, so the effect is not known")
    solved = np.linalg.lstsq(table, seconds - seconds.mean(), rcond=1e-9)[0]
    variance = np.square(seconds - seconds.mean() - table @ solved).sum() / free
    return 2.0 * math.sqrt(variance * np.square(along[varied] / spread[varied]).sum())

"""What changed keys do to the size of messages, and so to the service times: fitted to the sizes that a profile knows.

Payloads and stages say how large a piece of work was: `measures`, name -> amount (tokens, anchors). A key `max_NAME` or
`num_NAME` is about the measure NAME. The source's scales whole messages, and with them every measure of every stage, if
it is the only limit there or all of them scale alike: which of several limits binds, a profile cannot tell. Another
stage's allows so many in a row. What any other key does to the time, a profile cannot tell either, unless the stage
says that it changes none (`Stage.untimed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
# A change is noise where the fit leaves more than this share of all work open, and more than it changes.
_OPEN = 0.02
# A fit is trusted within this share of what it says of a change, and outside of what was measured within all of it.
_TRUSTED = 0.3
# Beyond so many times what was measured, a fit says nothing.
_FAR = 2.0
Floats = NDArray[np.float64]


# --- from keys to sizes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What changed keys make of messages. everywhere: factor on every measure of every stage. limits: stage ->
    measure -> (was, is) so many in a row at most."""

    everywhere: float = 1.0
    limits: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)


def sizes(before: Graph, after: Graph, profile: Profile) -> Sizes:
    """What keys that differ do to the sizes that are in the profile (of `before`).

    Raises BadInput where a profile does not tell that: another stage, or a key of which no size follows.
    """
    growth, limits, unknown = dict[str, float](), dict[str, dict[str, tuple[float, float]]](), list[str]()
    if before.threads != after.threads:
        unknown.append(f"threads ({before.threads} -> {after.threads})")
    for stage, key, was, now in _changed(before, after):
        old, new = _size_keys(before, profile, stage), _size_keys(after, profile, stage)
        source = after.stages[stage].signature.source
        if key not in old or key not in new or (source and not _scale_alike(old, new)):
            unknown.append(f"{stage}.{key} ({was!r} -> {now!r})")
        elif source:
            growth[stage] = now / was
        else:
            limits.setdefault(stage, {})[_measure(key)] = (was, now)
    if unknown:
        told = f"what {', '.join(unknown)} {'does' if len(unknown) == 1 else 'do'} to the time"
        raise BadInput(f"the profile does not tell {told}; profile a run with it")
    return Sizes(math.prod(growth.values()), limits)


def telling_keys(graph: Graph, profile: Profile) -> Iterator[tuple[str, str, int]]:
    """Keys of which the profile may tell what they do by themselves: stage, key and what it is now."""
    for name, stage in graph.stages.items():
        keys = _size_keys(graph, profile, name)
        if not stage.signature.source or len(keys) == 1:
            yield from ((name, key, value) for key, value in keys.items() if isinstance(value, int))


def _changed(before: Graph, after: Graph) -> Iterator[tuple[str, str, Any, Any]]:
    """Keys that differ: stage, key, what it was and is. Not those that only refer to another, nor those that change no
    time. Raises BadInput if a stage is another."""
    for name in sorted(before.stages.keys() & after.stages.keys()):
        old, new = before.stages[name], after.stages[name]
        if old.use != new.use:
            raise BadInput(f"the profile is of another stage {name!r}: {old.use}, not {new.use}")
        written = [graph.resolved["stages"][name].get("with") or {} for graph in (before, after)]
        for key, (_, default) in new.signature.parameters.items():
            was, now = old.parameters.get(key, default), new.parameters.get(key, default)
            alike = key in written[0] and written[0][key] == written[1].get(key)
            if was != now and not alike and key not in getattr(new.make, "untimed", ()):
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


def resized(profile: Profile, change: Sizes) -> tuple[Profile, list[str], dict[str, float]]:
    """The profile as a run with such messages would have left it; what lies outside of what was measured, in words; and
    stage -> by which share its times may be longer: 2 standard errors of the fit, and what its form leaves open.

    Every sample keeps its own deviation from the fit. Raises BadInput where the profile does not tell what the change
    does: a measure that never varied, or went along with the others, times that vary for other reasons, or sizes of
    more than twice, or less than half, what was measured.
    """
    all_work = sum(samples.total for parts in profile.stages.values() for samples in parts.values())
    stages, outside, squares, off = dict(profile.stages), dict[str, None](), 0.0, dict[str, float]()
    for stage, parts in profile.stages.items():
        new: dict[Part, Samples] = {}
        longer = 0.0
        for part, samples in parts.items():
            amounts = _amounts(samples, change.everywhere, change.limits.get(stage, {}))
            try:
                found = _resized(samples, amounts, samples.total < _SLIGHT * all_work)
            except ValueError as error:
                raise BadInput(f"{stage}: {error}") from None
            new[part] = found.samples
            outside |= dict.fromkeys(found.outside)
            squares += (found.noise * samples.count) ** 2
            # A message that is larger in everything is no more work than so many messages.
            most = math.inf if stage in change.limits else max(1.0, change.everywhere) * samples.total
            doubt = min(found.doubt * samples.count, max(0.0, most - found.samples.total))
            longer += found.noise * samples.count + doubt
        stages[stage] = new
        if longer:
            off[stage] = longer / (sum(samples.total for samples in new.values()) or 1.0)
    effect = abs(sum(s.total for parts in stages.values() for s in parts.values()) / (all_work or 1.0) - 1.0)
    if math.sqrt(squares) / (all_work or 1.0) > max(_OPEN, effect):
        raise BadInput(
            "the measured times do not tell its effect from noise "
            "(a longer run, on a quiet machine, of messages that differ more, may)"
        )
    remarks = [f"extrapolated: measured were {', '.join(outside)}"] if outside else []
    return replace(profile, stages=stages), remarks, off


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
            most = np.where(full, np.maximum(held, _room(amounts)), held)
            amounts[name] = np.minimum(most, now * rows)
        elif name in amounts:
            amounts[name] = amounts[name] * (now / was)
    return {name: held * everywhere for name, held in amounts.items()}


@dataclass(frozen=True)
class _Resized:
    """noise: how far off the mean may be (95 %), in seconds. doubt: how much further, if times are not quite linear in
    the measures. outside: what lies outside of what was measured."""

    samples: Samples
    noise: float = 0.0
    doubt: float = 0.0
    outside: tuple[str, ...] = ()


def _room(amounts: Mapping[str, Floats]) -> Floats:
    """How much messages can hold of a measure that only supervised tokens have; each row as much as the longest."""
    if not {"supervised", "tokens", "padded"} <= amounts.keys():
        return amounts.get("supervised", np.array(np.inf))
    return amounts["supervised"] * amounts["padded"] / np.maximum(amounts["tokens"], 1.0)


def _resized(samples: Samples, amounts: Mapping[str, Floats], slight: bool) -> _Resized:
    """The samples with these amounts. Raises ValueError where the samples do not tell."""
    measures = {name: tuple(held.tolist()) for name, held in amounts.items()}
    changed = [name for name in _work(samples) if measures[name] != samples.measures[name]]
    if not changed or slight:
        return _Resized(replace(samples, measures=measures))
    noise = _uncertainty(samples, changed, amounts)
    slopes, seconds, outside, doubt = fit(samples).slopes, np.array(samples.seconds), list[str](), 0.0
    for name in changed:
        more, slope = amounts[name] - np.array(samples.measures[name]), slopes.get(name, 0.0)
        seconds += slope * more
        beyond, said = _outside(samples, name, amounts)
        outside += [said] if beyond else []
        doubt += slope * (_TRUSTED * float(np.abs(more).mean()) + (1.0 - _TRUSTED) * beyond)
    times = np.maximum(seconds, 0.0)
    total = samples.total * float(times.sum()) / (sum(samples.seconds) or 1.0)
    samples = replace(samples, seconds=tuple(times.tolist()), total=total, measures=measures)
    return _Resized(samples, noise, doubt, tuple(outside))


def _outside(samples: Samples, name: str, amounts: Mapping[str, Floats]) -> tuple[float, str]:
    """How much of a measure lies outside of what was measured, in the mean, and what that was: in a row, if messages
    have as many rows as before. Raises ValueError if it lies far outside."""
    old, new, rows, unit = np.array(samples.measures[name]), amounts[name], np.ones(1), "message"
    if "rows" in amounts and samples.measures["rows"] == tuple(amounts["rows"].tolist()):
        rows, unit = amounts["rows"], "row"
        old, new = old / rows, new / rows
    low, high, least, most = (float(each) for each in (old.min(), old.max(), new.min(), new.max()))
    said = f"{low:.4g} {'' if low == high else f'to {high:.4g} '}{name} a {unit}"
    for asked, far, near in (
        (most, most > _FAR * high * (1 + 1e-6), f"{most / _FAR:.3g} or more"),
        (least, least * _FAR * (1 + 1e-6) < low, f"{least * _FAR:.3g} or less"),
    ):
        if far:
            raise ValueError(f"measured were {said}, and {asked:.3g} is too far from that; measure at {near}")
    over = np.maximum(new - high * (1 + 1e-6), 0.0) + np.maximum(low * (1 - 1e-6) - new, 0.0)
    return float((over * rows).mean()), said


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
        raise ValueError(f"too few messages ({len(seconds)}) to tell the effect of {', '.join(changed)}")
    _, spread, axes = np.linalg.svd(table, full_matrices=False)
    along = axes @ ((np.array([amounts[name].mean() for name in names]) - mean) / scale)
    varied = spread > 1e-6 * spread[0]
    if np.abs(along[~varied]).sum() > 1e-6 * np.abs(along).sum():
        raise ValueError(f"{', '.join(changed)} only varied together with others, so the effect is not known")
    solved = np.linalg.lstsq(table, seconds - seconds.mean(), rcond=1e-9)[0]
    variance = np.square(seconds - seconds.mean() - table @ solved).sum() / free
    return 2.0 * math.sqrt(variance * np.square(along[varied] / spread[varied]).sum())

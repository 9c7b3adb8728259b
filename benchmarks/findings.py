"""What a comparison of topologies found, in words and figures; how it is shown is for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.busy import device_busy
from benchmarks.compare import Topology, difference, ratio
from benchmarks.graphs import VARIANT, is_control
from benchmarks.interval import Estimate
from dflash_pipe.counted import counted
from dflash_pipe.forecast import TRUSTED, Forecast, Options, predict
from dflash_pipe.forecast_table import duration, figure, unit_of
from dflash_pipe.graph import transport_of
from dflash_pipe.plan import plan
from dflash_pipe.profile import Profile
from dflash_pipe.service import uncontended

__all__ = ["Findings", "found", "gpus_busy", "rates", "telling"]

# So many times the messages that are worked on ahead have to be measured; a step as forecast needs no doubt.
_MANY, _CLOSE = 5, 0.05
# A stage that takes so much longer than in the first topology, and so much of the step, is worth a word.
_LONGER, _MATTERS = 0.02, 0.01
_DECIMALS = 2  # of a ratio; what they do not show is no difference
_HEADS = (
    "topology",
    "GPUs",
    "step",
    "times as fast",
    "forecast",
    "measured / forecast",
    "overlap efficiency",
    "busiest GPU",
    "rows/s",
    "rows/s per GPU",
    "supervised tokens/s",
    "padding",
    "GPU memory",
    "all rows in",
)


@dataclass(frozen=True)
class Findings:
    """headline: who is fastest. sameness: whether all computed alike. differences: what was computed differently.
    heads, rows: the table; a cell is (text, small print). verdicts: of each topology. remarks: what else to know of the
    figures."""

    headline: str
    sameness: str
    differences: Sequence[str]
    heads: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str]]]
    verdicts: dict[str, str]
    remarks: Sequence[str]


def found(
    compared: Sequence[Topology], forecasts: Sequence[Forecast], own: Sequence[float], rows: int | None
) -> Findings:
    """Compare the first topology with the others. own: seconds a step of each as forecast from its own profile. rows:
    of the whole training, if that is known."""
    differences = list(_differences(compared))
    each = zip(compared, forecasts, own, strict=True)
    table = [_row(topology, forecast, seconds, compared[0], rows) for topology, forecast, seconds in each]
    shown = [number for number, _ in enumerate(_HEADS) if any(row[number][0] != "-" for row in table)]
    return Findings(
        headline=_headline(compared, differences),
        sameness=_sameness(compared, differences),
        differences=differences,
        heads=[_HEADS[number] for number in shown],
        rows=[[row[number] for number in shown] for row in table],
        verdicts=_verdicts(compared, forecasts),
        remarks=[*_remarks(compared, forecasts, rows), *_slower(compared, forecasts, own)],
    )


# --- the same? --------------------------------------------------------------------------------------------------------


def _differences(compared: Sequence[Topology]) -> Iterator[str]:
    """One line for each topology that did not compute what the first did, and for each that differs from itself."""
    first = compared[0]
    expected = first.checked or first.trials[0]
    for topology in compared:
        runs = [trial for trial in (topology.checked, *topology.trials) if trial is not None]
        for number, trial in enumerate(runs):
            if said := difference(expected, trial):
                yield f"{topology.name} differs from {first.name} in run {number + 1}, first in {said}"
                break


def _sameness(compared: Sequence[Topology], differences: Sequence[str]) -> str:
    if differences:
        return "The topologies did NOT compute the same."
    first = compared[0].checked or compared[0].trials[0]
    equal = [counted(len(first.digests), "digest")] * bool(first.digests) + ["the final weights"] * bool(first.weights)
    runs = sum(len(topology.trials) + (topology.checked is not None) for topology in compared)
    if runs == 1:
        return "There was one run, which is compared with none."
    return f"All {runs} runs computed the same: {' and '.join(equal)} are equal."


# --- the fastest ------------------------------------------------------------------------------------------------------


def _original(topology: Topology, compared: Sequence[Topology]) -> Topology:
    """The first topology that is the same graph: itself, unless it is a control."""
    return next(other for other in compared if is_control(topology.graph, other.graph))


def _headline(compared: Sequence[Topology], differences: Sequence[str]) -> str:
    if differences:
        return "No topology can be called the fastest."
    first = compared[0]
    rivals = [topology for topology in compared if _original(topology, compared) is topology]
    if len(rivals) == 1:
        return f"{first.name}: {duration(first.step.median)} a step."
    fastest, second, *_ = sorted(rivals, key=lambda topology: ratio(topology, first).median, reverse=True)
    lead = ratio(fastest, second)
    if min(round(end, _DECIMALS) for end in (lead.median, lead.low) if end is not None) <= 1.0:
        gain, sure = _factor(lead)
        return (
            f"{fastest.name} and {second.name} cannot be told apart by {counted(len(first.trials), 'run')} each: "
            f"{fastest.name} is {sure or gain} times as fast."
        )
    against = second if fastest is first else first
    gain, sure = _factor(ratio(fastest, against))
    return f"{fastest.name} is the fastest: {gain} times as fast as {against.name}{sure and f' ({sure})'}."


def _factor(times: Estimate, decimals: int = _DECIMALS) -> tuple[str, str]:
    """How many times, and the ends of its interval."""
    sure = "" if times.low is None else f"{times.low:.{decimals}f} to {times.high:.{decimals}f}"
    return f"{times.median:.{decimals}f}", sure


# --- the table --------------------------------------------------------------------------------------------------------


def _row(
    topology: Topology, forecast: Forecast, own: float, first: Topology, total: int | None
) -> list[tuple[str, str]]:
    step, a_second, peaks = topology.step, rates(topology), topology.memory.values()
    busiest = max(((share, name) for name, share in gpus_busy(topology).items()), default=None)
    gain, sure = _factor(ratio(topology, first))
    _, size = unit_of(step.median)
    rows = a_second.get("rows")
    padded = {"tokens", "padded"} <= set(a_second)
    return [
        (topology.name, ""),
        (str(topology.gpus) if topology.gpus else "-", ""),
        (duration(step.median), _bracketed(step.range(1 / size))),
        ("1" if topology is first else gain, "" if topology is first else _bracketed(sure)),
        (duration(forecast.pace.step), ""),
        (f"{step.median / forecast.pace.step:.1%}", ""),
        (f"{own / topology.middle.step:.1%}", ""),
        (f"{busiest[0]:.1%}", busiest[1]) if busiest else ("-", ""),
        (figure(rows) if rows else "-", ""),
        (figure(rows / topology.gpus) if rows and topology.gpus else "-", ""),
        (figure(a_second["supervised"]) if "supervised" in a_second else "-", ""),
        (f"{1 - a_second['tokens'] / a_second['padded']:.1%}" if padded else "-", ""),
        (f"{max(peaks) / 2**30:.1f} GiB" if peaks else "-", ""),
        (duration(total / rows) if total and rows else "-", ""),
    ]


def _bracketed(text: str) -> str:
    return f"[{text}]" if text else ""


def gpus_busy(topology: Topology) -> dict[str, float]:
    """GPU -> share of the steady state for which it computed."""
    return device_busy(topology.middle.timeline, plan(topology.graph))


def rates(topology: Topology) -> dict[str, float]:
    """measure -> amount a second: what the messages held on average, and how many were computed a second."""
    profile = topology.middle.profile
    held: dict[str, float] = {}
    for parts in profile.stages.values():
        for samples in parts.values():
            for name, values in samples.measures.items():
                held.setdefault(name, float(np.mean(values)))
    return {name: amount * profile.window / topology.step.median for name, amount in held.items()}


# --- why, and what else -----------------------------------------------------------------------------------------------


def _remarks(compared: Sequence[Topology], forecasts: Sequence[Forecast], rows: int | None) -> Iterator[str]:
    """What makes a figure doubtful, and what was asked for and cannot be told."""
    first = compared[0]
    if len(compared) == 1:
        yield f"one graph, so nothing is compared ({VARIANT})"
    if rows is not None and "rows" not in rates(first):
        yield "no stage of these graphs measures rows, so there is no time for all rows"
    for topology, forecast in zip(compared, forecasts, strict=True):
        original = _original(topology, compared)
        if original is not topology:
            gain, sure = _factor(ratio(topology, original), 3)
            yield (
                f"{topology.name} is the same graph as {original.name}, a control: its ratio should be 1 and is "
                f"{gain}{sure and f' ({sure})'}"
            )
        if telling(topology, first) is not first.middle.profile:
            yield f"{topology.name} has another transport than {first.name}: its forecast is from its own profile"
        yield from (f"{topology.name}: {doubt}" for doubt in topology.middle.profile.doubts())
        ahead, measured = topology.ahead, topology.middle.profile.steps.count * topology.graph.window
        if measured < _MANY * ahead and abs(topology.step.median / forecast.pace.step - 1) > _CLOSE:
            yield (
                f"{topology.name} was measured over {counted(measured, 'message')}, and up to {ahead} may have been "
                "worked on before that: it may look faster than it is (more --steps)"
            )


def _slower(compared: Sequence[Topology], forecasts: Sequence[Forecast], own: Sequence[float]) -> Iterator[str]:
    """Where a forecast misses and the one from the topology's own profile does not: which stages took other times than
    in the first. Where both are one forecast there is nothing to tell."""
    for topology, forecast, seconds in zip(compared, forecasts, own, strict=True):
        step, expected = topology.middle.step, forecast.pace.step
        missed = abs(step / expected - 1) > _LONGER
        if missed and abs(step - seconds) < abs(step - expected) / 2:
            sign = 1 if step > expected else -1
            changes = _changes(*(uncontended(t.middle.profile, plan(t.graph)) for t in (topology, compared[0])))
            said = [f"{stage} {times:.2f}x" for stage, times in changes.items() if sign * (times - 1) > _LONGER]
            if said:
                what = "longer" if sign > 0 else "less time"
                yield f"{topology.name}: its stages took {what} than in {compared[0].name}: {', '.join(said)}"


def _changes(profile: Profile, first: Profile) -> dict[str, float]:
    """Stage -> how many times as long what it does took as in the first profile, of those that matter."""
    changes = {}
    for stage, parts in profile.stages.items():
        before = first.stages.get(stage, {})
        common = [part for part in parts if part in before and before[part].total]
        work = sum(before[part].total for part in common)
        if work and sum(samples.total for samples in parts.values()) > _MATTERS * profile.steps.total:
            changes[stage] = sum(before[part].count * parts[part].mean for part in common) / work
    return changes


def _verdicts(compared: Sequence[Topology], forecasts: Sequence[Forecast]) -> dict[str, str]:
    """What binds each topology and what would help, where its forecast was right; else by how much not, and whether
    hand-offs, which a first graph of one worker does not have, or a shared processor explain it."""
    said = {}
    for topology, forecast in zip(compared, forecasts, strict=True):
        off = topology.step.median / forecast.pace.step
        said[topology.name] = _verdict(topology, forecast)
        if off > 1 + TRUSTED:
            said[topology.name] = f"takes {off:.2f} times its forecast, so what that advises is left out"
            profile = telling(topology, compared[0])
            handing = replace(profile, handed=topology.middle.profile.handed)
            with_them = predict(topology.graph, handing, options=Options(changes=False)).pace.step
            if abs(topology.step.median / with_them - 1) < TRUSTED:
                said[topology.name] = (
                    f"takes {off:.2f} times its forecast, and what its hand-offs take explains it: "
                    f"{_verdict(topology, predict(topology.graph, handing))}"
                )
                continue
            together = dict.fromkeys(topology.graph.stages, "one processor")
            shared = predict(topology.graph, profile, options=Options(together=together, changes=False)).pace.step
            if shared > 1.05 * forecast.pace.step:
                said[topology.name] += (
                    "; if no two stages ever computed at the same time (one interpreter, or too few cores), "
                    f"it would be {duration(shared)} a step"
                )
        elif off < 1 - TRUSTED:
            said[topology.name] = f"takes only {off:.2f} times its forecast, so what that advises is left out"
    return said


def telling(topology: Topology, first: Topology) -> Profile:
    """The profile that a topology is forecast from: the first's; its own, if another transport carries its messages."""
    same = transport_of(topology.graph) == transport_of(first.graph)
    return (first if same else topology).middle.profile


def _verdict(topology: Topology, forecast: Forecast) -> str:
    """The forecast's verdict, but with the share of its time for which what binds was busy as it was measured."""
    stage, share = next(iter(forecast.pace.stages.items()))
    busy = [worker.busy for worker in topology.middle.view.workers if stage in worker.stages]  # none: a hand-off
    _, _, advice = forecast.verdict.partition("; ")
    measured = f"busy {max(busy):.0%} as measured, " if busy else ""
    bound = f"bound by {stage}: {measured}{share:.0%} of the forecast's critical path"
    return f"{bound}; {advice}" if advice else bound

"""What work on a device takes by itself, where several workers compute on that device at the same time.

They slow each other down, and what is measured of each contains the others. Forecasts need what each takes alone, so
the device is taken to serve all who compute on it equally: what they take then adds up to the time for which it worked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dflash_pipe.exclusive import shared_devices
from dflash_pipe.plan import Plan
from dflash_pipe.profile import Part, Profile, Samples
from dflash_pipe.trace import Span

__all__ = ["own_seconds", "with_own_seconds"]

_Share = Mapping[int, float]  # message -> what is its own of the time that was measured


def with_own_seconds(profile: Profile, plan: Plan, spans: Iterable[Span]) -> Profile:
    """The profile, with what each stage that shares a device with other workers takes by itself (`Samples.own`).

    plan, spans: of the run, those of the warm-up too. What a source reads is no work on a device.
    """
    shares = _shares(plan, spans)
    stages: dict[str, dict[Part, Samples]] = {
        stage: {part: _with_own(samples, shares.get((stage, part), {})) for part, samples in parts.items()}
        for stage, parts in profile.stages.items()
    }
    return replace(profile, stages=stages)


def own_seconds(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Of each span (begin, end) on one device its own seconds: while n of them are open, each has an nth."""
    begins, ends = ([(span[end], change, n) for n, span in enumerate(spans)] for end, change in ((0, 1), (1, -1)))
    own, each, among, before = [0.0] * len(spans), 0.0, 0, 0.0
    for at, change, number in sorted((*begins, *ends)):
        each += (at - before) / among if among else 0.0  # what one that was always there has had
        own[number] -= change * each
        among, before = among + change, at
    return own


def _shares(plan: Plan, spans: Iterable[Span]) -> dict[tuple[str, str], _Share]:
    """Of every part of a stage of which any replica shares its device: those that do not are slowed by nobody."""
    sharing = {stage for stage, _ in shared_devices(plan)}
    devices = {(worker.name, each.stage): each.device for worker in plan.workers for each in worker.stations}
    beside: dict[str, list[Span]] = {}
    for span in spans:
        if span.stage in sharing and span.what in ("process", "end_window"):
            beside.setdefault(devices[span.worker, span.stage], []).append(span)
    taken: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    for device, those in beside.items():
        measured = [(span.begin, span.end) for span in those]
        own = own_seconds(measured) if device != "cpu" else [end - begin for begin, end in measured]
        for span, seconds in zip(those, own, strict=True):
            sums = taken.setdefault((span.stage, span.what), {})
            before = sums.get(span.index, (0.0, 0.0))  # of another replica
            sums[span.index] = (before[0] + span.end - span.begin, before[1] + seconds)
    return {
        part: {index: own / measured for index, (measured, own) in sums.items() if measured}
        for part, sums in taken.items()
    }


def _with_own(samples: Samples, share: _Share) -> Samples:
    """A message that the timeline has no more is slowed as the others were."""
    known = [
        (seconds, share[index]) for index, seconds in zip(samples.index, samples.seconds, strict=True) if index in share
    ]
    if not (total := sum(seconds for seconds, _ in known)):
        return samples
    mean = sum(seconds * own for seconds, own in known) / total
    own = (seconds * share.get(index, mean) for index, seconds in zip(samples.index, samples.seconds, strict=True))
    return replace(samples, own=tuple(own))

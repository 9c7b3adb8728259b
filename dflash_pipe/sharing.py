"""What work on a device takes by itself, where several workers compute on that device at the same time.

They slow each other down, and what is measured of each contains the others. Forecasts let workers that share a device
take turns there, so they need what each takes alone: the device is taken to serve all who compute on it equally, which
makes the sum of what they take the time for which it computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dflash_pipe.exclusive import shared_devices
from dflash_pipe.plan import Plan
from dflash_pipe.profile import Profile, Samples
from dflash_pipe.trace import Span

__all__ = ["alone", "own_seconds"]


def alone(profile: Profile, plan: Plan, spans: Iterable[Span]) -> Profile:
    """The profile with what each stage takes by itself, reckoned from the spans of the windows that it counts."""
    slowed = _slowed(plan, spans)
    stages = {
        stage: {part: _faster(samples, slowed.get(stage, 1.0)) for part, samples in parts.items()}
        for stage, parts in profile.stages.items()
    }
    return replace(profile, stages=stages, slowed=slowed)


def own_seconds(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Of each span (begin, end) on one device its own seconds: while n of them are open, each has an nth."""
    begins, ends = ([(span[end], change, n) for n, span in enumerate(spans)] for end, change in ((0, 1), (1, -1)))
    own, each, among, before = [0.0] * len(spans), 0.0, 0, 0.0
    for at, change, number in sorted((*begins, *ends)):
        each += (at - before) / among if among else 0.0  # what one that was always there has had
        own[number] -= change * each
        among, before = among + change, at
    return own


def _slowed(plan: Plan, spans: Iterable[Span]) -> dict[str, float]:
    """Stage -> how many times as long it took as by itself; of those that share a device with other workers. What a
    source reads is no work on a device, and a hand-off is none of the stage's."""
    replica = {worker.name: worker.replica for worker in plan.workers}
    places = shared_devices(plan)
    beside: dict[str, list[Span]] = {}
    for span in spans:
        place = places.get((span.stage, replica[span.worker]))
        if place is not None and span.what in ("process", "end_window"):
            beside.setdefault(place.name, []).append(span)
    measured: dict[str, float] = {}
    own: dict[str, float] = {}
    for those in beside.values():
        for span, seconds in zip(those, own_seconds([(span.begin, span.end) for span in those]), strict=True):
            measured[span.stage] = measured.get(span.stage, 0.0) + span.end - span.begin
            own[span.stage] = own.get(span.stage, 0.0) + seconds
    return {stage: measured[stage] / seconds for stage, seconds in own.items() if seconds}


def _faster(samples: Samples, times: float) -> Samples:
    return replace(samples, total=samples.total / times, seconds=tuple(each / times for each in samples.seconds))

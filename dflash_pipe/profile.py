"""What a run measured about itself: how long each stage takes for how much, how long a step takes. A JSON file.

A `Recorder` is called by the workers; it keeps a bounded sample. Which messages are kept depends on their index alone,
so all stages keep the same ones: a long batch is long for every stage, and the sample shows it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from dflash_pipe.counted import counted
from dflash_pipe.errors import BadInput

__all__ = [
    "HAND_OFF",
    "LATER",
    "DeviceMemory",
    "Host",
    "Part",
    "Profile",
    "Recorder",
    "Samples",
    "Way",
    "hand_off",
    "load",
    "save",
]

Part = Literal["read", "process", "end_window"]
Way = Literal["within", "between"]  # one device, or from one to another
LATER = "later"
HAND_OFF = "hand-off"
_FORMAT = "dflash-pipe profile 1"
_LONGEST = 1e9  # seconds, thirty years
_WARM_UP = 2  # windows
_ENOUGH = 5  # measured steps, for a forecast to rest on
_QUIET = 0.05  # share of the machine's CPU time that other programs may use
_SLOWED, _MATTERS = 1.05, 0.01  # times as long, share of the steps' time
_DRIFT, _MANY = 0.1, 40  # by how much the halves of a run may differ, and how many samples it takes to tell


@dataclass(frozen=True)
class Samples:
    """Service times of one part of one stage.

    count, total: of all that was measured, in seconds. index, seconds: of those that were kept, in order of the index
    (a message's index in the stream; what happens once a window has the index of the window's last message; replicas
    may repeat one). measures: name -> amount in each kept one ("tokens", "padding", "rows", ...). own: seconds that
    each takes by itself, where others that computed on its device meanwhile slowed it (`dflash_pipe.sharing`).
    """

    count: int
    total: float
    index: tuple[int, ...]
    seconds: tuple[float, ...]
    measures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    own: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        return self.total / self.count

    def fault(self) -> str:
        """What is inconsistent; empty if nothing is."""
        lengths = {len(self.index), len(self.seconds), *map(len, self.measures.values()), len(self.own or self.index)}
        if len(lengths) > 1:
            return "index, seconds, own and measures have different lengths"
        if not self.seconds or self.count < len(self.seconds):
            return f"count is {self.count}, with {counted(len(self.seconds), 'sample')} (expected at least one)"
        numbers = (self.total, *self.seconds, *self.own, *(v for values in self.measures.values() for v in values))
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            return "a number is negative or not finite"
        if max(self.total, *self.seconds) > _LONGEST:
            return f"a time is {max(self.total, *self.seconds):.3g} s, longer than any run"
        if any(own > seconds * (1 + 1e-6) for own, seconds in zip(self.own, self.seconds, strict=False)):
            return "own is longer than what was measured"
        kept = math.fsum(self.seconds)
        if self.count == len(self.seconds) and not math.isclose(self.total, kept, rel_tol=1e-6, abs_tol=1e-9):
            return f"total is {self.total:.6g} s, but the samples add up to {kept:.6g} s"
        return ""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: the most that the run held at once, and all there is. stages: that computed there."""

    peak: int
    total: int
    stages: tuple[str, ...]


@dataclass(frozen=True)
class Host:
    """The CPU that a run had. cores: that it could use. stages: that computed there. others: share of all CPU time of
    the machine that other programs used meanwhile, None if that is not known."""

    cores: int
    stages: tuple[str, ...]
    others: float | None = None


@dataclass(frozen=True)
class Profile:
    """graph: YAML text of the graph that ran (`dflash_pipe.graph.dump`). window: its messages in a step. machine: where
    it ran, in words. warm_up: first windows that were left out. steps: seconds between the ends of windows; a sample's
    index is the window. stages: stage -> part -> samples. memory: device -> what it held, where that is known. host:
    None if it is not known. handed: channel -> way -> for how long handing a message over to one receiver kept the
    sender; measure `later`: seconds until it was there after that. Only where the receiver's device was known."""

    graph: str
    window: int
    machine: str
    warm_up: int
    steps: Samples
    stages: dict[str, dict[Part, Samples]]
    memory: dict[str, DeviceMemory] = field(default_factory=dict)
    host: Host | None = None
    handed: dict[str, dict[Way, Samples]] = field(default_factory=dict)
    format: str = _FORMAT

    def doubts(self) -> list[str]:
        """What makes its times doubtful, a line each."""
        found = []
        if self.steps.count < _ENOUGH:
            steps = counted(self.steps.count, "measured step")
            steps += "" if self.warm_up else " of the warm-up"
            found.append(
                f"the profile rests on {steps}: {_ENOUGH} are needed (a run of {_WARM_UP + _ENOUGH} windows or more)"
            )
        if self.host is not None and (self.host.others or 0.0) > _QUIET:
            found.append(f"the machine was not quiet: other programs used {self.host.others:.0%} of its CPU time")
        if abs(drift := self._drift()) > _DRIFT:
            longer = "longer" if drift > 0 else "shorter"
            found.append(
                f"service times were {abs(drift):.0%} {longer} in the second half of the run than in the first"
            )
        if slow := [f"{stage} {times:.2f}" for stage, times in self._slowed().items() if times > _SLOWED]:
            found.append(
                f"workers that computed on one device at the same time took so many times as long as alone: "
                f"{', '.join(slow)}; reckoned with is what each takes alone, if they slow each other equally"
            )
        return found

    def _drift(self) -> float:
        """How much more time the same work took in the second half of the run, as a share."""
        halves = [0.0, 0.0]
        for samples in (s for parts in self.stages.values() for s in parts.values() if len(s.seconds) >= _MANY):
            middle = len(samples.seconds) // 2
            weight = samples.total / (fmean(samples.seconds) or 1.0)
            for half, seconds in enumerate((samples.seconds[:middle], samples.seconds[middle:])):
                halves[half] += weight * fmean(seconds)
        return halves[1] / halves[0] - 1.0 if halves[0] else 0.0

    def _slowed(self) -> dict[str, float]:
        """Stage that matters -> how many times as long it took as by itself, where that is known."""
        found = {}
        for stage, parts in self.stages.items():
            known = [samples for samples in parts.values() if sum(samples.own)]
            if sum(samples.total for samples in known) > _MATTERS * self.steps.total:
                found[stage] = sum(sum(each.seconds) for each in known) / sum(sum(each.own) for each in known)
        return found

    def fault(self) -> str:
        """What is inconsistent; empty if nothing is."""
        if self.window < 1 or self.warm_up < 0:
            return f"window is {self.window} and warm_up {self.warm_up}, expected at least 1 and 0"
        if any(memory.peak < 0 or memory.total < 0 for memory in self.memory.values()):
            return "memory: a number is negative"
        if any(LATER not in samples.measures for ways in self.handed.values() for samples in ways.values()):
            return f"handed: samples without the measure {LATER!r}"
        if self.host is not None and not (self.host.cores >= 1 and 0.0 <= (self.host.others or 0.0) <= 1.0):
            return "host: expected at least 1 core, and a share of others between 0 and 1"
        parts = {f"stages.{s}.{p}": samples for s, parts in self.stages.items() for p, samples in parts.items()}
        parts |= {f"handed.{c}.{way}": samples for c, ways in self.handed.items() for way, samples in ways.items()}
        faults = {place: samples.fault() for place, samples in {"steps": self.steps, **parts}.items()}
        return next((f"{place}: {fault}" for place, fault in faults.items() if fault), "")


def hand_off(channel: str) -> str:
    """What stands for a channel's hand-offs where stages have their names."""
    return f"{HAND_OFF} of {channel}"


class Recorder:
    """Takes what the workers measure; may be called from all of them.

    window: messages in a step. start: the first window of the run (not 0 if it was resumed). warm_up: windows left out
    from there (compilation, tuning), unless the run has no others. keep: samples kept of each part. A call costs about
    a microsecond.
    """

    def __init__(self, window: int, *, start: int = 0, warm_up: int = _WARM_UP, keep: int = 512) -> None:
        self._window, self._warm_up, self._keep = window, warm_up, keep
        self._start, self._from = start, start + warm_up
        self._lock = threading.Lock()
        self._parts: dict[bool, dict[tuple[str, Part], _Reservoir]] = {True: {}, False: {}}  # of the warm-up: True
        self._ways: dict[bool, dict[tuple[str, Way], _Reservoir]] = {True: {}, False: {}}
        self._steps = {True: _Reservoir(keep), False: _Reservoir(keep)}
        self._ended: float | None = None

    def record(
        self, stage: str, part: Part, index: int, seconds: float, measures: Mapping[str, float] | None = None
    ) -> None:
        """One firing: on message `index` (once a window: the window's last message), which held `measures`.

        The measure `sent_bytes` is what the stage sends; it matters to channels that count bytes, not to the time.
        """
        parts = self._parts[index < self._from * self._window]
        with self._lock:
            reservoir = parts.get((stage, part))
            if reservoir is None:
                reservoir = parts[stage, part] = _Reservoir(self._keep)
            reservoir.add(index, seconds, measures)

    def handed(self, channel: str, way: Way, index: int, seconds: float, later: float) -> None:
        """One hand-off of message `index` to one receiver; see `Profile.handed`."""
        ways = self._ways[index < self._from * self._window]
        with self._lock:
            reservoir = ways.get((channel, way))
            if reservoir is None:
                reservoir = ways[channel, way] = _Reservoir(self._keep)
            reservoir.add(index, seconds, {LATER: later})

    def window_done(self, window: int, at: float) -> None:
        """A window (from 0, in order) has ended at `at`, in seconds of any clock that only goes forward."""
        with self._lock:
            if self._ended is not None:
                self._steps[window < self._from].add(window, at - self._ended, None)
            self._ended = at

    @property
    def first(self) -> int:
        """The first window that counts."""
        return self._from

    def profile(
        self, graph: str, machine: str, memory: Mapping[str, DeviceMemory] | None = None, began: float | None = None
    ) -> Profile:
        """What was measured so far; if all of that is warm-up, then of the warm-up. began: when the first firing did,
        without which the first window has no time. Raises BadInput if no step was measured."""
        with self._lock:
            early = not self._steps[False].count
            steps = self._steps[early]
            if not steps.count and began is not None and self._ended is not None:
                steps.add(self._start, self._ended - began, None)
            if not steps.count:
                full = f"no window of {counted(self._window, 'message')} was full"
                raise BadInput(f"{full}, and only full ones are timed")
            stages: dict[str, dict[Part, Samples]] = {}
            for (stage, part), reservoir in self._parts[early].items():
                stages.setdefault(stage, {})[part] = reservoir.samples()
            handed: dict[str, dict[Way, Samples]] = {}
            for (channel, way), reservoir in self._ways[early].items():
                handed.setdefault(channel, {})[way] = reservoir.samples()
            warm_up = 0 if early else self._warm_up
            return Profile(
                graph, self._window, machine, warm_up, steps.samples(), stages, dict(memory or {}), handed=handed
            )


class _Reservoir:
    """The `keep` to 2 `keep` entries whose index has the smallest hash: bounded, repeatable, spread over the run."""

    def __init__(self, keep: int) -> None:
        self.count, self.total = 0, 0.0
        self._keep = keep
        self._limit = 1 << 64
        self._kept: list[tuple[int, int, float, Mapping[str, float]]] = []

    def add(self, index: int, seconds: float, measures: Mapping[str, float] | None) -> None:
        self.count += 1
        self.total += seconds
        rank = (index + 1) * 0x9E3779B97F4A7C15 % (1 << 64)  # Fibonacci hashing: neighbours fall far apart
        if rank < self._limit:
            self._kept.append((rank, index, seconds, measures or {}))
            if len(self._kept) >= 2 * self._keep:
                self._kept.sort(key=lambda entry: entry[0])
                self._limit = self._kept[self._keep][0]
                del self._kept[self._keep :]

    def samples(self) -> Samples:
        kept = sorted(self._kept, key=lambda entry: entry[1])
        names = set(kept[0][3]).intersection(*(entry[3] for entry in kept)) if kept else set()
        return Samples(
            count=self.count,
            total=self.total,
            index=tuple(index for _, index, _, _ in kept),
            seconds=tuple(seconds for _, _, seconds, _ in kept),
            measures={name: tuple(float(entry[3][name]) for entry in kept) for name in sorted(names)},
        )


# --- the file ---------------------------------------------------------------------------------------------------------

_ADAPTER = TypeAdapter(Profile)


def save(profile: Profile, path: Path) -> None:
    """Write the file; it appears whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(_ADAPTER.dump_json(profile))
    new.replace(path)


def load(path: Path) -> Profile:
    """Read and check the file. Raises BadInput: one line with the place."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot be read as a profile: {error.strerror}", str(path)) from error
    try:
        profile = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"{part}." for part in first["loc"])[:-1]
        said = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise BadInput(f"no profile of a run: {place}{': ' if place else ''}{said}", str(path)) from None
    if profile.format != _FORMAT:
        raise BadInput(f"format: expected {_FORMAT!r}, got {profile.format!r}", str(path))
    if fault := profile.fault():
        raise BadInput(fault, str(path))
    return profile

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
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from dflash_pipe.errors import BadInput

__all__ = ["DeviceMemory", "Part", "Profile", "Recorder", "Samples", "load", "save"]

Part = Literal["read", "process", "end_window"]
_FORMAT = "dflash-pipe profile 1"


@dataclass(frozen=True)
class Samples:
    """Service times of one part of one stage.

    count, total: of all that was measured, in seconds. index, seconds: of those that were kept, in order of the index
    (a message's index in the stream; what happens once a window has the index of the window's last message; replicas
    may repeat one). measures: name -> amount in each kept one ("tokens", "padding", "rows", ...).
    """

    count: int
    total: float
    index: tuple[int, ...]
    seconds: tuple[float, ...]
    measures: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return self.total / self.count

    def fault(self) -> str:
        """What is inconsistent; empty if nothing is."""
        lengths = {len(self.index), len(self.seconds), *map(len, self.measures.values())}
        if len(lengths) > 1:
            return "index, seconds and measures have different lengths"
        if not self.seconds or self.count < len(self.seconds):
            return f"count is {self.count}, but there are {len(self.seconds)} samples (expected at least one)"
        numbers = (self.total, *self.seconds, *(v for values in self.measures.values() for v in values))
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            return "a number is negative or not finite"
        return ""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: the most that the run held at once, and all there is. stages: that computed there."""

    peak: int
    total: int
    stages: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """graph: YAML text of the graph that ran (`dflash_pipe.graph.dump`). window: its messages in a step. machine: where
    it ran, in words. warm_up: first windows that were left out. steps: seconds between the ends of windows; a sample's
    index is the window. stages: stage -> part -> samples. memory: device -> what it held, where that is known."""

    graph: str
    window: int
    machine: str
    warm_up: int
    steps: Samples
    stages: dict[str, dict[Part, Samples]]
    memory: dict[str, DeviceMemory] = field(default_factory=dict)
    format: str = _FORMAT


class Recorder:
    """Takes what the workers measure; may be called from all of them.

    window: messages in a step. start: the first window of the run (not 0 if it was resumed). warm_up: windows left out
    from there (compilation, tuning). keep: samples kept of each part. A call costs about a microsecond.
    """

    def __init__(self, window: int, *, start: int = 0, warm_up: int = 2, keep: int = 512) -> None:
        self._window, self._warm_up, self._keep = window, warm_up, keep
        self._from = start + warm_up
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, Part], _Reservoir] = {}
        self._steps = _Reservoir(keep)
        self._ended: float | None = None

    def record(
        self, stage: str, part: Part, index: int, seconds: float, measures: Mapping[str, float] | None = None
    ) -> None:
        """One firing: on message `index` (once a window: the window's last message), which held `measures`.

        The measure `sent_bytes` is what the stage sends; it matters to channels that count bytes, not to the time.
        """
        if index < self._from * self._window:
            return
        with self._lock:
            reservoir = self._parts.get((stage, part))
            if reservoir is None:
                reservoir = self._parts[stage, part] = _Reservoir(self._keep)
            reservoir.add(index, seconds, measures)

    def window_done(self, window: int, at: float) -> None:
        """A window (from 0, in order) has ended at `at`, in seconds of any clock that only goes forward."""
        with self._lock:
            if self._ended is not None and window >= self._from:
                self._steps.add(window, at - self._ended, None)
            self._ended = at

    @property
    def first(self) -> int:
        """The first window that counts."""
        return self._from

    def profile(self, graph: str, machine: str, memory: Mapping[str, DeviceMemory] | None = None) -> Profile:
        """What was measured so far. Raises BadInput if no step was measured after the warm-up."""
        with self._lock:
            if not self._steps.count:
                raise BadInput(f"no step to measure: the run needs more than {max(self._warm_up, 1)} windows (warm-up)")
            stages: dict[str, dict[Part, Samples]] = {}
            for (stage, part), reservoir in self._parts.items():
                stages.setdefault(stage, {})[part] = reservoir.samples()
            steps = self._steps.samples()
            return Profile(graph, self._window, machine, self._warm_up, steps, stages, dict(memory or {}))


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
    parts = {f"stages.{s}.{p}": samples for s, parts in profile.stages.items() for p, samples in parts.items()}
    for place, samples in {"steps": profile.steps, **parts}.items():
        if fault := samples.fault():
            raise BadInput(f"{place}: {fault}", str(path))
    return profile

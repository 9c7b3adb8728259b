"""The critical cycle by name: from the chain of work that decided the time to "target[0] → features → drafter → …".

A chain goes round: a step is waited for by the next one. What it goes round most of the time is the bottleneck; making
anything else faster brings nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_pipe.clock import Work

__all__ = ["Cycle", "Leg", "critical_cycle", "seconds_by_stage"]


@dataclass(frozen=True)
class Leg:
    """A worker's time on the critical path, and through what it was let on: a channel, a gate; "" at the very start."""

    worker: str
    seconds: float
    via: str


@dataclass(frozen=True)
class Cycle:
    """legs: in the order of time; each is let on by the one before, the first by the last. share: of the path's time.

    A cycle of one leg is a worker that never waits.
    """

    legs: tuple[Leg, ...]
    share: float

    def __str__(self) -> str:
        if len(self.legs) == 1:
            return f"{self.legs[0].worker} → {self.legs[0].worker}"
        following = (*self.legs[1:], self.legs[0])
        pairs = (f"{leg.worker} → {after.via}" for leg, after in zip(self.legs, following, strict=True))
        return " → ".join((*pairs, self.legs[0].worker))


def seconds_by_stage(path: Sequence[Work]) -> dict[str, float]:
    """How much of the critical path each stage is, most first."""
    seconds: dict[str, float] = {}
    for work in path:
        if work.stage:
            seconds[work.stage] = seconds.get(work.stage, 0.0) + work.end - work.start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def critical_cycle(path: Sequence[Work], order: Sequence[str]) -> Cycle:
    """The cycle that the path spends most of its time on. order: workers; a cycle is named from its first one on.

    The path is walked with a memory of where it came from: whenever it is back at a worker, what lies between is one
    turn of a cycle.
    """
    turns: dict[tuple[tuple[str, str], ...], list[tuple[Leg, ...]]] = {}
    legs = _legs(path)
    walked: list[Leg] = []
    for leg in legs:
        back = next((place for place, seen in enumerate(walked) if seen.worker == leg.worker), None)
        if back is not None:
            turn = _turned((Leg(leg.worker, walked[back].seconds, leg.via), *walked[back + 1 :]), order)
            turns.setdefault(tuple((each.worker, each.via) for each in turn), []).append(turn)
            del walked[back:]
        walked.append(leg)
    total = sum(leg.seconds for leg in legs) or 1.0
    if not turns:
        longest = max(legs, key=lambda leg: leg.seconds)
        return Cycle((longest,), longest.seconds / total)
    spent = {key: sum(leg.seconds for turn in each for leg in turn) for key, each in turns.items()}
    most = max(turns, key=lambda key: spent[key])
    means = (sum(leg.seconds for leg in same) / len(same) for same in zip(*turns[most], strict=True))
    return Cycle(tuple(Leg(w, s, via) for (w, via), s in zip(most, means, strict=True)), spent[most] / total)


def _legs(path: Sequence[Work]) -> list[Leg]:
    """Consecutive work of one worker as one leg."""
    legs: list[Leg] = []
    for work in path:
        seconds = work.end - work.start
        if legs and legs[-1].worker == work.worker:
            legs[-1] = Leg(work.worker, legs[-1].seconds + seconds, legs[-1].via)
        else:
            legs.append(Leg(work.worker, seconds, work.via))
    return legs


def _turned(legs: tuple[Leg, ...], order: Sequence[str]) -> tuple[Leg, ...]:
    first = min(range(len(legs)), key=lambda place: order.index(legs[place].worker))
    return legs[first:] + legs[:first]

"""A training run in miniature, without torch: the stages wait instead of computing, and a digest stands for weights.

The dataflow has the shape of the real one (source -> target -> drafter <-> optimizer). Every result is hashed into the
next, in order, so the last digest tells whether messages were reordered, lost, doubled, or read with stale parameters.
Payloads are small; `nbytes` is what they claim to hold, for channels that count bytes. Every stage waits for `seconds`
times `scale`: seconds as measured somewhere, and a scale that makes a run of them short.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_pipe import Context, Source, Stage, Stamp, refuse_other_form

__all__ = ["Digest", "Number", "Numbers", "Partials", "Wait", "WaitOptimizer", "WaitStep", "Weights"]

_LONGEST = 86_400  # seconds, a day: what a run waits for in one go


@dataclass(frozen=True)
class Number:
    """One item of data. index: its row number."""

    index: int
    nbytes: int = 8


@dataclass(frozen=True)
class Digest:
    """What the target makes of a number."""

    digest: str
    nbytes: int = 32


@dataclass(frozen=True)
class Partials:
    """What one drafter replica accumulated over a window: number of the partial -> its digest."""

    digests: dict[int, str]


@dataclass(frozen=True)
class Weights:
    """The state after a step: steps done, and the digest of everything that led there."""

    step: int
    digest: str


def _hash(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


class _Timed:
    """A stage that waits."""

    seconds: float
    scale: float

    def check(self, replicas: int) -> None:
        """Raise ValueError for times that nobody can wait for, and for sizes below zero."""
        if not 0 <= self.seconds <= _LONGEST:
            raise ValueError(f"seconds is {self.seconds}, expected 0 to {_LONGEST}")
        if not 0 <= self.seconds * self.scale <= _LONGEST or not 0 <= self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}, expected 0 or more, and at most {_LONGEST} when times seconds")
        for name in ("count", "nbytes"):
            if (size := getattr(self, name, 0)) < 0:
                raise ValueError(f"{name} is {size}, expected 0 or more")

    def wait(self) -> None:
        time.sleep(self.seconds * self.scale)


class Numbers(_Timed, Source[Number]):
    """Count from 0. count: how many. seconds: time for each. scale: of the seconds. nbytes: what each claims
    to hold."""

    untimed = ("count",)
    count: int
    seconds: float = 0.0
    scale: float = 1.0
    nbytes: int = 8

    def read(self, cursor: Any) -> Iterator[tuple[Any, Number | None]]:
        if cursor is not None:
            refuse_other_form(range(1, self.count + 1), cursor, "cursor")
        for index in range(cursor or 0, self.count):
            self.wait()
            yield index + 1, Number(index, self.nbytes)


class Wait(_Timed, Stage):
    """The target: hash a number. seconds: time for each message. scale: of the seconds. nbytes: what a result
    claims to hold."""

    seconds: float = 0.0
    scale: float = 1.0
    nbytes: int = 32

    def process(self, number: Number) -> Digest:
        self.wait()
        return Digest(_hash("target", number.index), self.nbytes)


class WaitStep(_Timed, Stage):
    """The drafter: chain each result with the weights into `partials` chains, message i into chain i mod partials.

    seconds: time for each message. scale: of the seconds. partials: chains; with r replicas a multiple of r, so that
    every chain lies on one replica, in input order, and the window's result does not depend on r.
    """

    untimed = ("partials",)
    seconds: float = 0.0
    scale: float = 1.0
    partials: int = 1

    def check(self, replicas: int) -> None:
        super().check(replicas)
        if self.partials < 1 or self.partials % replicas:
            raise ValueError(f"partials: {self.partials} is not a multiple of {replicas}, the replicas")

    def open(self, ctx: Context) -> None:
        self._chains: dict[int, str] = {}

    def process(self, features: Digest, params: Weights, stamp: Stamp) -> None:
        self.wait()
        number = stamp.slot % self.partials
        before = self._chains.get(number, "")
        self._chains[number] = _hash(before, features.digest, params.step, params.digest)

    def end_window(self) -> Partials:
        done, self._chains = self._chains, {}
        return Partials(done)


class WaitOptimizer(_Timed, Stage):
    """The optimizer: chain a window's partials, in their order, onto the digest. seconds: time for each step. scale: of
    the seconds."""

    seconds: float = 0.0
    scale: float = 1.0

    def open(self, ctx: Context) -> None:
        self._report = ctx.report
        self._weights = Weights(0, _hash("seed", ctx.seed))

    def initial(self) -> Weights:
        return self._weights

    def process(self, grads: tuple[Partials, ...]) -> Weights:
        self.wait()
        chains = {number: digest for share in grads for number, digest in share.digests.items()}
        ordered = [chains[number] for number in sorted(chains)]
        self._weights = Weights(self._weights.step + 1, _hash(self._weights.digest, *ordered))
        self._report({"step": self._weights.step, "digest": self._weights.digest})
        return self._weights

    def state(self) -> dict[str, Any]:
        return {"step": self._weights.step, "digest": self._weights.digest}

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_form({"step": 0, "digest": ""}, state, "state")
        self._weights = Weights(state["step"], state["digest"])

"""A stage in its place in a run, with everything that it is joined to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_pipe.gate import CreditGate
from dflash_pipe.message import Message
from dflash_pipe.plan import StationPlan
from dflash_pipe.route import Inlet, Local, Outlet
from dflash_pipe.snapshot import Snapshots
from dflash_pipe.stage import Context, Stage

__all__ = ["Feed", "Port", "Station"]


@dataclass
class Feed:
    """How a source's stream is cut and when it ends.

    start: (index, window) of the first message, after `cursor`. keep_partial: whether a last window that is not full
    is ended (and so stepped). stopping: asked before each window.
    """

    cursor: Any
    start: tuple[int, int]
    window: int
    keep_partial: bool
    stopping: Callable[[], bool]
    credits: CreditGate | None = None
    window_credits: CreditGate | None = None


@dataclass(eq=False)
class Port:
    """One input port of a station: where it reads, and whether it is read once a window.

    feedback: what comes is older than the other ports' message, by the tokens that the channel began with.
    """

    inlet: Inlet
    per_window: bool
    feedback: bool = False
    held: Message | None = None


@dataclass
class Station:
    """A stage in its place, with everything it is joined to.

    inputs: in the order of the stage's parameters. outputs: routes of what `process` returns; window_outputs: routes of
    what `end_window` returns. credits: told when the stage is done with a message, because the stream ends here.
    """

    plan: StationPlan
    stage: Stage
    context: Context
    inputs: dict[str, Port] = field(default_factory=dict)
    outputs: list[Outlet | Local] = field(default_factory=list)
    window_outputs: list[Outlet | Local] = field(default_factory=list)
    stamp_port: str | None = None
    ends_window: bool = False
    credits: Sequence[CreditGate] = ()
    awaited: bool = False
    feed: Feed | None = None
    snapshots: Snapshots | None = None

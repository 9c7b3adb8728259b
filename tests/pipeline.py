"""Small stages, graphs and threads for the tests of channels and runs: held up by events, never by time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_pipe import Context, EndOfChannel, Message, Source, Stage, Stamp, Transport
from dflash_pipe.check import check
from dflash_pipe.graph import Graph, load
from dflash_pipe.plan import plan
from dflash_pipe.runtime import Result, Run
from dflash_pipe.snapshot import Snapshot
from dflash_pipe.stats import BUSY, Activity, be
from stages.toy import Digest, Number, Partials, Wait, WaitOptimizer, Weights

TOY = Path(__file__).parent.parent / "graphs" / "toy"
PATIENCE = 10.0
HOOKS: dict[str, Callable[..., Any]] = {}
SEEN: dict[str, list[Any]] = {}


def message(index: int, payload: Any = None) -> Message:
    """A message of a stream with windows of one."""
    return Message(Stamp(index, index, 0, True), index + 1, index if payload is None else payload)


def until(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "what was waited for never came"
        time.sleep(0)


class Beside:
    """A function on a thread of its own, with an activity that tells whether it waits."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.activity = Activity("beside")
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        be(self.activity)
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error

    def waits(self) -> Beside:
        """Return when it waits for something."""
        until(lambda: self.activity.state is not BUSY)
        return self

    def ended(self) -> Beside:
        """Join it."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self


def hook(name: str, *arguments: Any) -> Any:
    """What the test has put there for a stage to call, if anything."""
    return HOOKS[name](*arguments) if name in HOOKS else None


class Hooked(Transport):
    """Calls HOOKS["receive"](payload)."""

    def on_receive(self, payload: Any, device: str) -> Any:
        hook("receive", payload)
        return payload


class Count(Source[int]):
    """0, 1, 2, ... ; `holes` are sent as None. Calls HOOKS["read"](index)."""

    count: int | None = 8
    holes: tuple[int, ...] = ()

    def read(self, cursor: Any) -> Iterator[tuple[Any, int | None]]:
        index = cursor or 0
        while self.count is None or index < self.count:
            hook("read", index)
            yield index + 1, None if index in self.holes else index
            index += 1


class Lost(Source[int]):
    """Does not say where to go on after the second."""

    def read(self, cursor: Any) -> Iterator[tuple[Any, int]]:
        yield from [(1, 0), (None, 1), (3, 2), (4, 3)]


class Unkept(Source[int]):
    """Its cursors are no JSON."""

    def read(self, cursor: Any) -> Iterator[tuple[Any, int]]:
        yield from [({0: "a"}, 0), ({1: "b"}, 1)]


class Step(Stage):
    """Passes on what it gets, or what HOOKS[name](value, replica) returns; drop: sends None for these."""

    name: str = "step"
    drop: tuple[int, ...] = ()

    def open(self, ctx: Context) -> None:
        self._replica = ctx.replica
        hook(f"{self.name}.open", ctx.replica)

    def process(self, value: int) -> int | None:
        made = hook(self.name, value, self._replica)
        return None if value in self.drop else value if made is None else made

    def finish(self) -> None:
        hook(f"{self.name}.finish")

    def close(self) -> None:
        hook(f"{self.name}.close")


class AsyncStep(Stage):
    """`Step` as a coroutine: awaits HOOKS[name](value)."""

    name: str = "step"

    async def process(self, value: int) -> int:
        if self.name in HOOKS:
            await HOOKS[self.name](value)
        return value


class Collect(Stage):
    """Puts what it gets into SEEN[name]; leaves at `leave`."""

    name: str = "sink"
    leave: int | None = None

    def process(self, value: int, stamp: Stamp) -> None:
        hook(self.name, value)
        if value == self.leave:
            raise EndOfChannel
        SEEN.setdefault(self.name, []).append(value)


class Both(Stage):
    """Puts pairs into SEEN["pairs"]."""

    def process(self, a: int, b: int) -> None:
        SEEN.setdefault("pairs", []).append((a, b))


class Sum(Stage):
    """Sums a window."""

    def open(self, ctx: Context) -> None:
        self._sum = 0

    def process(self, value: int) -> None:
        self._sum += value

    def end_window(self) -> int:
        done, self._sum = self._sum, 0
        return done


class Total(Stage):
    """Sums what it gets once a window; its state is the sum."""

    name: str = "total"
    total: int = 0

    def process(self, value: int) -> None:
        self.total += value
        hook(self.name, self.total)
        SEEN.setdefault(self.name, []).append(self.total)

    def finish(self) -> None:
        hook(f"{self.name}.finish")

    def close(self) -> None:
        hook(f"{self.name}.close")

    def state(self) -> dict[str, Any]:
        hook(f"{self.name}.state")
        return {"total": self.total}

    def restore(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def double(value: int, *, factor: int = 2) -> int:
    """A stage that is a function."""
    return value * factor


def graph_of(folder: Path, text: str, *overrides: str) -> Graph:
    """The checked graph of a YAML text."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "test.yaml"
    file.write_text(text.replace("(", "tests.pipeline:").replace(")", ""))
    graph = load([file], overrides)
    check(graph)
    return graph


def run_of(folder: Path, text: str, *overrides: str, restored: Snapshot | None = None) -> Run:
    """A run of the YAML text; `use: (Step)` stands for a stage of this module."""
    return Run(plan(graph_of(folder, text, *overrides)), folder, restored)


def toy(folder: Path, topology: str, *overrides: str, restored: Snapshot | None = None) -> Run:
    """A run of a toy topology that does not wait anywhere."""
    quick = ("target.seconds=0", "drafter.seconds=0", "optimizer.seconds=0")
    graph = load([TOY / f"{topology}.yaml"], [*quick, *overrides])
    check(graph)
    return Run(plan(graph), folder, restored)


def executed(run: Run, *, signals: bool = False) -> Result:
    """Execute; whatever happens, no thread is left and every channel accounts for what was sent."""
    before = set(threading.enumerate())
    try:
        return run.execute(signals=signals)
    finally:
        assert set(threading.enumerate()) <= before
        for channel in run._wiring.channels:
            sent, received, dropped = channel.counts
            assert (sent, channel.load.depth, channel.load.nbytes) == (received + dropped, 0, 0), channel.name


def failure(run: Run) -> tuple[BaseException, str]:
    """The one failure of a run, and its notes."""
    try:
        executed(run)
    except BaseExceptionGroup as group:
        assert len(group.exceptions) == 1, group.exceptions
        error = group.exceptions[0]
        return error, "\n".join(error.__notes__)
    raise AssertionError("it did not fail")


class Gate:
    """An event with patience: whoever waits at it says so."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        """Say that somebody is here and wait until it is opened."""
        self._reached.set()
        assert self._opened.wait(PATIENCE)

    def open(self) -> None:
        """Let everybody through from now on."""
        self._opened.set()

    def reached(self) -> None:
        """Return when somebody waits (or has waited) here."""
        assert self._reached.wait(PATIENCE)


class Totals(Stage):
    """Puts what all replicas send once a window into SEEN["totals"]."""

    def process(self, values: tuple[int, ...]) -> None:
        SEEN.setdefault("totals", []).append(values)


class EndFails(Sum):
    def end_window(self) -> int:
        raise ArithmeticError("boom")


class SecondSum(Sum):
    """A sum that has nothing to say of the first window."""

    def end_window(self) -> int | None:
        done = super().end_window()
        return done if done > 6 else None


class Held(Sum):
    """Sums a window; what came back from the window before is only held."""

    def process(self, value: int, held: int) -> None:  # type: ignore[override]
        self._sum += value


class InitialFails(Stage):
    def initial(self) -> int:
        raise ArithmeticError("boom")

    def process(self, value: int) -> int:
        return value


class Weigh(Stage):
    """Pairs each value with its window's sum."""

    def process(self, value: int, sum: int) -> None:
        SEEN.setdefault("weighed", []).append((value, sum))


class Chain(Stage):
    """Adds what came back."""

    def process(self, value: int, previous: int) -> int:
        return value + previous


class Back(Stage):
    """Sends back what it gets."""

    def initial(self) -> int:
        return 0

    def process(self, value: int) -> int:
        SEEN.setdefault("back", []).append(value)
        return value


class HookedTarget(Wait):
    """The toy's target; calls HOOKS["target"](index)."""

    def process(self, number: Number) -> Digest:
        hook("target", number.index)
        return super().process(number)


class Mortal(WaitOptimizer):
    """The toy's optimizer; the process is killed in step DIE_AT (of the environment)."""

    def process(self, grads: tuple[Partials, ...]) -> Weights:
        if str(self._weights.step + 1) == os.environ.get("DIE_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().process(grads)


class SlowTotal(Stage):
    """Its `state` says that it is called, then waits until the file SLOW_STATE (of the environment) exists."""

    def process(self, value: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        go = Path(os.environ["SLOW_STATE"])
        go.with_suffix(".reached").touch()
        until(go.exists)
        return {"total": 0}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class Telling(Count):
    """Says that it was closed: it waits for room while SlowTotal waits, so it was cancelled."""

    def close(self) -> None:
        Path(os.environ["SLOW_STATE"]).with_suffix(".cancelled").touch()


class Multiply(Stage):
    """Multiplies matrices."""

    def open(self, ctx: Context) -> None:
        import torch

        self._matrix = torch.eye(200)

    def process(self, number: Number) -> None:
        self._matrix = self._matrix @ self._matrix

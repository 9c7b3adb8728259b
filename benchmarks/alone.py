"""Each stage of a graph alone, on inputs that were made before: its ceiling, which sharing a machine can only lower."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_pipe import BadInput, Context, Source, Stage, Stamp
from dflash_pipe.check import rate
from dflash_pipe.graph import ChannelSpec, Graph
from dflash_pipe.plan import Plan, WorkerPlan, plan, stage_order

__all__ = ["alone"]

# What a stage works on: the stamp, and its inputs by port.
Firing = tuple[Stamp, dict[str, Any]]


@dataclass
class _Made:
    """What a stage sent: a payload for each message, and the last that it sent for a window.

    Only the last, because gradients of a window are as large as the model: all windows are stepped with these.
    """

    each: list[Any] = field(default_factory=list)
    window: Any = None


def alone(graph: Graph, windows: int = 2) -> dict[str, float]:
    """stage -> seconds for a step (its whole window), nothing else running; the second time over, so nothing is cold.

    Fewer windows where the source ends before. Every window sees the initial weights, and is stepped with the last
    one's gradients. Raises what a stage raises.
    """
    for name, stage in graph.stages.items():
        if stage.signature.is_async:
            raise BadInput(f"--profile-stages: stage {name} is async, so its time is that of whatever it waits for")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return _Bench(plan(graph), Path(folder)).run(windows)


class _Bench:
    def __init__(self, laid_out: Plan, folder: Path) -> None:
        self.graph, self.plan = laid_out.graph, laid_out
        self.transport = self.graph.transport
        self.devices = {s.stage: s.device for w in self.plan.workers if w.replica == 0 for s in w.stations}
        self.contexts = {s: self._context(w, s, folder) for w in self.plan.workers for s in w.spec.stages}
        self.stages: dict[str, Stage] = {}
        self.made: dict[str, _Made] = {}

    def _context(self, worker: WorkerPlan, stage: str, folder: Path) -> Context:
        graph = self.graph
        return Context(
            stage=stage, device=self.devices[stage], seed=graph.seed, window=graph.window, folder=folder,
            worker=worker.spec.name,
        )  # fmt: skip

    def run(self, windows: int) -> dict[str, float]:
        try:
            for name in stage_order(self.graph):
                self.transport.enter(self.devices[name])
                stage = self.graph.stages[name].build()
                stage.open(self.contexts[name])
                self.stages[name] = stage
            return {name: self._measure(name, windows) for name in stage_order(self.graph)}
        finally:
            for stage in self.stages.values():
                stage.close()

    def _measure(self, name: str, windows: int) -> float:
        self.transport.enter(self.devices[name])
        stage, count = self.stages[name], windows * self.graph.window
        if isinstance(stage, Source):
            took, payloads = self._timed(name, lambda: [p for (_, p), _ in zip(stage.read(None), range(count))])  # noqa: B905
            self.made[name] = _Made(each=payloads)
            return took * self.graph.window / len(payloads)
        firings = list(self._firings(name))
        took, self.made[name] = self._timed(name, lambda: self._fire(name, firings))
        return took / len({stamp.window for stamp, _ in firings})

    def _timed(self, name: str, act: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of the second time, in the device's own time, and what came of it."""
        act()
        device = self.devices[name]
        begin = self.transport.mark(device)
        result = act()
        end = self.transport.mark(device)
        while (seconds := self.transport.elapsed(begin, end)) is None:
            time.sleep(0.001)  # the device is still at it
        return seconds, result

    def _fire(self, name: str, firings: Sequence[Firing]) -> _Made:
        stage, made = self.stages[name], _Made()
        stamped = self.graph.stages[name].signature.stamp
        ends = self.graph.stages[name].signature.window_output is not None
        once = rate(self.graph, name) == "window"
        for stamp, inputs in firings:
            sent = stage.process(**inputs, **({stamped: stamp} if stamped else {}))
            if once:
                made.window = sent
            else:
                made.each.append(sent)
            if ends and stamp.last:
                made.window = stage.end_window()
        return made

    def _firings(self, name: str) -> Iterator[Firing]:
        """Everything that the stage works on, on its device; a window that is not whole is left out."""
        window, once = self.graph.window, rate(self.graph, name) == "window"
        first = next(made for stage, made in self.made.items() if self.graph.stages[stage].signature.source)
        held = self._inputs(name, "window", 0)
        for index in range(len(first.each) // window * window):
            stamp = Stamp(index, index // window, index % window, index % window == window - 1)
            if once and not stamp.last:
                continue
            if None not in (inputs := self._inputs(name, "message", index) | held).values():
                yield stamp, inputs

    def _inputs(self, name: str, per: str, index: int) -> dict[str, Any]:
        """What the stage's ports of this rate receive: for message `index`, or for any window."""
        channels = (c for c in self.graph.channels.values() if c.per == per)
        ports = [(to.port, channel) for channel in channels for to in channel.receivers if to.stage == name]
        return {port: self._received(name, port, self._sent(channel, index)) for port, channel in ports}

    def _sent(self, channel: ChannelSpec, index: int) -> Any:
        if channel.initial:
            return self.stages[channel.sender].initial()
        made = self.made[channel.sender]
        return made.window if channel.per == "window" else made.each[index]

    def _received(self, name: str, port: str, payload: Any) -> Any:
        gathered = self.graph.stages[name].signature.inputs[port].gather and payload is not None
        return self.transport.on_receive((payload,) if gathered else payload, self.devices[name])

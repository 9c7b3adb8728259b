"""The one loop that every worker runs: receive, process, send, for each of its stages in dataflow order.

A pass of the loop is a *tick*: one message of the stream (or one window, if all stages of the worker fire once a
window). A stage that fires per message reads its per-message ports each tick, and its per-window ports once, before
the window's first message; `end_window` follows the window's last message. Stages on one worker hand over directly.

The loop is written once, with `await`; on a thread no await ever suspends (see `route.Blocking`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_pipe.errors import BrokenChannel, EndOfChannel
from dflash_pipe.message import ELSEWHERE, NOTHING, Message, Stamp
from dflash_pipe.plan import StationPlan
from dflash_pipe.route import CreditGate, Inlet, Lane, Local, Outlet, TurnGate, Waits
from dflash_pipe.snapshot import Snapshots
from dflash_pipe.stage import Context, Source, Stage
from dflash_pipe.stats import Activity
from dflash_pipe.transport import Transport

__all__ = ["Feed", "Port", "Station", "Worker", "drive"]


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


@dataclass
class Port:
    """One input port of a station: where it reads, and whether it is read once a window."""

    inlet: Inlet
    per_window: bool
    held: Message | None = None


@dataclass
class Station:
    """A stage in its place, with everything it is joined to.

    inputs: in the order of the stage's parameters. outputs: routes of what `process` returns; window_outputs: routes of
    what `end_window` returns. returns: credits given back when the stage is done with a message (or window).
    """

    plan: StationPlan
    stage: Stage
    context: Context
    inputs: dict[str, Port] = field(default_factory=dict)
    outputs: list[Outlet | Local] = field(default_factory=list)
    window_outputs: list[Outlet | Local] = field(default_factory=list)
    stamp_port: str | None = None
    ends_window: bool = False
    returns: CreditGate | None = None
    returns_window: CreditGate | None = None
    feed: Feed | None = None
    snapshots: Snapshots | None = None


class Worker:
    """One replica of a worker: its stations, opened, run and closed on one thread or in one coroutine."""

    def __init__(self, name: str, stations: Sequence[Station], waits: Waits, transport: Transport) -> None:
        self.name = name
        self.stations = stations
        self.activity = Activity(name)
        self.turn: TurnGate | None = None
        self.unfinished = 0
        self._device: str | None = None
        self._waits = waits
        self._transport = transport
        self._opened: list[Station] = []
        self._stream: Generator[Message, None, None] | None = None

    # --- opening

    def open(self, restored: dict[str, Any] | None) -> None:
        """Open the stages in dataflow order, on this worker's own thread; restore the stateful one."""
        for station in self.stations:
            self._doing(station, "open")
            station.stage.open(station.context)
            self._opened.append(station)
            if restored is not None and hasattr(station.stage, "state"):
                station.stage.restore(restored)
            if isinstance(station.stage, Source) and station.feed is not None:
                self._stream = self._messages(station.stage, station.feed)

    async def send_first_tokens(self, feedback: Sequence[tuple[Station, Outlet | Local, int]], stamp: Stamp) -> None:
        """Put each feedback channel's initial tokens on it, made by the producer's `initial()`."""
        for station, outlet, tokens in feedback:
            self._doing(station, "initial")
            for _ in range(tokens):
                await self._send([outlet], station, Message(stamp, None, station.stage.initial()))

    # --- the loop

    async def run(self) -> None:
        """Tick until the stream ends, then `finish` the stages. Ends are closed by `close`, whatever happened."""
        try:
            while True:
                await self._tick()
                self.activity.items += 1
        except (EndOfChannel, BrokenChannel):
            # The stream is over, or whoever we send to has left: both end this worker in order.
            pass
        for station in self._opened:
            self._doing(station, "finish")
            if station.snapshots is not None:
                station.snapshots.finish(station.stage)
            station.stage.finish()

    def close(self) -> None:
        """Close the stages, last opened first, then every channel end; then raise the first error there was."""
        errors: list[BaseException] = []
        for station in reversed(self._opened):
            try:
                station.stage.close()
            except Exception as error:
                errors.append(error)
        if self._stream is not None:
            self._stream.close()
        for station in self.stations:
            for outlet in (*station.outputs, *station.window_outputs):
                outlet.close()
            for port in station.inputs.values():
                port.inlet.close()
        if errors:
            raise errors[0]

    async def _tick(self) -> None:
        stamp: Stamp | None = None
        for station in self.stations:
            if station.plan.rate == "window" and stamp is not None and not stamp.last:
                continue
            stamp = await self._fire(station)

    async def _fire(self, station: Station) -> Stamp:
        """Let one stage work on the next message; returns its stamp."""
        if station.feed is not None:
            message = await self._next_from_source(station, station.feed)
            await self._send(station.outputs, station, message)
        else:
            message, arguments = await self._gather_inputs(station)
            message = await self._work(station, message, arguments)
        self._give_back(station, message)
        return message.stamp

    async def _next_from_source(self, station: Station, feed: Feed) -> Message:
        self._doing(station, "read")
        assert self._stream is not None
        message = next(self._stream, None)
        if message is None:
            raise EndOfChannel(f"source {station.plan.stage!r} has ended")
        if feed.window_credits is not None and message.stamp.slot == 0:
            await self._waits.at(feed.window_credits, message.stamp.window)
        if feed.credits is not None:
            await self._waits.at(feed.credits, message.stamp.index)
        return message

    def _messages(self, source: Source[Any], feed: Feed) -> Generator[Message, None, None]:
        """Stamp what the source yields; one message is read ahead so that the last one can be marked."""
        index, window = feed.start
        slot = 0
        reading = iter(source.read(feed.cursor))
        ahead = next(reading, None)
        while ahead is not None and not (slot == 0 and feed.stopping()):
            (cursor, payload), ahead = ahead, next(reading, None)
            last = slot == feed.window - 1 or (ahead is None and feed.keep_partial)
            yield Message(Stamp(index, window, slot, last), cursor, None).carrying(payload)
            index, slot = index + 1, slot + 1
            if last:
                window, slot = window + 1, 0

    async def _gather_inputs(self, station: Station) -> tuple[Message, dict[str, Any]]:
        """Read the ports in order. The message that leads is the first one, or the first tombstone among them."""
        leading: Message | None = None
        arguments: dict[str, Any] = {}
        for name, port in station.inputs.items():
            if port.per_window and station.plan.rate == "message":
                continue
            message = await self._receive(station, name, port)
            if leading is not None and message.stamp != leading.stamp:
                raise AssertionError(f"port {name!r} got {message.stamp}, but {leading.stamp} was due")
            if leading is None or (message.empty and not leading.empty):
                leading = message
            arguments[name] = message.payload
        assert leading is not None
        if station.plan.rate == "message":
            for name, port in station.inputs.items():
                if port.per_window:
                    if leading.stamp.slot == 0 or port.held is None:
                        received = await self._receive(station, name, port)
                        port.held = port.held if received.empty and port.held else received
                    arguments[name] = port.held.payload
        if station.stamp_port is not None:
            arguments[station.stamp_port] = leading.stamp
        return leading, arguments

    async def _receive(self, station: Station, name: str, port: Port) -> Message:
        self.activity.place = f"{station.plan.stage} receive {name}"
        message = await port.inlet.receive(self._waits)
        if message.empty:
            return message
        return message.carrying(self._transport.on_receive(message.payload, station.plan.device))

    async def _work(self, station: Station, message: Message, arguments: dict[str, Any]) -> Message:
        """process, then end_window if the window ends, each followed by sending its result."""
        lane = Lane(station.plan.stage, message.stamp.index if station.context.replicas > 1 else None)
        if not message.empty:
            self._doing(station, "process", message.stamp)
            result = await self._in_turn(lane, station.stage.process, arguments)
            self._transport.release(message.payload, station.plan.device)
            message = message.carrying(result)
        elif message.payload is NOTHING and self.turn is not None:
            self.turn.skip(lane)
        if message.payload is not ELSEWHERE:
            await self._send(station.outputs, station, message)
        if station.ends_window:
            self.unfinished += 1
            if message.stamp.last:
                self.unfinished = 0
                self._doing(station, "end_window", message.stamp)
                result = await self._in_turn(Lane(station.plan.stage, None), station.stage.end_window, {})
                await self._send(station.window_outputs, station, message.carrying(result))
        if station.snapshots is not None and message.stamp.last:
            station.snapshots.window_done(station.stage, message)
        return message

    async def _in_turn(self, lane: Lane, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call (and await, if it is a coroutine function), holding the worker's turn only around the call itself."""
        if self.turn is not None:
            await self._waits.at(self.turn, lane)
        try:
            result = function(**arguments)
            return await result if inspect.isawaitable(result) else result
        finally:
            if self.turn is not None:
                self.turn.give_back(lane)

    async def _send(self, outlets: Sequence[Outlet | Local], station: Station, message: Message) -> None:
        if outlets:
            self.activity.place = f"{station.plan.stage} send"
            if not message.empty:
                message = message.carrying(self._transport.on_send(message.payload, station.plan.device))
            for outlet in outlets:
                await outlet.send(self._waits, message)

    def _give_back(self, station: Station, message: Message) -> None:
        if station.returns is not None and message.payload is not ELSEWHERE:
            station.returns.give_back(message.stamp.index)
        if station.returns_window is not None and message.stamp.last:
            station.returns_window.give_back(message.stamp.window)

    def _doing(self, station: Station, what: str, stamp: Stamp | None = None) -> None:
        if station.plan.device != self._device:
            self._device = station.plan.device
            self._transport.enter(self._device)
        at = f" message {stamp.index} of window {stamp.window}" if stamp is not None else ""
        self.activity.place = f"{station.plan.stage} {what}{at}"


def drive(coroutine: Any) -> None:
    """Run a coroutine whose awaits never suspend (thread workers)."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("a worker on a thread awaited something that suspends: its stage needs `kind: async`")

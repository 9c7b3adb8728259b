"""The one loop that every worker runs: receive, process, send, for each of its stages in dataflow order.

A pass of the loop is a *tick*: one message of the stream (or one window, if all stages of the worker fire once a
window). A stage that fires per message reads its per-message ports each tick, and its per-window ports once, before
the window's first message; `end_window` follows the window's last message. Stages on one worker hand over directly.

The loop is written once, with `await`; on a thread no await ever suspends (see `route.Blocking`).
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Generator, Sequence
from typing import Any

from dflash_pipe.errors import BadInput, BrokenChannel, EndOfChannel
from dflash_pipe.form import refuse_no_json
from dflash_pipe.gate import Lane, TurnGate
from dflash_pipe.message import ELSEWHERE, NOTHING, Message, Stamp, Tombstone
from dflash_pipe.profile import Part, Way
from dflash_pipe.recording import Tape
from dflash_pipe.route import Local, Outlet, Waits
from dflash_pipe.stage import Source
from dflash_pipe.station import Feed, Port, Station
from dflash_pipe.stats import Activity
from dflash_pipe.transport import Transport

__all__ = ["Worker", "drive"]


class Worker:
    """One replica of a worker: its stations, opened, run and closed on one thread or in one coroutine.

    unfinished: messages that the source sent of a last window that it did not end. passed: stamp and cursor of the last
    message that the source has sent, and of the last window that each stage at the stream's end has finished.
    """

    def __init__(self, name: str, stations: Sequence[Station], waits: Waits, transport: Transport) -> None:
        self.name = name
        self.stations = stations
        self.activity = Activity(name)
        self.tape: Tape | None = None  # if the run is recorded
        self.turn: TurnGate | None = None
        self.in_order = False  # whether its replicas get the turn in input order
        self.unfinished = 0
        self.passed: dict[str, tuple[Stamp, Any]] = {}
        self._device: str | None = None
        self._waits = waits
        self._transport = transport
        self._opened: list[Station] = []
        self._stream: Generator[Message, None, None] | None = None
        self._leaves_early = False

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
                self._stream = self._messages(station, station.stage, station.feed)

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
            while not self._leaves_early:
                await self._tick()
        except EndOfChannel:  # the stream is over
            pass
        except BrokenChannel:  # whoever we send to has left
            self._leaves_early = True
        for station in self._opened:
            if station.snapshots is not None:
                self._doing(station, "state")
                station.snapshots.finish(station.stage)
            self._doing(station, "finish")
            station.stage.finish()

    def close(self) -> list[tuple[str, BaseException]]:
        """Close the stages, last opened first, then every channel end. Returns what failed where."""
        closing = [(station, "close", station.stage.close) for station in reversed(self._opened)]
        if self._stream is not None:
            closing += [(s, "read", self._stream.close) for s in self.stations if s.feed is not None]
        failures: list[tuple[str, BaseException]] = []
        for station, what, close in closing:
            self._device = None  # what it is to finish may have failed, and is over in any case
            try:
                self._doing(station, what)
                close()
            except BaseException as error:
                failures.append((self.activity.place, error))
        for station in self.stations:
            for outlet in (*station.outputs, *station.window_outputs):
                outlet.close()
            for port in station.inputs.values():
                port.inlet.close()
            for gate in station.credits:
                gate.ender_left()
            if self.turn is not None and self._leaves_early:
                self.turn.replica_left(station.plan.stage)
        return failures

    async def _tick(self) -> None:
        stamp: Stamp | None = None
        for station in self.stations:
            if station.plan.rate == "window" and stamp is not None and not stamp.last:
                continue
            message = await self._fire(station)
            if stamp is None and message.payload is not ELSEWHERE:
                self.activity.items += 1
            stamp = message.stamp

    async def _fire(self, station: Station) -> Message:
        """Let one stage work on the next message; returns what it sent."""
        if station.feed is not None:
            message = await self._next_from_source(station, station.feed)
            await self._send(station.outputs, station, message)
        else:
            message = await self._work(station, *await self._gather_inputs(station))
        if message.payload is not ELSEWHERE:
            for gate in station.credits:
                gate.done(message.stamp)
            if station.plan.ends and self.tape is not None:
                self.tape.over(message.stamp)
        if station.feed is not None or (station.plan.ends and message.stamp.last):
            self.passed[station.plan.stage] = message.stamp, message.cursor
        return message

    async def _next_from_source(self, station: Station, feed: Feed) -> Message:
        assert self._stream is not None
        message = next(self._stream, None)
        if message is None:
            raise EndOfChannel(f"source {station.plan.stage!r} has ended")
        if feed.window_credits is not None and message.stamp.slot == 0:
            await self._waits.at(feed.window_credits, message.stamp.window)
        if feed.credits is not None:
            await self._waits.at(feed.credits, message.stamp.index)
        return message

    def _messages(self, station: Station, source: Source[Any], feed: Feed) -> Generator[Message, None, None]:
        """Stamp what the source yields. Where a last window is ended although it is not full, one message is read
        ahead inside a window, to know whether it is the last."""
        index, window = feed.start
        slot = 0
        reading = iter(source.read(feed.cursor))

        def read(ahead: int) -> tuple[Any, Any] | None:
            stamp = Stamp(index + ahead, window, slot + ahead, False)
            self._doing(station, "read", stamp)
            begin = self.tape.mark("cpu") if self.tape is not None else None
            try:
                item = next(reading, None)
            except EndOfChannel:
                return None
            if item is None:
                return None
            if item[0] is None:
                raise BadInput("it yields None as the cursor: a cursor says where to go on; None means the beginning")
            if stamp.index == feed.start[0]:  # what cannot be kept is known before work is lost
                refuse_no_json(item[0], "cursor")
            if self.tape is not None and begin is not None:
                self.tape.fired(station.plan.stage, "read", stamp, begin, (item[1],), item[1])
            return item

        try:
            item: tuple[Any, Any] | None = None
            while not (slot == 0 and feed.stopping()) and (item := item or read(0)) is not None:
                full = slot == feed.window - 1
                following = read(1) if feed.keep_partial and not full else None
                last = full or (feed.keep_partial and following is None)
                (cursor, payload), item = item, following
                yield Message(Stamp(index, window, slot, last), cursor, None).carrying(payload)
                index, window, slot = index + 1, window + last, 0 if last else slot + 1
            self.unfinished = slot
        finally:
            if isinstance(reading, Generator):
                reading.close()

    async def _gather_inputs(self, station: Station) -> tuple[Message, dict[str, Any]]:
        """Read the ports in order. The message that leads is the first one, or the first tombstone among them."""
        leading: Message | None = None
        fed_back: Message | None = None
        arguments: dict[str, Any] = {}
        held = [p for p in station.inputs.values() if p.per_window and station.plan.rate == "message"]
        for name, port in station.inputs.items():
            if port in held:
                continue
            message = await self._receive(station, name, port)
            arguments[name] = message.payload
            if port.feedback:
                fed_back = message
                continue
            if leading is not None and message.stamp != leading.stamp:
                raise RuntimeError(f"port {name!r} got {message.stamp}, but {leading.stamp} was due")
            if leading is None or (message.empty and not leading.empty):
                leading = message
        leading = leading or fed_back
        assert leading is not None
        for name, port in station.inputs.items():
            if port in held:
                if leading.stamp.slot == 0 or port.held is None:
                    received = await self._receive(station, name, port)
                    port.held = port.held if received.empty and port.held else received
                arguments[name] = port.held.payload
        if not leading.empty and any(isinstance(payload, Tombstone) for payload in arguments.values()):
            leading = leading.carrying(None)
        if station.stamp_port is not None:
            arguments[station.stamp_port] = leading.stamp
        return leading, arguments

    async def _receive(self, station: Station, name: str, port: Port) -> Message:
        self.activity.place = f"{station.plan.stage} receive {name}"
        message = await port.inlet.receive(self._waits)
        if message.empty:
            return message
        self.activity.place = f"{self.activity.place} {message.stamp}"
        began = self.activity.clock()
        received = message.carrying(self._transport.on_receive(message.payload, station.plan.device))
        if not isinstance(port.inlet, Local):  # it came from another worker, and was not there yet
            self.activity.idled(self.activity.clock() - began)
        return received

    async def _work(self, station: Station, message: Message, arguments: dict[str, Any]) -> Message:
        """process, then end_window if the window ends, each followed by sending its result."""
        lane = Lane(station.plan.stage, message.stamp.index if self.in_order else None)
        if not message.empty:
            self._doing(station, "process", message.stamp)
            result = await self._in_turn(lane, station, "process", message.stamp, arguments)
            message = message.carrying(result)
        elif message.payload is NOTHING and self.turn is not None:
            self.turn.skip(lane)
        arguments.clear()  # what was received is not kept while the result waits for room
        await self._send(station.outputs, station, message)
        if station.ends_window and message.stamp.last:
            self._doing(station, "end_window", message.stamp)
            result = await self._in_turn(Lane(station.plan.stage, None), station, "end_window", message.stamp, {})
            await self._send(station.window_outputs, station, message.carrying(result))
        if station.snapshots is not None and message.stamp.last:
            self._doing(station, "state", message.stamp)
            station.snapshots.window_done(station.stage, message)
        return message

    async def _in_turn(self, lane: Lane, station: Station, part: Part, stamp: Stamp, arguments: dict[str, Any]) -> Any:
        """Call (and await, if it is a coroutine function), holding the worker's turn only around the call itself.

        A stage that raises EndOfChannel has nothing this time and wants no more: the worker leaves after this tick.
        """
        if self.turn is not None:
            await self._waits.at(self.turn, lane)
        try:
            begin = self.tape.mark(station.plan.device) if self.tape is not None else None
            result = getattr(station.stage, part)(**arguments)
            result = await result if inspect.isawaitable(result) else result
            if self.tape is not None and begin is not None:
                self.tape.fired(station.plan.stage, part, stamp, begin, (*arguments.values(), station.stage), result)
            (self._transport.finish if station.awaited else self._transport.follow)(station.plan.device)
            return result
        except EndOfChannel:
            self._leaves_early = True
            return None
        finally:
            if self.turn is not None:
                self.turn.give_back(lane)

    async def _send(self, outlets: Sequence[Outlet | Local], station: Station, message: Message) -> None:
        """Send along every route; if the receivers of one have left, still along the others, so that nothing is
        missing there, and then raise BrokenChannel."""
        if not outlets:
            return
        self.activity.place = f"{station.plan.stage} send {message.stamp}"
        broken: BrokenChannel | None = None
        for outlet in outlets:
            try:
                await outlet.send(self._waits, message)
            except BrokenChannel as error:
                broken = error
        if broken is not None:
            raise broken

    def hand_over(self, station: Station, channel: str, to: str | None, message: Message) -> Message:
        """What enters the channel: the payload as the transport makes it for a receiver on device `to`."""
        begin = self.tape.mark(station.plan.device) if self.tape is not None and to is not None else None
        sent = self._transport.on_send(message.payload, station.plan.device, to)
        if self.tape is not None and begin is not None:
            way: Way = "within" if to == station.plan.device else "between"
            self.tape.handed(station.plan.stage, channel, way, message.stamp, begin, sent)
        return message.carrying(sent)

    def _doing(self, station: Station, what: str, stamp: Stamp | None = None) -> None:
        left, self._device = self._device, station.plan.device
        if left not in (None, self._device):  # one stage after the other, on several devices too
            self._transport.finish(left)
        self.activity.place = f"{station.plan.stage} {what}{f' {stamp}' if stamp else ''}"
        if left != self._device:
            self._transport.enter(self._device)


def drive(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine whose awaits never suspend (thread workers); one that does fails at that place."""
    try:
        coroutine.send(None)
        coroutine.throw(RuntimeError("awaited something that suspends: the worker needs kind: async"))
    except StopIteration:
        return

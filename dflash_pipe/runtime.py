"""One run of a plan: start the workers, watch them, end them together.

- Every worker opens its stages in turn, nothing else runs meanwhile; then all start.
- The first failure cancels every channel and gate; all workers are joined; one ExceptionGroup tells what failed where.
- If every worker waits and nothing moves for `stall_after` seconds, that is a failure too: `Stalled` says who waits on
  what.
- SIGINT, SIGTERM or SIGHUP: the source ends at the next window, the stream drains, the snapshot is written. A second
  signal cancels, but for a second SIGHUP.

The calling thread only supervises: it waits for reports on one queue, so signals are handled at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_pipe.errors import BadInput, BadSnapshot, Cancelled, Stalled, noted
from dflash_pipe.graph import dataflow, difference, dump
from dflash_pipe.message import Stamp
from dflash_pipe.plan import Plan
from dflash_pipe.profile import Profile
from dflash_pipe.recording import Recording
from dflash_pipe.sharing import with_own_seconds
from dflash_pipe.signals import HANG_UP, listening
from dflash_pipe.snapshot import Snapshot
from dflash_pipe.stage import Source, Stage
from dflash_pipe.stall import Watchdog
from dflash_pipe.stats import View, be, shares
from dflash_pipe.trace import Timeline
from dflash_pipe.wiring import Origin, wire
from dflash_pipe.worker import Worker, drive

__all__ = ["Result", "Run"]

# How long a cancelled worker may go on computing before the run reports it as left behind.
_JOIN_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """How a run ended. stopped: the signal that asked it to stop, or None. snapshot: the newest that this run wrote.
    unfinished: micro-batches of a partial last window that were not stepped. left_behind: threads that did not end in
    time after the run was cancelled. cursor: behind the last finished window (None: there is none). account: what
    became of all that the source has read, in its own words. profile, timeline: what was recorded, None if nothing was.
    unmeasured: why there is no profile, or ''."""

    view: View
    stopped: signal.Signals | None
    cancelled: bool
    snapshot: Path | None
    unfinished: int
    left_behind: tuple[str, ...]
    cursor: Any = None
    account: str = ""
    profile: Profile | None = None
    timeline: Timeline | None = None
    unmeasured: str = ""


class Run:
    """A plan, run once, in `folder`. `restored` goes on after a snapshot of the same dataflow. record: whether service
    times, waits and depths are recorded. on_state: is given the stage with the state, instead of a snapshot of it.

    Raises BadInput if the snapshot belongs to another dataflow.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        restored: Snapshot | None = None,
        *,
        record: bool = True,
        on_state: Callable[[Stage], None] | None = None,
    ) -> None:
        computed = dataflow(plan.graph)
        if restored is not None and (other := difference(restored.dataflow, computed)) is not None:
            raise BadSnapshot(f"cannot go on: the snapshot is of another dataflow ({other})", restored.place)
        self.plan = plan
        self.metrics: dict[str, Any] = {}
        self.on_report: Callable[[dict[str, Any]], None] = lambda metrics: None
        self._stopping = threading.Event()
        self._stopped: signal.Signals | None = None
        self._cancelled = False
        self._torn_down: float | None = None
        origin = Origin(folder, restored, self._report, self._stopping.is_set, on_state)
        self._start = origin.start
        self._restored = restored
        self._wiring = wire(plan, origin, computed)
        self._events: queue.SimpleQueue[str | signal.Signals] = queue.SimpleQueue()
        self._open_turns = [threading.Event() for _ in self._wiring.workers]
        self._all_open = threading.Event()
        self._failures: list[BaseException] = []
        self._failing = threading.Lock()
        self._running = 0  # threads that have not reported their end
        self._began = time.perf_counter()
        self._recording = Recording(plan, origin.start[1], self._began) if record else None
        if self._recording is not None:
            self._recording.join([worker.activity for worker in self._wiring.workers], self._wiring.channels)
            for worker in self._wiring.workers:
                worker.tape = self._recording.tapes[worker.name]

    def stop(self) -> None:
        """Ask the source to end at the next window; `execute` returns when the stream has drained."""
        self._stopping.set()

    def cancel(self) -> None:
        """Tear the run down: everybody who waits is woken, nothing more is computed."""
        self._cancelled = True
        self._tear_down()

    def view(self) -> View:
        """What every worker and channel is doing at this moment."""
        workers = self._wiring.workers
        return View(
            run=self.plan.graph.name,
            elapsed=time.perf_counter() - self._began,
            window=int(self.metrics.get("step", 0)),
            workers=tuple(shares(w.activity, tuple(s.plan.stage for s in w.stations)) for w in workers),
            channels=tuple(channel.load for channel in self._wiring.channels),
            metrics=dict(self.metrics),
        )

    def execute(self, *, signals: bool = False) -> Result:
        """Run to the end and return how it ended. Raises an ExceptionGroup of what failed, with notes.

        signals: take SIGINT, SIGTERM and SIGHUP (main thread only).
        """
        threads = self._threads()
        # SimpleQueue.put may be called from a signal handler.
        with listening(self._events.put) if signals else nullcontext():
            for thread in threads:
                self._running += 1
                thread.start()
            self._open_turns[0].set()
            try:
                self._supervise()
            except BaseException:  # Ctrl-C where signals are not ours, or a fault of the supervision itself
                self.cancel()
                self._supervise()
                raise
            finally:
                left = self._join(threads)
        if self._failures:
            if left:
                self._failures[0].add_note(f"still computing when the run was given up: {', '.join(left)}")
            raise self._group()
        if not left:
            self._account()
        return Result(
            **self._recorded(),  # first, because it tells the view for how long workers waited on their devices
            view=self.view(),
            stopped=self._stopped,
            cancelled=self._cancelled,
            snapshot=self._wiring.snapshots.written if self._wiring.snapshots else None,
            unfinished=sum(w.unfinished for w in self._wiring.workers),
            left_behind=left,
            **self._read_and_done(),
        )

    def _read_and_done(self) -> dict[str, Any]:
        """What the result says of the source: how far its stream was finished, and its own account."""
        start = (Stamp(-1, -1, 0, True), self._restored.cursor if self._restored else None)
        stations = [(w.passed.get(s.plan.stage, start), s) for w in self._wiring.workers for s in w.stations]
        ending = [(at, s) for at, s in stations if s.plan.ends]
        enders = [at for at, s in ending if s.plan.rate == "window"] or [at for at, _ in ending]
        _, done = min(enders, key=lambda at: at[0].window, default=start)
        (_, read), source = next((at, s) for at, s in stations if s.feed is not None)
        with noted(f"stage {source.plan.stage}: account"):
            account = source.stage.account(read, done) if isinstance(source.stage, Source) else ""
        return {"cursor": done, "account": account}

    def _recorded(self) -> dict[str, Any]:
        """What of the result comes from the recording."""
        if self._recording is None:
            return {"unmeasured": "nothing was recorded"}
        timeline = self._recording.timeline()
        try:
            profile = self._recording.profile(dump(self.plan.graph))
        except BadInput as error:
            return {"timeline": timeline, "unmeasured": error.message}
        return {"timeline": timeline, "profile": with_own_seconds(profile, self.plan, timeline.spans)}

    # --- workers

    def _threads(self) -> list[threading.Thread]:
        """A thread for each thread worker, and one for all coroutines together."""
        bodies: list[tuple[str, Callable[[], None]]] = []
        coroutines: list[tuple[int, Worker]] = []
        for number, worker in enumerate(self._wiring.workers):
            if self._wiring.kinds[worker.name] == "async":
                coroutines.append((number, worker))
            else:
                bodies.append((worker.name, lambda n=number, w=worker: drive(self._live(n, w))))  # type: ignore[misc]
        if coroutines:
            bodies.append(("coroutines", lambda: asyncio.run(self._together(coroutines))))
        context = contextvars.copy_context()
        # Daemons, so that a stage that never returns cannot keep the process alive; all are joined below.
        return [
            threading.Thread(target=context.copy().run, args=(self._thread, body), name=name, daemon=True)
            for name, body in bodies
        ]

    def _thread(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # a fault of the runtime itself must not leave the others waiting
            self._failed(error, "")
        finally:
            self._events.put("a thread ended")

    async def _together(self, workers: list[tuple[int, Worker]]) -> None:
        for number, worker in workers:
            await asyncio.to_thread(self._open_turns[number].wait)
            self._open(number, worker)
        await asyncio.to_thread(self._all_open.wait)
        await asyncio.gather(*(self._working(worker) for _, worker in workers))

    async def _live(self, number: int, worker: Worker) -> None:
        self._open_turns[number].wait()
        self._open(number, worker)
        self._all_open.wait()
        await self._working(worker)

    def _open(self, number: int, worker: Worker) -> None:
        """Opens are serial: imports, tuning and graph capture want the machine for themselves."""
        be(worker.activity)
        try:
            if not self._failures and not self._cancelled:
                worker.open(self._restored.state if self._restored else None)
        except BaseException as error:
            self._failed(error, worker.activity.place, worker)
        finally:
            last = number + 1 == len(self._open_turns)
            (self._all_open if last else self._open_turns[number + 1]).set()

    async def _working(self, worker: Worker) -> None:
        be(worker.activity)
        worker.activity.restart_clock()
        index, window = self._start
        try:
            if not self._failures and not self._cancelled:
                stamp = Stamp(index - 1, window - 1, self.plan.graph.window - 1, True)
                await worker.send_first_tokens(self._wiring.feedback[worker.name], stamp)
                await worker.run()
        except Cancelled:
            pass
        except BaseException as error:
            self._failed(error, worker.activity.place, worker)
        for place, failure in worker.close():
            self._failed(failure, place, worker)
        worker.activity.end()

    def _failed(self, error: BaseException, place: str, worker: Worker | None = None) -> None:
        """Record what failed where, with every channel's depth, and tear the rest down."""
        if isinstance(error, BadSnapshot) and self._restored is not None:
            error.where = error.where or self._restored.place
        with self._failing:
            if isinstance(error, BadInput) and worker is not None:
                stage, _, doing = place.partition(" ")
                error.met_by = error.met_by or f"stage {stage} (worker {worker.name}, {doing})"
            elif worker is not None:
                error.add_note(f"in worker {worker.name}: {place}")
            if not self._failures:
                depths = ", ".join(f"{c.name} {c.depth}/{c.capacity}" for c in self.view().channels)
                error.add_note(f"channels: {depths}" if depths else "no channels")
            self._failures.append(error)
        self._tear_down()

    def _tear_down(self) -> None:
        if self._torn_down is None:
            self._torn_down = time.perf_counter()
        self._wiring.cancel()

    # --- supervision

    def _supervise(self) -> None:
        """Take reports until every thread has ended, or is overdue; in between, look whether anything moves."""
        watchdog = Watchdog([worker.activity for worker in self._wiring.workers], self.plan.graph.stall_after)
        while self._running and not self._overdue():
            try:
                event = self._events.get(timeout=watchdog.every)
            except queue.Empty:
                stalled = watchdog.look()
                if stalled is not None and not self._failures:
                    self._failed(Stalled(stalled), "")
                continue
            if isinstance(event, signal.Signals):
                self._signalled(event)
            else:
                self._running -= 1

    def _overdue(self) -> bool:
        """Whether a torn-down run has waited long enough for workers that still compute."""
        return self._torn_down is not None and time.perf_counter() - self._torn_down > _JOIN_SECONDS

    def _signalled(self, number: signal.Signals) -> None:
        if self._stopped is None:
            self._stopped = number
            self.stop()
        elif number != HANG_UP:  # the system and the shell may both send one for the same hang-up
            self.cancel()

    def _join(self, threads: list[threading.Thread]) -> tuple[str, ...]:
        for thread in threads:
            if not self._overdue():  # then each has reported its end
                thread.join()
        return tuple(thread.name for thread in threads if thread.is_alive())

    def _account(self) -> None:
        """What was sent was received or dropped, on every channel."""
        for channel in self._wiring.channels:
            sent, received, dropped = channel.counts
            if sent != received + dropped:
                raise RuntimeError(f"channel {channel.name}: {sent} sent, {received} received, {dropped} dropped")

    def _group(self) -> BaseExceptionGroup[BaseException]:
        """All failures as one group, without what their frames hold, which would keep the stages' tensors alive."""
        seen: set[int] = set()
        rest: list[BaseException | None] = list(self._failures)
        while rest:
            error = rest.pop()
            if error is not None and id(error) not in seen:
                seen.add(id(error))
                traceback.clear_frames(error.__traceback__)
                rest += [error.__cause__, error.__context__]
                rest += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        return BaseExceptionGroup(f"run {self.plan.graph.name} failed", self._failures)

    def _report(self, metrics: dict[str, Any]) -> None:
        self.metrics.update(metrics)  # in one step: several workers may report at once
        self.on_report(metrics)

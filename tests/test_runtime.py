"""Runs: how they end, what their failures tell, who may wait for whom, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_pipe.errors import BadInput, BadSnapshot, EndOfChannel, Missing, Stalled
from dflash_pipe.plan import plan
from dflash_pipe.snapshot import newest, read
from dflash_pipe.stall import Watchdog
from dflash_pipe.stats import BLOCKED, STARVED
from tests.pipeline import HOOKS, SEEN, Gate, executed, failure, graph_of, run_of, until

LINE = """
window: 4
stages:
  data: {use: (Count), with: {count: 8}}
  a: {use: (Step), with: {name: a}}
  sink: {use: (Collect)}
channels:
  one: {from: data, to: a}
  two: {from: a, to: sink}
workers:
  loader: {stages: [data]}
  a: {stages: [a]}
  sink: {stages: [sink]}
"""
WINDOWS = """
window: 4
stages:
  data: {use: (Count), with: {count: 12}}
  a: {use: (Step), with: {name: a}}
  sum: {use: (Sum)}
  total: {use: (Total)}
channels:
  one: {from: data, to: a}
  two: {from: a, to: sum}
  sums: {from: sum, to: total, per: window}
workers:
  loader: {stages: [data]}
  a: {stages: [a]}
  sum: {stages: [sum]}
  total: {stages: [total]}
"""


TWO_SUMS = ("sum.replicas=2", "sum.take=round_robin", 'stages.total.use="tests.pipeline:Totals"')


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    HOOKS.clear()
    SEEN.clear()
    yield
    HOOKS.clear()


def boom(*arguments: Any) -> None:
    raise ArithmeticError("boom")


def at(index: int, call: Any) -> Any:
    """A hook that calls `call` for one value only."""
    return lambda value, *rest: call() if value == index else None


# --- the normal end


def test_a_line_delivers_everything_in_order(tmp_path: Path) -> None:
    result = executed(run_of(tmp_path, LINE))
    assert SEEN["sink"] == list(range(8))
    assert (result.stopped, result.cancelled, result.snapshot, result.unfinished, result.left_behind) == (
        None, False, None, 0, ()
    )  # fmt: skip
    assert [w.items for w in result.view.workers] == [8, 8, 8]
    assert all(w.now == "done" for w in result.view.workers)
    assert all(w.busy + w.starved + w.blocked == pytest.approx(1) for w in result.view.workers)


def test_stages_are_finished_then_closed(tmp_path: Path) -> None:
    calls: list[str] = []
    for what in ("open", "finish", "close"):
        HOOKS[f"a.{what}"] = lambda *_, what=what: calls.append(what)
    executed(run_of(tmp_path, LINE))
    assert calls == ["open", "finish", "close"]


def test_opens_are_serial_and_in_their_workers_threads(tmp_path: Path) -> None:
    inside: list[int] = []
    threads: set[str] = set()

    def opening(replica: int) -> None:
        inside.append(1)
        assert len(inside) == 1
        threads.add(threading.current_thread().name)
        inside.pop()

    HOOKS["a.open"] = opening
    executed(run_of(tmp_path, LINE, "a.replicas=4"))
    assert threads == {"a[0]", "a[1]", "a[2]", "a[3]"}


def test_tombstones_are_never_seen_by_stages(tmp_path: Path) -> None:
    executed(run_of(tmp_path, LINE, "data.holes=[0,3,7]", "a.drop=[1]"))
    assert SEEN["sink"] == [2, 4, 5, 6]


@pytest.mark.parametrize(
    "workers",
    ["{main: {stages: [data, a, sum, total]}}", "{x: {stages: [data, total]}, y: {stages: [a, sum]}}"],
)
@pytest.mark.parametrize("overrides", [(), ("data.holes=[3,4]", "stages.a.with.drop=[11]")])
def test_fused_workers_compute_the_same(tmp_path: Path, workers: str, overrides: tuple[str, ...]) -> None:
    executed(run_of(tmp_path, WINDOWS, *overrides))
    alone = SEEN.pop("total")
    text = WINDOWS[: WINDOWS.index("workers:")] + f"workers: {workers}"
    executed(run_of(tmp_path, text, *overrides))
    assert SEEN["total"] == alone


FUSED_REPLICAS = (
    WINDOWS[: WINDOWS.index("workers:")].replace("(Total)", "(Totals)")
    + """
workers:
  loader: {stages: [data, total]}
  both: {stages: [a, sum], replicas: 2, take: round_robin}
"""
)


def test_stages_fused_on_dealt_replicas_pass_on_what_went_elsewhere(tmp_path: Path) -> None:
    result = executed(run_of(tmp_path, FUSED_REPLICAS, "data.holes=[2]"))
    assert SEEN["totals"] == [(0 + 0, 1 + 3), (4 + 6, 5 + 7), (8 + 10, 9 + 11)]
    assert [w.items for w in result.view.workers if w.name.startswith("both")] == [6, 6]


def test_a_stage_once_a_window_comes_after_those_of_its_worker_that_work_per_message(tmp_path: Path) -> None:
    """However the file lists them: here the total would wait for messages that its own worker has to pass on."""
    text = WINDOWS.replace("  a: {use: (Step), with: {name: a}}\n", "") + "  late: {stages: [a]}\n"
    text = text.replace("  a: {stages: [a]}\n", "").replace(
        "total: {stages: [total]}", "total: {stages: [total, sink]}"
    )
    text = text.replace("channels:", "  a: {use: (Step)}\n  sink: {use: (Collect)}\nchannels:")
    text = text.replace("to: sum}", "to: [sum, sink], capacity: 1}")
    executed(run_of(tmp_path, text))
    assert SEEN["total"] == [6, 28, 66] and SEEN["sink"] == list(range(12))


@pytest.mark.parametrize(("policy", "totals", "unfinished"), [("keep", [6, 28, 45], 0), ("drop", [6, 28], 2)])
@pytest.mark.parametrize("replicas", [(), TWO_SUMS])
def test_a_partial_last_window(
    tmp_path: Path, policy: str, totals: list[int], unfinished: int, replicas: tuple[str, ...]
) -> None:
    result = executed(run_of(tmp_path, WINDOWS, "data.count=10", f"partial_window={policy}", *replicas))
    if replicas:
        assert len(SEEN["totals"]) == len(totals)
    else:
        assert SEEN["total"] == totals
    assert result.unfinished == unfinished


def test_a_source_does_not_read_ahead_of_a_full_window(tmp_path: Path) -> None:
    """What has been read is sent before the next read, so that a slow source holds nothing back."""
    HOOKS["read"] = lambda index: until(lambda: len(SEEN.get("sink", [])) == index)
    executed(run_of(tmp_path, LINE, "window=1"))
    assert SEEN["sink"] == list(range(8))


# --- leaving early


@pytest.mark.parametrize("overrides", [
    (), ("a.replicas=3",), ("credits={messages: 1}",), ("credits={windows: 1}",), ("one.capacity=1", "two.capacity=1"),
    ("a.replicas=2", "a.take=round_robin"), ("a.replicas=3", "a.turn=t"), ("two.group=2",),
    ("a.replicas=3", "two.group=2", "credits={messages: 2}"),
])  # fmt: skip
def test_an_infinite_source_ends_when_the_consumer_leaves(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    executed(run_of(tmp_path, LINE, "data.count=null", "sink.leave=3", *overrides))
    assert SEEN["sink"] == [0, 1, 2]


@pytest.mark.parametrize("replicas", [1, 3])
def test_when_one_receiver_leaves_the_others_get_everything_that_was_made(tmp_path: Path, replicas: int) -> None:
    made: list[int] = []
    HOOKS["a"] = lambda value, replica: made.append(value)
    text = LINE.replace("to: sink}", "to: [sink, other]}")
    text = text.replace("channels:", "  other: {use: (Collect), with: {name: other}}\nchannels:")
    text += "  other: {stages: [other]}\n"
    executed(run_of(tmp_path, text, f"a.replicas={replicas}", "sink.leave=3", "data.count=null"))
    assert SEEN["sink"] == [0, 1, 2] and SEEN["other"] == sorted(made)


@pytest.mark.parametrize("extra", [(), ("a.turn=t",), ("credits={messages: 2}",)])
def test_a_replica_that_leaves_hands_its_work_to_the_others(tmp_path: Path, extra: tuple[str, ...]) -> None:
    left: list[int] = []

    def leave_once(value: int, replica: int) -> None:
        if value >= 2 and not left:
            left.append(value)
            raise EndOfChannel

    HOOKS["a"] = leave_once
    executed(run_of(tmp_path, LINE, "a.replicas=3", *extra))
    assert SEEN["sink"] == [i for i in range(8) if i not in left]


def test_a_dealt_replica_that_leaves_ends_the_stream(tmp_path: Path) -> None:
    HOOKS["a"] = lambda value, replica: at(2, lambda: (_ for _ in ()).throw(EndOfChannel))(value)
    executed(run_of(tmp_path, LINE, "a.replicas=2", "a.take=round_robin", "a.turn=t", "data.count=null"))
    assert SEEN["sink"][:2] == [0, 1] and 2 not in SEEN["sink"]


def test_a_source_may_end_by_raising(tmp_path: Path) -> None:
    def end() -> None:
        raise EndOfChannel

    HOOKS["read"] = at(6, end)
    executed(run_of(tmp_path, WINDOWS, "data.count=null"))
    assert SEEN["total"] == [6, 15]  # the last window has two


# --- failing


FAILURES = {
    "open": ("a.open", boom, "in worker a: a open"),
    "read": ("read", at(6, boom), "in worker loader: data read message 6 of window 1"),
    "receive": ("receive", at(5, boom), "in worker a: a receive value message 5 of window 1"),
    "process": ("a", at(5, boom), "in worker a: a process message 5 of window 1"),
    "finish": ("a.finish", boom, "in worker a: a finish"),
    "close": ("a.close", boom, "in worker a: a close"),
    "state": ("total.state", boom, "in worker total: total state message 3 of window 0"),
    "finish at the end": ("total.finish", boom, "in worker total: total finish"),
}


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("kind", [ArithmeticError, SystemExit, KeyboardInterrupt, Missing])
def test_a_failure_tells_where(tmp_path: Path, where: str, kind: type[BaseException]) -> None:
    """Wrong input in its one line, once; anything else in a note."""
    name, call, note = FAILURES[where]

    def fail(*arguments: Any) -> None:
        try:
            call(*arguments)
        except ArithmeticError as error:
            raise kind("boom") from error

    HOOKS[name] = fail
    error, notes = failure(run_of(tmp_path, WINDOWS, "snapshot=1", "transport=tests.pipeline:Hooked"))
    assert type(error) is kind
    worker, _, place = note.removeprefix("in worker ").partition(": ")
    stage, _, doing = place.partition(" ")
    said = f"boom; in stage {stage} (worker {worker}, {doing})" if kind is Missing else "boom"
    assert str(error) == said and (note in notes) is (kind is not Missing)
    assert all(f"{name} " in notes.partition("channels: ")[2] for name in ("one", "two", "sums"))


def test_what_is_wrong_in_a_snapshot_keeps_its_cause_and_where_it_was_found(tmp_path: Path) -> None:
    executed(run_of(tmp_path, WINDOWS))
    restored = read(newest(tmp_path))
    told = BadSnapshot("no such row")
    told.add_note("looked twice")

    def refuse(replica: int) -> None:
        raise told from ZeroDivisionError()

    HOOKS["a.open"] = refuse
    error, notes = failure(run_of(tmp_path, WINDOWS, restored=restored))
    assert str(error) == f"{restored.place}: no such row; in stage a (worker a, open)"
    assert isinstance(error.__cause__, ZeroDivisionError) and "looked twice" in notes
    assert traceback.extract_tb(error.__traceback__)[-1].name == "refuse"


@pytest.mark.parametrize("partial", ["keep", "drop"])
def test_a_source_that_says_nowhere_to_go_on_is_refused(tmp_path: Path, partial: str) -> None:
    """Its snapshots could not be resumed: None means the beginning."""
    error, _ = failure(
        run_of(tmp_path, WINDOWS.replace("(Count), with: {count: 12}", "(Lost)"), f"partial_window={partial}")
    )
    assert type(error) is BadInput and "\n" not in str(error)
    assert str(error).startswith("it yields None as the cursor: ")
    assert str(error).endswith("; in stage data (worker loader, read message 1 of window 0)")


def test_a_source_whose_cursor_no_snapshot_can_hold_fails_before_anything_is_computed(tmp_path: Path) -> None:
    error, notes = failure(run_of(tmp_path, WINDOWS.replace("(Count), with: {count: 12}", "(Unkept)"), "snapshot=null"))
    assert type(error) is TypeError and str(error).startswith("cursor has the key 0, which would come back as text")
    assert "in worker loader: data read message 0 of window 0" in notes


@pytest.mark.parametrize("stage", ["EndFails", "InitialFails"])
def test_a_failure_in_end_window_and_initial(tmp_path: Path, stage: str) -> None:
    text = WINDOWS.replace("(Sum)", "(EndFails)")
    place = "sum end_window message 3 of window 0"
    if stage == "InitialFails":
        text = (
            WINDOWS.replace("(Sum)", "(Held)")
            .replace("(Total)", "(InitialFails)")
            .replace("to: sum}", "to: sum.value}")
        )
        text = text.replace("workers:", "  back: {from: total, to: sum.held, per: window, initial: 1}\nworkers:")
        place = "total initial"
    error, notes = failure(run_of(tmp_path, text))
    assert isinstance(error, ArithmeticError) and place in notes


def test_a_replica_is_named(tmp_path: Path) -> None:
    HOOKS["a"] = lambda value, replica: boom() if replica == 1 else None
    _, notes = failure(run_of(tmp_path, LINE, "a.replicas=2", "a.take=round_robin"))
    assert "in worker a[1]: a process message 1 of window 0" in notes


def test_every_failed_close_is_told_and_all_ends_are_closed(tmp_path: Path) -> None:
    HOOKS["a.close"] = HOOKS["total.close"] = boom
    text = WINDOWS[: WINDOWS.index("workers:")] + "workers: {main: {stages: [data, a, sum, total]}}"
    with pytest.raises(ExceptionGroup) as failed:
        executed(run_of(tmp_path, text))
    notes = ["\n".join(e.__notes__) for e in failed.value.exceptions]
    assert [("total close" in n, "a close" in n) for n in notes] == [(True, False), (False, True)]


def test_an_opened_stage_is_closed_when_a_later_one_does_not_open(tmp_path: Path) -> None:
    closed: list[str] = []
    HOOKS["a.close"], HOOKS["b.open"] = lambda: closed.append("a"), boom
    HOOKS["b.close"] = lambda: closed.append("b")
    text = LINE.replace("to: sink}", "to: b}").replace(
        "channels:", "  b: {use: (Step), with: {name: b}}\nchannels:\n  three: {from: b, to: sink}"
    )
    failure(run_of(tmp_path, text + "  b: {stages: [b]}\n"))
    assert closed == ["a"]


def test_a_failure_releases_whoever_waits_anywhere(tmp_path: Path) -> None:
    gate = Gate()
    HOOKS["sink"] = lambda value: (gate.wait(), boom()) if value == 1 else None
    run = run_of(tmp_path, LINE, "a.replicas=3", "a.turn=t", "data.count=null", "one.capacity=1", "two.capacity=1")
    before = set(threading.enumerate())
    threading.Thread(target=lambda: (gate.reached(), until(lambda: _all_but(run, "sink")), gate.open())).start()
    with pytest.raises(ExceptionGroup) as failed:
        run.execute()
    assert len(failed.value.exceptions) == 1
    until(lambda: set(threading.enumerate()) <= before)


def _all_but(run: Any, name: str) -> bool:
    return all(w.activity.state in (STARVED, BLOCKED) for w in run._wiring.workers if w.name != name)


def test_what_a_failure_held_is_freed_after_the_report(tmp_path: Path) -> None:
    class Large:
        pass

    gone: list[weakref.ref[Large]] = []

    def fail(*arguments: Any) -> None:
        large = Large()
        gone.append(weakref.ref(large))
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ArithmeticError("second") from error

    HOOKS["a"] = fail
    with pytest.raises(ExceptionGroup) as failed:
        run_of(tmp_path, LINE).execute()
    kept = failed.value
    HOOKS.clear()
    gc.collect()
    assert gone[0]() is None and kept.exceptions


def test_a_source_that_cannot_account_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pipeline.Count.account", lambda *cursors: boom(), raising=False)
    with pytest.raises(ArithmeticError) as failed:
        run_of(tmp_path, LINE).execute()
    assert failed.value.__notes__ == ["in stage data: account"]


# --- stalls


DIAMOND = """
stall_after: 0.2
window: 4
stages:
  data: {use: (Count), with: {count: 8}}
  sum: {use: (Sum)}
  join: {use: (Weigh)}
channels:
  all: {from: data, to: sum}
  each: {from: data, to: join.value}
  sums: {from: sum, to: join.sum, per: window}
workers:
  data: {stages: [data]}
  sum: {stages: [sum]}
  join: {stages: [join]}
"""


def test_a_stall_says_who_waits_for_what(tmp_path: Path) -> None:
    error, notes = failure(run_of(tmp_path, DIAMOND, "each.capacity=1"))
    assert isinstance(error, Stalled)
    for line in ("data waits for room in 'each'", "sum waits for input from 'all'", "join waits for input from 'sums'"):
        assert line in str(error)
    assert "each 1/1" in notes


def test_with_room_for_the_window_it_does_not_stall(tmp_path: Path) -> None:
    executed(run_of(tmp_path, DIAMOND, "each.capacity=2"))
    assert SEEN["weighed"] == [(i, 6 if i < 4 else 22) for i in range(8)]


def test_what_would_wait_for_its_own_worker_is_refused(tmp_path: Path) -> None:
    text = DIAMOND[: DIAMOND.index("workers:")] + "workers: {main: {stages: [data, sum, join]}}"
    with pytest.raises(BadInput, match="'sums': join needs before a window what sum sends after it"):
        plan(graph_of(tmp_path, text))


@pytest.mark.parametrize("where", ["sink", "a", "open", "turn"])
def test_somebody_busy_is_no_stall(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the limit passes while everybody but one waits: for input, for room, for a turn, to be opened."""
    looks: list[Any] = []
    run = run_of(tmp_path, LINE, "stall_after=0.02", "a.replicas=2", "a.turn=t", "one.capacity=1", "two.capacity=1")
    look, counted = Watchdog.look, threading.Event()

    def looked(watchdog: Watchdog) -> str | None:
        looks.append(look(watchdog))
        if len(looks) > 40:
            counted.set()
        return looks[-1]

    monkeypatch.setattr(Watchdog, "look", looked)
    hook = {"open": "a.open", "turn": "a"}.get(where, where)
    HOOKS[hook] = at(1, lambda: counted.wait(10) and None)
    executed(run)
    assert counted.is_set() and SEEN["sink"] == list(range(8))


# --- replicas


def test_replicas_in_a_row_cannot_lock_each_other_out(tmp_path: Path) -> None:
    """b's replicas take whatever a's send; all of them could hold what lies too far ahead of the one that a still
    works on. So the bound stands before a, where messages still come in order."""
    gate, seen = Gate(), []
    text = LINE.replace("two: {from: a, to: sink}", "two: {from: a, to: b, capacity: 64}\n  three: {from: b, to: sink}")
    text = text.replace("  sink: {use", "  b: {use: (Step), with: {name: b}}\n  sink: {use")
    run = run_of(
        tmp_path, text + "  b: {stages: [b], replicas: 2}\n", "a.replicas=2", "data.count=60", "one.capacity=64"
    )

    def first_is_slow(value: int, replica: int) -> None:
        if value == 0:
            gate.wait()
        seen.append(value)

    HOOKS["a"] = first_is_slow
    others = [w.activity for w in run._wiring.workers if w.name.startswith("a[")]

    def release() -> None:
        gate.reached()
        until(lambda: any(a.waits_for == "the merge behind 'a'" and a.state is STARVED for a in others))
        gate.open()

    threading.Thread(target=release).start()
    executed(run)
    assert SEEN["sink"] == list(range(60))
    assert max(seen[: seen.index(0)]) == 11  # 3 for each of the 4 replicas, less the first


def test_a_group_larger_than_the_reorder_bound(tmp_path: Path) -> None:
    executed(run_of(tmp_path, LINE, "a.replicas=2", "two.group=16", "two.capacity=16", "data.count=40"))
    assert SEEN["sink"] == list(range(40))


def test_groups_between_replicas_and_replicas_are_refused(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, LINE, "a.replicas=2", "sink.replicas=2", "two.group=2")
    with pytest.raises(BadInput, match="'two': groups need their order"):
        plan(graph)


def test_a_group_starts_when_all_of_it_is_there(tmp_path: Path) -> None:
    """Two targets, one slow: the drafter takes nothing before both have sent."""
    gate = Gate()
    HOOKS["a"] = at(1, gate.wait)
    run = run_of(tmp_path, LINE, "a.replicas=2", "two.group=2")
    sink = next(w for w in run._wiring.workers if w.name == "sink")

    def release() -> None:
        gate.reached()
        until(lambda: sink.activity.state is STARVED and run._wiring.channels[1].counts[1] > 0)
        assert "sink" not in SEEN
        gate.open()

    other = threading.Thread(target=release)
    other.start()
    executed(run)
    other.join()
    assert SEEN["sink"] == list(range(8))


@pytest.mark.parametrize("take", ["first_free", "round_robin"])
def test_turns_are_granted_in_input_order(tmp_path: Path, take: str) -> None:
    order, inside = [], []

    def work(value: int, replica: int) -> None:
        inside.append(value)
        assert inside == [value]
        order.append(value)
        inside.pop()

    HOOKS["a"] = work
    executed(run_of(tmp_path, LINE, "a.replicas=3", "a.turn=t", f"a.take={take}", "data.holes=[2,3]", "data.count=24"))
    assert order == [i for i in range(24) if i not in (2, 3)]


def test_a_turn_keeps_no_order_where_there_is_none(tmp_path: Path) -> None:
    """b's replicas hold 1 and 2 while a still works on 0: they must not wait for the turn of 0."""
    gate, done = Gate(), []

    def work(value: int, replica: int) -> None:
        done.append(value)
        if {1, 2} <= set(done):
            gate.open()

    HOOKS["a"], HOOKS["b"] = at(0, gate.wait), work
    text = LINE.replace("two: {from: a, to: sink}", "two: {from: a, to: b}\n  three: {from: b, to: sink}")
    text = text.replace("  sink: {use", "  b: {use: (Step), with: {name: b}}\n  sink: {use")
    executed(run_of(tmp_path, text + "  b: {stages: [b], replicas: 2, turn: t}\n", "a.replicas=2"))
    assert SEEN["sink"] == list(range(8))


@pytest.mark.parametrize("limit", ["messages: 1", "windows: 1", "messages: 3"])
@pytest.mark.parametrize("replicas", [(), ("sink.replicas=2",), ("sink.replicas=2", "sink.take=round_robin")])
def test_credits_bound_what_is_in_flight_and_come_back(tmp_path: Path, limit: str, replicas: tuple[str, ...]) -> None:
    ahead: list[int] = []
    HOOKS["read"] = lambda index: ahead.append(index - len(SEEN.get("sink", [])))
    executed(
        run_of(
            tmp_path, LINE, f"credits={{{limit}}}", "data.count=40", "partial_window=drop", "one.capacity=8", *replicas
        )
    )
    assert sorted(SEEN["sink"]) == list(range(40))
    kind, number = limit.split(": ")
    assert max(ahead) <= int(number) * (4 if kind == "windows" else 1) + 1  # + the one that is read but not admitted


def test_one_credit_means_no_overlap_with_the_step_either(tmp_path: Path) -> None:
    inside: list[str] = []

    def alone(name: str) -> None:
        inside.append(name)
        assert inside == [name]
        inside.pop()

    HOOKS["a"] = lambda value, replica: alone("a")
    HOOKS["total"] = lambda value: alone("total")
    executed(run_of(tmp_path, WINDOWS, "credits={messages: 1}", "data.count=40"))
    assert len(SEEN["total"]) == 10


# --- coroutines, functions, feedback


@pytest.mark.parametrize("replicas", [1, 3])
def test_coroutines_and_threads_in_one_graph(tmp_path: Path, replicas: int) -> None:
    together = asyncio.Barrier(replicas) if replicas > 1 else None

    async def meet(value: int) -> None:
        if together is not None and value < replicas:
            async with asyncio.timeout(5):
                await together.wait()

    HOOKS["a"] = meet
    text = LINE.replace("(Step)", "(AsyncStep)").replace(
        "{stages: [a]}", f"{{stages: [a], kind: async, replicas: {replicas}, turn: null}}"
    )
    executed(run_of(tmp_path, text, "data.count=30", "one.capacity=1", "two.capacity=1"))
    assert SEEN["sink"] == list(range(30))


def test_a_failing_coroutine_is_named_and_releases_the_threads(tmp_path: Path) -> None:
    async def fail(value: int) -> None:
        if value == 3:
            boom()

    HOOKS["a"] = fail
    text = LINE.replace("(Step)", "(AsyncStep)").replace("{stages: [a]}", "{stages: [a], kind: async, replicas: 2}")
    _, notes = failure(run_of(tmp_path, text, "data.count=null"))
    assert "a process message 3 of window 0" in notes


def test_a_function_is_a_stage(tmp_path: Path) -> None:
    executed(run_of(tmp_path, LINE.replace("{use: (Step), with: {name: a}}", "{use: (double), with: {factor: 3}}")))
    assert SEEN["sink"] == [3 * i for i in range(8)]


def test_feedback_once_a_message(tmp_path: Path) -> None:
    """a(value, previous) -> b -> a.previous: each message is joined with what became of the one before."""
    text = """
stages:
  data: {use: (Count)}
  a: {use: (Chain)}
  b: {use: (Back)}
channels:
  one: {from: data, to: a.value}
  there: {from: a, to: b}
  back: {from: b, to: a.previous, initial: 1}
workers:
  data: {stages: [data]}
  a: {stages: [a]}
  b: {stages: [b]}
"""
    executed(run_of(tmp_path, text))
    apart = SEEN.pop("back")
    assert apart == [0, 1, 3, 6, 10, 15, 21, 28]
    executed(run_of(tmp_path, text[: text.index("workers:")] + "workers: {main: {stages: [data, a, b]}}"))
    assert SEEN["back"] == apart


def test_a_window_port_that_has_nothing_yet_is_an_empty_place(tmp_path: Path) -> None:
    """The first window's sum is None: a stage never sees what is not there, and later windows go on."""
    text = DIAMOND.replace("(Sum)", "(SecondSum)")
    executed(run_of(tmp_path, text, "each.capacity=4"))
    assert SEEN["weighed"] == [(i, 22) for i in range(4, 8)]


# --- stopping


def test_a_stop_ends_at_a_window(tmp_path: Path) -> None:
    run = run_of(tmp_path, WINDOWS, "data.count=null")
    HOOKS["read"] = at(6, run.stop)
    result = executed(run)
    assert SEEN["total"] == [6, 28] and result.unfinished == 0 and not result.cancelled
    assert result.snapshot is not None and result.snapshot.name == "window-00000002"


def test_a_cancel_ends_at_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, WINDOWS, "data.count=null")
    HOOKS["a"] = at(6, run.cancel)
    result = executed(run)
    assert result.cancelled and len(SEEN.get("total", [])) <= 1


def test_what_does_not_end_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_pipe.runtime._JOIN_SECONDS", 0.05)
    gate = Gate()
    HOOKS["a"] = at(1, gate.wait)
    run = run_of(tmp_path, LINE, "stall_after=0.05", "data.count=null")
    before = set(threading.enumerate())
    cancelling = threading.Thread(target=lambda: (gate.reached(), run.cancel()))
    cancelling.start()
    result = run.execute()
    assert result.cancelled and result.left_behind == ("a",)
    gate.open()
    until(lambda: set(threading.enumerate()) <= before)


def test_reports_of_several_workers_are_all_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path, LINE)
    told: list[Any] = []
    run.on_report = told.append
    threads = [threading.Thread(target=run._report, args=({f"m{i}": i},)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.metrics == {f"m{i}": i for i in range(20)} and len(told) == 20
    executed(run)

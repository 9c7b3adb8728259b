"""Failures that other pipelines had, as small scenarios. Each name says where one was reported, and what went wrong."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipe.channel import Channel
from dflash_pipe.errors import BadInput, BrokenChannel, Cancelled, Stalled
from dflash_pipe.plan import REORDER
from dflash_pipe.snapshot import newest, read
from tests.pipeline import HOOKS, SEEN, TOY, Beside, Gate, executed, failure, message, run_of, until

ROOT = Path(__file__).parent.parent
LINE = """
stages:
  data: {use: (Count), with: {count: 6}}
  a: {use: (Step), with: {name: a}}
  b: {use: (Step), with: {name: b}}
  sink: {use: (Collect)}
channels:
  one: {from: data, to: a}
  two: {from: a, to: b}
  three: {from: b, to: sink}
workers:
  loader: {stages: [data]}
  a: {stages: [a]}
  b: {stages: [b]}
  sink: {stages: [sink]}
"""
DIAMOND = """
stall_after: 0.1
window: 4
stages:
  split: {use: (Count), with: {count: 8}}
  batch: {use: (Sum)}
  zip: {use: (Weigh)}
channels:
  a: {from: split, to: batch}
  b: {from: split, to: zip.value}
  a2: {from: batch, to: zip.sum, per: window}
workers:
  split: {stages: [split]}
  batch: {stages: [batch]}
  zip: {stages: [zip]}
"""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    HOOKS.clear()
    SEEN.clear()
    yield
    HOOKS.clear()


def boom_at(index: int) -> Any:
    def hook(value: int, *rest: Any) -> None:
        if value == index:
            raise ArithmeticError("boom")

    return hook


@pytest.mark.parametrize("capacity", [1, 2])
def test_2_pytorch_9539_items_lost_at_shutdown(capacity: int, tmp_path: Path) -> None:
    capacities = [f"{channel}.capacity={capacity}" for channel in ("one", "two", "three")]
    executed(run_of(tmp_path, LINE, "a.replicas=3", "b.replicas=2", "sink.replicas=2", *capacities))
    assert sorted(SEEN["sink"]) == list(range(6))


def test_4_spdl_1624_blocking_stages_share_a_pool(tmp_path: Path) -> None:
    """Eight replicas of two stages block at once, until all of them do."""
    everybody = threading.Barrier(8)

    def block(value: int, replica: int) -> None:
        everybody.wait(10)

    HOOKS["a"] = lambda value, replica: block(value, replica) if value >= 4 else None
    HOOKS["b"] = lambda value, replica: block(value, replica) if value < 4 else None
    executed(run_of(tmp_path, LINE, "data.count=8", "a.replicas=4", "b.replicas=4"))
    assert SEEN["sink"] == list(range(8))


def test_6_torchdata_1003_a_source_dies_and_the_consumer_waits(tmp_path: Path) -> None:
    HOOKS["read"] = boom_at(7)
    _, notes = failure(run_of(tmp_path, LINE, "data.count=null", "one.capacity=4"))
    assert "in worker loader: data read message 7 of window 7" in notes


def test_7_spdl_1006_one_failure_reported_for_all(tmp_path: Path) -> None:
    HOOKS["b"] = boom_at(3)
    error, notes = failure(run_of(tmp_path, LINE, "a.replicas=2", "b.replicas=2", "sink.replicas=2"))
    assert "in worker b[" in notes and notes.count("in worker") == 1 and str(error) == "boom"


def test_9_torchspec_the_consumer_leaves_a_full_queue(tmp_path: Path) -> None:
    executed(run_of(tmp_path, LINE, "data.count=null", "sink.leave=3", "one.capacity=1", "two.capacity=1"))
    assert SEEN["sink"] == [0, 1, 2]


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_10_hop_7854_a_diamond_that_is_consumed_unevenly(capacity: int, tmp_path: Path) -> None:
    """zip holds one, the channel `capacity`, and split offers one: together they have to hold the window."""
    run = run_of(tmp_path, DIAMOND, f"b.capacity={capacity}")
    if capacity > 1:
        executed(run)
        assert SEEN["weighed"] == [(i, 6 if i < 4 else 22) for i in range(8)]
    else:
        error, _ = failure(run)
        assert isinstance(error, Stalled)
        assert "split waits for room in 'b'" in str(error)
        assert "batch waits for input from 'a'" in str(error)
        assert "zip waits for input from 'a2'" in str(error)


@pytest.mark.parametrize(("tokens", "line"), [(0, "a cycle without a token"), (3, "3 tokens do not fit")])
def test_11_trl_5656_a_cycle_without_tokens_or_with_too_many(tokens: int, line: str, tmp_path: Path) -> None:
    text = f"""
stages: {{data: {{use: (Count)}}, a: {{use: (Chain)}}, b: {{use: (Back)}}}}
channels:
  one: {{from: data, to: a.value}}
  there: {{from: a, to: b}}
  back: {{from: b, to: a.previous, initial: {tokens}, capacity: 2}}
workers: {{x: {{stages: [data]}}, y: {{stages: [a]}}, z: {{stages: [b]}}}}
"""
    with pytest.raises(BadInput, match=line) as refused:
        run_of(tmp_path, text)
    assert tokens or "a → b → a" in str(refused.value)


def test_12_ray_63277_an_item_larger_than_the_limit(tmp_path: Path) -> None:
    class Large(int):
        nbytes = 2_000_000

    HOOKS["a"] = lambda value, replica: Large(value)
    executed(run_of(tmp_path, LINE, "two.capacity={items: 4, bytes: 1MB}"))
    assert SEEN["sink"] == list(range(6))


def test_14_ray_65060_a_slow_consumer_is_no_stall(tmp_path: Path) -> None:
    """The sink takes three times the limit over one item, while all others wait."""
    run = run_of(tmp_path, LINE, "stall_after=0.1", "data.count=20")
    everybody = [w for w in run._wiring.workers if w.name != "sink"]

    def slow(value: int) -> None:
        if value == 1:
            until(lambda: all(w.activity.waits_for.startswith("room") for w in everybody))
            time.sleep(0.3)  # this is the case itself, not a wait for something

    HOOKS["sink"] = slow
    executed(run)
    assert SEEN["sink"] == list(range(20))


def dflash_pipe(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dflash_pipe", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_16_fgumi_252_a_deadlock_is_only_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "diamond.yaml"
    file.write_text(
        DIAMOND.replace("(", "tests.pipeline:").replace(")", "").replace("to: zip.value", "to: zip.value, capacity: 1")
    )
    with dflash_pipe("run", "--plain", "--runs", tmp_path, file) as process:
        _, said = process.communicate(timeout=20)
    assert process.returncode == 1 and "nothing moves: split waits for room in 'b'" in said


def test_32_dask_2144_ctrl_c_while_stages_sleep_wait_and_compute(tmp_path: Path) -> None:
    """The target sleeps, the drafter waits for it, and one stage multiplies matrices all the time."""
    busy = (
        "stages.busy={use: tests.pipeline:Multiply}",
        "channels.busy={from: data, to: busy}",
        "workers.busy={stages: [busy]}",
    )
    overrides = (*busy, "data.count=1000000", "name=interrupted")
    with dflash_pipe("run", "--plain", "--runs", tmp_path, TOY / "parallel_target.yaml", *overrides) as process:
        metrics = tmp_path / "interrupted" / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_text().count('"step"') >= 2)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
    assert "still computing" not in said and "resume: dflash-pipe run --resume" in said
    assert read(newest(tmp_path / "interrupted")).window == metrics.read_text().count('"step"')


def test_34_sabnzbd_3534_a_second_signal_during_the_snapshot(tmp_path: Path) -> None:
    """SIGTERM twice while a snapshot is written: one whole snapshot, and the handler only makes a note."""
    text = """
window: 2
snapshot: 1
stages: {data: {use: (Count), with: {count: null}}, total: {use: (Total)}}
channels: {one: {from: data, to: total}}
workers: {a: {stages: [data]}, b: {stages: [total]}}
"""
    run = run_of(tmp_path, text)
    cancelled = threading.Event()
    tear_down = run._tear_down

    def told() -> None:
        tear_down()
        cancelled.set()

    run._tear_down = told  # type: ignore[method-assign]

    def saving() -> None:
        if not cancelled.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            until(run._stopping.is_set)
            os.kill(os.getpid(), signal.SIGTERM)
            assert cancelled.wait(10)

    HOOKS["total.state"] = saving
    before = signal.getsignal(signal.SIGTERM)
    result = executed(run, signals=True)
    assert (result.stopped, result.cancelled) == (signal.SIGTERM, True)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [p.name for p in (tmp_path / "snapshots").iterdir()] == ["window-00000001"]
    assert read(newest(tmp_path)).state == {"total": 1}


@pytest.mark.parametrize(("policy", "expected"), [("drop", [(2, 4), (10, 12)]), ("keep", [(2, 4), (10, 12), (8, 9)])])
def test_37_accelerate_961_the_last_partial_batch(policy: str, expected: list[Any], tmp_path: Path) -> None:
    text = f"""
window: 4
partial_window: {policy}
stages: {{data: {{use: (Count), with: {{count: 10}}}}, trainer: {{use: (Sum)}}, step: {{use: (Totals)}}}}
channels: {{one: {{from: data, to: trainer}}, sums: {{from: trainer, to: step, per: window}}}}
workers:
  loader: {{stages: [data]}}
  trainer: {{stages: [trainer], replicas: 2, take: round_robin}}
  step: {{stages: [step]}}
"""
    result = executed(run_of(tmp_path, text))
    assert SEEN["totals"] == expected
    assert result.unfinished == (2 if policy == "drop" else 0)


@pytest.mark.parametrize("order", ["input", "completion"])
def test_39_pytorch_135409_order_lost(order: str, tmp_path: Path) -> None:
    clock = random.Random(7)
    HOOKS["a"] = lambda value, replica: time.sleep(clock.random() / 500)
    for repeat in range(20):
        SEEN.clear()
        executed(run_of(tmp_path / str(repeat), LINE, "data.count=24", "a.replicas=4", f"a.order={order}"))
        assert (SEEN["sink"] if order == "input" else sorted(SEEN["sink"])) == list(range(24))


def test_40_telcoin_992_and_52_prime_rl_2960_a_slow_input_is_starved(tmp_path: Path) -> None:
    """While one replica works on message 1, the others run ahead by the reorder bound and no further."""
    gate, started = Gate(), []

    def work(value: int, replica: int) -> None:
        started.append(value)
        if value == 1:
            gate.wait()

    HOOKS["a"] = work
    run = run_of(tmp_path, LINE, "data.count=60", "a.replicas=3", "one.capacity=60", "two.capacity=60")
    others = [w.activity for w in run._wiring.workers if w.name.startswith("a[")]

    def release() -> None:
        gate.reached()
        until(lambda: SEEN.get("sink") == [0])  # so the merge waits for 1
        until(lambda: sum(a.waits_for == "the merge behind 'a'" and a.state == "starved" for a in others) == 2)
        started.append(-1)
        gate.open()

    other = threading.Thread(target=release)
    other.start()
    executed(run)
    other.join()
    assert max(started[: started.index(-1)]) == REORDER * 3
    assert SEEN["sink"] == list(range(60))


@pytest.mark.parametrize("taken", [False, True])
def test_41_cpython_112202_a_wake_up_lost_with_its_waiter(taken: bool) -> None:
    """Two coroutines wait as an item comes and the channel is cancelled, at once or after it was taken: it is delivered
    once or counted as dropped, and nobody waits for ever."""

    async def once() -> None:
        channel = Channel("c", 1)
        sender, receivers = channel.sender(), [channel.receiver(), channel.receiver()]
        waiting = [asyncio.ensure_future(r.areceive()) for r in receivers]
        await asyncio.sleep(0)
        await sender.asend(message(0))
        if taken:
            first, _ = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result().payload for task in first] == [0]
            await sender.asend(message(1))
        channel.cancel()
        ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        sent, received, dropped = channel.counts
        assert received == sum(not isinstance(e, Cancelled) for e in ended) and sent == received + dropped

    for _ in range(100):
        asyncio.run(once())


def test_44_sentry_803_del_takes_the_queues_lock(tmp_path: Path) -> None:
    """Payloads in cycles, collected at any moment, also inside a channel; their deletion reports to the run."""
    run = run_of(tmp_path, LINE, "data.count=2000")
    told: list[Any] = []
    run.on_report = told.append

    class Cyclic(int):
        def __del__(self) -> None:
            run._report({"deleted": int(self)})
            run.view()

    def made(value: int, replica: int) -> Cyclic:
        item = Cyclic(value)
        item.me = item  # type: ignore[attr-defined]
        return item

    HOOKS["a"] = made
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        executed(run)
    finally:
        gc.set_threshold(*before)
    SEEN.clear()
    gc.collect()
    assert len(told) == 2000


def test_46_janus_237_a_blocked_put_is_released_by_close() -> None:
    channel = Channel("c", 1)
    sender, receiver = channel.sender(), channel.receiver()
    sender.send(message(0))
    blocked = Beside(lambda: channel.sender().send(message(1))).waits()
    receiver.close()
    assert isinstance(blocked.ended().error, BrokenChannel)


def test_48_pytorch_27600_a_kept_traceback_pins_tensors(tmp_path: Path) -> None:
    gone: list[weakref.ref[Any]] = []

    def fail(value: int, replica: int) -> None:
        held = np.zeros(100 * 2**20, np.uint8)
        gone.append(weakref.ref(held))
        raise ArithmeticError(f"boom {held.nbytes}")

    HOOKS["b"] = fail
    kept = None
    try:
        run_of(tmp_path, LINE).execute()
    except ExceptionGroup as error:
        kept = error
    gc.collect()
    assert kept is not None and str(kept.exceptions[0]) == f"boom {100 * 2**20}"
    assert gone[0]() is None

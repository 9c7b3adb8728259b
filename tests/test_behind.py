"""What a device is still working on: a worker is one message ahead of it, and none where others wait for its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_pipe import BadInput, Transport
from tests.pipeline import HOOKS, executed, run_of

LOG: list[tuple[Any, ...]] = []


class Noted(Transport):
    """Two devices; notes what it is asked, in order."""

    def accelerators(self) -> list[str]:
        return ["gpu:0", "gpu:1"]

    def on_send(self, payload: Any, device: str, to: str | None) -> Any:
        LOG.append(("send", device, to))
        return payload

    def follow(self, device: str) -> None:
        LOG.append(("follow", device))

    def finish(self, device: str) -> None:
        LOG.append(("finish", device))


LINE = """
window: 2
transport: "tests.test_behind:Noted"
stages:
  count: {use: "tests.pipeline:Count", with: {count: 4}}
  step: {use: "tests.pipeline:Step"}
  collect: {use: "tests.pipeline:Collect"}
channels:
  a: {from: count, to: step}
  b: {from: step, to: collect}
workers:
  source: {stages: [count], device: cpu}
  middle: {stages: [step], device: "gpu:0"}
  end: {stages: [collect], device: "gpu:1"}
"""


@pytest.fixture
def noted(tmp_path: Path) -> Any:
    def run(*overrides: str) -> list[tuple[Any, ...]]:
        LOG.clear()
        executed(run_of(tmp_path, LINE, *overrides))
        return LOG

    return run


def waits(log: list[tuple[Any, ...]], device: str) -> set[str]:
    return {entry[0] for entry in log if entry[1] == device and entry[0] != "send"}


def test_a_worker_is_one_message_ahead_of_its_device(noted: Any) -> None:
    log = noted()
    assert waits(log, "gpu:0") == waits(log, "gpu:1") == {"follow"}
    assert log.count(("follow", "gpu:0")) == 4


@pytest.mark.parametrize(
    ("overrides", "finished"),
    [
        ("middle.turn=one middle.replicas=2", {"gpu:0"}),
        ("b.group=2", {"gpu:0"}),
        ("credits.messages=1", {"gpu:1"}),
        ("credits.windows=1", {"gpu:1"}),
    ],
)
def test_where_others_wait_for_its_end_it_is_the_end_on_the_device(
    noted: Any, overrides: str, finished: set[str]
) -> None:
    log = noted(*overrides.split())
    for device in ("gpu:0", "gpu:1"):
        assert waits(log, device) == ({"finish"} if device in finished else {"follow"})


ONE = (
    LINE.partition("workers:")[0]
    + """
workers:
  main: {stages: [count, step, collect], device: {"*": "gpu:0", collect: "gpu:1"}}
"""
)


def test_a_worker_of_two_devices_finishes_on_one_before_it_turns_to_the_other(tmp_path: Path) -> None:
    """Otherwise its stages would overlap by a message, and a forecast of one after the other would be wrong."""
    LOG.clear()
    executed(run_of(tmp_path, ONE))
    computed = [entry for entry in LOG if entry[0] in ("follow", "finish")]
    turns = [("follow", "gpu:0"), ("finish", "gpu:0"), ("follow", "gpu:1"), ("finish", "gpu:1")]
    begin = computed.index(turns[0])
    assert computed[begin : begin + 16] == turns * 4


class Failing(Noted):
    """Its first device fails with the second message, for good, as a GPU does."""

    def finish(self, device: str) -> None:
        super().finish(device)
        if device == "gpu:0" and LOG.count(("finish", device)) > 1:
            raise RuntimeError("the device has failed")


def test_where_a_device_has_failed_all_stages_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    for name in ("one", "two"):
        monkeypatch.setitem(HOOKS, f"{name}.close", lambda name=name: closed.append(name))
    text = """
window: 2
transport: "tests.test_behind:Failing"
stages:
  count: {use: "tests.pipeline:Count", with: {count: 4}}
  one: {use: "tests.pipeline:Step", with: {name: one}}
  two: {use: "tests.pipeline:Step", with: {name: two}}
  collect: {use: "tests.pipeline:Collect"}
channels: {a: {from: count, to: one}, b: {from: one, to: two}, c: {from: two, to: collect}}
workers: {main: {stages: [count, one, two, collect], device: {"*": cpu, one: "gpu:0", two: "gpu:1"}}}
"""
    LOG.clear()
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="the device has failed")):
        executed(run_of(tmp_path, text))
    assert closed == ["two", "one"]


def test_the_sender_is_told_where_a_payload_goes(noted: Any) -> None:
    assert {entry[1:] for entry in noted() if entry[0] == "send"} == {("cpu", "gpu:0"), ("gpu:0", "gpu:1")}


@pytest.mark.parametrize(
    ("take", "devices", "expected"),
    [
        ("round_robin", "[gpu:0, gpu:1]", {"gpu:0", "gpu:1"}),
        ("first_free", "[gpu:0, gpu:1]", {None}),  # nobody knows yet
        ("first_free", "[gpu:1, gpu:1]", {"gpu:1"}),
    ],
)
def test_towards_replicas(noted: Any, take: str, devices: str, expected: set[str | None]) -> None:
    log = noted("middle.replicas=2", f"middle.take={take}", f"middle.device={devices}")
    assert {to for kind, device, to in (e for e in log if e[0] == "send") if device == "cpu"} == expected


ASYNC = """
window: 2
transport: "tests.test_behind:Noted"
stages:
  count: {use: "tests.pipeline:Count", with: {count: 4}}
  one: {use: "tests.pipeline:AsyncStep"}
  two: {use: "tests.pipeline:AsyncStep"}
  collect: {use: "tests.pipeline:Collect"}
channels:
  a: {from: count, to: one}
  b: {from: one, to: two}
  c: {from: two, to: collect}
workers:
  ends: {stages: [count, collect], device: cpu}
  first: {stages: [one], kind: async, device: "gpu:0"}
  second: {stages: [two], kind: async, device: "gpu:0"}
"""


def test_coroutines_share_a_thread_and_so_a_device(tmp_path: Path) -> None:
    executed(run_of(tmp_path, ASYNC))
    with pytest.raises(BadInput, match="worker 'second': kind: async, on gpu:1, but 'first' is on gpu:0: they share"):
        run_of(tmp_path, ASYNC, "second.device=gpu:1")
    with pytest.raises(BadInput, match="worker 'first': kind: async, on gpu:1, but 'first' is on gpu:0"):
        run_of(tmp_path, ASYNC, "first.replicas=2", "first.device=[gpu:0, gpu:1]")

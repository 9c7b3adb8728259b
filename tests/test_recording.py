"""What a run records of itself: service times, waits, depths, measures; on a device by marks that are read later."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipe import Source, Stage, Transport, recording
from dflash_pipe.closing import closing_lines
from dflash_pipe.graph import dump
from dflash_pipe.message import Stamp
from dflash_pipe.profile import Profile, Samples, load
from dflash_pipe.recording import Recording
from dflash_pipe.runtime import Run
from dflash_pipe.snapshot import newest, read
from dflash_pipe.stats import Activity, Newest
from stages.devices import DeviceTransport
from stages.messages import FeatureBatch, TokenBatch
from tests.pipeline import HOOKS, executed, run_of, toy
from tests.test_cli import called
from tests.test_forecast import toy as toy_graph
from tests.test_trace import broken_rules

TOY = Path(__file__).parent.parent / "graphs" / "toy"
WARM_UP = 2


@pytest.fixture(autouse=True)
def clean():
    HOOKS.clear()
    yield
    HOOKS.clear()


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["sequential", "overlapped", "parallel_target", "data_parallel"])
def test_every_firing_is_recorded_and_the_warm_up_is_left_out_of_the_profile(topology, tmp_path):
    """32 messages in windows of 4."""
    run = toy(tmp_path, topology)
    result = executed(run)
    drafters = sum(worker.name.startswith("drafter") for worker in run.plan.workers) or 1
    fired = Counter((span.stage, span.what) for span in result.timeline.spans)
    assert fired == {
        ("data", "read"): 32,
        ("target", "process"): 32,
        ("drafter", "process"): 32,
        ("drafter", "end_window"): 8 * drafters,
        ("optimizer", "process"): 8,
    }
    counts = {(stage, part): s.count for stage, parts in result.profile.stages.items() for part, s in parts.items()}
    assert counts == {key: count * 6 // 8 for key, count in fired.items()}
    assert result.profile.warm_up == WARM_UP == result.timeline.warm_up
    assert result.profile.steps.index == tuple(range(WARM_UP, 8)) and not result.unmeasured
    for span in result.timeline.spans:
        assert 0 <= span.begin <= span.end <= result.view.elapsed and span.window == span.index // 4


def test_work_and_waits_of_a_worker_do_not_overlap(tmp_path):
    timeline = executed(toy(tmp_path, "parallel_target")).timeline
    assert timeline.waits and {wait.state for wait in timeline.waits} <= {"starved", "blocked"}
    for worker in timeline.workers:
        own = sorted((e.begin, e.end) for e in (*timeline.spans, *timeline.waits) if e.worker == worker)
        assert all(before[1] <= after[0] for before, after in pairwise(own))


def test_the_depth_of_a_channel_goes_up_and_down_by_one_and_stays_in_its_room(tmp_path):
    result = executed(toy(tmp_path, "data_parallel", "features.capacity=2"))
    rooms = {load.name: load.capacity for load in result.view.channels}
    assert rooms["features[0]"] == 2
    for name, room in rooms.items():
        seen = [(depth.items, depth.nbytes) for depth in result.timeline.depths if depth.channel == name]
        items = [0, *(count for count, _ in seen)]
        assert all(abs(after - before) == 1 for before, after in pairwise(items))
        assert max(items) <= room
        if name.startswith("features"):
            assert all(nbytes == 32 * count for count, nbytes in seen) and seen[-1] == (0, 0)


def test_a_service_time_is_that_of_the_work_alone(tmp_path):
    """The drafter holds up the target's channel; the target's times do not grow by that."""
    result = executed(toy(tmp_path, "overlapped", "drafter.seconds=0.01", "features.capacity=1"))
    stages = result.profile.stages
    assert stages["drafter"]["process"].mean == pytest.approx(0.01, rel=0.3)
    assert stages["target"]["process"].mean < 0.004
    assert result.profile.steps.mean == pytest.approx(0.04, rel=0.3)


def test_the_wait_for_a_turn_is_a_wait_and_no_work(tmp_path):
    run = toy(tmp_path, "parallel_target", "target.turn=gpu", "target.seconds=0.004")
    result = executed(run)
    assert any(wait.what == "its turn (gpu)" for wait in result.timeline.waits)
    assert result.profile.stages["target"]["process"].mean < 0.008


def test_recording_can_be_switched_off(tmp_path):
    plain = toy(tmp_path, "overlapped")
    result = executed(Run(plain.plan, tmp_path, record=False))
    assert result.profile is None and result.timeline is None and result.unmeasured == "nothing was recorded"


def test_it_computes_the_same_with_and_without(tmp_path):
    runs = [Run(toy(tmp_path, "data_parallel").plan, tmp_path / str(on), record=on) for on in (True, False)]
    for run in runs:
        executed(run)
    assert runs[0].metrics["digest"] == runs[1].metrics["digest"]


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_a_run_of_any_window_has_a_profile_that_says_on_how_little_it_rests(windows, tmp_path):
    result = executed(toy(tmp_path, "overlapped", f"data.count={4 * windows}"))
    assert result.profile.steps.count == 1 and 0 < result.profile.steps.mean < result.view.elapsed
    assert result.profile.doubts()[0].startswith("the profile rests on 1 measured step")
    assert result.profile.stages["target"]["process"].count == (4 * windows if windows < 3 else 4)
    assert len(result.timeline.spans) == windows * (4 * 3 + 2)


def test_a_run_without_a_whole_window_has_no_profile(tmp_path):
    result = executed(toy(tmp_path, "overlapped", "data.count=3"))
    assert result.profile is None and " was full, and only full ones are timed" in result.unmeasured


def test_it_knows_the_cores_what_ran_on_them_and_what_other_programs_used(tmp_path, monkeypatch):
    """All cores: 20 s. Busy: 12 s, 9 of them this process."""
    seen = iter([(100.0, 50.0, 1.0), (120.0, 62.0, 10.0)])
    monkeypatch.setattr(recording, "_cpu_seconds", lambda: next(seen))
    host = executed(toy(tmp_path, "overlapped")).profile.host
    assert host.cores >= 1 and host.stages == ("data", "target", "drafter", "optimizer")
    assert host.others == pytest.approx(0.15)


def test_the_seconds_of_the_cpu_only_grow():
    before = recording._cpu_seconds()
    if before is None:
        pytest.skip("this system does not tell")
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    every, busy, own = (b - a for a, b in zip(before, recording._cpu_seconds(), strict=True))
    assert own >= 0.15 and 0 < busy <= every + 1e-6  # counted in ticks, and summed as floats


def test_the_warm_up_of_a_resumed_run_begins_again(tmp_path):
    hooked = ("overlapped", 'stages.target.use="tests.pipeline:HookedTarget"', "data.count=200")
    first = toy(tmp_path, *hooked)
    HOOKS["target"] = lambda index: first.stop()
    executed(first)
    restored = read(newest(tmp_path))
    HOOKS.clear()
    result = executed(toy(tmp_path, *hooked, restored=restored))
    assert 0 < restored.window < 40 and result.timeline.warm_up == restored.window + WARM_UP
    assert result.profile.steps.index == tuple(range(restored.window + WARM_UP, 50))


def test_a_window_that_is_not_full_is_no_step(tmp_path):
    result = executed(toy(tmp_path, "overlapped", "data.count=30", "partial_window=keep"))
    assert result.profile.steps.index == (2, 3, 4, 5, 6)


def test_a_timeline_keeps_the_newest_and_counts_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "KEEP", 10)
    timeline = executed(toy(tmp_path, "sequential")).timeline
    assert len(timeline.spans) == 10 and timeline.left_out == {"spans": 32 * 3 + 8 * 2 - 10}
    assert timeline.spans[-1].stage == "optimizer" and timeline.spans[-1].index == 31


def test_the_newest_are_kept():
    newest_two: Newest[int] = Newest(2)
    for number in range(5):
        newest_two.add(number)
    assert list(newest_two.entries) == [3, 4] and newest_two.seen == 5


# --- measures ---------------------------------------------------------------------------------------------------------


class Sized:
    """A payload that says how large it is."""

    def __init__(self, tokens):
        self.measures = {"tokens": float(tokens)}
        self.nbytes = 2 * tokens


class SizedSource(Source[Sized]):
    def read(self, cursor: Any) -> Iterator[tuple[Any, Sized]]:
        for index in range(12):
            yield index, Sized(100 + index)


class SizedStep(Stage):
    def process(self, x: Sized, stamp: Stamp) -> Sized:
        return Sized(1)


class SizedEnd(Stage):
    """Says, too, how large its work was."""

    def process(self, x: Sized, stamp: Stamp) -> None:
        self.measures = {"anchors": 10.0 + stamp.index}

    def end_window(self) -> Sized:
        return Sized(3)


class SizedLast(Stage):
    def process(self, x: Sized) -> None:
        pass


def test_a_firing_is_recorded_with_what_its_payloads_and_its_stage_say_of_its_size(tmp_path):
    run = run_of(
        tmp_path,
        'stages: {data: {use: "tests.test_recording:SizedSource"}, step: {use: "tests.test_recording:SizedStep"}, '
        'end: {use: "tests.test_recording:SizedEnd"}, last: {use: "tests.test_recording:SizedLast"}}\nwindow: 2\n'
        "channels: {a: {from: data, to: step}, b: {from: step, to: end}, c: {from: end, to: last, per: window}}\n"
        "workers: {w: {stages: [data, step, end, last]}}\n",
    )
    stages = executed(run).profile.stages
    tokens = tuple(float(n) for n in range(104, 112))
    assert stages["data"]["read"].measures == {"tokens": tokens, "sent_bytes": tuple(2 * n for n in tokens)}
    assert stages["step"]["process"].measures == {"tokens": tokens, "sent_bytes": (2.0,) * 8}
    assert stages["end"]["process"].measures == {"tokens": (1.0,) * 8, "anchors": tuple(n - 90 for n in tokens)}
    assert stages["end"]["end_window"].measures == {"sent_bytes": (6.0,) * 4}


def test_a_token_batch_says_its_size_without_a_look_at_its_tensors():
    ids = torch.empty(3, 8, dtype=torch.int64, device="meta")
    lengths = torch.empty(3, dtype=torch.int64, device="meta")
    batch = TokenBatch(ids, ids.bool(), lengths, lengths, real=20, supervised=11)
    expected = {"rows": 3.0, "padded": 24.0, "tokens": 20.0, "supervised": 11.0}
    assert batch.measures == expected
    assert FeatureBatch(batch, torch.empty(3, 8, 4, device="meta")).measures == expected
    assert TokenBatch(ids, ids.bool(), lengths, lengths).measures == {"rows": 3.0, "padded": 24.0}


# --- a device that is behind the host ---------------------------------------------------------------------------------


class Behind(Transport):
    """A device with a clock of its own (1000 s ahead); it comes to a mark when the test says so."""

    def __init__(self, threads=None):
        self.reached = 0.0
        self.marks: list[float] = []

    def resolve(self, device):
        return device

    def mark(self, device):
        return ("mark", self.marks.pop(0)) if device == "gpu" else super().mark(device)

    def elapsed(self, begin, end):
        return None if end[1] > self.reached else end[1] - begin[1]


STAMPS = [Stamp(index, index // 4, index % 4, False) for index in range(8, 12)]  # behind the warm-up


@pytest.fixture
def behind(tmp_path):
    """A tape whose marks lie on the device, and the transport that says when they are reached."""
    run = toy(tmp_path, "sequential")
    run.plan.graph.transport.__class__ = Behind
    run.plan.graph.transport.__init__()
    recorded = Recording(run.plan, 0, time.perf_counter())
    return recorded.tapes["main"], run.plan.graph.transport, recorded


def fire(tape, transport, stamp, begin, end):
    transport.marks += [begin, end]
    tape.fired("target", "process", stamp, tape.mark("gpu"), (), None)


def test_a_firing_is_taken_down_when_the_device_has_ended_it(behind):
    tape, transport, recorded = behind
    fire(tape, transport, STAMPS[0], 1000.0, 1000.25)
    fire(tape, transport, STAMPS[1], 1000.25, 1000.75)
    tape.read()
    assert tape.spans.seen == 0
    transport.reached = 1000.25
    tape.read()
    assert [entry[2] for entry in tape.spans.entries] == [8]
    transport.reached = 1001.0
    tape.read()
    assert [entry[2] for entry in tape.spans.entries] == [8, 9]
    recorded.recorder.window_done(1, 0.0)
    recorded.recorder.window_done(2, 1.0)
    samples = recorded.profile("").stages["target"]["process"]
    assert samples.seconds == pytest.approx((0.25, 0.5), abs=1e-9)


def test_a_host_that_waits_for_its_inputs_on_the_device_is_not_busy(behind, monkeypatch):
    """Both firings end on the host with their work on the device: 5 s each of which 4 and 1 were work. The third does
    not wait, and its work takes longer than its launch."""
    tape, transport, _ = behind
    clock = iter([0.0, 5.0, 5.0, 10.0, 10.0, 10.1])
    monkeypatch.setattr(recording, "perf_counter", lambda: next(clock, 100.0))
    tape.activity = Activity("main", clock=lambda: 20.0)
    tape.activity.since = 0.0
    fire(tape, transport, STAMPS[0], 1001.0, 1005.0)
    fire(tape, transport, STAMPS[1], 1009.0, 1010.0)
    fire(tape, transport, STAMPS[2], 1010.0, 1018.0)
    transport.reached = 2000.0
    tape.read()
    assert tape.activity.spent() == pytest.approx({"busy": 15.0, "starved": 5.0, "blocked": 0.0})


def test_a_host_that_waits_for_its_own_work_is_busy(behind, monkeypatch):
    """The device always works; every firing begins with a look at the result of the one before."""
    tape, transport, _ = behind
    clock = iter([0.0, 0.1, 0.1, 1.0, 1.0, 1.5, 1.5, 2.5])
    monkeypatch.setattr(recording, "perf_counter", lambda: next(clock, 100.0))
    tape.activity = Activity("main", clock=lambda: 3.0)
    tape.activity.since = 0.0
    moments = (1000.0, 1001.0, 1001.5, 1002.5, 1003.0)
    for stamp, (begin, end) in zip(STAMPS, pairwise(moments), strict=True):
        fire(tape, transport, stamp, begin, end)
    transport.reached = 2000.0
    tape.read()
    assert tape.activity.spent() == pytest.approx({"busy": 3.0, "starved": 0.0, "blocked": 0.0})


def test_the_host_goes_on_while_the_device_is_behind(behind):
    tape, transport, _ = behind
    for index in range(200):
        fire(tape, transport, Stamp(index, index, 0, True), 1000.0 + index, 1001.0 + index)
    assert tape.spans.seen == 0
    transport.reached = 1e9
    tape.read()
    assert tape.spans.seen == 200


def test_a_devices_moments_are_put_on_the_hosts_clock(behind, monkeypatch):
    """Marks made at host times 10, 11, 12 and 30; the device is behind at first, and idle before the last."""
    tape, transport, _ = behind
    clock = iter([10.0, 10.1, 11.0, 11.1, 12.0, 12.1, 30.0, 30.1])
    monkeypatch.setattr(recording, "perf_counter", lambda: next(clock, 100.0))
    fire(tape, transport, STAMPS[0], 1000.0, 1003.0)  # 10 to 13
    fire(tape, transport, STAMPS[1], 1003.0, 1005.0)  # 13 to 15
    fire(tape, transport, STAMPS[2], 1005.5, 1006.0)  # 15.5 to 16
    fire(tape, transport, STAMPS[3], 1019.0, 1021.0)  # 29 to 31 by its clock, but not before the host's 30
    transport.reached = 2000.0
    tape.read()
    assert [entry[4:] for entry in tape.spans.entries] == [(10.0, 13.0), (13.0, 15.0), (15.5, 16.0), (30.0, 32.0)]


def test_what_has_ended_does_not_lie_ahead(behind, monkeypatch):
    """A device clock that runs fast: what was seen to have ended at 14 did not end later."""
    tape, transport, _ = behind
    clock = iter([10.0, 10.1, 10.2, 10.3])
    monkeypatch.setattr(recording, "perf_counter", lambda: next(clock, 14.0))
    fire(tape, transport, STAMPS[0], 1000.0, 1001.0)
    fire(tape, transport, STAMPS[1], 1003.0, 1005.0)
    transport.reached = 2000.0
    tape.read()
    assert [entry[4:] for entry in tape.spans.entries] == [(10.0, 11.0), (12.0, 14.0)]


def test_on_the_cpu_the_transport_of_torch_graphs_marks_host_time():
    transport = DeviceTransport()
    before = time.perf_counter()
    mark = transport.mark("cpu")
    assert before <= mark <= time.perf_counter() and transport.elapsed(mark, mark + 2.0) == 2.0
    assert transport.memory("cpu") is None


# --- the command ------------------------------------------------------------------------------------------------------

SLOW = ("target.seconds=0.004", "drafter.seconds=0.002", "optimizer.seconds=0.001")


def said_by(capsys, *arguments):
    assert called("run", "--plain", *arguments) == 0
    return capsys.readouterr().out


def test_every_run_ends_with_its_step_its_forecast_and_what_binds_it(tmp_path, capsys):
    said = said_by(capsys, "--runs", tmp_path, TOY / "overlapped.yaml", "data.count=48")
    assert "measured (mean of 10 after 2 of warm-up, median " in said and "forecast: overlap efficiency 9" in said
    assert re.search(r"bound by target: busy \d+% as measured, .* a second target replica would give 1\.", said)
    assert "messages/s" in said and "rows/s" not in said
    log = (tmp_path / "overlapped" / "log.txt").read_text()
    assert "overlap efficiency" in log and "bound by target" in log
    profile = load(tmp_path / "overlapped" / "profile.json")
    assert profile.window == 4 and profile.stages["target"]["process"].count == 40


def test_where_the_source_counts_rows_and_tokens_their_rates_are_told():
    steps = Samples(10, 5.0, tuple(range(10)), (0.5,) * 10)
    held = {"rows": (2.0, 4.0), "tokens": (100.0, 300.0), "supervised": (50.0, 150.0)}
    reads = Samples(20, 0.2, (8, 9), (0.01, 0.01), held)
    graph = toy_graph()
    profile = Profile(dump(graph), 4, "", 2, steps, {"data": {"read": reads}})
    *_, rates = closing_lines(graph, profile, "")
    assert rates == "8 messages/s · 24 rows/s · 1,600 tokens/s · 800 supervised tokens/s"


def test_a_short_run_ends_with_how_little_was_measured(tmp_path, capsys):
    said = said_by(capsys, "--runs", tmp_path, TOY / "overlapped.yaml", "data.count=8", *SLOW)
    assert "measured (mean of 1 after 0 of warm-up, median " in said
    assert "the profile rests on 1 measured step of the warm-up: 5 are needed (a run of 7 windows or more)\n" in said
    assert load(tmp_path / "overlapped" / "profile.json").steps.count == 1


@pytest.mark.parametrize(
    ("rest", "title", "told"),
    [
        ("partial_window=keep", "1 window in 0:00", ""),
        (
            "partial_window=drop",
            "0:00",
            "not stepped: 3 micro-batches of a last window that was not full; no step was made\n",
        ),
    ],
)
def test_a_run_without_a_full_window_ends_with_that(rest, title, told, tmp_path, capsys):
    said = said_by(capsys, "--runs", tmp_path, TOY / "overlapped.yaml", "data.count=3", rest, *SLOW)
    assert f"overlapped · {title}\n" in said
    assert f"not measured (no window of 4 messages was full, and only full ones are timed)\n{told}run folder" in said
    assert not (tmp_path / "overlapped" / "profile.json").exists()


def test_a_forecast_that_fails_is_told_and_does_not_fail_the_run(tmp_path, capsys, monkeypatch):
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr("dflash_pipe.closing.predict", broken)
    said = said_by(capsys, "--runs", tmp_path, TOY / "overlapped.yaml", *SLOW)
    assert "no forecast: ZeroDivisionError: nothing to divide by" in said
    assert "messages/s" in said


def test_a_stopped_run_has_a_profile_too(tmp_path):
    run = toy(tmp_path, "overlapped", 'stages.target.use="tests.pipeline:HookedTarget"', "data.count=100000")
    HOOKS["target"] = lambda index: run.stop() if index == 24 else None
    result = executed(run)
    assert result.profile is not None and result.profile.steps.count >= 4


def test_the_trace_is_written_where_it_is_asked_for(tmp_path, capsys):
    said_by(capsys, "--runs", tmp_path, "--trace", tmp_path / "trace.json", TOY / "parallel_target.yaml", *SLOW)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert broken_rules(trace) == [] and len(trace["traceEvents"]) > 200


def test_a_trace_into_no_folder_is_refused_before_the_run(tmp_path, capsys):
    file = tmp_path / "no" / "t.json"
    assert called("run", "--runs", tmp_path, "--trace", file, TOY / "overlapped.yaml") == 2
    said = capsys.readouterr().err
    assert said == f"command line: --trace: {file} cannot be written (No such file or directory)\n"
    assert not (tmp_path / "overlapped").exists()

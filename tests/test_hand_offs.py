"""What handing over costs: measured by a run, part of its forecast, and named where it binds."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from dflash_pipe import Transport
from dflash_pipe.check import check
from dflash_pipe.forecast import predict
from dflash_pipe.graph import Graph, load
from dflash_pipe.hand_offs import sized
from dflash_pipe.plan import plan
from dflash_pipe.profile import HAND_OFF, Recorder, Samples, Way
from dflash_pipe.recording import Recording
from dflash_pipe.simulate import ways
from stages.toy import Digest, Partials
from tests.pipeline import executed, toy
from tests.test_forecast import SEQUENTIAL, profile_of
from tests.test_recording import STAMPS, Behind

HELD = 0.02


class Slow(Transport):
    """Keeps whoever sends gradients, and tells of their way that it took a second on a device."""

    def on_send(self, payload: Any, device: str, to: str | None) -> Any:
        if isinstance(payload, Partials):
            time.sleep(HELD)
        return payload

    def crossing(self, sent: Any) -> list[tuple[float, float]]:
        return [(3.0, 3.25), (7.0, 7.75)] if isinstance(sent, Partials) else []


SLOW = "transport=tests.test_hand_offs:Slow"


# --- measured ---------------------------------------------------------------------------------------------------------


def test_a_run_measures_what_every_hand_off_takes(tmp_path):
    """32 messages in windows of 4, two of them warm-up; two drafters each send and are sent to once a window."""
    result = executed(toy(tmp_path, "data_parallel", SLOW))
    assert result.profile is not None
    counts = {channel: {way: s.count for way, s in ways.items()} for channel, ways in result.profile.handed.items()}
    assert counts == {c: {"within": n} for c, n in {"batches": 24, "features": 24, "grads": 12, "params": 12}.items()}
    grads, params = (result.profile.handed[channel]["within"] for channel in ("grads", "params"))
    assert min(grads.seconds) >= HELD > 2 * min(params.seconds)
    assert set(grads.measures["later"]) == {1.0} and set(params.measures["later"]) == {0.0}
    assert "grads" not in result.profile.stages and not result.profile.fault()


def test_what_takes_long_is_seen_in_the_timeline_of_whoever_sends(tmp_path):
    spans = executed(toy(tmp_path, "data_parallel", SLOW)).timeline.spans
    seen = [span for span in spans if span.work == HAND_OFF]
    slow = [span for span in seen if span.end - span.begin >= HELD]
    assert {(span.worker, span.stage, span.what) for span in slow} == {
        (f"drafter[{replica}]", "drafter", "hand-off of grads") for replica in (0, 1)
    }
    assert sorted(span.index for span in slow) == sorted(2 * [*range(3, 32, 4)])


class Two(Slow):
    """A CPU that passes for two devices; each has a clock of its own."""

    def resolve(self, device: str) -> str:
        return device

    def mark(self, device: str) -> Any:
        return ("mark", float(device.removeprefix("gpu"))) if device.startswith("gpu") else super().mark(device)

    def elapsed(self, begin: Any, end: Any) -> float:
        assert type(begin) is type(end) and (isinstance(begin, float) or begin[1] == end[1])
        return 0.0 if isinstance(begin, tuple) else end - begin


def test_what_leaves_a_device_is_told_from_what_stays_and_measured_on_it(tmp_path):
    devices = ("target.device=gpu1", "drafter.device=gpu2", "optim.device=gpu2")
    profile = executed(toy(tmp_path, "overlapped", "transport=tests.test_hand_offs:Two", *devices)).profile
    ways = {channel: set(ways) for channel, ways in profile.handed.items()}
    assert ways == {"batches": {"between"}, "features": {"between"}, "grads": {"within"}, "params": {"within"}}
    assert profile.handed["grads"]["within"].total == 0.0  # by the device's clock


class Late(Transport):
    """What the target sends is there some time after it has been taken out of its channel."""

    def on_receive(self, payload: Any, device: str) -> Any:
        if isinstance(payload, Digest):
            time.sleep(HELD)
        return payload


def test_whoever_waits_for_what_it_has_received_is_starved_unless_it_sent_it_itself(tmp_path):
    late = "transport=tests.test_hand_offs:Late"
    apart, alone = (executed(toy(tmp_path, name, late)).view.workers for name in ("overlapped", "sequential"))
    drafter = next(worker for worker in apart if worker.name == "drafter")
    assert drafter.starved * drafter.seconds >= 32 * HELD > drafter.busy * drafter.seconds
    assert alone[0].busy * alone[0].seconds >= 32 * HELD and alone[0].starved == 0.0


def test_inside_a_worker_nothing_is_handed_over(tmp_path):
    assert executed(toy(tmp_path, "sequential", SLOW)).profile.handed == {}


def test_a_transport_that_has_no_say_costs_no_measurement(tmp_path):
    assert executed(toy(tmp_path, "overlapped")).profile.handed == {}


def test_a_hand_off_on_a_device_is_measured_when_the_device_has_done_it(tmp_path):
    run = toy(tmp_path, "sequential")
    run.plan.graph.transport.__class__ = Behind
    transport = run.plan.graph.transport
    transport.__init__()
    recorded = Recording(run.plan, 0, time.perf_counter())
    tape = recorded.tapes["main"]
    transport.crossing = lambda sent: [(("mark", 1000.5), ("mark", 1001.5))]
    transport.marks += [1000.0, 1000.25]
    tape.handed("drafter", "grads", "between", STAMPS[0], tape.mark("gpu"), "sent")
    transport.marks += [1000.3, 1000.4]
    tape.fired("drafter", "process", STAMPS[1], tape.mark("gpu"), (), None)
    for window in (1, 2):
        recorded.recorder.window_done(window, float(window))
    for reached, spans, taken in ((1000.2, 0, 0), (1001.4, 2, 0), (1001.5, 2, 1)):  # a copy holds nothing else up
        transport.reached = reached
        profile = recorded.profile("")
        assert (tape.spans.seen, len(profile.handed)) == (spans, taken)
    samples = profile.handed["grads"]["between"]
    assert samples.seconds == pytest.approx((0.25,)) and samples.measures["later"] == pytest.approx((1.0,))


# --- forecast ---------------------------------------------------------------------------------------------------------


GPUS = ("target.device=[cuda:0, cuda:1, cuda:0]", "drafter.device=cuda:1", "optim.device=cuda:1")


def graph_of(topology: str, *words: str) -> Graph:
    elsewhere = any("cuda" in word for word in words)
    graph = load([f"graphs/toy/{topology}.yaml"], list(words), elsewhere=elsewhere)
    check(graph)
    return graph


def with_handed(profile, channel, way: Way, held, later):
    taken = Samples(9, 9 * held, (1,), (held,), {"later": (later,)})
    return replace(profile, handed={channel: {way: taken}})


def test_a_run_is_forecast_with_its_hand_offs(tmp_path):
    """The drafter, the optimizer and the hand-off are a cycle, whatever the machine makes of their times."""
    quick = ("target.seconds=0.002", "drafter.seconds=0.006", "optimizer.seconds=0.002")
    profile = executed(toy(tmp_path, "overlapped", SLOW, *quick)).profile
    grads = profile.handed["grads"]["within"]
    assert grads.measures["later"][0] == 1.0  # which is made up: nobody waited for it
    profile = replace(
        profile, handed={"grads": {"within": replace(grads, measures={"later": (0.0,) * len(grads.index)})}}
    )
    drafter, optimizer = (profile.stages[stage] for stage in ("drafter", "optimizer"))
    work = 4 * drafter["process"].mean + drafter["end_window"].mean + optimizer["process"].mean
    step = predict(graph_of("overlapped", SLOW, *quick), profile).pace.step
    assert step == pytest.approx(work + grads.mean, rel=0.02)


@pytest.mark.parametrize(("held", "later"), [(0.1, 0.0), (0.0, 0.1), (0.04, 0.06)])
def test_a_hand_off_that_binds_is_named_and_so_is_what_it_costs(held, later):
    graph = graph_of("overlapped")
    step = 4 * 0.006 + 0.002 + 0.1
    forecast = predict(graph, with_handed(profile_of(graph, step), "grads", "within", held, later))
    assert forecast.pace.step == pytest.approx(step) and forecast.pace.exact
    assert str(forecast.pace.cycle) == "drafter → grads → optim → params → drafter"
    assert forecast.pace.workers["optim"].busy == pytest.approx(0.002 / step)
    gain = step / 0.044  # then the target binds
    assert forecast.verdict == (
        f"bound by hand-off of grads: {0.1 / step:.0%} of the critical path; "
        f"handing grads over in no time would give {gain:.2f}x"
    )


def test_on_one_worker_it_costs_nothing_and_short_ones_are_not_asked_about():
    profile = with_handed(profile_of(graph_of("overlapped"), 0.044), "grads", "within", 0.0001, 0.0)
    assert predict(graph_of("sequential"), profile).pace.step == pytest.approx(SEQUENTIAL)
    names = [outcome.change.name for outcome in predict(graph_of("overlapped"), profile).outcomes]
    assert not any("in no time" in name for name in names)


def test_a_step_holds_the_hand_offs_of_all_its_messages():
    """One copy of a worker's goes after the other; each is short, and all together are most of the step."""
    graph = graph_of("overlapped")
    for held, later in ((0.02, 0.0), (0.0, 0.02)):
        slow = with_handed(profile_of(graph, 4 * 0.02), "features", "within", held, later)
        forecast = predict(graph, slow)
        assert forecast.pace.step == pytest.approx(4 * (0.02 + (0.011 if held else 0.0)), rel=0.02)
    many = graph_of("overlapped", "window=128", "target.seconds=0", "drafter.seconds=0.001", "data.count=1280")
    named = [
        o.change.name
        for o in predict(many, with_handed(profile_of(many, 0.13), "features", "within", 0.0005, 0)).outcomes
    ]
    assert "features: handed over in no time" in named


def test_a_change_that_can_be_made_is_not_hidden_behind_one_that_cannot():
    graph = graph_of("overlapped")
    verdict = predict(graph, with_handed(profile_of(graph, 0.044), "features", "within", 0.0005, 0.0)).verdict
    assert "in no time" not in verdict and "a second target replica would give" in verdict


def test_times_of_hand_offs_that_vary_are_drawn():
    """Every fourth of the hand-offs takes long."""
    graph = graph_of("overlapped")
    profile = with_handed(profile_of(graph, 0.126), "grads", "within", 0.0, 0.0)
    uneven = Samples(4, 0.4, (3, 7, 11, 15), (0.0, 0.0, 0.0, 0.4), {"later": (0.0,) * 4})
    pace = predict(graph, replace(profile, handed={"grads": {"within": uneven}})).pace
    assert not pace.exact and pace.high > 0.4 > pace.step > pace.low
    for held, later in ((0.1, 0.0), (0.0, 0.1)):
        spread = with_handed(profile_of(graph, 0.126, spread=0.2), "grads", "within", held, later)
        pace = predict(graph, spread).pace
        assert pace.step == pytest.approx(0.126, rel=0.03)
        assert str(pace.cycle) == "drafter → grads → optim → params → drafter"


def test_only_what_goes_from_device_to_device_pays_for_that():
    """Two of three targets sit on another GPU than the drafter; which of them takes a batch is not known before."""
    laid_out = plan(graph_of("parallel_target", *GPUS))
    route = {r.name: r for r in laid_out.routes}
    assert [ways(laid_out, route["features"], replica) for replica in range(3)] == [
        ["between"],
        ["within"],
        ["between"],
    ]
    assert ways(laid_out, route["grads"], 0) == ["within"] and ways(laid_out, route["batches"], 0) == [None]
    slow = with_handed(profile_of(graph_of("sequential"), SEQUENTIAL), "features", "between", 0.1, 0.0)
    steps = [predict(graph_of("parallel_target", *gpus), slow).pace.step for gpus in (GPUS, ())]
    assert steps[0] > 2 * steps[1]  # the one on the same GPU takes most


def test_what_decides_and_was_not_measured_is_said():
    """The drafter and the optimizer on two devices decide; a graph without a transport hands over in no time."""
    said = "what it takes to hand over grads, params is not in the profile"
    moved = "transport=stages.devices:DeviceTransport"
    slow, apart = "drafter.seconds=0.02", ("optim.device=cuda:2", "drafter.device=cuda:1")
    profile = profile_of(graph_of("overlapped", slow, moved), 0.082)
    assert said in predict(graph_of("overlapped", slow, moved, *apart), profile).pace.remarks
    for way, told in (("between", False), ("within", True)):
        grads = with_handed(profile, "grads", way, 0.0, 0.0).handed["grads"]
        known = replace(profile, handed={"grads": grads, "params": grads})
        assert (said in predict(graph_of("overlapped", slow, moved, *apart), known).pace.remarks) == told
    plain = profile_of(graph_of("overlapped", slow), 0.082)
    assert not predict(graph_of("overlapped", slow), plain).pace.remarks


def test_hand_offs_that_grow_with_the_messages_are_said():
    graph = graph_of("overlapped")
    profile = with_handed(profile_of(graph, 0.044), "features", "within", 0.01, 0.0)
    assert list(sized(graph, profile, 0.044)) == [
        "handing features over is forecast as it was measured, whatever the size"
    ]
    assert not list(sized(graph, with_handed(profile, "grads", "within", 0.01, 0.0), 0.044))  # once a window
    assert not list(sized(graph_of("sequential"), profile, 0.044))  # never handed over


def test_a_profile_of_hand_offs_without_their_ways_is_refused():
    recorder = Recorder(4, warm_up=0)
    recorder.handed("grads", "within", 3, 0.1, 0.2)
    recorder.record("data", "read", 0, 0.1)
    for window in range(6):
        recorder.window_done(window, window * 1.0)
    profile = recorder.profile("", "")
    assert not profile.fault()
    grads = replace(profile.handed["grads"]["within"], measures={})
    assert "without the measure 'later'" in replace(profile, handed={"grads": {"within": grads}}).fault()

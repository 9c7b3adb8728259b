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
from dflash_pipe.plan import plan
from dflash_pipe.profile import Recorder, Samples, Way
from dflash_pipe.recording import Recording
from stages.toy import Partials
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
    grads = result.profile.handed["grads"]["within"]
    assert grads.mean == pytest.approx(HELD, rel=0.3) and set(grads.measures["later"]) == {1.0}
    assert result.profile.handed["params"]["within"].mean < HELD / 4
    assert "grads" not in result.profile.stages and not result.profile.fault()


def test_what_takes_long_is_seen_in_the_timeline(tmp_path):
    spans = executed(toy(tmp_path, "overlapped", SLOW)).timeline.spans
    seen = [span for span in spans if span.what not in ("read", "process", "end_window")]
    assert [(span.worker, span.stage, span.what) for span in seen] == [("drafter", "drafter", "hand-off of grads")] * 8
    assert [span.index for span in seen] == list(range(3, 32, 4))
    assert all(span.end - span.begin > 0.9 * HELD for span in seen)


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
    for reached, seen in ((1000.2, 0), (1001.4, 0), (1001.5, 1)):  # before its end, before the copy's end, and after
        transport.reached = reached
        tape.read()
        assert tape.spans.seen == seen
    for window in (1, 2):
        recorded.recorder.window_done(window, float(window))
    taken = recorded.profile("").handed["grads"]["between"]
    assert taken.seconds == pytest.approx((0.25,)) and taken.measures["later"] == pytest.approx((1.0,))


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
    """The drafter's 4 x 6 ms and the optimizer's 2 ms are a cycle with the hand-off; without it the target binds."""
    quick = ("target.seconds=0.002", "drafter.seconds=0.006", "optimizer.seconds=0.002")
    profile = executed(toy(tmp_path, "overlapped", SLOW, *quick)).profile
    forecast = predict(graph_of("overlapped", SLOW, *quick), without_copies(profile))
    assert forecast.pace.step == pytest.approx(profile.steps.mean, rel=0.1)
    assert forecast.pace.step == pytest.approx(4 * 0.006 + 0.002 + HELD, rel=0.15)
    assert not forecast.refusal


def without_copies(profile):
    """What the transport above tells of their way is made up: nobody waits for it."""
    grads = profile.handed["grads"]["within"]
    grads = replace(grads, measures={"later": tuple(0.0 for _ in grads.seconds)})
    return replace(profile, handed={**profile.handed, "grads": {"within": grads}})


@pytest.mark.parametrize(("held", "later"), [(0.1, 0.0), (0.0, 0.1), (0.04, 0.06)])
def test_a_hand_off_that_binds_is_named_and_so_is_what_it_costs(held, later):
    graph = graph_of("overlapped")
    step = 4 * 0.006 + 0.002 + 0.1
    forecast = predict(graph, with_handed(profile_of(graph, step), "grads", "within", held, later))
    assert forecast.pace.step == pytest.approx(step) and forecast.pace.exact
    assert str(forecast.pace.cycle) == "drafter → grads → optim → params → drafter"
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


def test_only_what_goes_from_device_to_device_pays_for_that():
    """Two of three targets sit on another GPU than the drafter; which of them takes a batch is not known before."""
    laid_out = plan(graph_of("parallel_target", *GPUS))
    route = {r.name: r for r in laid_out.routes}
    towards = [laid_out.towards(route["features"], replica, 1) for replica in (0, 1)]
    assert towards == [("cuda:0", ["cuda:1"]), ("cuda:1", ["cuda:1"])]
    assert laid_out.towards(route["batches"], 0, 1)[1] == [None]
    assert laid_out.is_between(route["features"]) and not laid_out.is_between(route["grads"])
    slow = with_handed(profile_of(graph_of("sequential"), SEQUENTIAL), "features", "between", 0.1, 0.0)
    steps = [predict(graph_of("parallel_target", *gpus), slow).pace.step for gpus in (GPUS, ())]
    assert steps[0] > 2 * steps[1]  # the one on the same GPU takes most


def test_a_way_that_decides_and_was_not_measured_is_said():
    unknown = "what the way from device to device takes is not in the profile: grads, params"
    slow, apart = "drafter.seconds=0.02", ("optim.device=cuda:2", "drafter.device=cuda:1")
    profile = profile_of(graph_of("overlapped", slow), 0.082)
    assert unknown in predict(graph_of("overlapped", slow, *apart), profile).pace.remarks
    assert unknown not in predict(graph_of("overlapped", slow), profile).pace.remarks
    at_once = with_handed(profile, "grads", "between", 0.0, 0.0).handed["grads"]
    profile = replace(profile, handed={"grads": at_once, "params": at_once})
    assert unknown not in predict(graph_of("overlapped", slow, *apart), profile).pace.remarks


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

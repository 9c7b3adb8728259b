"""Workers that compute on one device at the same time: what each takes alone is reckoned from what was measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.busy import union
from benchmarks.graphs import loaded
from dflash_pipe.closing import closing_lines
from dflash_pipe.forecast import predict
from dflash_pipe.plan import Plan, plan
from dflash_pipe.profile import Recorder
from dflash_pipe.service import uncontended
from dflash_pipe.sharing import own_seconds, with_own_seconds
from dflash_pipe.trace import Span
from dflash_pipe.transport import Transport
from tests.pipeline import executed, toy

_MOMENTS = st.floats(0.0, 100.0).map(lambda seconds: round(seconds, 3))


@given(st.lists(st.tuples(_MOMENTS, _MOMENTS.map(lambda seconds: seconds + 0.001)), min_size=1, max_size=12))
def test_the_jobs_of_a_device_that_serves_all_equally_are_found_again(jobs: list[tuple[float, float]]) -> None:
    """jobs: when each arrives, and what it takes alone."""
    spans = served(jobs)
    assert own_seconds(spans) == pytest.approx([seconds for _, seconds in jobs], abs=1e-6)
    assert sum(own_seconds(spans)) == pytest.approx(union(spans, 0.0, 1e6))


def served(jobs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """When each began and ended: of n jobs that are there each gets an nth of the device."""
    left, ended, now = {n: seconds for n, (_, seconds) in enumerate(jobs)}, [0.0] * len(jobs), 0.0
    while left:
        here = [n for n in left if jobs[n][0] <= now]
        arrivals = [jobs[n][0] for n in left if jobs[n][0] > now]
        until = min([*arrivals, *(now + left[n] * len(here) for n in here)])
        for n in here:
            left[n] -= (until - now) / len(here)
            if left[n] < 1e-9:
                ended[n] = until
                del left[n]
        now = until
    return [(arrived, end) for (arrived, _), end in zip(jobs, ended, strict=True)]


# --- what a profile tells of it ---------------------------------------------------------------------------------------


def shared(*words: str) -> Plan:
    """Two targets, of which the second shares its GPU with the drafter, whose worker does the optimizer's work, too."""
    (graph,) = loaded(["graphs/toy/parallel_target.yaml", "transport=tests.test_sharing:OneDevice", *words], None)
    return plan(graph)


GPUS = (
    "target.replicas=2",
    "target.device=[gpu0, gpu1]",
    "drafter.device=gpu1",
    "optim.device=cpu",
    "loader.device=cpu",
)


def span(worker: str, what: str, index: int, begin: float, end: float) -> Span:
    return Span(worker, worker.partition("[")[0], what, index, index // 4, begin, end)


def test_each_part_of_each_replica_is_slowed_by_what_ran_beside_it() -> None:
    """Windows of 4, one of warm-up. Message 3 is of the warm-up and still computes when 4 begins; what is handed over,
    and what the target on the other GPU does, slows nobody. The timeline has lost message 6."""
    spans = [
        span("drafter", "process", 3, 0.0, 20.0),
        span("target[1]", "process", 5, 10.0, 20.0),
        span("target[0]", "process", 4, 10.0, 20.0),
        span("drafter", "process", 4, 20.0, 30.0),
        span("drafter", "hand-off of grads", 5, 30.0, 90.0),
        span("target[1]", "process", 7, 30.0, 40.0),
        span("drafter", "process", 5, 50.0, 70.0),
        span("target[1]", "process", 9, 50.0, 70.0),
        span("drafter", "end_window", 7, 70.0, 80.0),
    ]
    recorder = Recorder(4, warm_up=1)
    for each in spans:
        if each.what in ("process", "end_window"):
            recorder.record(each.stage, each.what, each.index, each.end - each.begin)
    recorder.record("target", "process", 6, 12.0)
    for window in range(3):
        recorder.window_done(window, 100.0 * window)
    profile = with_own_seconds(recorder.profile("", ""), shared(*GPUS), spans)
    target, drafter = profile.stages["target"]["process"], profile.stages["drafter"]
    assert dict(zip(target.index, target.own, strict=True)) == pytest.approx(
        {4: 10, 5: 5, 6: 12 * 35 / 50, 7: 10, 9: 10}
    )
    assert target.seconds == (10.0, 10.0, 12.0, 10.0, 20.0) and not profile.fault()  # as measured
    assert drafter["process"].own == pytest.approx((10.0, 10.0)) and drafter["end_window"].own == (10.0,)
    forecast_with = uncontended(profile, shared(*GPUS)).stages
    assert forecast_with["target"]["process"].total == pytest.approx(10 + 5 + 12 * 35 / 50 + 10 + 10)
    assert forecast_with["drafter"]["end_window"].total == 10.0


def test_what_shares_no_device_is_as_it_was_measured() -> None:
    profile = Recorder(4)
    profile.record("target", "process", 0, 10.0)
    profile.record("drafter", "process", 0, 10.0)
    profile.window_done(0, 0.0)
    profile.window_done(1, 1.0)
    both = [span("target[0]", "process", 0, 0.0, 10.0), span("drafter", "process", 0, 0.0, 10.0)]
    apart = shared(*GPUS, "target.device=[gpu0, gpu2]")
    measured = profile.profile("", "")
    assert with_own_seconds(measured, apart, both) == measured == uncontended(measured, apart)


# --- a run ------------------------------------------------------------------------------------------------------------


class OneDevice(Transport):
    """A CPU that passes for a device."""

    def resolve(self, device: str) -> str:
        return device

    def mark(self, device: str) -> Any:
        return (device, time.perf_counter())

    def elapsed(self, begin: Any, end: Any) -> float:
        return float(end[1] - begin[1])


@pytest.mark.parametrize("apart", [False, True])
def test_a_run_whose_workers_share_a_device_is_forecast_from_itself(apart: bool, tmp_path: Path) -> None:
    """The toy's stages wait, so that two of them do not slow each other: what each takes alone is half of that."""
    devices = ("optim.device=cpu", "target.device=gpu1", "drafter.device=gpu2" if apart else "drafter.device=gpu1")
    equal = ("target.seconds=0.01", "drafter.seconds=0.01", "optimizer.seconds=0", "data.count=48")
    run = toy(tmp_path, "overlapped", "transport=tests.test_sharing:OneDevice", *devices, *equal)
    done = executed(run)
    profile, graph = done.profile, run.plan.graph
    assert predict(graph, profile).pace.step == pytest.approx(profile.steps.mean, rel=0.15)
    target = profile.stages["target"]["process"]
    assert bool(target.own) is not apart and target.mean == pytest.approx(0.01, rel=0.25) and not profile.fault()
    alone = uncontended(profile, run.plan).stages["target"]["process"]
    assert alone.mean == pytest.approx(0.01 if apart else 0.005, rel=0.25)
    said = "\n".join(closing_lines(graph, profile, ""))
    assert ("computed on one device at the same time" in said) is not apart

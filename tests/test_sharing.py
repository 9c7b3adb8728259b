"""Workers that compute on one device at the same time: what each takes alone is reckoned from what was measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.busy import union
from dflash_pipe.closing import closing_lines
from dflash_pipe.forecast import predict
from dflash_pipe.sharing import own_seconds
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
    assert target.mean == pytest.approx(0.01 if apart else 0.005, rel=0.25) and not profile.fault()
    said = "\n".join(closing_lines(graph, profile, ""))
    assert ("computed on one device at the same time" in said) is not apart
    assert set(profile.slowed) == (set() if apart else {"target", "drafter"})

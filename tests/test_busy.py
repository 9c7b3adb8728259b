"""For how much of the steady state each GPU computed: hand-made timelines, and a law against a count of moments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.busy import device_busy, steady, union
from benchmarks.graphs import loaded
from dflash_pipe.plan import Plan, plan
from dflash_pipe.trace import Span, Timeline
from tests.called import TOY

_ON = {"loader": "cuda:0", "target": "cuda:0", "drafter": "cuda:1", "optim": "cuda:1"}


def placed(**where: str) -> Plan:
    """The overlapped toy graph, its workers on these devices; the others on the CPU."""
    (graph,) = loaded([TOY[1]], None)
    workers = {
        name: replace(worker, device=dict.fromkeys(worker.stages, (where.get(name, "cpu"),)))
        for name, worker in graph.workers.items()
    }
    return plan(replace(graph, workers=workers))


def spans(worker: str, stage: str, *each: tuple[int, float, float], what: str = "process") -> list[Span]:
    return [Span(worker, stage, what, window, window, begin, end) for window, begin, end in each]


def timeline(*each: list[Span], warm_up: int = 1) -> Timeline:
    return Timeline(tuple(_ON), tuple(span for own in each for span in own), (), (), warm_up)


# Steps of 10: the target takes 6 of them, a message ahead; the drafter 5 and the optimizer 4, on one GPU, 1 of it at
# the same time. Window 0 is the warm-up and ends at 20, the others at 30, 40 and 50; the target's last work ends at 36.
TARGET = spans("target", "target", *((n, 10.0 * n, 10.0 * n + 6) for n in range(4)))
DRAFTER = spans("drafter", "drafter", *((n, 10.0 * n + 11, 10.0 * n + 16) for n in range(4)))
OPTIMIZER = spans("optim", "optimizer", *((n, 10.0 * n + 15, 10.0 * n + 19) for n in range(4)), what="end_window")
ENDS = spans("optim", "optimizer", *((n, 10.0 * n + 19, 10.0 * n + 20) for n in range(4)))


def test_a_gpu_that_workers_share_is_busy_while_any_of_them_works() -> None:
    share = device_busy(timeline(TARGET, DRAFTER, OPTIMIZER, ENDS), placed(**_ON))
    assert share == pytest.approx({"cuda:0": 0.6, "cuda:1": 0.9})


def test_the_warm_up_and_the_end_of_the_stream_are_left_out() -> None:
    """A target without rest is busy all the time, though it has nothing left while the last window is drafted."""
    busy = spans("target", "target", *((n, 10.0 * n, 10.0 * n + 10) for n in range(4)))
    whole = timeline(busy, DRAFTER, OPTIMIZER, ENDS)
    assert device_busy(whole, placed(**_ON)) == pytest.approx({"cuda:0": 1.0, "cuda:1": 0.9})
    slow_start = [replace(span, begin=-90.0) if span.window == 0 else span for span in TARGET]
    assert device_busy(timeline(slow_start, DRAFTER, OPTIMIZER, ENDS), placed(**_ON))["cuda:0"] == pytest.approx(0.6)


def test_what_no_gpu_computes_is_not_counted() -> None:
    read = spans("loader", "data", (3, 26.0, 30.0), what="read")  # on the host, wherever it is said to be
    handed = spans("target", "target", (3, 36.0, 40.0), what="hand-off of features")
    whole = timeline(TARGET, DRAFTER, OPTIMIZER, ENDS, read, handed)
    assert device_busy(whole, placed(**_ON))["cuda:0"] == pytest.approx(0.6)
    assert device_busy(whole, placed(target="cuda:3")) == pytest.approx({"cuda:3": 0.6})
    assert device_busy(whole, placed(loader="cuda:0")) == device_busy(whole, placed()) == {}


def test_a_timeline_without_its_begin_counts_from_the_first_window_that_it_has() -> None:
    kept = [[span for span in own if span.begin >= 25] for own in (TARGET, DRAFTER, OPTIMIZER, ENDS)]
    assert device_busy(timeline(*kept), placed(**_ON)) == {}  # from 30 to 30
    kept = [[span for span in own if span.begin >= 15] for own in (TARGET, DRAFTER, OPTIMIZER, ENDS)]
    assert device_busy(timeline(*kept), placed(**_ON))["cuda:1"] == pytest.approx(0.9)


def test_a_run_without_a_steady_state_has_no_share() -> None:
    assert device_busy(timeline(TARGET[:1], DRAFTER, OPTIMIZER, ENDS), placed(**_ON)) == {}
    assert steady({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, 2, 3.5) == (2.0, 3.0)
    assert steady({0: 1.0, 1: 2.0, 2: 3.0}, 1, 0.5) == (1.0, 1.0)


moments = st.integers(0, 40)


@given(st.lists(st.tuples(moments, moments).map(sorted)), moments, moments)
def test_a_union_is_the_number_of_moments_in_any_span(drawn: list[list[int]], begin: int, end: int) -> None:
    intervals = [(float(first), float(last)) for first, last in drawn]
    expected = sum(any(first <= moment < last for first, last in drawn) for moment in range(begin, end))
    assert union(intervals, begin, end) == expected

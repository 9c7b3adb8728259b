"""What the benchmark of several targets counts. Its measuring needs GPUs."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import targets
from benchmarks.targets import GOAL, Case, rate
from dflash_pipe import BadInput
from tests.called import called


def test_times_are_of_the_mean_of_one_alone():
    case = Case(alone=[2.0, 3.0], at_once=4.9)
    assert case.times == pytest.approx(2 * GOAL) == pytest.approx(4.9 / 2.5)
    assert not Case(alone=[2.0, 3.0], at_once=4.91).missed
    assert Case(alone=[2.0, 3.0], at_once=4.8).missed


def test_all_run_at_once_and_every_call_counts_after_the_warm_up(monkeypatch):
    """Each act takes what it takes on a clock of its own thread, and more in its first calls, while it warms up; an act
    is called with the other thread in one, too."""
    clock, both, calls = threading.local(), threading.Barrier(2, timeout=20), []
    monkeypatch.setattr(targets, "time", SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))

    def act(seconds):
        both.wait()
        calls.append(seconds)
        both.wait()
        clock.now = getattr(clock, "now", 0.0) + (2 * seconds if len(calls) <= 2 * 4 else seconds)

    assert rate([partial(act, 1.0), partial(act, 1.0)], 8.0) == 2.0


def test_one_that_fails_ends_all():
    def fails():
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        rate([lambda: None, fails, lambda: None], 0.01)


def test_gpus_that_differ_have_not_settled():
    assert Case(alone=[23.5, 11.8], at_once=13.9).unsettled
    assert not Case(alone=[2.16, 2.18], at_once=4.35).unsettled


def test_several_gpus_are_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInput, match="this machine has 1 GPU, and one target is set against several"):
        called("targets")

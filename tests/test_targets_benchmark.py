"""What the benchmark of several targets counts. Its measuring needs GPUs."""

import threading

import pytest
import torch

from benchmarks.targets import GOAL, Case, at_once
from dflash_pipe import BadInput
from tests.called import called


def test_times_are_of_the_mean_of_one_alone():
    case = Case(alone=[2.0, 3.0], at_once=4.9)
    assert case.times == pytest.approx(2 * GOAL) == pytest.approx(4.9 / 2.5)
    assert not Case(alone=[2.0, 3.0], at_once=4.91).missed
    assert Case(alone=[2.0, 3.0], at_once=4.8).missed


def test_all_run_at_once_and_every_call_counts():
    """An act that returns only when the other thread is in it too: two calls each time."""
    both, calls = threading.Barrier(2, timeout=20), []

    def act():
        both.wait()
        calls.append(threading.get_ident())
        if len(calls) >= 40:
            both.abort()

    def stopping():
        try:
            act()
        except threading.BrokenBarrierError:
            stopped.set()

    stopped = threading.Event()
    assert at_once([stopping, stopping], 0.05) > 0
    assert len(set(calls)) == 2 and stopped.is_set()


def test_several_gpus_are_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInput, match="this machine has 1 GPUs, and one target is set against several"):
        called("targets")

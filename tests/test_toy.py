"""The miniature: its last digest is the same in every topology, and anything out of order or stale changes it."""

import math
from functools import partial

import pytest

from dflash_pipe import Context, Stamp
from dflash_pipe.check import check
from dflash_pipe.graph import load
from dflash_pipe.plan import plan
from dflash_pipe.runtime import Run
from stages.toy import Digest, Numbers, Wait, WaitOptimizer, WaitStep, Weights

QUICK = ["data.count=22", "target.seconds=0", "drafter.seconds=0", "optimizer.seconds=0"]
WINDOW = [Digest("a"), Digest("b"), Digest("c"), Digest("d")]


def digests(topology, folder, *overrides):
    """The digest after each step of a run."""
    graph = load([f"graphs/toy/{topology}.yaml"], [*QUICK, *overrides])
    check(graph)
    run = Run(plan(graph), folder, None)
    reported = []
    run.on_report = lambda *arguments: reported.append(arguments[-1])
    run.execute()
    return [metrics["digest"] for metrics in reported if "digest" in metrics]


@pytest.mark.parametrize("topology", ["overlapped", "parallel_target", "data_parallel"])
def test_every_topology_gives_the_same_digests(topology, tmp_path):
    expected = digests("sequential", tmp_path / "sequential")
    assert len(expected) == 6  # five windows of 4, and the last one of 2
    assert digests(topology, tmp_path / topology) == expected


def test_stale_weights_change_the_digest(tmp_path):
    expected = digests("sequential", tmp_path / "a")
    stale = digests("overlapped", tmp_path / "b", "params.initial=2")
    assert stale[0] == expected[0]
    assert stale[1] != expected[1]


def stepped(window, replicas=1, partials=2, weights=Weights(0, "w")):  # noqa: B008
    """What the optimizer makes of one window that is dealt to replicas of the drafter."""
    steps = [WaitStep(partials=partials) for _ in range(replicas)]
    for replica, step in enumerate(steps):
        step.check(replicas)
        step.open(Context(replica=replica, replicas=replicas))
    for slot, features in enumerate(window):
        steps[slot % replicas].process(features, weights, Stamp(slot, 0, slot, slot == len(window) - 1))
    optimizer = WaitOptimizer()
    optimizer.open(Context(seed=1))
    return optimizer.process(tuple(step.end_window() for step in steps))


def test_replicas_do_not_change_the_digest_but_order_loss_and_staleness_do():
    expected = stepped(WINDOW)
    assert stepped(WINDOW, replicas=2) == expected
    for other in ([WINDOW[2], WINDOW[1], WINDOW[0], WINDOW[3]], WINDOW[:3], [*WINDOW[:3], WINDOW[2]]):
        assert stepped(other).digest != expected.digest
    assert stepped(WINDOW, weights=Weights(1, "w")).digest != expected.digest


def test_windows_do_not_leak_into_one_another():
    step = WaitStep()
    step.open(Context())
    stamp = Stamp(0, 0, 0, True)
    step.process(WINDOW[0], Weights(0, "w"), stamp)
    first = step.end_window()
    step.process(WINDOW[0], Weights(0, "w"), stamp)
    assert step.end_window() == first


def test_the_source_goes_on_after_its_cursor():
    source = Numbers(count=5)
    rows = list(source.read(None))
    assert [number.index for _, number in rows] == [0, 1, 2, 3, 4]
    for position, (cursor, _) in enumerate(rows):
        assert list(source.read(cursor)) == rows[position + 1 :]


def test_the_optimizer_goes_on_after_its_state():
    whole, first, second = WaitOptimizer(), WaitOptimizer(), WaitOptimizer()
    for stage in (whole, first, second):
        stage.open(Context(seed=3))
    step = WaitStep()
    step.open(Context())
    step.process(WINDOW[0], Weights(0, "w"), Stamp(0, 0, 0, True))
    grads = (step.end_window(),)
    whole.process(grads)
    first.process(grads)
    second.restore(first.state())
    assert second.initial() == whole.initial()
    assert second.process(grads) == whole.process(grads)


@pytest.mark.parametrize("make", [partial(Numbers, count=1), Wait, WaitStep, WaitOptimizer])
@pytest.mark.parametrize("key", ["seconds", "scale"])
@pytest.mark.parametrize("value", [-1.0, -math.inf, math.inf, math.nan, 1e308])
def test_times_that_nobody_can_wait_for_are_refused(make, key, value):
    with pytest.raises(ValueError, match=rf"^{key} is "):
        make(**{"seconds": 1.0, key: value}).check(1)
    make(seconds=0.5, scale=2.0).check(1)


@pytest.mark.parametrize("stage", [Numbers(count=-1), Numbers(count=1, nbytes=-1), Wait(nbytes=-1)])
def test_sizes_below_zero_are_refused(stage):
    with pytest.raises(ValueError, match="is -1, expected 0 or more"):
        stage.check(1)


def test_the_target_hashes_what_it_gets():
    target = Wait(nbytes=7)
    (_, a), (_, b) = Numbers(count=2).read(None)
    assert target.process(a) != target.process(b)
    assert target.process(a).nbytes == 7

"""Triton's real Autotuner with several threads, without a GPU: a fake kernel and a fake benchmark."""

import atexit
import collections
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import autotune
from stages.autotune import keep_in, make_thread_safe, patch
from stages.tuning import keep_tuning
from tests import autotuned
from tests.autotuned import BRIEFLY, GPU, PATIENCE, FakeJit, Working, launch, messages, tuning_in_progress
from tests.interpreted import NO_TRITON

make = autotuned.make  # the fixture


# --- the race


def test_upstream_loses_the_arguments_of_a_tuning_in_progress(make):
    with tuning_in_progress(make) as (tuner, a):
        launch(tuner, None, 2)
    assert isinstance(a.error, TypeError) and "NoneType" in str(a.error)


def test_a_hot_launch_neither_disturbs_nor_awaits_a_tuning_in_progress(make):
    make_thread_safe()
    with tuning_in_progress(make) as (tuner, a):
        b = Working("B", lambda: launch(tuner, None, 2))
        assert b.ended() and (b.error, b.result) == (None, 32)
        assert a.is_alive()
    assert (a.error, a.result) == (None, 16)


def test_a_kernel_with_one_configuration_does_not_wait_either(make):
    make_thread_safe()
    with tuning_in_progress(make):
        other = make()
        other.configs = other.configs[:1]
        b = Working("B", lambda: launch(other, None, 7))
        assert b.ended() and (b.error, b.result) == (None, 16)


def test_a_lock_for_each_instance_is_safe_but_makes_hot_launches_wait(make):
    patch("lock per instance")
    with tuning_in_progress(make) as (tuner, a):
        other = Working("other instance", lambda: launch(make(), None, 1))
        assert other.ended() and other.error is None
        b = Working("B", lambda: launch(tuner, None, 2))
        assert not b.ended(BRIEFLY)
    assert b.ended() and (a.error, b.error) == (None, None)
    assert (a.result, b.result) == (16, 32)


def corrupted(make, overlapping):
    """Two threads tune two keys of a kernel that adds 1 to x, and whose x Triton restores after every benchmark."""
    in_kernel = {"A": threading.Event(), "B": threading.Event()}
    go_on = {"A": threading.Event(), "B": threading.Event()}

    def add_one(arguments):
        name = threading.current_thread().name
        arguments["x"] += 1
        if not in_kernel[name].is_set():
            in_kernel[name].set()
            assert go_on[name].wait(PATIENCE)

    tuner = make(launched=add_one, restore=["x"])
    x = {"A": torch.tensor([10.0]), "B": torch.tensor([500.0])}
    a = Working("A", lambda: launch(tuner, x["A"], 1))
    assert in_kernel["A"].wait(PATIENCE)
    b = Working("B", lambda: launch(tuner, x["B"], 2))
    assert in_kernel["B"].wait(PATIENCE if overlapping else BRIEFLY) == overlapping
    go_on["A"].set()
    assert a.ended() and a.error is None
    go_on["B"].set()
    assert b.ended()
    return x["A"].item(), x["B"].item(), b.error


def test_upstream_restores_another_threads_tensor_without_an_error(make):
    mine, _, _ = corrupted(make, overlapping=True)
    assert mine > 500  # 11 would be right


@pytest.mark.parametrize("way", ["lock-free", "lock per instance"])
def test_tensors_that_benchmarks_change_are_restored(make, way):
    patch(way)
    assert corrupted(make, overlapping=False) == (11.0, 501.0, None)


# --- tuning


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_that_meet_at_a_new_key_tune_it_once(make, threads):
    make_thread_safe()
    count, at_once, together = collections.Counter(), [], threading.Barrier(threads)

    def bench(call, quantiles):
        count["running"] += 1
        at_once.append(count["running"])
        count["benchmarks"] += 1
        call()
        count["running"] -= 1
        return [1.0 if count["benchmarks"] > 1 else 2.0] * 3

    tuner = make(bench)
    workers = [Working(str(n), lambda: (together.wait(PATIENCE), launch(tuner, None, 7))[1]) for n in range(threads)]
    assert all(w.ended() for w in workers)
    assert [(w.error, w.result) for w in workers] == [(None, 32)] * threads
    assert count["benchmarks"] == 2 and set(at_once) == {1}


def test_different_kernels_are_tuned_one_after_the_other(make):
    make_thread_safe()
    with tuning_in_progress(make):
        other = Working("other instance", lambda: launch(make(), None, 1))
        assert not other.ended(BRIEFLY)
    assert other.ended() and other.error is None


@pytest.mark.parametrize("way", ["lock-free", "lock per instance"])
@pytest.mark.parametrize("same", [False, True], ids=["another kernel", "the same kernel"])
def test_a_hook_may_launch_a_kernel_that_is_not_tuned(make, way, same):
    patch(way)
    inner = make()

    def hook(arguments, reset_only=False):
        if arguments["T"] == 1:
            launch(tuner if same else inner, None, 5)

    tuner = make(pre_hook=hook)
    a = Working("A", lambda: launch(tuner, None, 1))
    assert a.ended() and (a.error, a.result) == (None, 16)
    assert (5,) in (tuner if same else inner).cache


@pytest.mark.parametrize("way", ["lock-free", "lock per instance"])
def test_a_failed_tuning_leaves_neither_the_lock_nor_the_tensors_behind(make, way):
    patch(way)

    def bench(call, quantiles):
        raise RuntimeError("no room")

    tuner = make(bench)
    for name in "AB":
        thread = Working(name, lambda: launch(tuner, torch.zeros(1), 1))
        assert thread.ended() and str(thread.error) == "no room"
    assert tuner.nargs is None and not tuner.cache


def test_warming_up_waits_for_a_tuning_in_progress(make):
    make_thread_safe()
    with tuning_in_progress(make) as (tuner, a):
        b = Working("B", lambda: tuner.warmup(None, 1, grid=(1,)))
        assert not b.ended(BRIEFLY)
    assert b.ended() and (a.error, b.error, b.result) == (None, None, [16, 32])


def test_the_hook_of_a_configuration_gets_the_arguments_of_its_own_launch(make):
    from triton.runtime.autotuner import Config

    make_thread_safe()
    seen = collections.Counter()
    lock = threading.Lock()

    def hook(arguments):
        with lock:
            seen[(threading.current_thread().name, arguments["x"], arguments["BT"])] += 1

    tuner = make(configs=[Config({"BT": 16}, pre_hook=hook)])
    workers = [Working(str(n), lambda n=n: [launch(tuner, n, 1) for _ in range(100)]) for n in range(4)]
    assert all(w.ended() and w.error is None for w in workers)
    assert seen == {(str(n), n, 16): 100 for n in range(4)}


# --- the same as Triton

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from(["a", "b"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]).map(lambda dtype: torch.empty(1, dtype=dtype)),
)


def six(a, b, c, d, e, f, BT):
    pass


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_keys_and_choices_are_those_of_triton(data):
    pytest.importorskip("triton", reason=NO_TRITON)
    names = data.draw(st.permutations("abcdef"))
    plain = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.sampled_from(["a", "b"]))
    keys = data.draw(st.lists(st.sampled_from("abcdef"), unique=True))
    given_values = {name: data.draw(plain if name in keys else values) for name in "abcdef"}
    positional = data.draw(st.integers(0, 6))
    args = [given_values[name] for name in "abcdef"[:positional]]
    named = {name: given_values[name] for name in names if name not in "abcdef"[:positional]}
    if named and data.draw(st.booleans()):
        named.popitem()  # an argument with a default
    extern = torch.empty(1, dtype=torch.float16)  # no argument of the kernel: no part of its key
    named |= {"grid": (1,), "extern": extern}

    def once(lock_free):
        with pytest.MonkeyPatch.context() as monkeypatch:
            from triton.runtime.autotuner import Autotuner, Config

            monkeypatch.setattr(Autotuner, "run", Autotuner.run)
            monkeypatch.setattr(Autotuner, "warmup", Autotuner.warmup)
            if lock_free:
                patch("lock-free")
            jit = FakeJit(six, lambda arguments: sorted(arguments))
            times = iter([[2.0] * 3, [1.0] * 3])
            configs = [Config({"BT": 16}), Config({"BT": 32}, num_warps=8)]
            tuner = Autotuner(
                jit, jit.arg_names, configs, keys, None, None, do_bench=lambda call, quantiles: next(times)
            )
            results = [tuner.run(*args, **named)]
            del tuner.nargs
            results.append(tuner.run(*args, **named))
            assert hasattr(tuner, "nargs") != lock_free  # else the key was not found, and Triton's code ran again
            return results, list(tuner.cache), str(tuner.best_config)

    assert once(True) == once(False)


# --- which way is taken


def test_a_tested_triton_is_changed_once_and_without_a_word(make, caplog):
    from triton.runtime.autotuner import Autotuner

    before = Autotuner.run
    ways = [Working(str(n), make_thread_safe) for n in range(8)]
    assert all(w.ended() for w in ways) and {w.result for w in ways} == {"lock-free"}
    run, warmup = Autotuner.run, Autotuner.warmup
    assert run is not before
    assert make_thread_safe() == "lock-free" and (Autotuner.run, Autotuner.warmup) == (run, warmup)
    assert not messages(caplog)


def test_an_untested_triton_gets_a_lock_for_each_instance_and_one_line(make, monkeypatch, caplog):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.99.0")
    assert [make_thread_safe(), make_thread_safe()] == ["lock per instance"] * 2
    (line,) = messages(caplog)
    assert "Triton 3.99.0 was not tested" in line and "\n" not in line
    with tuning_in_progress(make) as (tuner, _):
        b = Working("B", lambda: launch(tuner, None, 2))
        assert not b.ended(BRIEFLY)
    assert b.ended() and b.error is None


def test_a_class_that_somebody_else_has_changed_gets_locks_around_that(make, monkeypatch, caplog):
    from triton.runtime.autotuner import Autotuner

    theirs, calls = Autotuner.run, []

    def run(self, *args, **kwargs):
        calls.append(args)
        return theirs(self, *args, **kwargs)

    monkeypatch.setattr(Autotuner, "run", run)
    assert make_thread_safe() == "lock per instance"
    assert f"{__name__} has changed" in messages(caplog)[0]
    assert launch(make(), None, 1) == 16 and len(calls) == 1


def test_a_triton_that_keeps_no_call_on_the_instance_is_left_alone(make, monkeypatch, caplog):
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    run.__module__ = Autotuner.__module__
    monkeypatch.setattr(Autotuner, "run", run)
    assert make_thread_safe() == "unchanged" and Autotuner.run is run
    assert not messages(caplog)


def test_without_triton_there_is_nothing_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", None)
    monkeypatch.setattr(atexit, "register", lambda save: save())
    assert make_thread_safe() == "unchanged"
    keep_tuning(tmp_path / "tuning.json", GPU)
    keep_in(None)
    assert not (tmp_path / "tuning.json").exists()

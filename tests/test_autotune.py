"""Triton's real Autotuner with several threads, without a GPU: a fake kernel and a fake benchmark."""

import atexit
import collections
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipe import BadInput
from stages import autotune
from stages.autotune import keep_in, make_thread_safe, patch
from stages.tuning import TunedConfigs, keep_tuning, tuning_file

ROOT = Path(__file__).parent.parent
TRITONS = "DFLASH_PIPE_TRITONS"
PATIENCE = 20  # seconds until a test calls it a deadlock
BRIEFLY = 0.2  # seconds for which a thread that must not get on is watched
GPU = "NVIDIA H200"


class FakeJit:
    """What Autotuner needs of a compiled function. launched: the arguments of every launch go there."""

    def __init__(self, function, launched):
        self.fn, self.launched = function, launched
        self.arg_names = list(function.__code__.co_varnames[: function.__code__.co_argcount])

    def run(self, *args, grid=None, warmup=False, **kwargs):
        return self.launched({**dict(zip(self.arg_names, args, strict=False)), **kwargs})

    def warmup(self, *args, **kwargs):
        return self.run(*args, **kwargs, warmup=True)


def kernel(x, T, BT):
    pass


def block(arguments):
    """What a launch gives back: which configuration it ran with."""
    return arguments["BT"]


@pytest.fixture
def make(monkeypatch):
    """Makes instances of Triton's Autotuner; the class is as Triton made it again afterwards."""
    pytest.importorskip("triton", reason="Triton is not installed (there is none for this platform)")
    from triton.runtime.autotuner import Autotuner, Config

    monkeypatch.setattr(Autotuner, "run", Autotuner.run)
    monkeypatch.setattr(Autotuner, "warmup", Autotuner.warmup)
    made = []

    def make(
        bench=None, launched=lambda arguments: arguments["BT"], function=kernel, configs=None, restore=None, **more
    ):
        jit = FakeJit(function, launched)
        configs = configs or [Config({"BT": 16}), Config({"BT": 32})]
        bench = bench or (lambda call, quantiles: (call(), [1.0] * 3)[1])
        made.append(Autotuner(jit, jit.arg_names, configs, ["T"], None, restore, do_bench=bench, **more))
        return made[-1]

    yield make
    keep_in(None)
    for tuner in made:  # whoever looks for tuned kernels finds none of this test
        tuner.cache.clear()


def launch(tuner, *args, **kwargs):
    return tuner.run(*args, grid=(1,), warmup=False, **kwargs)


class Working(threading.Thread):
    """A thread whose error is kept."""

    def __init__(self, name, work):
        super().__init__(name=name, daemon=True)
        self.work, self.error, self.result = work, None, None
        self.start()

    def run(self):
        try:
            self.result = self.work()
        except Exception as error:
            self.error = error

    def ended(self, within=PATIENCE):
        self.join(within)
        return not self.is_alive()


@contextmanager
def tuning_in_progress(make, x=None, *dtypes):
    """An instance whose key 2 is tuned; thread A tunes key 1 and stands in the middle of its first benchmark."""
    inside, go_on = threading.Event(), threading.Event()

    def bench(call, quantiles):
        call()
        inside.set()
        assert go_on.wait(PATIENCE)
        return [1.0] * 3

    tuner = make(bench)
    tuner.cache[(2, *dtypes)] = tuner.configs[1]
    a = Working("A", lambda: launch(tuner, x, 1))
    assert inside.wait(PATIENCE)
    try:
        yield tuner, a
    finally:
        go_on.set()
        assert a.ended()


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
    pytest.importorskip("triton", reason="Triton is not installed (there is none for this platform)")
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


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


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
    assert not list(tmp_path.iterdir())


# --- saved tuning


def counted(make, count, best, **more):
    """A kernel whose configuration with BT = `best` is the fastest, and whose benchmarks are counted."""
    last = []

    def launched(arguments):
        last[:] = [arguments["BT"]]
        return arguments["BT"]

    def bench(call, quantiles):
        count["benchmarks"] += 1
        call()
        return [1.0 if last == [best] else 2.0] * 3

    return make(bench, launched, **more)


def tuned(file):
    """The rows of the file."""
    return json.loads(file.read_text())["tuned"]


@pytest.mark.parametrize("way", ["lock-free", "lock per instance"])
def test_what_one_process_tuned_the_next_one_uses(make, tmp_path, way):
    def mine(x, T, BT):
        pass

    patch(way)
    file, count = tmp_path / "run" / "tuning.json", collections.Counter()
    keep_tuning(file, GPU)
    first = counted(make, count, 32, function=mine)
    x = torch.zeros(1)
    assert [launch(first, x, T) for T in (1, None, True, 1)] == [32] * 4
    assert count["benchmarks"] == 4  # 1 and True are the same key
    rows = [row for row in tuned(file) if row["kernel"].endswith("mine")]
    assert sorted(map(str, (row["key"] for row in rows))) == ["[1, 'torch.float32']", "[None, 'torch.float32']"]
    assert all(row["config"]["BT"] == 32 and row["config"]["num_warps"] == 4 for row in rows)
    made_with = json.loads(file.read_text())["made_with"]
    assert (made_with["gpu"], made_with["triton"]) == (GPU, metadata.version("triton"))

    keep_in(None)  # as if a new process began, where the other configuration would win
    del first
    keep_tuning(tmp_path / "elsewhere.json", GPU)
    second = counted(make, count, 16, function=mine)
    assert launch(second, x, 1) == 16
    keep_tuning(file, GPU)
    count.clear()
    late = counted(make, count, 16, function=mine)  # made after the file was read
    for tuner in (second, late):
        assert [launch(tuner, x, T) for T in (1, None)] == [32, 32]
    assert count["benchmarks"] == 0
    assert launch(late, x, 9) == 16 and count["benchmarks"] == 2  # a new key is tuned, and added
    assert {row["key"][0] for row in tuned(file) if row["kernel"].endswith("mine")} == {None, 1, 9}


@pytest.mark.parametrize("what", ["gpu", "triton", "fla-core"])
def test_a_file_made_on_another_gpu_or_version_is_refused_in_one_line(make, tmp_path, caplog, what):
    def mine(x, T, BT):
        pass

    make_thread_safe()
    file, count = tmp_path / "tuning.json", collections.Counter()
    keep_tuning(file, GPU)
    launch(counted(make, count, 32, function=mine), None, 1)
    whole = json.loads(file.read_text())
    whole["made_with"][what] = "another"
    file.write_text(json.dumps(whole))
    before = file.read_text()
    keep_tuning(tmp_path / "elsewhere.json", GPU)
    assert keep_tuning(file, GPU) is None
    (line,) = messages(caplog)
    assert "another" in line and GPU in line and "not used" in line and "\n" not in line
    assert launch(counted(make, count, 16, function=mine), None, 1) == 16  # tuned by itself
    assert file.read_text() == before


@pytest.mark.parametrize("text", ["", "[]", '{"made_with": {}}', '{"made_with": {}, "tuned": [{"kernel": "k"}]}'])
def test_a_file_that_holds_something_else_is_bad_input(make, tmp_path, text):
    file = tmp_path / "tuning.json"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"tuning.json: no file of tuned configurations"):
        keep_tuning(file, GPU)


@pytest.mark.parametrize("change", ["source", "config"])
def test_a_configuration_of_another_form_of_the_kernel_is_not_used(make, tmp_path, caplog, change):
    def mine(x, T, BT):
        pass

    make_thread_safe()
    file, count = tmp_path / "tuning.json", collections.Counter()
    keep_tuning(file, GPU)
    launch(counted(make, count, 32, function=mine), None, 1)
    whole = json.loads(file.read_text())
    for row in whole["tuned"]:
        row[change] = "0" * 16 if change == "source" else {**row["config"], "BT": 64}
    file.write_text(json.dumps(whole))
    keep_tuning(tmp_path / "elsewhere.json", GPU)
    keep_tuning(file, GPU)
    tuner = counted(make, count, 16, function=mine)
    assert launch(tuner, None, 1) == 16
    assert sum("mine: 1 configurations belong to another form" in line for line in messages(caplog)) == 1


def test_a_key_that_json_does_not_know_is_not_kept_and_said_once(make, tmp_path, caplog):
    def mine(x, T, BT):
        pass

    make_thread_safe()
    file = tmp_path / "tuning.json"
    keep_tuning(file, GPU)
    tuner = make(function=mine)
    for T in (torch.float32, torch.bfloat16):
        launch(tuner, None, T)
    lines = [line for line in messages(caplog) if "mine" in line]
    assert len(lines) == 1 and "cannot be kept" in lines[0]
    assert not file.exists() or not any(row["kernel"].endswith("mine") for row in tuned(file))


def test_processes_that_write_one_file_keep_what_the_others_wrote(make, tmp_path):
    file, made_with = tmp_path / "tuning.json", {"gpu": GPU}
    processes = [TunedConfigs(file, made_with, {}) for _ in range(3)]  # all began before there was a file
    for process, key, config in zip(processes, (1, 1, 2), (0, 1, 1), strict=True):
        tuner = make()
        tuner.cache[(key,)] = tuner.configs[config]
        process.add(tuner)
    assert [(row["key"], row["config"]["BT"]) for row in tuned(file)] == [([1], 16), ([2], 32)]
    assert not list(tmp_path.glob("*.tmp"))


def test_where_triton_is_left_alone_the_file_is_written_at_the_end(make, tmp_path, monkeypatch):
    def mine(x, T, BT):
        pass

    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    file = tmp_path / "tuning.json"
    keep_tuning(file, GPU)
    launch(make(function=mine), None, 1)
    assert not file.exists()
    (save,) = at_exit
    save()
    assert [row["key"] for row in tuned(file) if row["kernel"].endswith("mine")] == [[1]]


def test_a_file_that_another_gpu_has_written_meanwhile_stays(make, tmp_path, caplog):
    file, tuner = tmp_path / "tuning.json", make()
    tuner.cache[(1,)] = tuner.configs[0]
    mine, other = TunedConfigs(file, {"gpu": GPU}, {}), TunedConfigs(file, {"gpu": "NVIDIA B200"}, {})
    other.add(tuner)
    before = file.read_text()
    mine.add(tuner)
    assert file.read_text() == before and "NVIDIA B200" in messages(caplog)[0]


def test_the_runs_folder_holds_the_file_unless_the_variable_names_another(tmp_path, monkeypatch):
    monkeypatch.delenv("DFLASH_PIPE_TUNING", raising=False)
    assert tuning_file(tmp_path) == tmp_path / "tuning.json"
    monkeypatch.setenv("DFLASH_PIPE_TUNING", str(tmp_path / "shared.json"))
    assert tuning_file(tmp_path / "run") == tmp_path / "shared.json"


# --- flash-linear-attention, in a process of its own: imported here, it would change which kernels other tests run on


def with_fla(function, **environment):
    """Run a function of this file in a process of its own; what it logs is returned."""
    pytest.importorskip("triton", reason="Triton is not installed (there is none for this platform)")
    try:
        metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        pytest.skip("flash-linear-attention is not installed")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"from tests.test_autotune import {function.__name__} as f; f()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stderr


def entries(function):
    """Where a function that `tensor_cache` decorated keeps its results."""
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))["cached"].cell_contents


def decorated(decorators):
    """A function that was decorated before `make_thread_safe`, and one that was decorated after it."""

    @decorators.tensor_cache
    def early(x):
        return x + 1

    assert make_thread_safe() == "lock-free"

    @decorators.tensor_cache
    def late(x):
        return x + 1

    return early, late


def use_tensor_caches():
    from fla.ops.utils import index
    from fla.utils import decorators

    early, late = decorated(decorators)
    kinds = {type(entries(f)) for f in (early, late, index.prepare_chunk_indices, index.prepare_lens)}
    assert len(kinds) == 1 and collections.deque not in kinds
    x = torch.zeros(1)
    for function in (early, late):
        mine = function(x)
        assert function(x) is mine
        other = Working("other", lambda f=function: (f(x), f(x)))
        assert other.ended() and other.error is None
        assert other.result[0] is other.result[1] and other.result[0] is not mine
        looking = iter(entries(function))  # a look that another thread's call interrupts
        assert Working("another", lambda f=function: f(torch.ones(1))).ended()
        assert len(list(looking)) == 1


def use_unknown_tensor_cache():
    from fla.utils import decorators

    decorators.deque = lambda maxlen: collections.deque(maxlen=maxlen)
    x = torch.zeros(1)
    for function in decorated(decorators):
        assert function(x) is not function(x)


def use_cached_autotuner():
    """The race, with the class of flash-linear-attention, and whether it looks for saved configurations itself."""
    from fla.ops.utils import cache
    from triton.runtime.autotuner import Config

    looks, build = [], cache.AutotuneKey.build
    cache.AutotuneKey.build = lambda *args: (looks.append(args), build(*args))[1]

    def make(bench):
        jit = FakeJit(kernel, lambda arguments: (arguments["x"].add_(1), arguments["BT"])[1])
        configs = [Config({"BT": 16}), Config({"BT": 32})]
        return cache.CachedAutotuner(jit, jit.arg_names, configs, ["T"], None, ["x"], do_bench=bench)

    make_thread_safe()
    x = torch.tensor([10.0])
    with tuning_in_progress(make, x, "torch.float32") as (tuner, a):
        b = Working("B", lambda: launch(tuner, torch.zeros(1), 2))
        assert b.ended() and (b.error, b.result) == (None, 32)
        assert a.is_alive()
    assert (a.error, a.result, x.item()) == (None, 16, 11)
    on = cache.FLA_CACHE_MODE is not cache.FlaCacheMode.DISABLED
    assert bool(looks) == on


def use_it_as_it_is():
    use_tensor_caches()
    use_cached_autotuner()


def use_it_otherwise():
    use_unknown_tensor_cache()
    use_cached_autotuner()


@pytest.mark.slow
def test_flash_linear_attention_is_safe_for_threads():
    assert with_fla(use_it_as_it_is) == ""


@pytest.mark.slow
def test_with_its_own_cache_of_configurations_and_another_kind_of_tensor_cache_it_is_safe_too(tmp_path):
    (line,) = with_fla(use_it_otherwise, FLA_CACHE_MODE="strict", FLA_CONFIG_DIR=str(tmp_path)).splitlines()
    assert "tensor cache is not the one that is known" in line


# --- the oldest and the newest Triton


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_these_tests_pass_on_every_triton_that_is_provided():
    folders = [folder for folder in os.environ.get(TRITONS, "").split(os.pathsep) if folder]
    if not folders:
        pytest.skip(f"{TRITONS} names no directories (made by pip install --no-deps --target DIRECTORY triton==3.6.0)")
    for folder in folders:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
        del environment[TRITONS]
        asked = [sys.executable, "-c", "import triton; print(triton.__file__)"]
        found = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
        assert Path(found.strip()).is_relative_to(Path(folder).resolve())
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_autotune.py"]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
        assert ended.returncode == 0, ended.stdout[-5000:]
        assert " passed" in ended.stdout

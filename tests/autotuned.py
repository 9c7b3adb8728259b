"""Triton's real Autotuner without a GPU, for tests: a fake kernel, a fake benchmark, and threads that are watched."""

import threading
from contextlib import contextmanager

import pytest

from stages.autotune import keep_in
from tests.interpreted import NO_TRITON

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
    pytest.importorskip("triton", reason=NO_TRITON)
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


def messages(caplog):
    return [record.getMessage() for record in caplog.records]

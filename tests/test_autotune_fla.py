"""flash-linear-attention with several threads, in a process of its own.

Imported here, it would change which kernels other tests run on.
"""

import collections
import os
import subprocess
import sys
import warnings
from importlib import metadata

import pytest
import torch

from stages.autotune import make_thread_safe
from tests.autotuned import FakeJit, Working, kernel, launch, tuning_in_progress
from tests.interpreted import NO_TRITON, ROOT


def with_fla(function, **environment):
    """Run a function of this file in a process of its own; what it logs is returned."""
    pytest.importorskip("triton", reason=NO_TRITON)
    try:
        metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        pytest.skip("flash-linear-attention is not installed here")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"from tests.test_autotune_fla import {function.__name__} as f; f()"],
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


def work_out_the_sizes_of_a_target_on_a_gpu():
    from stages.target_model import weight_count

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert weight_count("sizes:qwen3_6_27b", None, [1], "cuda:0") > 1e9
    assert "fla.utils" in sys.modules  # transformers imports it with such a model's code
    assert [str(each.message) for each in said if "Triton" in str(each.message)] == []


def test_sizes_for_a_gpu_are_no_word_on_triton_where_there_is_none():
    assert with_fla(work_out_the_sizes_of_a_target_on_a_gpu, CUDA_VISIBLE_DEVICES="") == ""


@pytest.mark.slow
def test_flash_linear_attention_is_safe_for_threads():
    assert with_fla(use_it_as_it_is) == ""


@pytest.mark.slow
def test_with_its_own_cache_of_configurations_and_another_kind_of_tensor_cache_it_is_safe_too(tmp_path):
    (line,) = with_fla(use_it_otherwise, FLA_CACHE_MODE="strict", FLA_CONFIG_DIR=str(tmp_path)).splitlines()
    assert "tensor cache is not the one that is known" in line

"""Triton's autotuned kernels, made safe for several threads of one process.

`Autotuner.run` keeps the arguments of the call in progress, what its hooks have set aside and its timings on the
instance, which every thread that launches the kernel shares. While one thread tunes a key, a launch by another takes
these away: a TypeError about None, or, if a hook restores the other's tensors, wrong numbers and no error.

Here a launch whose key is tuned reads the key's configuration and keeps everything else in local variables: no lock.
A key that is not tuned yet goes through Triton's own code under one lock of the process. One for all kernels, since
benchmarks that run side by side falsify each other, and reentrant, since a kernel's hook may launch a kernel.

Tuning waits for the device. So a thread must not tune while a collective that needs another, waiting thread is in
flight on its device: tune before the first collective, or keep targets and drafters on different GPUs.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, Literal, Protocol, TypeAlias

import torch

__all__ = ["FLA_TESTED", "TRITON_TESTED", "Keeper", "Way", "keep_in", "make_thread_safe", "patch", "way_taken"]

TRITON_TESTED = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
FLA_TESTED = ("0.6.0",)

Way: TypeAlias = Literal["lock-free", "lock per instance", "unchanged"]

_OURS = "_dflash_pipe_way"  # marks the functions that are put into Autotuner
_NAMES, _LOCK = "_dflash_pipe_names", "_dflash_pipe_lock"  # kept on each instance
_WITHOUT_DTYPE = frozenset({int, bool, float, str, tuple, type(None)})  # asking them takes longer than this does
_TUNING = threading.RLock()
_PATCHING = threading.Lock()

log = logging.getLogger("dflash_pipe")


class Keeper(Protocol):
    """What keeps tuned configurations. Both are called by the thread that launches, before and after it tunes."""

    def fill(self, kernel: Any) -> None:
        """Put the configurations that are known into the cache of an `Autotuner`."""

    def add(self, kernel: Any) -> None:
        """The cache of an `Autotuner` has grown."""


_keeper: Keeper | None = None


def keep_in(keeper: Keeper | None) -> None:
    """From now on `keeper` is asked before a kernel is tuned, and told after it. None: nobody is."""
    global _keeper
    _keeper = keeper


def make_thread_safe() -> Way:
    """Make autotuned kernels safe for threads. Every stage that launches them on a GPU calls it when it opens, on its
    own thread, with its model loaded; the classes are changed at the first call only.

    "lock-free": the launch of a tuned key takes no lock. "lock per instance": a Triton that this was not tested with,
    or one that somebody else has changed; said in one line. "unchanged": a Triton that keeps no call on the instance,
    or none installed.
    """
    if importlib.util.find_spec("triton") is None:
        return "unchanged"
    with _PATCHING:
        way = _patch_autotuner()
        _shorten_cached_autotuner(way)
        _separate_tensor_caches()
    if torch.cuda.is_available():
        _prepare_thread()
    return way


# --- Triton


def way_taken() -> Way:
    """How Triton's Autotuner class has been changed so far."""
    module = sys.modules.get("triton.runtime.autotuner")
    return getattr(module.Autotuner.run, _OURS, "unchanged") if module else "unchanged"


def _patch_autotuner() -> Way:
    import triton
    from triton.runtime.autotuner import Autotuner

    run: Any = Autotuner.run
    if (way := way_taken()) != "unchanged":
        return way
    if run.__module__ != Autotuner.__module__:
        why = f"{run.__module__} has changed Triton's Autotuner"
    elif "nargs" not in run.__code__.co_names:
        return "unchanged"
    elif triton.__version__ not in TRITON_TESTED:
        why = f"Triton {triton.__version__} was not tested with threads (tested: {', '.join(TRITON_TESTED)})"
    else:
        patch("lock-free")
        return "lock-free"
    log.warning("%s: every launch of an autotuned kernel takes that kernel's lock", why)
    patch("lock per instance")
    return "lock per instance"


def patch(way: Literal["lock-free", "lock per instance"]) -> None:
    """Change `run` and `warmup` of Triton's Autotuner class, for all its instances and subclasses."""
    from triton.runtime.autotuner import Autotuner

    changed: Any = Autotuner
    if way == "lock-free":
        run, warmup = _lock_free(changed.run), _guarded(changed.warmup, lambda kernel: _TUNING)
    else:
        run, warmup = _guarded(changed.run, _lock_of), _guarded(changed.warmup, _lock_of)
    setattr(run, _OURS, way)
    changed.run, changed.warmup = run, warmup


def _lock_free(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs = self.configs
        if len(configs) > 1:
            config = self.cache.get(_key(self, args, kwargs))
            if config is None:
                with _TUNING:
                    return _tune(self, upstream, args, kwargs)
        else:
            config = configs[0]
        self.best_config = config  # for whoever looks; the last launch wins, as in Triton
        chosen = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **chosen})
        return self.fn.run(*args, **kwargs, **chosen)

    return run


def _key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key under which Triton files a configuration: values of the arguments in `key=`, then every dtype."""
    names = vars(kernel).get(_NAMES)
    if names is None:
        names = frozenset(kernel.arg_names)
        setattr(kernel, _NAMES, names)
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs} if args else kwargs
    key = [given[name] for name in kernel.keys if name in given and name in names]
    key += [
        str(value.dtype)
        for name, value in given.items()
        if type(value) not in _WITHOUT_DTYPE and name in names and hasattr(value, "dtype")
    ]
    return tuple(key)


def _guarded(upstream: Callable[..., Any], guard: Callable[[Any], Any]) -> Callable[..., Any]:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with guard(self):
            return _tune(self, upstream, args, kwargs)

    return guarded


def _lock_of(kernel: Any) -> Any:
    # setdefault of a dict is one step: all threads get the same lock
    return vars(kernel).get(_LOCK) or vars(kernel).setdefault(_LOCK, threading.RLock())


def _tune(kernel: Any, upstream: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Triton's own code, with the lock held. Whoever waited for it finds the key tuned, and only launches."""
    keeper = _keeper
    if keeper is not None:
        keeper.fill(kernel)
    outer, tuned = vars(kernel).get("nargs"), len(kernel.cache)
    try:
        result = upstream(kernel, *args, **kwargs)
    finally:
        # None, also after an error, which else would keep the call's tensors alive; or the call whose hook launched
        kernel.nargs = outer
    if keeper is not None and len(kernel.cache) > tuned:
        keeper.add(kernel)
    return result


def _prepare_thread() -> None:
    import triton

    driver: Any = triton.runtime.driver
    driver.active.get_current_target()  # made at the first look; two threads that look together would make two
    # Triton keeps it for each context, so one that was set by the import of a package is not there in other threads.
    triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Global memory for a kernel that asks for some: bytes on the current device."""
    return torch.empty(size, dtype=torch.int8, device=torch.device("cuda", torch.cuda.current_device()))


# --- flash-linear-attention, as far as it is imported


def _shorten_cached_autotuner(way: Way) -> None:
    """Its subclass makes the key a second time, to look into a cache of its own; if that is off, `run` adds nothing."""
    module = sys.modules.get("fla.ops.utils.cache")
    if module is None or way != "lock-free" or sys.modules["fla"].__version__ not in FLA_TESTED:
        return
    if module.FLA_CACHE_MODE is module.FlaCacheMode.DISABLED and "run" in vars(module.CachedAutotuner):
        del module.CachedAutotuner.run


class _DequeOfThread(threading.local):
    """What `tensor_cache` needs of a deque, for each thread by itself."""

    def __init__(self, maxlen: int) -> None:
        self._entries: deque[Any] = deque(maxlen=maxlen)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def append(self, entry: Any) -> None:
        self._entries.append(entry)


def _separate_tensor_caches() -> None:
    """Each thread gets its own entries in the caches of `tensor_cache`.

    Shared ones change while another thread looks through them (RuntimeError), hand out what another stream has not
    finished, and are too short for several targets.
    """
    decorators = sys.modules.get("fla.utils.decorators")
    if decorators is None or getattr(decorators, "deque", None) is _DequeOfThread:
        return
    package: Any = sys.modules["fla.utils"]
    if package.FLA_DISABLE_TENSOR_CACHE:
        return
    code = _code_with_cache(decorators)
    if code is None or getattr(decorators, "deque", None) is not deque:
        log.warning("flash-linear-attention's tensor cache is not the one that is known: it is turned off")
        package.FLA_DISABLE_TENSOR_CACHE = True
        return
    decorators.deque = _DequeOfThread  # type: ignore[attr-defined]  # for functions decorated later
    position = code.co_freevars.index("cached")
    for function in gc.get_referrers(code):
        if isinstance(function, FunctionType) and function.__closure__ is not None:
            cell = function.__closure__[position]
            cell.cell_contents = _DequeOfThread(cell.cell_contents.maxlen)


def _code_with_cache(decorators: Any) -> CodeType | None:
    """The code of what `tensor_cache` returns, which all functions that it decorated share."""
    inside = getattr(getattr(decorators, "tensor_cache", None), "__code__", None)
    codes = (c for c in inside.co_consts if isinstance(c, CodeType)) if inside else ()
    return next((c for c in codes if "cached" in c.co_freevars), None)

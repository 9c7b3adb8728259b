"""What autotuned launches cost and get wrong with several threads: the real `Autotuner`, a kernel that does nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from stages.autotune import make_thread_safe, patch

__all__ = ["OURS", "THREADS", "WAYS", "Launches", "at_once", "launches"]

OURS = "ours"
THREADS = (1, 2, 4, 8)
_KERNELS = 7  # what a Gated DeltaNet layer launches
_QUEUE = 0.0004  # seconds that a launch waits for room while the GPU's queue is full


def _one_lock() -> None:
    from triton.runtime.autotuner import Autotuner

    changed: Any = Autotuner
    upstream, lock = changed.run, threading.RLock()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return upstream(self, *args, **kwargs)

    changed.run = run


WAYS: dict[str, Callable[[], Any]] = {
    "as Triton does it": lambda: None,
    "one lock": _one_lock,
    "a lock for each kernel": lambda: patch("lock per instance"),
    OURS: make_thread_safe,
}


def at_once(bodies: Sequence[Callable[[], Any]]) -> float:
    """Run each body in a thread of its own, from the same moment; seconds until the last has ended. Raises what the
    first of them raises."""
    together = threading.Barrier(len(bodies) + 1)

    def begin(body: Callable[[], Any]) -> None:
        together.wait()
        body()

    with ThreadPoolExecutor(len(bodies)) as pool:
        try:
            running = [pool.submit(begin, body) for body in bodies]
            together.wait()
            began = time.perf_counter()
            for each in running:
                each.result()
        except BaseException:
            together.abort()  # else a Ctrl-C before all have come would leave the others waiting for ever
            raise
    return time.perf_counter() - began


@dataclass(frozen=True)
class Launches:
    """Of `launched` launches by four threads with new keys among them: how many failed, and how many computed something
    wrong. rate, waiting: launches a second of tuned kernels by 1, 2, 4, 8 threads; a waiting one waits for the GPU."""

    launched: int
    errors: int
    wrong: int
    rate: dict[int, float]
    waiting: dict[int, float]


def _function() -> None:
    """What a kernel is named after; nothing is computed."""


class _Kernel:
    """What `Autotuner` needs of a compiled function. body: what a launch does."""

    def __init__(self, body: Callable[[dict[str, Any]], None]) -> None:
        self.fn, self.body = _function, body
        self.arg_names = [name for name in _arguments(1, torch.empty(0)) if name not in ("grid", "warmup")] + ["BS"]

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        self.body(kwargs)


def _autotuner(body: Callable[[dict[str, Any]], None]) -> Any:
    from triton.runtime.autotuner import Autotuner, Config

    def bench(call: Callable[[], None], quantiles: Any) -> list[float]:
        for _ in range(3):
            call()
            time.sleep(0.0002)  # as it waits for the device
        return [1.0] * 3

    configs, kernel = [Config({"BS": size}) for size in (16, 32, 64)], _Kernel(body)
    keys = ["T", "H", "K", "V", "IS_VARLEN"]
    made: Any = Autotuner
    return made(kernel, kernel.arg_names, configs, keys, None, ["x"], do_bench=bench)


def _arguments(tokens: int, x: torch.Tensor) -> dict[str, Any]:
    tensors = dict.fromkeys(("q", "k", "v", "g", "beta", "o", "h"), torch.zeros(4, dtype=torch.bfloat16))
    sizes = {"T": tokens, "H": 16, "K": 128, "V": 128, "BT": 64, "BK": 64, "BV": 64, "USE_G": True, "IS_VARLEN": False}
    return {
        **tensors,
        "x": x,
        "cu_seqlens": None,
        "indices": None,
        "scale": 1.0,
        **sizes,
        "grid": (1,),
        "warmup": False,
    }


def _race(threads: int, count: int) -> tuple[int, int]:
    """Errors and wrong results of `count` launches a thread, every 50th with a new key."""

    def add_one(arguments: dict[str, Any]) -> None:
        arguments["x"] += 1

    kernels = [_autotuner(add_one) for _ in range(2)]
    found: list[tuple[int, int]] = []

    def body(number: int) -> None:
        errors = wrong = 0
        for i in range(count):
            x = torch.tensor([float(number)])
            try:
                kernels[i % 2].run(**_arguments(i // 50 * threads + number if i % 50 < 2 else -1, x))
                wrong += x.item() != number + 1
            except (TypeError, KeyError):
                errors += 1
        found.append((errors, wrong))

    at_once([lambda n=n: body(n) for n in range(threads)])  # type: ignore[misc]
    return sum(errors for errors, _ in found), sum(wrong for _, wrong in found)


def _rate(threads: int, count: int, body: Callable[[dict[str, Any]], None]) -> float:
    """Launches a second of `threads` threads, `count` each, over kernels that are tuned."""
    kernels = [_autotuner(lambda arguments: None) for _ in range(_KERNELS)]
    arguments = _arguments(1, torch.zeros(1))
    for kernel in kernels:
        kernel.run(**arguments)
        kernel.fn.body = body

    def launch() -> None:
        for i in range(count):
            kernels[i % _KERNELS].run(**arguments)

    return threads * count / at_once([launch] * threads)


def launches(count: int, repeats: int) -> dict[str, Launches]:
    """Measure every way, in turns, so that what else the machine does hits all of them. The best of the repeats."""
    from triton.runtime.autotuner import Autotuner

    changed: Any = Autotuner
    upstream = changed.run, changed.warmup
    runs = {}
    for way, change in WAYS.items():
        change()
        runs[way] = changed.run
        changed.run, changed.warmup = upstream
    rate: dict[str, dict[int, float]] = {way: dict.fromkeys(THREADS, 0.0) for way in WAYS}
    waiting: dict[str, dict[int, float]] = {way: dict.fromkeys(THREADS, 0.0) for way in WAYS}
    failed = dict.fromkeys(WAYS, (0, 0))
    try:
        for _ in range(repeats):
            for way, changed.run in runs.items():
                errors, wrong = _race(4, count // 10)
                failed[way] = failed[way][0] + errors, failed[way][1] + wrong
                for n in THREADS:
                    rate[way][n] = max(rate[way][n], _rate(n, count // n, lambda arguments: None))
                    waiting[way][n] = max(waiting[way][n], _rate(n, count // 40, lambda arguments: time.sleep(_QUEUE)))
    finally:
        changed.run = upstream[0]
    return {way: Launches(4 * (count // 10) * repeats, *failed[way], rate[way], waiting[way]) for way in WAYS}

"""Adding two replicas' gradients: what the way costs, and how much of it is size, number of tensors, or kind of memory.

Every way does the same: both replicas end with the sum. Where a machine lacks what a way needs, that is said.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.machine import Out, described, keep
from benchmarks.terminal import output
from dflash_pipe import BadInput
from dflash_pipe.counted import counted

__all__ = ["GOAL", "WAYS", "Gradients", "Grid", "concluded", "factors", "sync"]

GOAL = 30.0  # per parameter through the CPU / flat pinned, on CUDA
_DTYPE = torch.bfloat16
_PER_PARAMETER, _PINNED = "each through the CPU", "flat through the CPU, pinned"
_CPU_SIZE, _GPU_SIZE = 20_000_000, 1_730_000_000
_LEAST = 16 * 1000  # a sixteenth of them in 1,000 tensors
_WORTH = 1.05  # a factor of less may be chance


class Gradients:
    """A flat buffer [numbers] for each of two replicas, `count` views of each, and pinned host buffers if asked for."""

    def __init__(self, numbers: int, count: int, devices: Sequence[str], pinned: bool = False) -> None:
        self.flat = [torch.ones(numbers, dtype=_DTYPE, device=device) for device in devices]
        sizes = [numbers // count + (number < numbers % count) for number in range(count)]
        self.each = [flat.split(sizes) for flat in self.flat]
        self.host = [torch.empty(numbers, dtype=_DTYPE, pin_memory=True) for _ in devices] if pinned else []


def _through_cpu(one: Tensor, other: Tensor) -> None:
    total = one.to("cpu", copy=True).add_(other.to("cpu"))
    one.copy_(total)
    other.copy_(total)


def each_through_cpu(grads: Gradients) -> None:
    """Tensor by tensor, through memory that the system may page out."""
    for one, other in zip(*grads.each, strict=True):
        _through_cpu(one, other)


def flat_through_cpu(grads: Gradients) -> None:
    """All at once, through memory that the system may page out."""
    _through_cpu(*grads.flat)


def flat_through_pinned(grads: Gradients) -> None:
    """All at once, through pinned buffers that exist already."""
    for flat, host in zip(grads.flat, grads.host, strict=True):
        host.copy_(flat, non_blocking=True)
    _wait(grads.flat)
    grads.host[0].add_(grads.host[1])
    for flat in grads.flat:
        flat.copy_(grads.host[0], non_blocking=True)


def each_between_gpus(grads: Gradients) -> None:
    """Tensor by tensor, from GPU to GPU."""
    for one, other in zip(*grads.each, strict=True):
        one.add_(other.to(one.device))
        other.copy_(one)


def flat_between_gpus(grads: Gradients) -> None:
    """All at once, from GPU to GPU."""
    one, other = grads.flat
    one.add_(other.to(one.device))
    other.copy_(one)


def nccl(grads: Gradients) -> None:
    """NCCL's all-reduce of one flat buffer a GPU, from this one process."""
    torch.cuda.nccl.all_reduce(grads.flat)


# way -> (how, GPUs it needs)
WAYS: dict[str, tuple[Callable[[Gradients], None], int]] = {
    _PER_PARAMETER: (each_through_cpu, 0),
    "flat through the CPU": (flat_through_cpu, 0),
    _PINNED: (flat_through_pinned, 1),
    "each, GPU to GPU": (each_between_gpus, 2),
    "flat, GPU to GPU": (flat_between_gpus, 2),
    "NCCL, flat": (nccl, 2),
}


def _wait(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def timed(act: Callable[[], None], tensors: Sequence[Tensor], repeats: int) -> float:
    """Median seconds, the first time left out."""
    times = []
    for _ in range(repeats + 1):
        _wait(tensors)
        began = time.perf_counter()
        act()
        _wait(tensors)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


# --- the factors, one by one

_FRESH, _KEPT, _PINNED_MEMORY = "pageable, fresh", "pageable, kept", "pinned, kept"


@dataclass(frozen=True)
class Grid:
    """Seconds to bring gradients to host memory and back. memory: pageable that is asked for anew each time or kept, or
    pinned and kept."""

    numbers: int
    count: int
    memory: str
    seconds: float


def factors(numbers: int, counts: Sequence[int], device: str, repeats: int) -> list[Grid]:
    """Every size (whole, a sixteenth), number of tensors and kind of memory, with every other."""
    kinds = (_FRESH, _KEPT) if device == "cpu" else (_FRESH, _KEPT, _PINNED_MEMORY)
    found = []
    for size in (numbers, numbers // 16):
        for count in counts:
            own = Gradients(size, count, [device]).each[0]
            for kind in kinds:
                host = None if kind == _FRESH else _on_host(own, pinned=kind == _PINNED_MEMORY)
                found.append(Grid(size, count, kind, timed(partial(_there_and_back, own, host), own, repeats)))
    return found


def _on_host(own: Sequence[Tensor], pinned: bool) -> Sequence[Tensor]:
    """As many tensors in one block of host memory."""
    sizes = [len(part) for part in own]
    return torch.empty(sum(sizes), dtype=_DTYPE, pin_memory=pinned).split(sizes)


def _there_and_back(own: Sequence[Tensor], host: Sequence[Tensor] | None) -> None:
    """host: None asks for memory, tensor by tensor."""
    away = [torch.empty(len(part), dtype=_DTYPE) for part in own] if host is None else host
    for there, here in zip(away, own, strict=True):
        there.copy_(here, non_blocking=True)
    for there, here in zip(away, own, strict=True):
        here.copy_(there, non_blocking=True)


def concluded(grid: Sequence[Grid]) -> list[str]:
    """How many times longer each factor alone makes it, all else being equal: geometric mean over all of that."""

    def times(**changed: tuple[object, object]) -> float:
        ((name, (slow, fast)),) = changed.items()
        others = [key for key in ("numbers", "count", "memory") if key != name]
        seconds = {(getattr(g, name), *(getattr(g, key) for key in others)): g.seconds for g in grid}
        ratios = [took / seconds[fast, *rest] for (value, *rest), took in seconds.items() if value == slow]
        return statistics.geometric_mean(ratios)

    numbers, counts = sorted({g.numbers for g in grid}), sorted({g.count for g in grid})
    found = {
        f"{counts[-1]:,} tensors instead of {counts[0]}": times(count=(counts[-1], counts[0])),
        "memory asked for anew instead of kept": times(memory=(_FRESH, _KEPT)),
    }
    if any(g.memory == _PINNED_MEMORY for g in grid):
        found["pageable memory instead of pinned"] = times(memory=(_KEPT, _PINNED_MEMORY))
    lines = [f"{what}: {factor:.2f} times the seconds" for what, factor in found.items()]
    lines.append(f"16 times the size: {times(numbers=(numbers[-1], numbers[0])):.2f} times the seconds")
    most = max(found, key=lambda what: found[what])
    if found[most] < _WORTH:
        return [*lines, f"neither the number of tensors nor the kind of memory costs more than {_WORTH - 1:.0%}"]
    return [*lines, f"what costs most, all else being equal: {most}"]


# --- the command


def sync(
    numbers: Annotated[
        int | None, typer.Option(help="gradients of a replica (1.73 B; 20 M without a GPU)", min=_LEAST)
    ] = None,
    count: Annotated[int, typer.Option(help="tensors that they are in", min=1, max=1000)] = 58,
    repeats: Annotated[int, typer.Option(help="times each is measured", min=1)] = 3,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if the goal is missed (CUDA only)")] = False,
    out: Out = None,
) -> None:
    """Ways to add two replicas' gradients, and what each costs.

    Then how much of that is size, number of tensors and kind of memory, each with all else being equal.
    """
    gpus = torch.cuda.device_count()
    stated = numbers in (None, _GPU_SIZE) and gpus > 0
    if check and not stated:
        raise BadInput(f"--check: the goal is stated for {_GPU_SIZE:,} gradients and a GPU", "command line")
    numbers = numbers or (_GPU_SIZE if gpus else _CPU_SIZE)
    devices = ["cpu", "cpu"] if gpus == 0 else ["cuda:0", "cuda:0" if gpus == 1 else "cuda:1"]
    seconds = _ways(Gradients(numbers, count, devices, pinned=gpus > 0), gpus, repeats)
    grid = factors(numbers, (1, count, 1000), devices[0], repeats)
    console = output()
    size = f"{numbers:,} {str(_DTYPE).removeprefix('torch.')} gradients in {counted(count, 'tensor')}"
    size += f", on {' and '.join(devices)}"
    console.print(described(), size, sep="\n", highlight=False)
    _print(console, seconds, grid)
    for way, (_, needed) in WAYS.items():
        if way not in seconds:
            console.print(f"not run: {way} (needs {counted(needed, 'GPU')}, this machine has {gpus})", highlight=False)
    gain = seconds[_PER_PARAMETER] / seconds[_PINNED] if _PINNED in seconds else None
    if gain is not None:
        met = ("met" if gain >= GOAL else "missed") if stated else f"stated for {_GPU_SIZE:,} gradients"
        console.print(f"{_PER_PARAMETER} / {_PINNED}: {gain:.1f} (goal ≥ {GOAL:g}: {met})", highlight=False)
    if out:
        figures = {
            "numbers": numbers,
            "count": count,
            "seconds": seconds,
            "grid": [vars(g) for g in grid],
            "gain": gain,
        }
        console.print(f"results: {keep(out, 'sync', figures)}", highlight=False)
    if check and gain is not None and gain < GOAL:
        raise typer.Exit(1)


def _ways(grads: Gradients, gpus: int, repeats: int) -> dict[str, float]:
    """way -> seconds, of those that this machine can."""
    return {
        way: timed(partial(how, grads), grads.flat, repeats) for way, (how, needed) in WAYS.items() if needed <= gpus
    }


def _print(console: Console, seconds: dict[str, float], grid: Sequence[Grid]) -> None:
    ways = Table("way", "ms", "times as fast as the first", box=None, pad_edge=False)
    for way, took in seconds.items():
        ways.add_row(way, f"{took * 1e3:.4g}", f"{seconds[_PER_PARAMETER] / took:.1f}")
    console.print(ways)
    console.print("\nto host memory and back, one replica:")
    table = Table("gradients", "tensors", "memory", "ms", "GB/s", box=None, pad_edge=False)
    for g in grid:
        rate = 2 * g.numbers * _DTYPE.itemsize / g.seconds / 1e9
        table.add_row(f"{g.numbers:,}", f"{g.count:,}", g.memory, f"{g.seconds * 1e3:.4g}", f"{rate:.3g}")
    console.print(table)
    for line in concluded(grid):
        console.print(line, highlight=False)

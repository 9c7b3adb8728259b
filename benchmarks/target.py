"""The frozen target's forward on a GPU: fused kernels and CUDA graphs against transformers, and the card's matmul rate.

Random weights at full size, random tokens. Counted are the matrix products with weights, 2 operations a weight and
token. A card that computes all the time has to slow down for its power and heat, in products alone as in a forward. So
every way, and the matmuls too, run by themselves until that has settled, and only then are timed. The rate of the cool
card, before everything, stands beside it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.compare import clear
from benchmarks.machine import Out, described, keep
from benchmarks.terminal import output
from dflash_pipe import BadInput, Context
from dflash_pipe.counted import counted
from stages.model_source import text_config
from stages.target_model import load_truncated, shortened
from stages.truncated_target import TruncatedTarget
from stages.tuning import prepare_kernels

__all__ = [
    "FUSED",
    "GOALS",
    "GRAPH",
    "PLAIN",
    "Case",
    "Measured",
    "Shape",
    "captured_layers",
    "exact_delta_rule",
    "load",
    "missed",
    "operations",
    "random_batch",
    "target",
]

PLAIN, FUSED, GRAPH = "transformers", "fused", "fused, CUDA graph"
_STATED = "sizes:qwen3_6_27b"  # whose goals these are
_SIDE = 8192  # of the square product that gives the card's rate
_COMPARED = 8  # layers that are computed in float32 too
_DEVICE = "cuda:0"


@dataclass(frozen=True)
class Shape:
    """A micro-batch: rows of so many tokens."""

    rows: int
    tokens: int

    @staticmethod
    def parse(text: str) -> Shape:
        """ROWSxTOKENS. Raises BadInput."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not found:
            raise BadInput(f"{text!r} is not ROWSxTOKENS, such as 3x2000", "command line")
        return Shape(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}"

    @property
    def count(self) -> int:
        return self.rows * self.tokens


# Share of the cool card's matmul rate that a CUDA graph of the fused layers is to reach.
GOALS = {Shape(3, 2000): 0.80, Shape(8, 2048): 0.80, Shape(1, 512): 0.50}


@dataclass(frozen=True)
class Measured:
    """One way at one shape. seconds: median of a forward. tflops: counted work a second; share: of the matmul rate of a
    card that computes all the time, as it does here; cool: of the cool card's. gib: memory beside the weights."""

    seconds: float
    tflops: float
    share: float
    cool: float
    gib: float


@dataclass(frozen=True)
class Case:
    """All ways at one shape. rate: operations a second of matmuls that run all the time. same: the graph's bits are
    those of the launches that it replays."""

    ways: dict[str, Measured]
    rate: float
    same: bool


def captured_layers(depth: int) -> list[int]:
    """Five layers, evenly from the second to the last of `depth` ≥ 6."""
    return [round(1 + i * (depth - 2) / 4) for i in range(5)]


def operations(model: TruncatedTarget) -> int:
    """Of the matrix products with weights, a token."""
    return 2 * sum(weight.numel() for weight in model.decoder.layers.parameters() if weight.dim() == 2)


def timed(act: Callable[[], object], times: int) -> float:
    """Median seconds on the GPU."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        act()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairwise(events)) / 1e3


def settled(act: Callable[[], object], seconds: float) -> float:
    """Median seconds on the GPU: of what runs for so long after it has run for so long."""
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        act()
        torch.cuda.synchronize()
        times += 1
    return timed(act, max(times, 3))


class Matmuls:
    """Square products in bfloat16 of random numbers. operations: of one."""

    operations = 2.0 * _SIDE**3

    def __init__(self) -> None:
        self._a, self._b = torch.randn(2, _SIDE, _SIDE, dtype=torch.bfloat16, device=_DEVICE)

    def __call__(self) -> Tensor:
        return self._a @ self._b


def load(model: str, depth: int, device: str = _DEVICE) -> TruncatedTarget:
    """The first `depth` layers with random weights."""
    whole = text_config(model)
    if depth > whole.num_hidden_layers - 1:
        raise BadInput(f"--layers is {depth}, {model} has {whole.num_hidden_layers}: expected fewer", "command line")
    with tempfile.TemporaryDirectory() as folder:
        shortened(whole, depth + 1).save_pretrained(folder)
        return load_truncated(folder, None, captured_layers(depth), "bfloat16", device, "random")


def random_batch(shape: Shape, vocabulary: int, device: str = _DEVICE) -> tuple[Tensor, Tensor]:
    """ids [rows, tokens] and lengths [rows] without padding."""
    draw = torch.Generator().manual_seed(shape.count)
    ids = torch.randint(0, vocabulary, (shape.rows, shape.tokens), generator=draw)
    return ids.to(device), torch.full((shape.rows,), shape.tokens, device=device)


def errors(model: str, depth: int) -> dict[str, list[float]]:
    """way -> relative error of each captured layer's states (norm), against transformers in float32."""
    fused = load(model, min(depth, _COMPARED))
    exact = TruncatedTarget(copy.deepcopy(fused.decoder).float(), fused.layers, plain=True)
    plain = TruncatedTarget(fused.decoder, fused.layers, plain=True)
    batch = random_batch(Shape(2, 333), fused.vocab_size)
    with exact_delta_rule():
        expected = exact(*batch).split(fused.hidden_size, -1)
    found = {PLAIN: plain(*batch), FUSED: fused(*batch)}
    return {
        way: [
            float((got.float() - right).norm() / right.norm())
            for got, right in zip(states.split(fused.hidden_size, -1), expected, strict=True)
        ]
        for way, states in found.items()
    }


@contextlib.contextmanager
def exact_delta_rule() -> Iterator[None]:
    """transformers' own PyTorch code in place of kernels, which multiply float32 with fewer bits."""
    module = sys.modules.get("transformers.models.qwen3_5.modeling_qwen3_5")
    kernel = getattr(module, "torch_chunk_gated_delta_rule", None)
    if kernel is None:
        yield
        return
    setattr(module, "torch_chunk_gated_delta_rule", getattr(kernel, "__wrapped__", kernel))  # noqa: B010
    try:
        yield
    finally:
        setattr(module, "torch_chunk_gated_delta_rule", kernel)  # noqa: B010


def measure(fused: TruncatedTarget, plain: TruncatedTarget, shape: Shape, seconds: float, cool: float) -> Case:
    """Every way for twice so many seconds. cool: the card's matmul rate before everything."""
    batch = random_batch(shape, fused.vocab_size)
    acts: dict[str, Callable[[], Tensor]] = {PLAIN: lambda: plain(*batch), FUSED: lambda: fused(*batch)}
    gib = {way: _working(act) for way, act in acts.items()}
    launched = fused(*batch)
    clear()
    before = torch.cuda.memory_reserved()
    graphs = TruncatedTarget(fused.decoder, fused.layers)
    graphs.prepare([(shape.rows, shape.tokens)])
    clear()
    gib[GRAPH] = (torch.cuda.memory_reserved() - before) / 2**30
    acts[GRAPH] = lambda: graphs(*batch)
    same = torch.equal(launched, acts[GRAPH]())
    del launched
    rate = Matmuls.operations / settled(Matmuls(), seconds)
    work = operations(fused) * shape.count
    ways = {}
    for way, act in acts.items():
        took = settled(act, seconds)
        ways[way] = Measured(took, work / took / 1e12, work / took / rate, work / took / cool, gib[way])
    return Case(ways, rate, same)


def _working(act: Callable[[], Tensor]) -> float:
    """GiB that a forward and its result take at most."""
    act()  # builds and tunes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    act()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


# --- the command


def target(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="ROWSxTOKENS, ... (those with a goal)", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="whose sizes to take")] = _STATED,
    layers: Annotated[int, typer.Option(help="layers that are computed", min=6)] = 8,
    seconds: Annotated[float, typer.Option(help="how long each way runs before, and while it is timed", min=0.1)] = 0.7,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if a goal or the same bits are missed")] = False,
    out: Out = None,
) -> None:
    """The target's forward on a GPU: fused against transformers, and against the card's matmul rate."""
    chosen = [Shape.parse(text) for text in shapes or map(str, GOALS)]
    if not torch.cuda.is_available():
        raise BadInput("this machine has no GPU, and the forward is measured at full size", "command line")
    console = output()
    console.print(described(), highlight=False)
    matmuls = Matmuls()
    matmuls()
    cool = Matmuls.operations / timed(matmuls, 10)
    with tempfile.TemporaryDirectory() as folder:
        prepare_kernels(Context(device=_DEVICE, folder=Path(folder)))
        wrong = errors(model, layers)
        clear()
        fused = load(model, layers)
        plain = TruncatedTarget(fused.decoder, fused.layers, plain=True)
        work = f"{operations(fused) / 1e9:.2f} GFLOP a token"
        console.print(f"{model}, {counted(layers, 'layer')}, {fused.forward}, {work}; ", end="")
        console.print(f"matmul rate of the cool card {cool / 1e12:.0f} TFLOP/s", highlight=False)
        cases = {}
        for shape in chosen:
            clear()
            cases[shape] = measure(fused, plain, shape, seconds, cool)
            _print(console, shape, cases[shape])
    for way, each in wrong.items():
        console.print(f"error of {way}, by captured layer: {', '.join(f'{e:.4f}' for e in each)}", highlight=False)
    lines = missed(cases, model, wrong)
    console.print(*lines, sep="\n", highlight=False)
    if out:
        found = {str(shape): dataclasses.asdict(case) for shape, case in cases.items()}
        figures = {"model": model, "layers": layers, "operations": operations(fused), "cool_rate": cool}
        kept = keep(out, "target", {**figures, "errors": wrong, "cases": found})
        console.print(f"results: {kept}", highlight=False)
    if check and lines:
        raise typer.Exit(1)


def missed(cases: dict[Shape, Case], model: str, wrong: dict[str, list[float]]) -> list[str]:
    """What is not as it should be, in words. wrong: way -> error of each captured layer."""
    lines = [
        f"{shape}: missed: the graph's bits are not those of its launches" for shape, c in cases.items() if not c.same
    ]
    if any(one > other for one, other in zip(wrong[FUSED], wrong[PLAIN], strict=True)):
        lines.append("missed: the fused layers' error is larger than that of transformers")
    for shape, case in cases.items():
        goal, found = GOALS.get(shape, 0.0), case.ways[GRAPH]
        if model == _STATED and found.cool < goal:
            lines.append(f"{shape}: missed: {found.cool:.3f} of the cool card's matmul rate (goal {goal:g})")
    return lines


def _print(console: Console, shape: Shape, case: Case) -> None:
    console.print(f"\n{shape}; matmuls that run all the time: {case.rate / 1e12:.0f} TFLOP/s", highlight=False)
    columns = ("way", "ms", "times as fast", "TFLOP/s", "of that rate", "of the cool card's", "GiB beside the weights")
    table = Table(*columns, box=None, pad_edge=False)
    first = case.ways[PLAIN].seconds
    for way, m in case.ways.items():
        row = (f"{m.seconds * 1e3:.2f}", f"{first / m.seconds:.2f}", f"{m.tflops:.0f}")
        table.add_row(way, *row, f"{m.share:.3f}", f"{m.cool:.3f}", f"{m.gib:.2f}")
    console.print(table)

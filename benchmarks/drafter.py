"""The drafter's step, forward and backward, against the plain path of the same code and the card's own matmul rate.

Full sizes, random weights, random tokens; both sides are stage `drafter` itself, in one process. Work is counted as
6 · parameters · draft tokens + 4 · draft tokens · H · V (frozen head: forward and input gradient), so that seconds of
any implementation can be turned into the same share, whatever it saves or does twice. A card that computes all the
time has to slow down for its power and heat, so every side, and the matmuls too, run until that has settled; the rate
of the cool card stands beside it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.compare import clear
from benchmarks.machine import Out, described, keep
from benchmarks.target import Matmuls, settled, timed
from benchmarks.terminal import output
from dflash_pipe import BadInput, Context, Stamp
from dflash_pipe.errors import nearest
from stages.dflash_model import DFlashModel, Slot, parameter_layout
from stages.drafter import DrafterStep
from stages.frozen import Frozen
from stages.messages import FeatureBatch, Parameters
from stages.random_rows import RandomTokens
from stages.tensors import mapped

__all__ = ["GOALS", "SIZES", "Case", "Goal", "Measured", "drafter", "work"]

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_6_27b": {
        "target": "sizes:qwen3_6_27b", "layers": [1, 16, 31, 46, 61], "mask_token_id": 248070,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 2048,
    },
    "qwen3_8b": {"target": "sizes:qwen3_8b", "layers": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}  # fmt: skip
_SHALLOW = 2  # layers where gradients are compared, in float32 too
_STD = 0.02


@dataclass(frozen=True)
class Case:
    """A drafter's sizes, and a micro-batch: rows of `length` tokens with `anchors` blocks each."""

    sizes: str
    rows: int
    length: int
    anchors: int

    @staticmethod
    def parse(text: str) -> Case:
        """SIZES:ROWSxLENGTHxANCHORS. Raises BadInput."""
        found = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)", text)
        if not found:
            raise BadInput(f"{text!r} is not SIZES:ROWSxLENGTHxANCHORS, such as qwen3_8b:2x768x256", "command line")
        sizes, *numbers = found.groups()
        if sizes not in SIZES:
            raise BadInput(f"no sizes {sizes!r}{nearest(sizes, SIZES)}", "command line")
        case = Case(sizes, *map(int, numbers))
        if case.rows < 1 or case.anchors < 1 or case.length <= case.anchors:
            raise BadInput(f"{text!r}: expected a row, an anchor and more tokens than anchors", "command line")
        return case

    def __str__(self) -> str:
        return f"{self.sizes}:{self.rows}x{self.length}x{self.anchors}"


@dataclass(frozen=True)
class Goal:
    """What a case is to reach: at most so many seconds and GiB, at least this share of the cool card's matmul rate."""

    seconds: float | None = None
    gib: float | None = None
    share: float | None = None

    def missed(self, found: Measured) -> list[str]:
        """Which parts are missed, in words."""
        pairs = (
            (self.seconds, found.seconds, 1, "s"),
            (self.gib, found.gib, 1, "GiB"),
            (self.share, found.cool, -1, "of the cool card's matmul rate"),
        )
        return [
            f"{value:.3g} {unit} (goal {goal:g})"
            for goal, value, sign, unit in pairs
            if goal is not None and sign * value > sign * goal
        ]


GOALS = {
    "qwen3_6_27b:3x2000x512": Goal(seconds=0.55, gib=35),
    "qwen3_8b:4x3072x512": Goal(seconds=0.45),
    "qwen3_8b:2x768x256": Goal(share=0.75),
}


@dataclass(frozen=True)
class Measured:
    """One side of a case. seconds: median of a step. tflops: counted work a second; share: of the matmul rate of a card
    that computes all the time, as it does here; cool: of the cool card's. gib: the most that was allocated. error: of
    the gradient against float32, relative norm, at small depth. repeats: whether steps gave the same bits."""

    seconds: float
    tflops: float
    share: float
    cool: float
    gib: float
    error: float
    repeats: bool


def work(parameters: int, tokens: int, hidden: int, vocabulary: int) -> float:
    """Operations of a step of `tokens` block tokens."""
    return 6.0 * parameters * tokens + 4.0 * tokens * hidden * vocabulary


class Step:
    """Stage `drafter` with one micro-batch; calling it is a step of it, whose window's gradient `gradient` takes."""

    def __init__(self, case: Case, **keys: Any) -> None:
        self.stage = DrafterStep(**{**SIZES[case.sizes], "weights": "random", "num_anchors": case.anchors, **keys})
        self.stage.check(1)
        context = Context(device="cuda:0", seed=0)
        self.stage.open(context)
        config = self.stage.config
        source = RandomTokens(vocabulary=config.vocab_size, rows=case.rows, length=case.length, steps=1)
        source.open(context)
        tokens = mapped(next(batch for _, batch in source.read(None)), lambda tensor: tensor.cuda())
        draw = torch.Generator("cuda").manual_seed(0)
        hidden = torch.randn(*tokens.input_ids.shape, config.feature_size, generator=draw, device="cuda").bfloat16()
        self.layout: dict[str, Slot] = parameter_layout(DFlashModel(config, device="meta"))
        self.size = sum(slot.size for slot in self.layout.values())
        flat = torch.empty(self.size, dtype=torch.bfloat16, device="cuda").normal_(0, _STD, generator=draw)
        for slot in self.layout.values():
            if len(slot.shape) == 1:
                slot.of(flat).fill_(1.0)
        self._inputs = FeatureBatch(tokens, hidden), Parameters(flat, 0)
        self.work = work(self.size, case.rows * case.anchors * config.block_size, config.hidden_size, config.vocab_size)
        self()
        self.gradient()
        self._inputs = self._inputs[0], Parameters(flat.new_empty(0), 0)  # taken already, so not held twice

    def __call__(self) -> None:
        self.stage.process(*self._inputs, Stamp(0, 0, 0, False))

    def gradient(self) -> Tensor:
        """[P] float32, of the steps since the last call."""
        return self.stage.end_window().partials[0].gradient


def measure(case: Case, attention: str, seconds: float, rates: tuple[float, float], error: float) -> Measured:
    """One side. rates: operations a second of matmuls, on the settled and on the cool card."""
    clear()
    step = Step(case, attention=attention)
    step()
    first = step.gradient()
    same = True
    for _ in range(2):
        step()
        same &= torch.equal(step.gradient(), first)
    del first
    step()
    clear()
    torch.cuda.reset_peak_memory_stats()
    took = settled(step, seconds)
    gib = torch.cuda.max_memory_allocated() / 2**30
    tflops, settled_rate, cool_rate = step.work / took / 1e12, *rates
    return Measured(took, tflops, step.work / took / settled_rate, step.work / took / cool_rate, gib, error, same)


def errors(case: Case) -> dict[str, float]:
    """path -> relative error of the whole gradient, against the plain path in float32 on the same numbers."""
    small = Case(case.sizes, rows=1, length=512, anchors=32)
    found = {}
    for name, attention in _PATHS.items():
        clear()
        step = Step(small, num_layers=_SHALLOW, attention=attention)
        step()
        found[name], frozen = step.gradient(), step.stage.frozen
    step = Step(small, num_layers=_SHALLOW, attention="sdpa", dtype="float32")
    step.stage.frozen = Frozen(frozen.embed.float(), frozen.head.float())
    step()
    exact = step.gradient()
    return {name: float((gradient - exact).norm() / exact.norm()) for name, gradient in found.items()}


def drafter(
    cases: Annotated[
        list[str] | None, typer.Argument(help="SIZES:ROWSxLENGTHxANCHORS, ... (those with a goal)", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="each side runs so long, then is timed so long", min=0.1)] = 3.0,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if a goal is missed")] = False,
    out: Out = None,
) -> None:
    """The drafter's step on a GPU: fused against plain, and against the card's matmul rate."""
    chosen = [Case.parse(text) for text in cases or GOALS]
    if not torch.cuda.is_available():
        raise BadInput("this machine has no GPU, and the step is measured at full size", "command line")
    if check and not any(str(case) in GOALS for case in chosen):
        raise BadInput(f"--check: goals are stated for {', '.join(GOALS)}", "command line")
    console = output()
    console.print(described(), highlight=False)
    matmuls = Matmuls()
    matmuls()
    cool = Matmuls.operations / timed(matmuls, 10)
    console.print(f"matmul rate of the cool card {cool / 1e12:.0f} TFLOP/s", highlight=False)
    rates, found = {}, {}
    for case in chosen:
        wrong = errors(case)
        rates[str(case)] = Matmuls.operations / settled(matmuls, seconds)
        both = rates[str(case)], cool
        sides = {name: measure(case, attention, seconds, both, wrong[name]) for name, attention in _PATHS.items()}
        found[str(case)] = sides
        _print(console, case, sides, rates[str(case)])
    missed = [line for text, sides in found.items() for line in _missed(text, sides["fused"])]
    for line in missed:
        console.print(line, highlight=False)
    if out:
        figures = {
            text: {"rate": rates[text], **{name: dataclasses.asdict(side) for name, side in sides.items()}}
            for text, sides in found.items()
        }
        kept = keep(out, "drafter", {"cool_rate": cool, "cases": figures})
        console.print(f"results: {kept}", highlight=False)
    if check and missed:
        raise typer.Exit(1)


_PATHS = {"plain": "flex", "fused": "fused"}


def _missed(case: str, fused: Measured) -> list[str]:
    lines = [f"{case}: missed: {part}" for part in GOALS.get(case, Goal()).missed(fused)]
    return lines if fused.repeats else [*lines, f"{case}: missed: steps on the same inputs differ"]


def _print(console: Console, case: Case, sides: dict[str, Measured], rate: float) -> None:
    gain = sides["plain"].seconds / sides["fused"].seconds
    console.print(f"\n{case}: fused is {gain:.2f} times as fast", highlight=False)
    console.print(f"matmuls that run all the time: {rate / 1e12:.0f} TFLOP/s", highlight=False)
    columns = ("path", "s a step", "TFLOP/s", "of that rate", "of the cool card's", "peak GiB", "error", "repeats")
    table = Table(*columns, box=None, pad_edge=False)
    for name, m in sides.items():
        shares = f"{m.seconds:.3f}", f"{m.tflops:.0f}", f"{m.share:.3f}", f"{m.cool:.3f}"
        table.add_row(name, *shares, f"{m.gib:.1f}", f"{m.error:.2e}", "to the bit" if m.repeats else "NO")
    console.print(table)

"""`python -m stages.demo`: the main job on a real small model, on a CPU, inside a time budget.

SmolLM2-135M-Instruct writes the answers to school-maths problems, a DFlash drafter is trained on them through the
overlapped graph, its exact acceptance length τ is measured on held-out problems before and after, and it is exported.
Each part is a graph of graphs/demo/, run just as `dflash-pipe run` would. A slow machine trains less: how many steps
there is time for is measured on the first ones.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dflash_pipe.cli import execute, failures_to_exit_codes, opened
from dflash_pipe.run_folder import fresh
from dflash_pipe.runtime import Result
from stages.arrow_rows import ArrowRows
from stages.drafter_files import launch_lines
from stages.model_source import locate
from stages.prompts import prompts

__all__ = ["main"]

_MODEL, _BLOCK = "package:smollm2", 4
_PROMPTS = 320
# Shares of the time budget; what is left is for loading models, both evaluations and the export.
_ANSWERING, _TRAINING = 0.25, 0.45
_TRIAL_STEPS, _LEAST_STEPS, _MOST_STEPS = 4, 20, 400


class Stopped(Exception):
    """A signal ended a part of the demo; its number is the exit code."""


@dataclass(frozen=True)
class Budget:
    """Seconds for the whole demo, and when it began."""

    seconds: float
    began: float

    def left(self) -> float:
        return self.began + self.seconds - time.perf_counter()


class Demo:
    """One demo in its folder; every number that it tells comes from this run."""

    def __init__(self, folder: Path, minutes: float, console: Console) -> None:
        self.folder, self.console = folder, console
        self.budget = Budget(60 * minutes, time.perf_counter())
        self.dtype = faster_dtype()

    def run(self) -> None:
        self.answer()
        before = self.evaluate("before", "drafter.path=null")
        steps = self.steps()
        self.say(f"Training for {steps} steps")
        seconds = max(60.0, self.budget.left() - 0.12 * self.budget.seconds)
        training = self.train("training", steps, seconds=seconds)
        if (done := training.view.metrics["step"]) < steps:
            self.console.print(f"Ended at step {done} of {steps}: the time for training was up")
        after = self.evaluate("after", f"drafter.path={self.folder / 'training' / 'export'}")
        self.tell(training, before, after)

    def answer(self) -> None:
        """The target answers the prompts, as many as there is time for; some rows are held out."""
        self.say(f"SmolLM2 answers {_PROMPTS} school-maths problems: a drafter learns the target's own words")
        file = self.folder / "prompts.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in prompts("maths", _PROMPTS, seed=1)))
        paths = (f"prompts.path={file}", f"write.path={self.folder / 'data'}")
        self.graph("answers", *paths, f"target.dtype={self.dtype}", seconds=_ANSWERING * self.budget.seconds)

    def evaluate(self, name: str, drafter: str) -> dict[str, Any]:
        """evaluation.json of a drafter on the held-out rows.

        In the dtype in which the target wrote them: in another one they may not be its own greedy continuation.
        """
        self.say(f"Acceptance length on held-out problems, {name} training")
        data = f"data.path={self.folder / 'data' / 'eval.arrow'}"
        self.graph("evaluate", drafter, data, f"target.dtype={self.dtype}", name=name)
        found: dict[str, Any] = json.loads((self.folder / name / "evaluation.json").read_text())
        return found

    def steps(self) -> int:
        """As many steps as there is time for at the pace of the first ones."""
        self.say("A few steps to see how fast this machine is")
        with contextlib.redirect_stdout(io.StringIO()):  # where its drafter lies is of no use to anybody
            self.train("pace", _TRIAL_STEPS)
        lines = [json.loads(line) for line in (self.folder / "pace" / "metrics.jsonl").read_text().splitlines()]
        times = [line["time"] for line in lines if "loss" in line]
        pace = statistics.median(b - a for a, b in itertools.pairwise(times))
        return int(min(_MOST_STEPS, max(_LEAST_STEPS, _TRAINING * self.budget.seconds / pace)))

    def train(self, name: str, steps: int, seconds: float | None = None) -> Result:
        dtypes = (f"target.dtype={self.dtype}", f"drafter.dtype={self.dtype}")
        data = f"data.path={self.folder / 'data' / 'train.arrow'}"
        return self.graph("train", data, f"data.steps={steps}", *dtypes, name=name, seconds=seconds)

    def graph(self, graph: str, *overrides: str, name: str | None = None, seconds: float | None = None) -> Result:
        """Run graphs/demo/GRAPH.yaml in a folder of the demo's; `seconds`: the source ends after so long."""
        name = name or graph
        checked = opened([f"graphs/demo/{graph}.yaml", f"name={name}", *overrides])
        result = execute(checked, self.folder / name, console=self.console, signals=True, seconds=seconds)
        if result.stopped:
            raise Stopped(128 + result.stopped)
        return result

    def say(self, text: str) -> None:
        self.console.rule(f"[bold]{text}[/]", align="left")

    def tell(self, training: Result, before: dict[str, Any], after: dict[str, Any]) -> None:
        """The closing table, how to serve the drafter, and what to try next."""
        rows, tokens = training.cursor["rows"]["read"], training.cursor["tokens"]["real"]
        epochs = rows / len(ArrowRows(self.folder / "data" / "train.arrow"))
        steps = [json.loads(line) for line in (self.folder / "training" / "metrics.jsonl").read_text().splitlines()]
        losses = [step["loss"] for step in steps if "loss" in step]
        table = Table(title="What this run measured", title_justify="left", show_header=False, min_width=76)
        table.add_row("loss, first → last 10 steps", f"{losses[0]:.2f} → [bold]{statistics.mean(losses[-10:]):.2f}[/]")
        table.add_row("τ on held-out problems", f"{before['tau']:.2f} → [bold]{after['tau']:.2f}[/]")
        table.add_row("measured on", f"{after['responses']} answers, {after['tokens']:,} tokens, blocks of {_BLOCK}")
        table.add_row("steps, epochs", f"{training.view.metrics['step']}, {epochs:.1f}")
        table.add_row("trained tokens a second", f"{tokens / training.view.elapsed:,.0f}")
        for worker in training.view.workers:
            shares = f"{worker.busy:4.0%} /{worker.starved:4.0%} /{worker.blocked:4.0%}"
            table.add_row(f"{worker.name}: busy / starved / blocked", shares)
        table.add_row("computed in", f"{self.dtype} (timed: the faster one on this CPU)")
        table.add_row("whole demo", f"{time.perf_counter() - self.budget.began:.0f} s")
        table.add_row("drafter", str(self.folder / "training" / "export"))
        self.console.print(table)
        self.console.print("τ: tokens for each verification in greedy speculative decoding, the target's own included.")
        self.console.print("Serve it:")
        for line in launch_lines(self.folder / "training" / "export", locate(_MODEL).place, _BLOCK):
            self.console.print(f"  {line}", soft_wrap=True, highlight=False)
        self.console.print(
            "Two CPU cores are shared by all workers, so here topologies hardly differ in speed; where stages wait for"
            " different devices they do:\n  . .venv/bin/activate\n  dflash-pipe run graphs/toy/sequential.yaml\n"
            "  dflash-pipe run graphs/toy/parallel_target.yaml\nYour own model: docs/own_model.md",
            soft_wrap=True,
            highlight=False,
        )


def faster_dtype() -> str:
    """bfloat16 only where this CPU multiplies it faster than float32: not all can, so it is timed."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(512, 576).to(dtype), torch.randn(576, 1536).to(dtype)
        timings = []
        for _ in range(12):
            began = time.perf_counter()
            left @ right
            timings.append(time.perf_counter() - began)
        seconds[dtype] = statistics.median(timings[2:])
    return "bfloat16" if seconds[torch.bfloat16] < seconds[torch.float32] else "float32"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=7.0, help="time budget (default 7)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the demo's folder is made")
    chosen = parser.parse_args()
    if not chosen.minutes > 0:
        parser.error(f"--minutes is {chosen.minutes:g}, expected a positive number")
    with failures_to_exit_codes():
        folder = fresh(chosen.runs, "demo", chosen=False)
        folder.mkdir(parents=True)
        try:
            Demo(folder, chosen.minutes, Console()).run()
        except Stopped as stopped:
            raise SystemExit(stopped.args[0]) from None


if __name__ == "__main__":
    main()

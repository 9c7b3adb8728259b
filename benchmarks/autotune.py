"""Autotuned Triton kernels launched by several threads: as Triton does it, under one lock, a lock for each, and ours.

On any machine: the real `Autotuner` with a kernel that does nothing, for errors and for what a launch costs. With a GPU
also real Gated DeltaNet layers, from a cold cache, with shapes that change every round; every way in a process of its
own, so that none begins with what another has tuned.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.autotuned_launches import OURS, THREADS, WAYS, Launches, at_once, launches
from benchmarks.machine import Out, described, keep
from benchmarks.terminal import output, progress
from dflash_pipe import BadInput
from dflash_pipe.counted import counted
from stages.target_model import load_truncated
from stages.tuning import keep_tuning

__all__ = ["LAYERS", "SHAPES", "Stress", "autotune", "layers", "separately", "stress"]

SHAPES = ((1, 777), (2, 1500), (3, 2000), (1, 4500))  # rows and tokens; each brings kernels that are not tuned yet
_AGAIN = "ours, with saved tuning"
LAYERS = (OURS, _AGAIN, *(way for way in WAYS if way != OURS))  # in this order: whoever stops early has seen ours
_TIMED = 5

# Qwen3.6-27B's Gated DeltaNet layers; what does not matter here is small.
_LAYERS: dict[str, Any] = {
    "hidden_size": 5120,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Stress:
    """Rounds of changing shapes by one thread a target, from a cold cache.

    errors: what failed, one line each. wrong: forwards without an error whose result is not that of a lone thread.
    cold: seconds of each round. one, all: seconds of a forward at 3 x 2000 with tuned kernels, one thread alone and
    all at once. digest: of what a lone thread computed for all shapes. gpus: how many the targets were on.
    """

    errors: list[str]
    wrong: int
    cold: list[float]
    one: float
    all: float
    digest: str
    gpus: int


def stress(way: str, threads: int, tuning: Path | None = None) -> Stress:
    """Run one way in this process, whose kernels must not be tuned yet. tuning: where tuned configurations are kept."""
    gpus = min(torch.cuda.device_count(), threads)
    targets = [_target(f"cuda:{n % gpus}") for n in range(threads)]
    WAYS[way]()
    if tuning is not None:
        keep_tuning(tuning, torch.cuda.get_device_name())
    errors: list[str] = []
    results: list[tuple[tuple[int, int], torch.Tensor]] = []

    def forward(number: int, shape: tuple[int, int], times: int = 1) -> None:
        torch.cuda.set_device(number % gpus)
        ids, lengths = _batch(shape, f"cuda:{number % gpus}")
        try:
            for _ in range(times):
                hidden = targets[number](ids, lengths)
            torch.cuda.synchronize()
            results.append((shape, hidden))
        except (TypeError, KeyError, RuntimeError) as error:
            errors.append(f"{shape[0]} x {shape[1]}, thread {number}: {type(error).__name__}: {error}")

    def together(shape: tuple[int, int], count: int, times: int = 1) -> float:
        return at_once([lambda n=n: forward(n, shape, times) for n in range(count)])  # type: ignore[misc]

    cold = [together(shape, threads) for shape in SHAPES]
    for shape in SHAPES:  # now that all is tuned
        together(shape, threads)
    concurrent, results = results, []
    alone = {shape: _alone(targets[0], shape) for shape in SHAPES}
    wrong = sum(not torch.equal(hidden.cpu(), alone[shape]) for shape, hidden in concurrent)
    digest = hashlib.sha256(b"".join(alone[shape].view(torch.int16).numpy().tobytes() for shape in SHAPES)).hexdigest()
    one, every = (min(together((3, 2000), n, _TIMED) for _ in range(3)) / _TIMED for n in (1, threads))
    return Stress(errors, wrong, cold, one, every, digest, gpus)


def _target(device: str) -> Any:
    from transformers import Qwen3_5TextConfig

    with tempfile.TemporaryDirectory() as folder:
        Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"], **_LAYERS).save_pretrained(folder)
        return load_truncated(folder, None, [0, 2], "bfloat16", device, "random", plain=True)


def _batch(shape: tuple[int, int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, tokens = shape
    ids = torch.randint(0, _LAYERS["vocab_size"], shape, generator=torch.Generator().manual_seed(tokens))
    return ids.to(device), torch.full((rows,), tokens, device=device)


def _alone(target: Any, shape: tuple[int, int]) -> torch.Tensor:
    return target(*_batch(shape, "cuda:0")).cpu()


# --- the command


def separately(call: str, **environment: str) -> dict[str, Any]:
    """The fields of what `call`, an expression of this module, gives in a process of its own, which does not outlive
    this call.

    Raises subprocess.CalledProcessError if it fails, and subprocess.TimeoutExpired after three minutes; only then what
    it wrote on stderr is shown there.
    """
    script = (
        f"import json; from pathlib import Path; from benchmarks.autotune import *; print(json.dumps(vars({call})))"
    )
    command = [sys.executable, "-c", script]
    where: dict[str, Any] = {"cwd": Path(__file__).parents[1], "env": {**os.environ, **environment}}
    with subprocess.Popen(command, **where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, complaints = process.communicate(timeout=180)
        except BaseException as early:  # `subprocess.run` would not wait after a Ctrl-C
            process.kill()
            process.wait()
            sys.stderr.write(os.fsdecode(getattr(early, "stderr", None) or ""))
            raise
    if process.returncode:
        sys.stderr.write(complaints)
        raise subprocess.CalledProcessError(process.returncode, call)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def layers(
    threads: int, told: Callable[[str], None], run: Callable[..., dict[str, Any]] = separately
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way from a cold cache, as soon as it has run, with the seconds that its process took; ours once more, in
    another process with what the first has tuned."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuning.json"
        for way in LAYERS:
            told(f"Gated DeltaNet layers, {way}")
            ours = way in (OURS, _AGAIN)
            call = f"stress({OURS if ours else way!r}, {threads}, {f'Path({str(file)!r})' if ours else None})"
            began = perf_counter()
            found = run(call, TRITON_CACHE_DIR=str(Path(folder) / way.replace(" ", "-")))
            yield way, found | {"seconds": perf_counter() - began}


def autotune(
    count: Annotated[int, typer.Option(help="launches for each rate", min=1000)] = 4000,
    repeats: Annotated[int, typer.Option(help="repeats of each way, in turns", min=1)] = 15,
    threads: Annotated[int, typer.Option(help="threads with a target each, on the GPUs there are", min=2)] = 2,
    check: Annotated[
        bool, typer.Option("--check", help="exit with 1 if ours fails or computes something else")
    ] = False,
    out: Out = None,
) -> None:
    """Autotuned Triton kernels launched by several threads.

    Errors and launches a second; on a GPU also real Gated DeltaNet layers.
    """
    if importlib.util.find_spec("triton") is None:
        raise BadInput("autotune: Triton cannot be imported here; it needs Linux, where `pip install triton` brings it")
    console = output()
    console.print(described(), highlight=False)
    rates = launches(count, repeats)
    _print_launches(console, rates)
    real: dict[str, dict[str, Any]] = {}
    ended: BaseException | None = None
    if torch.cuda.is_available():
        try:
            with progress(console) as told:
                for way, found in layers(threads, told):
                    real[way] = found
        except (KeyboardInterrupt, subprocess.SubprocessError) as early:
            ended = early
    _print_layers(console, real, threads, ended is not None)
    if out:
        figures = {
            "count": count,
            "threads": threads,
            "launches": {way: vars(r) for way, r in rates.items()},
            "layers": real,
            "stopped": ended is not None,
        }
        console.print(f"results: {keep(out, 'autotune', figures)}", highlight=False)
    if isinstance(ended, KeyboardInterrupt):
        raise typer.Exit(128 + signal.SIGINT)
    if ended:
        raise ended
    if check and not _good(rates, real):
        raise typer.Exit(1)


def _good(rates: Mapping[str, Launches], real: Mapping[str, dict[str, Any]]) -> bool:
    """Whether ours neither failed nor computed anything wrong, and computed the same with saved tuning."""
    ours = [real[way] for way in (OURS, _AGAIN) if way in real]
    right = rates[OURS].errors == rates[OURS].wrong == 0 and not any(r["errors"] or r["wrong"] for r in ours)
    return right and len({r["digest"] for r in ours}) <= 1


def _print_launches(console: Console, rates: dict[str, Launches]) -> None:
    heads = ("way", "errors", "wrong", *(f"{n} thr." for n in THREADS), *(f"{n} waiting" for n in THREADS))
    table = Table(
        box=None, pad_edge=False, title="launches; thousands a second, and with a full queue", title_justify="left"
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "way" else "right")
    for way, r in rates.items():
        numbers = (f"{each[n] / 1000:.1f}" for each in (r.rate, r.waiting) for n in THREADS)
        table.add_row(way, f"{r.errors} of {r.launched}", str(r.wrong), *numbers)
    console.print(table)


def _print_layers(console: Console, found: Mapping[str, dict[str, Any]], threads: int, stopped: bool) -> None:
    """The ways that have run. stopped: before all of them had."""
    shapes, at_once = ", ".join(f"{rows} x {tokens}" for rows, tokens in SHAPES), counted(threads, "thread")
    table = Table(box=None, pad_edge=False, title=f"Gated DeltaNet layers, {shapes}, {at_once}", title_justify="left")
    for head in ("way", "errors", "wrong", "s of the cold rounds", "1 thread ms", f"{at_once} ms", "s in all"):
        table.add_column(head, justify="left" if head == "way" else "right")
    said = []
    for way, r in found.items():
        cold = " ".join(f"{seconds:.1f}" for seconds in r["cold"])
        times = (f"{1000 * r[key]:.1f}" for key in ("one", "all"))
        failed = f"{len(r['errors'])} of {2 * threads * len(SHAPES)}"
        table.add_row(way, failed, str(r["wrong"]), cold, *times, f"{r['seconds']:.0f}")
        said += [f"{way}: {error}" for error in r["errors"][:3]]
    if found:
        console.print(table)
        said.append(counted(next(iter(found.values()))["gpus"], "GPU"))
    if _AGAIN in found:
        same = "the same bits" if found[OURS]["digest"] == found[_AGAIN]["digest"] else "OTHER bits"
        said[-1] += f"; {_AGAIN}: {same}"
    if stopped:
        left = ", ".join(way for way in LAYERS if way not in found)
        said.append(f"Stopped after {len(found)} of {len(LAYERS)} ways, before {left}.")
    elif not found:
        said.append("Gated DeltaNet layers: not run (no GPU)")
    console.print(*said, sep="\n", highlight=False, markup=False)

"""Training runs for tests: a few random rows, a graph of graphs/, and everything that a run computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipe.check import check
from dflash_pipe.graph import load
from dflash_pipe.plan import plan
from dflash_pipe.runtime import Result, Run
from dflash_pipe.snapshot import Snapshot
from stages.arrow_shards import assemble, write_shard

GRAPHS = Path(__file__).parents[1] / "graphs"
TINY = ("window=4", "data.max_tokens=192", "data.epochs=2", "drafter.num_anchors=8", "threads=1", "snapshot=null")


@dataclass(frozen=True)
class Trained:
    """Per step: the digest of the summed gradient, and the loss; at the end: the exported weights, bit for bit."""

    digests: tuple[str, ...]
    losses: tuple[float, ...]
    weights: bytes
    result: Result


def write_rows(file: Path, vocabulary: int, rows: int = 24, longest: int = 64, seed: int = 5) -> Path:
    """Rows of random tokens of many lengths, supervised behind a prompt of a few tokens."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(rows):
        length = int(draw.integers(12, longest + 1))
        ids = draw.integers(5, vocabulary - 1, length, dtype=np.int32)
        mask = (np.arange(length) >= int(draw.integers(2, 6))).astype(np.uint8)
        made.append((ids, mask, f"row {number}"))
    shard = file.with_suffix(".shard")
    write_shard(shard, made)
    assemble([shard], file, {})
    return file


def run_of(graphs: Sequence[str], overrides: Sequence[str], folder: Path, restored: Snapshot | None = None) -> Run:
    """A checked, planned and wired run of graphs/NAME.yaml files."""
    graph = load([GRAPHS / f"{name}.yaml" for name in graphs], ["optimizer.digest=true", *overrides])
    check(graph)
    folder.mkdir(parents=True, exist_ok=True)
    return Run(plan(graph), folder, restored)


def train(graphs: Sequence[str], overrides: Sequence[str], folder: Path, restored: Snapshot | None = None) -> Trained:
    """Run to the end and collect what was computed."""
    run = run_of(graphs, overrides, folder, restored)
    steps: list[dict[str, Any]] = []
    run.on_report = lambda metrics: steps.append(metrics) if "digest" in metrics else None
    result = run.execute()
    return Trained(
        tuple(step["digest"] for step in steps),
        tuple(step["loss"] for step in steps),
        (folder / "export" / "model.safetensors").read_bytes(),
        result,
    )

"""Training runs for tests: a few random rows, a graph of graphs/, and everything that a run computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipe.check import check
from dflash_pipe.graph import load
from dflash_pipe.plan import plan
from dflash_pipe.runtime import Result, Run
from dflash_pipe.snapshot import Snapshot, newest, read
from stages.arrow_shards import assemble, write_shard

GRAPHS = Path(__file__).parents[1] / "graphs"
TINY = ("window=4", "data.max_tokens=192", "data.epochs=2", "drafter.num_anchors=8", "threads=1", "snapshot=null")


@dataclass(frozen=True)
class Trained:
    """Per step: its number, the digest of the summed gradient, the loss and the learning rate. At the end: digests of
    the exported weights and of the last snapshot's float32 masters. Two are equal if all bits are."""

    steps: tuple[int, ...]
    digests: tuple[str, ...]
    losses: tuple[float, ...]
    rates: tuple[float, ...]
    weights: str
    masters: str
    result: Result | None = field(default=None, compare=False)

    def since(self, step: int) -> Trained:
        """The same training without its first `step` steps: what a run that was resumed there has to compute."""
        return Trained(
            self.steps[step:], self.digests[step:], self.losses[step:], self.rates[step:], self.weights, self.masters
        )


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
    return collected(steps, folder, result)


def collected(steps: Sequence[dict[str, Any]], folder: Path, result: Result | None = None) -> Trained:
    """The metrics of a run's steps, and what lies in its folder."""
    columns = ([step[name] for step in steps] for name in ("step", "digest", "loss", "lr"))
    exported = (folder / "export" / "model.safetensors").read_bytes()
    masters = read(newest(folder)).state["masters"].tobytes()
    ends = (hashlib.sha256(content).hexdigest() for content in (exported, masters))
    return Trained(*map(tuple, columns), *ends, result)


def reported(folder: Path) -> list[dict[str, Any]]:
    """The steps in a run's metrics.jsonl."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "digest" in line]

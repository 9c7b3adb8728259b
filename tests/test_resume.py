"""A training that is killed anywhere and resumed, in the same or another topology, ends in the same bits."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_pipe.errors import BadInput
from dflash_pipe.snapshot import newest, read
from tests.training import GRAPHS, TINY, Trained, collected, reported, run_of, train, write_rows

TOPOLOGIES = ("sequential", "overlapped", "parallel_target", "data_parallel")
STEPS = 10


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rows = write_rows(tmp_path_factory.mktemp("rows") / "train.arrow", vocabulary=300)
    return [f"data.path={rows}", *TINY, "window=2", "data.epochs=6", f"data.steps={STEPS}"]


@pytest.fixture(scope="module")
def unbroken(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    done = train(["sequential", "targets/tiny_llama"], settings, tmp_path_factory.mktemp("unbroken"))
    assert done.steps == tuple(range(1, STEPS + 1))
    assert len(set(done.rates)) == len(set(done.digests)) == STEPS
    return done


class Killed(Exception):
    pass


@pytest.mark.parametrize("step", range(1, STEPS))
def test_killed_after_any_step(settings: list[str], unbroken: Trained, step: int, tmp_path: Path) -> None:
    graphs = itertools.cycle(TOPOLOGIES)
    before, after = next(itertools.islice(graphs, step, None)), next(graphs)
    every = 1 + step % 3  # up to two steps after the newest snapshot are computed again
    run = run_of([before, "targets/tiny_llama"], [*settings, f"snapshot={every}"], tmp_path)

    def die(metrics: dict[str, Any]) -> None:
        if metrics.get("step") == step:
            raise Killed

    run.on_report = die
    with pytest.raises(ExceptionGroup) as failed:
        run.execute()
    assert failed.group_contains(Killed)
    if step < every:
        with pytest.raises(BadInput, match="nothing to resume"):
            newest(tmp_path)
        return
    restored = read(newest(tmp_path))
    assert restored.window == step - step % every
    resumed = train([after, "targets/tiny_llama"], settings, tmp_path, restored)
    assert resumed == unbroken.since(restored.window)


def test_a_finished_run_that_is_resumed_exports_again(settings: list[str], unbroken: Trained, tmp_path: Path) -> None:
    """Its stream has nothing left, so no step is made; killed before its export was whole, it had none."""
    graphs = ["sequential", "targets/tiny_llama"]
    train(graphs, settings, tmp_path)
    for killed_before_the_export in (False, True):
        if killed_before_the_export:
            shutil.rmtree(tmp_path / "export")
        assert train(graphs, settings, tmp_path, read(newest(tmp_path))) == unbroken.since(STEPS)


def test_another_recipe_is_refused(settings: list[str], tmp_path: Path) -> None:
    graphs, settings = ["sequential", "targets/tiny_llama"], [*settings, "data.steps=2"]
    train(graphs, settings, tmp_path)
    with pytest.raises(BadInput, match=r"another dataflow \(stages.optimizer.with.lr is 0.0006 there, 1e-05 here"):
        run_of(graphs, [*settings, "optimizer.lr=1e-5"], tmp_path, read(newest(tmp_path)))


def test_sigkill_and_the_command_line(settings: list[str], unbroken: Trained, tmp_path: Path) -> None:
    """The same with a real process and a real SIGKILL, resumed by the command that a user types."""
    overrides = [*settings, "name=killed", "snapshot=1", "optimizer.digest=true"]
    files = [str(GRAPHS / "overlapped.yaml"), str(GRAPHS / "targets" / "tiny_llama.yaml")]
    command = [sys.executable, "-m", "dflash_pipe", "run", "--plain", "--runs", str(tmp_path)]
    with subprocess.Popen([*command, *files, *overrides], stdout=subprocess.DEVNULL) as running:
        metrics = tmp_path / "killed" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert running.poll() is None, "ended before it could be killed"
            os.sched_yield()
        running.send_signal(signal.SIGKILL)
    folder = tmp_path / "killed"
    restored, before = read(newest(folder)), len(reported(folder))
    subprocess.run([*command, "--resume", str(folder)], check=True, stdout=subprocess.DEVNULL, timeout=100)
    assert collected(reported(folder)[before:], folder) == unbroken.since(restored.window)

"""Signals, with real processes: what they end, what is left, and how a killed run goes on."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dflash_pipe.signals import leaving
from dflash_pipe.snapshot import newest, read
from tests.pipeline import TOY, executed, toy, until
from tests.test_cli import QUICK, ROOT, called, started, steps


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_window_writes_the_snapshot_and_says_how_to_go_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    endless = (TOY / "parallel_target.yaml", *QUICK, "data.count=100000000", "name=endless")
    with started("run", "--plain", "--runs", tmp_path, *endless) as process:
        until(lambda: steps(tmp_path / "endless") >= 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (code, "")
    assert f"stopped by {number.name} at the end of a window" in out
    assert f"resume: dflash-pipe run --resume {tmp_path / 'endless'}" in out
    assert read(newest(tmp_path / "endless")).window == steps(tmp_path / "endless")


def test_a_terminal_that_hangs_up_is_a_request_to_stop(tmp_path: Path) -> None:
    """Also where the shell sends a second signal, and although nothing can be written there any more."""
    folder = tmp_path / "endless"
    endless = (TOY / "overlapped.yaml", *QUICK, "target.seconds=0.001", "data.count=100000000", "name=endless")
    command = [sys.executable, "-m", "dflash_pipe", "run", "--runs", tmp_path, *endless]
    ours, its = pty.openpty()
    take = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", take, *map(str, command)],
        cwd=ROOT,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    ) as process:
        try:
            os.close(its)
            until(lambda: steps(folder) >= 2)
            os.close(ours)
            process.send_signal(signal.SIGHUP)
            assert process.wait(timeout=20) == 129
        finally:
            process.kill()
    log = (folder / "log.txt").read_text()
    assert "stopped by SIGHUP at the end of a window" in log and "failed" not in log
    assert read(newest(folder)).window == steps(folder)


def test_below_nohup_a_hang_up_changes_nothing(tmp_path: Path) -> None:
    graph = (TOY / "overlapped.yaml", *QUICK, "target.seconds=0.01", "name=on")
    command = ["nohup", sys.executable, "-m", "dflash_pipe", "run", "--plain", "--runs", tmp_path, *graph]
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: steps(tmp_path / "on") >= 1)
            process.send_signal(signal.SIGHUP)
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0 and steps(tmp_path / "on") == 8, out


def test_a_second_signal_cancels_and_the_snapshot_is_whole(tmp_path: Path) -> None:
    """Both come while a snapshot is written, and the run is cancelled before it is done (see SlowTotal)."""
    graph = tmp_path / "slow.yaml"
    graph.write_text(
        "window: 2\nsnapshot: 1\nstages: {data: {use: 'tests.pipeline:Telling', with: {count: null}},"
        " total: {use: 'tests.pipeline:SlowTotal'}}\n"
        "channels: {one: {from: data, to: total}}\nworkers: {a: {stages: [data]}, b: {stages: [total]}}\n"
    )
    with started("run", "--plain", "--runs", tmp_path, graph, SLOW_STATE=str(tmp_path / "go")) as process:
        until(lambda: (tmp_path / "go.reached").exists())
        process.send_signal(signal.SIGINT)  # two of one kind could arrive as one
        process.send_signal(signal.SIGTERM)
        until((tmp_path / "go.cancelled").exists)
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")
    assert "cancelled; what was in flight is lost" in out and "resume: dflash-pipe run --resume" in out
    snapshots = list((tmp_path / "slow" / "snapshots").iterdir())
    assert [p.name for p in snapshots] == ["window-00000001"] and read(snapshots[0]).index == 2


def test_killed_and_resumed_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL right after a step, by the process itself (see Mortal), and on in another topology."""
    mortal = 'stages.optimizer.use="tests.pipeline:Mortal"'
    run = toy(tmp_path / "unbroken", "sequential", mortal)
    executed(run)
    for step in (2, 5):
        name = f"killed-{step}"
        graph = (TOY / "data_parallel.yaml", *QUICK, mortal, "snapshot=1", f"name={name}")
        with started("run", "--plain", "--runs", tmp_path, *graph, DIE_AT=str(step)) as process:
            assert process.wait(20) == -signal.SIGKILL
        assert called("run", "--plain", "--resume", tmp_path / name, TOY / "parallel_target.yaml", *QUICK, mortal) == 0
        assert run.metrics["digest"] in (tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]


INTERRUPTS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt as error:  # as an extension module does, unless it aborts
    raise ImportError("initialization failed") from error
"""


TOY_GRAPH = "graphs/toy/overlapped.yaml"


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("typer", ("-m", "dflash_pipe", "check", TOY_GRAPH)),
        ("typer", ("-c", "from dflash_pipe.__main__ import main; main()")),  # as the installed script has it
        ("typer", ("-m", "benchmarks", "topologies", TOY_GRAPH)),
        ("interrupts", ("-m", "dflash_pipe", "check", TOY_GRAPH, "stages.target.use=interrupts:Stage")),
        ("interrupts", ("-m", "benchmarks", "topologies", TOY_GRAPH, "stages.target.use=interrupts:Stage")),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_no_traceback(
    module: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    """Those of the command itself, and a stage's."""
    (tmp_path / f"{module}.py").write_text(INTERRUPTS)
    paths = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, env=paths, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_where_nothing_is_imported_any_more_ctrl_c_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with leaving():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with leaving():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as an imported module may
    try:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_modules_may_be_imported_on_any_thread() -> None:
    seen = []

    def imports() -> None:
        with leaving():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=imports)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]

"""The command line: exit codes, one line for what is wrong, and resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_pipe import cli
from dflash_pipe.run_folder import RunFolder
from dflash_pipe.snapshot import newest, read
from tests.pipeline import HOOKS, TOY, executed, toy

ROOT = Path(__file__).parent.parent
QUICK = ("target.seconds=0", "drafter.seconds=0", "optimizer.seconds=0")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    HOOKS.clear()
    before = sys.getswitchinterval()
    yield
    HOOKS.clear()
    sys.setswitchinterval(before)


def called(*arguments: object) -> int:
    """The exit code of `dflash-pipe ARGUMENTS`, run here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dflash-pipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


@contextmanager
def started(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`dflash-pipe ARGUMENTS` as a process of its own."""
    command = [sys.executable, "-m", "dflash_pipe", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count('"step"') if metrics.exists() else 0


# --- one line for what is wrong


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rnu"], "command line: No such command 'rnu'."),
        (["run", "--ressume", "x"], "command line: No such option: --ressume"),
        (["run", "--resume"], "command line: Option '--resume' requires an argument."),
        (["run"], "command line: no graph file given (for example graphs/overlapped.yaml)"),
        (["plan"], "command line: no graph file given (for example graphs/overlapped.yaml)"),
        (["check", "window=3"], "command line: no graph file given (for example graphs/overlapped.yaml)"),
        (["run", "--resume", "/nowhere"], "/nowhere: no such run folder"),
        (["run", TOY / "overlapped.yaml", "target.secnds=1"], "command line: target.secnds: target has no 'secnds'"),
    ],
)
def test_wrong_command_lines(arguments: list[object], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(line) and said.err.count("\n") == 1


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert called(*arguments) == 0
        assert "2 bad input (one line says what)" in capsys.readouterr().out
    assert called("run", "--help") == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("--resume", "--runs", "--plain", "FILE... [KEY=VALUE]..."))


def test_plan_and_check_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("check", TOY / "parallel_target.yaml") == 0
    assert capsys.readouterr().out.endswith("parallel_target.yaml: 4 stages on 6 workers, all sound\n")
    assert called("plan", TOY / "parallel_target.yaml", "target.turn=gpu") == 0
    assert "target[2]" in capsys.readouterr().out
    assert called("plan", "--mermaid", TOY / "parallel_target.yaml") == 0
    assert capsys.readouterr().out.startswith("flowchart LR")


@pytest.mark.parametrize("where", ["bad.open", "bad"])
def test_wrong_input_found_by_a_stage_is_one_line(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise cli.BadInput("row 3 has no 'text'", "train.jsonl")

    HOOKS[where] = refuse
    graph = tmp_path / "bad.yaml"
    graph.write_text(
        'stages: {data: {use: "tests.pipeline:Count"}, bad: {use: "tests.pipeline:Step", with: {name: bad}}}\n'
        "channels: {one: {from: data, to: bad}}\nworkers: {a: {stages: [data]}, b: {stages: [bad], replicas: 2}}\n"
    )
    assert called("run", "--plain", "--runs", tmp_path / "runs", graph) == 2
    met = r"worker b\[[01]\], (open|process message \d of window \d)"
    assert re.fullmatch(rf"train.jsonl: row 3 has no 'text'; in stage bad \({met}\)\n", capsys.readouterr().err)


def test_what_several_replicas_met_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    met = [cli.BadInput("odd", "here") for _ in range(2)]
    met[0].met_by, met[1].met_by = "b[0]", "b[1]"
    with pytest.raises(SystemExit), cli.failures_to_exit_codes():
        raise ExceptionGroup("run", met)
    assert capsys.readouterr().err in ("here: odd; in b[0]\n", "here: odd; in b[1]\n")


@pytest.mark.parametrize(("index", "resume"), [(0, False), (8, True)])
def test_a_failing_stage_is_a_traceback_and_1(
    index: int, resume: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def boom(value: int) -> None:
        if value == index:
            raise ArithmeticError("boom")

    HOOKS["target"] = boom
    overrides = (*QUICK, 'stages.target.use="tests.pipeline:HookedTarget"', "snapshot=1", "credits={messages: 1}")
    assert called("run", "--plain", "--runs", tmp_path, TOY / "overlapped.yaml", *overrides) == 1
    said, folder = capsys.readouterr(), tmp_path / "overlapped"
    assert f"in worker target: target process message {index} of window {index // 4}" in said.err
    assert f"failed; the log is in {folder / 'log.txt'}" in said.out
    assert (f"resume: dflash-pipe run --resume {folder}" in said.out) is resume
    assert "boom" in (folder / "log.txt").read_text()


def test_a_stall_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = tmp_path / "stalls.yaml"
    graph.write_text(
        "window: 4\nstages: {data: {use: 'tests.pipeline:Count'}, sum: {use: 'tests.pipeline:Sum'},"
        " join: {use: 'tests.pipeline:Weigh'}}\n"
        "channels: {all: {from: data, to: sum}, each: {from: data, to: join.value, capacity: 1},"
        " sums: {from: sum, to: join.sum, per: window}}\n"
        "workers: {data: {stages: [data]}, sum: {stages: [sum]}, join: {stages: [join]}}\n"
    )
    assert called("run", "--plain", "--runs", tmp_path, graph, "stall_after=0.1") == 1
    assert "data waits for room in 'each'" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_traceback() -> None:
    with started("plan", TOY / "overlapped.yaml") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        process.wait(20)
    assert "Traceback" not in said


# --- run folders


def test_a_run_leaves_what_is_needed_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("run", "--plain", "--runs", tmp_path, TOY / "overlapped.yaml", *QUICK) == 0
    assert called("run", "--plain", "--runs", tmp_path, TOY / "overlapped.yaml", *QUICK) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"overlapped", "overlapped-2"}
    assert {p.name for p in (tmp_path / "overlapped").iterdir()} == {
        ".lock", "graph.yaml", "log.txt", "metrics.jsonl", "profile.json", "snapshots"
    }  # fmt: skip
    assert called("run", "--plain", "--resume", tmp_path / "overlapped") == 0
    assert steps(tmp_path / "overlapped") == 8  # nothing was left to do
    capsys.readouterr()
    assert called("run", "--runs", tmp_path, TOY / "overlapped.yaml", "name=overlapped-2") == 2
    assert "overlapped-2 exists already" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executed(toy(tmp_path / "busy", "overlapped", "data.count=4"))
    with RunFolder(tmp_path / "busy") as folder:
        folder.keep_graph((TOY / "sequential.yaml").read_text().replace("extends: ", f"extends: {TOY}/"))
        assert called("run", "--plain", "--resume", tmp_path / "busy", *QUICK) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path / 'busy'} is in use by another run: wait for it, or choose another name=\n"
    )


@pytest.mark.parametrize("how", ["nothing", "other dataflow", "damaged", "cursor", "state", "window"])
def test_a_resume_that_cannot_be_honoured_is_refused(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = [str(TOY / "overlapped.yaml"), *QUICK]
    if how != "nothing":
        assert called("run", "--plain", "--runs", tmp_path, *graph) == 0
    else:
        (tmp_path / "overlapped").mkdir()
    if how == "damaged":
        (newest(tmp_path / "overlapped") / "state.safetensors").write_bytes(b"")
    elif how in ("cursor", "state", "window"):
        file = newest(tmp_path / "overlapped") / "snapshot.json"
        other = {how: {"step": -1} if how == "state" else None, "format": 1}  # which has no checksums
        file.write_text(json.dumps({**json.loads(file.read_text()), **other}))
    capsys.readouterr()
    seed = ["seed=1"] if how == "other dataflow" else []
    assert called("run", "--plain", "--resume", tmp_path / "overlapped", *graph, *seed) == 2
    line = {
        "nothing": "it has no snapshot",
        "other dataflow": "another dataflow",
        "damaged": "not a whole snapshot",
        "cursor": "snapshot.json: cursor is null, expected",
        "state": "snapshot.json: state.step is -1, expected",
        "window": "snapshot.json: window is null, expected 8",
    }
    said = capsys.readouterr()
    assert line[how] in said.err and said.err.count("\n") == 1 and "resume: " not in said.out


def test_a_damaged_snapshot_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("run", "--plain", "--runs", tmp_path, TOY / "overlapped.yaml", *QUICK, "snapshot=3", "name=one") == 0
    folder, damaged = tmp_path / "one", newest(tmp_path / "one")
    (damaged / "snapshot.json").write_text("{")
    capsys.readouterr()
    assert called("run", "--plain", "--resume", folder) == 2
    said = capsys.readouterr().err
    assert f"window-00000006 is whole: remove the damaged one (rm -r {damaged}) and resume again" in said
    shutil.rmtree(damaged)
    assert called("run", "--plain", "--resume", folder) == 0
    assert read(newest(folder)).window == 8


@pytest.mark.parametrize(("words", "where"), [("name=other", "command line"), ("named.yaml", "named.yaml:2")])
def test_a_resume_under_another_name_is_refused(
    words: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("named.yaml").write_text("# of another run\nname: other\n")
    Path("topology.yaml").write_text(f"extends: {TOY / 'sequential.yaml'}\nname: fast\n")
    graph = [TOY / "overlapped.yaml", *QUICK]
    assert called("run", "--plain", *graph, "name=one") == 0
    capsys.readouterr()
    assert called("run", "--plain", *graph, words, "--resume", "runs/one") == 2
    assert capsys.readouterr().err == (
        f"{where}: name is 'other', but --resume goes on in runs/one: leave the name out (or name=one), or copy the "
        "folder to runs/other and resume the copy\n"
    )
    assert not Path("runs/other").exists()
    shutil.copytree("runs/one", "runs/other")
    for way in ([*graph, "name=one"], [*graph, words], [*graph, "name=other"], ["topology.yaml", *QUICK], []):
        assert called("run", "--plain", *way, "--resume", "runs/other") == 0


# --- the folder of a run


def test_a_run_that_failed_before_it_made_anything_leaves_its_name_free(tmp_path: Path) -> None:
    command = ["run", "--plain", "--runs", tmp_path, "name=first"]
    training = [ROOT / "graphs" / "sequential.yaml", ROOT / "graphs" / "targets" / "tiny_llama.yaml"]
    assert called(*command, *training, "threads=1", "data.path=nowhere.arrow") == 2
    assert called(*command, TOY / "overlapped.yaml") == 0
    assert called(*command, TOY / "overlapped.yaml") == 2, "that name is taken now"


def test_a_run_that_failed_before_its_first_snapshot_is_begun_again_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its stages had written by then; with metrics, its name is taken, and nobody is sent to --resume."""
    failing = ('stages.target.use="tests.pipeline:HookedTarget"', "name=first", "credits={messages: 1}", *QUICK)
    command = ["run", "--plain", "--runs", tmp_path, TOY / "overlapped.yaml", *failing]
    folder = tmp_path / "first"

    def fail_at(last: int) -> None:
        def boom(index: int) -> None:
            (folder / "tuning.json").write_text("{}")
            if index == last:
                raise ArithmeticError("boom")

        HOOKS["target"] = boom

    for index in (0, 8):  # before the first step, and after two
        fail_at(index)
        assert called(*command) == 1, capsys.readouterr().err
    capsys.readouterr()
    assert called(*command) == 2
    said = capsys.readouterr().err
    assert said == f"{folder} exists already: choose another name= (it has no snapshot to go on from)\n"
    assert called("run", "--plain", "--resume", folder) == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_half_a_line_of_metrics_as_a_crash_may_leave_it_is_made_again(tmp_path: Path) -> None:
    assert called("run", "--plain", "--runs", tmp_path, TOY / "overlapped.yaml", *QUICK, "snapshot=3", "name=one") == 0
    folder = tmp_path / "one"
    shutil.rmtree(newest(folder))  # that of the end: the one before is of step 6
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b'{"step": null}\n\xff{"st\n{"step": "x"}\n[]\n' + whole[:-9])
    assert called("run", "--plain", "--resume", folder) == 0
    again = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert again == [json.loads(line)["step"] for line in whole.splitlines()]


def test_metrics_of_steps_that_are_computed_again_are_taken_out(tmp_path: Path) -> None:
    command = ["run", "--plain", "--runs", tmp_path, "name=again", TOY / "overlapped.yaml", "snapshot=2"]
    assert called(*command) == 0
    folder = tmp_path / "again"
    shutil.rmtree(newest(folder))  # as if it had been killed after step 7 of 8
    assert called("run", "--plain", "--resume", folder) == 0
    made = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in made if "step" in line] == [*range(1, 9)]

"""`dflash-pipe predict`: from one profiled run, what other graphs would take, and how to split GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_pipe.errors import BadInput
from dflash_pipe.graph import load
from dflash_pipe.profile import DeviceMemory, Host, save
from dflash_pipe.profile import load as load_profile
from dflash_pipe.what_if import asked as asked_of
from stages.toy import Wait
from tests.test_cli import called
from tests.test_forecast import SEQUENTIAL, graph_of, ladder, profile_of
from tests.test_forecast import toy as toy_graph

ROOT = Path(__file__).parent.parent
LADDER = ROOT / "graphs" / "ladder"
OVERLAPPED = ROOT / "graphs" / "toy" / "overlapped.yaml"
SCALE = 0.05


@pytest.fixture(scope="module")
def v2(tmp_path_factory):
    """profile.json of a run of the ladder's rung v2, at a twentieth of its seconds."""
    runs = tmp_path_factory.mktemp("runs")
    assert called("run", "--plain", "--runs", runs, LADDER / "v2.yaml", f"data.scale={SCALE}") == 0
    return runs / "v2" / "profile.json"


@pytest.fixture
def profile(tmp_path):
    """A profile of the sequential toy, without a run."""
    path = tmp_path / "profile.json"
    save(profile_of(toy_graph(), SEQUENTIAL), path)
    return path


def said_by(capsys, *arguments):
    capsys.readouterr()
    assert called("predict", *arguments) == 0
    return capsys.readouterr().out


def seconds(text):
    number, unit = re.search(r"([\d.]+) (ms|s)\b", text).groups()
    return float(number) * (0.001 if unit == "ms" else 1.0)


def asked(profile, capsys, scale):
    """What `predict` says of v2 and, from its profile, of other rungs: seconds as published, and their rows."""
    files = {rung: f"{LADDER / rung}.yaml" for rung in ("v3", "v4", "v5")}
    what_ifs = [word for file in files.values() for word in ("--what-if", f"{file} data.scale={scale}")]
    lines = said_by(capsys, LADDER / "v2.yaml", f"data.scale={scale}", "--profile", profile, *what_ifs).splitlines()
    rows = {rung: next(line for line in lines if line.startswith(file)) for rung, file in files.items()}
    rows = {rung: row.partition(f"={scale}")[2] for rung, row in rows.items()}
    assert lines[0].startswith("v2: ") and "v5.yaml" in lines[-1] and "would give 2.7" in lines[-1]
    steps = {"v2": seconds(lines[0]), **{rung: seconds(row) for rung, row in rows.items()}}
    return {rung: step / scale for rung, step in steps.items()}, rows


def test_the_profile_of_v2_tells_what_the_other_rungs_take_and_why(tmp_path, capsys):
    save(profile_of(ladder("v2"), 3.0), tmp_path / "v2.json")
    steps, rows = asked(tmp_path / "v2.json", capsys, 1)
    assert steps == {"v2": 3.0, "v3": 3.0, "v4": 1.9, "v5": 1.1}
    targets = r"target\[0\] → turn targets → target\[1\]"
    barrier = r"grads → optim → credit \(windows\) → loader"
    assert re.search(rf"loader → batches → {targets} → features → drafter\[1\] → {barrier}", rows["v3"])
    assert re.search(rf"loader → batches → target\[(\d)\] → features → drafter\[\1\] → {barrier}", rows["v4"])
    assert re.search(r"(target\[\d\]) → \1 *$", rows["v5"])


def test_so_does_the_profile_that_a_run_of_v2_leaves(v2, capsys):
    """A busy machine wakes sleepers late, so the steps are told within 10 %."""
    steps, _ = asked(v2, capsys, SCALE)
    assert steps == pytest.approx({"v2": 3.0, "v3": 3.0, "v4": 1.9, "v5": 1.1}, rel=0.1)


def test_keys_do_as_well_as_files(tmp_path, capsys):
    save(profile_of(ladder("v2"), 3.0), tmp_path / "v2.json")
    changes = ["--what-if", "target.turn=null", "--what-if", "target.turn=null credits=null"]
    graph = (LADDER / "v2.yaml", "data.scale=1")
    lines = said_by(capsys, *graph, "--profile", tmp_path / "v2.json", *changes).splitlines()
    steps = [seconds(line.rpartition("null")[2]) for line in lines if line.startswith("target.turn=null")]
    assert steps == [1.9, 1.1]


# --- the table --------------------------------------------------------------------------------------------------------


def test_data_parallel_is_one_word_and_a_row_of_its_own(profile, capsys):
    graph = ROOT / "graphs/toy/data_parallel.yaml"
    what_ifs = ["data_parallel=1 target.replicas=3", "data_parallel=2", "data_parallel=4 drafter.partials=4"]
    words = [word for what_if in what_ifs for word in ("--what-if", what_if)]
    lines = said_by(capsys, graph, "--profile", profile, *words).splitlines()
    rows = {name: line for name in [*what_ifs, "data_parallel=1 "] for line in lines if line.startswith(name)}
    assert len(rows) == 4 and "1.00x" in rows["data_parallel=2"]
    assert seconds(rows["data_parallel=1 "]) == pytest.approx(4 * 0.006 + 0.002, abs=1e-4)
    assert not any("data_parallel" in line for line in said_by(capsys, OVERLAPPED, "--profile", profile).splitlines())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data_parallel=0", "data_parallel is '0', expected a number of at least 1"),
        ("data_parallel=-1", "data_parallel is '-1', expected a number of at least 1"),
        ("data_parallel=nan", "data_parallel is 'nan', expected a number of at least 1"),
        (
            "target.replicas=3, drafter.replicas=2",
            "'target.replicas=3,' ends in a comma: changes are separated by spaces",
        ),
        (
            "stages.target.use=tests.test_predict:Other target.size=3",
            "'target': stages.toy:Wait, not tests.test_predict:Other",
        ),
        ("data_parallel=3", "window: 4 cannot be dealt evenly to 3 replicas of drafter"),
        ("data_parallel=4", "partials: 2 is not a multiple of 4, the replicas"),
        ("target.seconds=.nan", "stages.target.with.seconds: should be a finite number, got NaN"),
        ("target.seconds=-.inf", "stages.target.with.seconds: should be a finite number, got -Infinity"),
        ("target.replicas=-1", "workers.target.replicas: should be at least 1, got -1"),
        ("target.seconds='0.1", "no closing quotation (expected key=value or a file)"),
        ("target.seconds=0.1", "not forecast: the profile does not tell what target.seconds (0.011 -> 0.1) does"),
    ],
)
def test_a_what_if_that_cannot_be_is_told_in_one_line(text, said, profile, capsys):
    assert called("predict", OVERLAPPED, "--profile", profile, "--what-if", text) == 2
    error = capsys.readouterr().err
    assert error.startswith("--what-if ") and said in error and error.count("\n") == 1
    assert error.count(text) == 1 and "MISSING" not in error


def test_where_no_stage_sums_gradients_nothing_is_data_parallel(tmp_path):
    graph = load(["graphs/statistics.yaml"])
    with pytest.raises(BadInput, match="no worker of this graph sums gradients"):
        asked_of(graph, "data_parallel=1")


def test_what_is_piped_is_as_wide_as_it_has_to_be_and_says_each_note_once(profile, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    more = ["target.replicas=2", "target.replicas=3 data.count=5"]
    words = [word for what_if in [*more, "features.capacity=9"] for word in ("--what-if", what_if)]
    measured = profile_of(graph_of("graphs/toy/sequential.yaml", threads=1), SEQUENTIAL)
    save(replace(measured, host=Host(4, tuple(measured.stages))), profile)
    graph = (OVERLAPPED, "credits.windows=1", "threads=1")
    said = said_by(capsys, *graph, "--profile", profile, *words)
    lines = said.splitlines()
    assert not any(line != line.rstrip() for line in lines)
    rows = [next(line for line in lines if line.startswith(f"{what_if} ")) for what_if in more]
    assert [re.findall(r" (\[\d\])", row) for row in rows] == [["[1]"], ["[1]"]]
    (note,) = (line for line in lines if line.startswith("["))
    assert note.startswith("[1] more workers than 4 CPU cores have room for (threads: 1): they take turns")
    cycle = "loader → batches → target → features → drafter → grads → optim → credit (windows) → loader"
    assert f"critical cycle: {cycle}" in lines


def test_of_several_what_ifs_those_that_can_be_forecast_are_and_the_others_say_why(profile, capsys):
    refused = {
        "target.seconds=0.0011": "the profile does not tell what target.seconds (0.011 -> 0.0011) does to the time",
        "data_parallel=0": "data_parallel is '0', expected a number of at least 1",
        str(
            LADDER / "v2.yaml"
        ): "the profile does not tell what data.scale (1.0 -> 0.05), drafter.seconds (0.006 -> 0.6)",
    }
    words = [word for what_if in refused for word in ("--what-if", what_if)]
    lines = said_by(capsys, OVERLAPPED, "--profile", profile, *words, "--what-if", "target.replicas=3").splitlines()
    for what_if, why in refused.items():
        (row,) = (line for line in lines if line.startswith(f"{what_if} "))
        assert f" not forecast: {why}" in row and "x" not in row.removeprefix(what_if).partition("not forecast")[0]
    assert any(line.startswith("target.replicas=3 ") and "1.69x" in line for line in lines)
    assert called("predict", OVERLAPPED, "--profile", profile, *words) == 2
    said = capsys.readouterr()
    assert not said.out and [line.partition(": ")[0] for line in said.err.splitlines()] == [
        f"--what-if {what_if!r}" for what_if in refused
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("target.seconds=0.0011",), "what target.seconds (0.011 -> 0.0011) does to the time; profile a run with it"),
        (("threads=2", "drafter.scale=2"), "what threads (None -> 2), drafter.scale (1.0 -> 2.0) do to the time"),
        (
            ("stages.target.use=tests.test_predict:Other", "target.size=3"),
            "'target': stages.toy:Wait, not tests.test_predict:Other",
        ),
    ],
)
def test_a_profile_of_other_stages_or_other_keys_of_them_is_refused_in_one_line(arguments, said, profile, capsys):
    for options in ((), ("--gpus", 2)):
        assert called("predict", OVERLAPPED, *arguments, "--profile", profile, *options) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and "MISSING" not in error


class Other(Wait):
    """Another target, with a key that must be given."""

    size: int


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((OVERLAPPED,), "command line: Missing option '--profile'."),
        ((OVERLAPPED, "--profile", "/nowhere.json"), "/nowhere.json: cannot be read as a profile"),
        (("--profile", "PROFILE"), "command line: no graph file given"),
        ((OVERLAPPED, "--profile", "PROFILE", "--what-if", "targt.replicas=2"), "--what-if 'targt.replicas=2'"),
        ((OVERLAPPED, "--profile", "PROFILE", "--write", "x.yaml"), "command line: --write needs --gpus"),
        ((OVERLAPPED, "--profile", "PROFILE", "--rows", "-1"), "command line: --rows is -1, expected at least 1"),
        ((OVERLAPPED, "--profile", "PROFILE", "--gpus", "0"), "command line: --gpus is 0, expected 1 to 1024"),
        (
            (OVERLAPPED, "--profile", "PROFILE", "--gpus", "1000000"),
            "command line: --gpus is 1000000, expected 1 to 1024",
        ),
        ((OVERLAPPED, "--profile", "PROFILE", "--gpus", "2", "--what-if", "a=1"), "command line: --gpus and --what-if"),
        ((OVERLAPPED, "--profile", "PROFILE", "--rows", "10"), "PROFILE: --rows: the profile measures no rows"),
        ((ROOT / "graphs/toy/sequential.yaml", "--profile", "PROFILE", "--gpus", "2"), "command line: no worker to"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(arguments, line, profile, capsys):
    assert called("predict", *(profile if word == "PROFILE" else word for word in arguments)) == 2
    said = capsys.readouterr()
    assert said.err.startswith(line.replace("PROFILE", str(profile))) and said.err.count("\n") == 1 and not said.out


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_the_best_split_is_written_as_a_few_lines_that_any_machine_can_plan(profile, tmp_path, capsys, monkeypatch):
    file = tmp_path / "new" / "best.yaml"
    file.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "over.yaml").write_text("extends: graphs/toy/overlapped.yaml\n")
    given = ("over.yaml", "data.count=40", "features.capacity=3")
    said = said_by(capsys, *given, "--profile", profile, "--gpus", 3, "--write", "new/best.yaml")
    first = said.splitlines()[1]
    assert first.startswith("target x2, drafter x1") and "messages/s" in first
    assert (
        "note: memory is not known: no stage says what memory it needs" in said
        and "written: new/best.yaml (target x2, drafter x1)" in said
    )
    assert file.read_text().splitlines() == [
        "# GPUs shared out as the forecast found best: target x2, drafter x1.",
        "extends: ../over.yaml",
        "stages:",
        "  data:",
        "    with: {count: 40}",
        "channels:",
        "  features: {capacity: 3}",
        "workers:",
        "  loader: {device: cpu}",
        "  target:",
        "    replicas: 2",
        "    device: ['auto:0', 'auto:1']",
        "  drafter: {device: 'auto:2'}",
        "  optim: {device: 'auto:2'}",
    ]
    assert called("plan", file) == 0
    planned, asked_for = load([file]), load(["over.yaml"], given[1:])
    assert planned.workers["target"].replicas == 2 and planned.name == "best"
    assert planned.stages == asked_for.stages and planned.channels == asked_for.channels


def test_that_times_were_measured_on_a_cpu_is_told_where_gpus_are_asked_for(profile, capsys):
    known = load_profile(profile)
    save(replace(known, host=Host(2, ("data", "target"), 0.5)), profile)
    said = said_by(capsys, OVERLAPPED, "--profile", profile, "--gpus", 2)
    assert "note: measured on a CPU, not on a GPU: target\n" in said
    assert "note: the machine was not quiet: other programs used 50% of its CPU time\n" in said


ON_GPUS = {"cuda:0": DeviceMemory(1, 2, ("target",)), "cuda:1": DeviceMemory(1, 2, ("drafter", "optimizer"))}


@pytest.mark.parametrize("drafter", ["auto:0", "auto:1", "cuda:0", "cuda:1"])
def test_on_a_machine_without_gpus_what_ran_on_some_is_forecast_on_those_that_the_graph_names(profile, capsys, drafter):
    """A worker that shares the target's GPU takes turns with it: 4 x (10 + 5) ms instead of 4 x 10."""
    save(replace(load_profile(profile), memory=ON_GPUS), profile)
    devices = ["loader.device=cpu", "target.device=auto:0", f"drafter.device={drafter}", "optim.device=auto:1"]
    words = [OVERLAPPED, *devices]
    said = said_by(capsys, *words, "--profile", profile)
    shared = drafter.endswith("0")
    assert ("device cuda:0" in said) == shared
    assert (seconds(said) > 0.055) == shared
    other = said_by(capsys, *words, "--profile", profile, "--what-if", "drafter.device=cuda:1")
    row = next(line for line in other.splitlines() if line.startswith("drafter.device=cuda:1"))
    assert "the same" in row if not shared else "the same" not in row


def test_what_another_transport_does_is_not_in_a_profile(profile, capsys):
    transport = "transport=tests.test_behind:Noted"
    assert called("predict", OVERLAPPED, transport, "--profile", profile) == 2
    assert (
        "measured with transport none at all; it does not tell what tests.test_behind:Noted does"
        in capsys.readouterr().err
    )
    assert called("predict", OVERLAPPED, "--profile", profile, "--what-if", transport) == 2
    assert "it does not tell what tests.test_behind:Noted does" in capsys.readouterr().err


def test_rows_give_an_eta(profile, capsys):
    known = load_profile(profile)
    parts = known.stages["data"]
    measured = {"read": replace(parts["read"], measures={"rows": (4.0,) * len(parts["read"].seconds)})}
    save(replace(known, stages={**known.stages, "data": measured}), profile)
    said = said_by(capsys, OVERLAPPED, "--profile", profile, "--rows", 16_000)
    assert "363.6 rows/s, all rows in 44 s" in said
    said = said_by(capsys, OVERLAPPED, "--profile", profile, "--rows", 16_000, "--gpus", 2)
    assert "all rows in 44 s with the first" in said


def test_a_what_if_of_another_dataflow_is_refused() -> None:
    graph = load(["graphs/toy/overlapped.yaml"])
    with pytest.raises(BadInput, match="another dataflow"):
        asked_of(graph, "graphs/overlapped.yaml graphs/targets/tiny_llama.yaml")


RUN, PREDICT = ("run", "MINE"), ("predict", "MINE", "--gpus", "2", "--profile", "HERE/profile.json")


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((*RUN, "--trace", "HERE"), "--trace: HERE cannot be written (Is a directory)"),
        (
            (*RUN, "--trace", "/proc/trace.json"),
            "--trace: /proc/trace.json cannot be written (No such file or directory)",
        ),
        ((*PREDICT, "--write", "HERE/no/x"), "--write: HERE/no/x cannot be written (No such file or directory)"),
        ((*RUN, "--trace", "MINE"), "--trace: MINE is read by this command, expected another file to write to"),
        ((*PREDICT, "--write", "MINE"), "--write: MINE is read by this command, expected another file to write to"),
        (
            (*PREDICT, "--write", "HERE/profile.json"),
            "--write: HERE/profile.json is read by this command, expected another file to write to",
        ),
    ],
)
def test_where_nothing_can_be_written_is_said_first_and_inputs_stay(
    options: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {Path('graphs/toy/sequential.yaml').absolute()}\n")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    given = [option.replace("MINE", str(mine)).replace("HERE", str(tmp_path)) for option in options]
    assert called(*given) == 2
    said = line.replace("MINE", str(mine)).replace("HERE", str(tmp_path))
    assert capsys.readouterr().err == f"command line: {said}\n"
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_another_graph_takes_what_it_leaves_open_from_the_one_that_is_asked_about() -> None:
    """graphs/parallel_target.yaml does not say which model; the graph it is compared with does."""
    graph = load(["graphs/sequential.yaml", "graphs/targets/random_tiny_qwen3.yaml"], ["drafter.num_layers=2"])
    change = asked_of(graph, "graphs/parallel_target.yaml")
    assert change.graph.workers["target"].replicas == 3 and change.same_result
    assert change.graph.stages["drafter"].parameters["num_layers"] == 2


def test_a_file_that_was_not_written_by_this_option_stays(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other, linked = (tmp_path / name for name in ("mine.yaml", "other.yaml", "linked.yaml"))
    for file in (mine, other):
        file.write_text(f"extends: {Path('graphs/toy/overlapped.yaml').absolute()}\n")
    linked.hardlink_to(mine)
    before = other.read_text()
    words = ("predict", str(mine), "--gpus", "2", "--profile", str(profile), "--write")
    assert called(*words, str(other)) == 2 and "this option did not write it" in capsys.readouterr().err
    assert called(*words, str(linked)) == 2 and "is read by this command" in capsys.readouterr().err
    assert mine.read_text() == other.read_text() == before
    assert called("run", str(mine), "--runs", str(tmp_path), "--trace", str(other)) == 2
    for _ in range(2):  # its own file it may write again
        assert called(*words, str(tmp_path / "best.yaml")) == 0

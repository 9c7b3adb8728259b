"""The other comparisons, `python -m benchmarks ladder | rows | sync | verdicts`, and what the command refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from typer.models import OptionInfo

from benchmarks import ladder, rows, sync
from benchmarks.commands import app, main
from benchmarks.verdicts import Verdict, verdict_of
from dflash_pipe import BadInput
from dflash_pipe.runtime import Run
from tests.called import TOY, called, refusal

# --- the command line -------------------------------------------------------------------------------------------------


def options(kind: Callable[[Any], bool]) -> Iterator[tuple[str, str]]:
    """(command, option) of those whose type is of a kind."""
    for command in app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            (told,) = getattr(hint, "__metadata__", [None])
            if isinstance(told, OptionInfo) and kind(hint.__origin__):
                written = [word for word in (told.default, *(told.param_decls or ())) if str(word).startswith("--")]
                yield command.callback.__name__, (*written, f"--{name.replace('_', '-')}")[0]


def test_every_benchmark_and_every_option_of_the_comparison_is_in_the_documents() -> None:
    text = Path("docs/benchmarks.md").read_text()
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    asked = {option for command, option in options(lambda kind: True) if command == "topologies"}
    assert [name for name in sorted(commands | asked) if f"`{name}" not in text] == []


NUMBERS = list(options(lambda kind: kind in (int, float, int | None)))


def test_there_are_options_to_test() -> None:
    assert {("rows", "--rows"), ("ladder", "--scale"), ("topologies", "--rows")} <= set(NUMBERS)


@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_numbers_that_cannot_be_are_refused_in_one_line(command, option, monkeypatch, capsys):
    for value in ("-5", "few", "nan"):
        assert option in refusal(monkeypatch, capsys, command, option, value)


@pytest.mark.parametrize("command", [command for command, option in options(lambda kind: True) if option == "--out"])
def test_a_folder_that_cannot_be_is_refused_before_anything_is_measured(command, monkeypatch, capsys):
    given = [*TOY] if command == "topologies" else []
    assert "--out: nothing can be written into README.md" in refusal(
        monkeypatch, capsys, command, *given, "--out", "README.md"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["topologis"], "command line: No such command 'topologis'"),
        (["topologies"], "command line: Missing argument 'GRAPH"),
        (["topologies", TOY[0], "--stepz", "3"], "command line: No such option: --stepz"),
        (["topologies", TOY[0], "--steps", "0"], "'--steps'"),
        (
            ["topologies", TOY[0], "target.seconds=.nan"],
            "stages.target.with.seconds: should be a finite number, got NaN",
        ),
        (["ladder", "--scale", "inf"], "scale: should be a valid number"),
        (["rows", "--rows", "200", "--check"], "--check: the goal is stated for 100,000 rows of 2,000 tokens"),
        (
            ["sync", "--numbers", "64000", "--check"],
            "--check: the goal is stated for 1,730,000,000 gradients and a GPU",
        ),
        (["parity", ".", "--attention", "flx"], "no such backend (did you mean 'flex'?)"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_told_in_one_line(words, told, monkeypatch, capsys):
    assert told in refusal(monkeypatch, capsys, *words)


def test_without_a_command_it_says_which_there_are(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().out
    assert not end.value.code and "verdicts" in said
    assert "..." not in said.partition("Commands:")[2]  # every command's purpose is there to its end


# --- the ladder -------------------------------------------------------------------------------------------------------


def test_every_rung_is_forecast_before_it_runs_and_measured_within_5_percent(tmp_path: Path) -> None:
    result = called("ladder", "--scale", 0.05, "--steps", 8, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "ladder.json").read_text())
    forecasts = {rung["file"]: rung["forecast"] for rung in kept["rungs"]}
    exact = {"v1": 8.88, "v2": 3.0, "v3": 3.0, "v3_without_barrier": 2.2, "v4": 1.9, "v4_fitted": 2.15, "v5": 1.1}
    assert forecasts == pytest.approx(exact, rel=1e-6)
    for rung in kept["rungs"]:
        assert rung["measured"] == pytest.approx(rung["forecast"], rel=0.05), rung["file"]
    assert "nobody ran it" in result.output and "fitted" in result.output


def test_a_ratio_that_is_off_is_found() -> None:
    steps = {"v1": 8.88, "v2": 2.97, "v3": 3.06, "v3_without_barrier": 9.9, "v4": 1.9, "v4_fitted": 2.2, "v5": 1.21}
    said: Any = None
    rungs = [ladder.Climbed(rung, said, 0.0, steps[rung.file]) for rung in ladder.RUNGS]
    worst, which = ladder.miss(rungs)
    assert worst == pytest.approx(0.1) and "v5" in which
    rungs = [replace(rung, measured=0.05 * (rung.rung.published or 7.0)) for rung in rungs]
    assert ladder.miss(rungs)[0] == pytest.approx(0.0)


def test_uneven_batches_cost_what_two_of_them_cost_at_most() -> None:
    """The greater of two times with deviation s is s / sqrt(pi) above their mean (normal; about so for a gamma)."""
    graph = ladder.graph_of("v4", 1.0)
    even, uneven = (ladder.forecast(graph, spread).pace.step for spread in (0.0, 0.2))
    assert even == pytest.approx(1.9)
    assert uneven - even == pytest.approx(1.1 * 0.2 / np.sqrt(np.pi), rel=0.15)


# --- rows and sync ----------------------------------------------------------------------------------------------------


def test_all_ways_read_the_same_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.arrow"
    rows.write(file, 300, 20)
    readers = [way(file, 300) for name, way in rows.WAYS.items() if "Hugging" not in name]
    for row in (0, 7, 299):
        ids, masks = zip(*(read(row) for read in readers), strict=True)
        assert all(list(found) == list(ids[0]) and len(found) == 20 for found in ids)
        assert all(list(found) == [1] * 20 for found in masks)


def test_rows_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    result = called("rows", "--rows", 2000, "--tokens", 500, "--reads", 500, "--out", tmp_path)
    assert result.exit_code == 0
    ways = {way["way"]: way for way in json.loads((tmp_path / "rows.json").read_text())["ways"]}
    ours, lists = ways["this project's reader"], ways["lists made at the start"]
    assert ours["handed_out"] < 10 and ours["in_batch"] < lists["in_batch"]
    assert "stated for 100,000 rows of 2,000 tokens" in result.output
    assert "missed" not in result.output and ": met" not in result.output
    if lists["resident"] is not None:
        assert lists["resident"] > 4 > ours["resident"]


def test_every_way_of_the_cpu_leaves_the_sum_on_both_sides() -> None:
    for way, (add, gpus) in sync.WAYS.items():
        if gpus == 0:
            grads = sync.Gradients(1000, 7, ["cpu", "cpu"])
            assert sum(len(part) for part in grads.each[0]) == 1000
            add(grads)
            assert all(bool((flat == 2).all()) for flat in grads.flat), way


def test_the_factor_that_costs_most_is_named() -> None:
    """Seconds made of known factors: the conclusion finds them again."""
    fresh, kept, pinned = "pageable, fresh", "pageable, kept", "pinned, kept"
    grid = [
        sync.Grid(numbers, count, memory, numbers * more * slow)
        for numbers in (16, 1)
        for count, more in ((1, 1.0), (58, 1.1), (1000, 1.5))
        for memory, slow in ((fresh, 20.0), (kept, 4.0), (pinned, 1.0))
    ]
    said = sync.concluded(grid)
    assert said[:2] == [
        "1,000 tensors instead of 1: 1.50 times the seconds",
        "memory asked for anew instead of kept: 5.00 times the seconds",
    ]
    assert said[2:4] == [
        "pageable memory instead of pinned: 4.00 times the seconds",
        "16 times the size: 16.00 times the seconds",
    ]
    assert said[4] == "what costs most, all else being equal: memory asked for anew instead of kept"


@pytest.mark.parametrize("most", [0.97, 1.04])
def test_where_no_factor_costs_anything_none_is_named(most: float) -> None:
    kinds = {"pageable, fresh": most, "pageable, kept": 1.0}
    grid = [sync.Grid(n, count, kind, n * slow) for n in (16, 1) for count in (1, 9) for kind, slow in kinds.items()]
    said = sync.concluded(grid)
    assert said[-1] == "neither the number of tensors nor the kind of memory costs more than 5%"
    assert not any("costs most" in line for line in said)


def test_what_the_rows_lack_is_told_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = called("rows", "--rows", 100, "--tokens", 5, "--reads", 100)
    assert "not run: Hugging Face datasets (not installed: pip install datasets)\n" in result.stdout


def test_recording_is_switched_off_in_every_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def run(plan: Any, folder: Path, *, record: bool) -> Run:
        made.append(record)
        return Run(plan, folder, record=record)

    monkeypatch.setattr("benchmarks.recording.Run", run)
    words = ["target.seconds=0.003", "--steps", 6, "--repeat", 3, "--out", tmp_path]
    result = called("recording", TOY[1], *words)
    assert result.exit_code == 0 and "overlapped, 6 steps, 3 pairs: " in result.stdout
    assert made == [True, False, True, True, False, False, True]  # the first is a warm-up
    kept = json.loads((tmp_path / "recording.json").read_text())
    assert len(kept["seconds"]) == 3 and all(0.02 < side < 0.2 for pair in kept["seconds"] for side in pair)
    assert kept["ratio"]["low"] <= kept["ratio"]["median"] <= kept["ratio"]["high"]


def test_a_cost_of_recording_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.recording.step_seconds", lambda graph, record: 1.02 if record else 1.0)
    result = called("recording", "--repeat", 2, "--check")
    assert result.exit_code == 1 and "with / without: 1.0200 (1.0200 to 1.0200, goal ≤ 1.01: missed)" in result.stdout


def test_recording_is_measured_on_one_graph_that_reports_its_steps(tmp_path, monkeypatch, capsys):
    assert "one graph is measured, here are 3" in refusal(monkeypatch, capsys, "recording", *TOY)
    silent = tmp_path / "silent.yaml"
    silent.write_text(
        'stages: {data: {use: "stages.toy:Numbers", with: {count: 9}}, target: {use: "stages.toy:Wait"}}\n'
        "channels: {batches: {from: data, to: target}}\nworkers: {main: {stages: [data, target]}}\n"
    )
    with pytest.raises(BadInput, match="silent: no stage reports its steps"):
        called("recording", silent, "--steps", 4)


def test_sync_says_what_it_did_not_run(tmp_path: Path) -> None:
    result = called("sync", "--numbers", 64_000, "--repeats", 1, "--out", tmp_path)
    assert result.exit_code == 0
    assert "not run: NCCL, flat (needs 2 GPUs, this machine has 0)" in result.output
    kept = json.loads((tmp_path / "sync.json").read_text())
    assert len(kept["grid"]) == 2 * 3 * 2 and kept["gain"] is None


@pytest.mark.parametrize(
    ("before", "seconds", "right"),
    [
        (10.0, {"named": 5.0, "other": 6.0}, True),
        (10.0, {"named": 6.0, "other": 5.95}, True),  # within 2 % of the best
        (10.0, {"named": 6.0, "other": 5.0}, False),
        (10.0, {"named": 10.1, "other": 9.9}, True),  # nothing gains 2 %, so nothing is named wrongly
        (10.0, {"named": 10.1, "other": 8.0}, False),
    ],
)
def test_a_verdict_is_right_if_nothing_else_helps_more(before, seconds, right):
    assert Verdict("graph", before, seconds, "named").right is right


def test_a_verdict_is_of_real_runs():
    verdict = verdict_of(3)
    assert verdict.named in verdict.seconds and verdict.best in verdict.seconds
    assert all(0.004 < seconds < 1 for seconds in (verdict.before, *verdict.seconds.values()))

"""What `python -m benchmarks` writes and prints: never over an input, something on Ctrl-C, tables that fit."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, ladder, topologies, verdicts
from benchmarks.graphs import loaded
from benchmarks.report import is_report
from dflash_pipe import BadInput
from dflash_pipe.forecast import Options, predict
from dflash_pipe.profile import load
from tests.called import FAST, TOY, called
from tests.pipeline import HOOKS
from tests.training import write_rows

HOOKED = "stages.target.use=tests.pipeline:HookedTarget"


@pytest.fixture(autouse=True)
def no_hooks() -> Iterator[None]:
    yield
    HOOKS.clear()


# --- what is written over ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A graph that extends a base and reads data, and an overlay."""
    made = {name: tmp_path / f"{name}.yaml" for name in ("base", "graph", "overlay")}
    made["data"] = write_rows(tmp_path / "train.arrow", vocabulary=300)
    made["base"].write_text("extends: graphs/overlapped.yaml\nseed: 3\n")
    made["graph"].write_text("extends: base.yaml\n")
    made["overlay"].write_text("extends: graphs/targets/tiny_qwen3.yaml\n")
    made["link"] = tmp_path / "link.html"
    made["link"].symlink_to(made["base"])
    return made


@pytest.mark.parametrize("name", ["base", "graph", "overlay", "data", "link"])
def test_no_result_is_written_over_an_input(name: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "run", lambda graph: pytest.fail("something ran"))
    before = files[name].read_bytes()
    named = [files["graph"], files["overlay"], f"data.path={files['data']}"]
    with pytest.raises(BadInput, match=r"--report: .* is read by this command") as error:
        called("topologies", *named, "--report", files[name])
    assert str(files[name]) in str(error.value) and "\n" not in str(error.value)
    assert files[name].read_bytes() == before
    kept = files["graph"].parent / "topologies.json"  # YAML holds all JSON
    kept.write_text('{"seed": 4}')
    with pytest.raises(BadInput, match=r"--out: .* is read by this command"):
        called("topologies", *named, kept, "--out", kept.parent)
    assert kept.read_text() == '{"seed": 4}'


@pytest.mark.parametrize("text", ["seed: 1\n", "<!doctype html>\n<p>mine</p>\n", "\n", "\0" * 5000])
def test_a_report_replaces_a_report_only(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    file.write_text(text)
    with monkeypatch.context() as changed, pytest.raises(BadInput, match="is there and is no report of this command"):
        changed.setattr(compare, "run", lambda graph: pytest.fail("something ran"))
        called("topologies", TOY[0], "--report", file)
    assert file.read_text() == text
    file.write_text("")
    for _ in range(2):  # over an empty file, and over the report
        assert called("topologies", TOY[1], *FAST, "--repeat", 1, "--report", file).exit_code == 0
        assert is_report(file)


@pytest.mark.parametrize("file", ["/proc/page.html", "/dev/full/page.html"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "run", lambda graph: pytest.fail("something ran"))
    with pytest.raises(BadInput, match=f"--report: {file} cannot be written"):
        called("topologies", TOY[0], "--report", file)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def stopping(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, but Ctrl-C comes with its call number `at`."""
    calls = 0

    def stopped(*words: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            signal.raise_signal(signal.SIGINT)
        return function(*words, **options)

    return stopped


def test_stopped_topologies_show_the_runs_that_all_of_them_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that are not timed, two rounds, and one run of the third."""
    monkeypatch.setattr(compare, "run", stopping(compare.run, 2 + 2 * 2 + 2))
    page, out = tmp_path / "page.html", tmp_path / "new" / "figures"
    result = called("topologies", TOY[0], TOY[1], *FAST, "--repeat", 4, "--report", page, "--out", out)
    assert result.exit_code == 130
    assert "\nStopped after 2 of 4 timed runs of each. " in result.output
    assert "Stopped after 2 of 4" in page.read_text()
    kept = json.loads((out / "topologies.json").read_text())
    assert kept["stopped"] and kept["repeats"] == 2
    assert [len(found["step_seconds"]) for found in kept["topologies"].values()] == [2, 2]
    for name, figures in kept["topologies"].items():  # what was forecast is forecast again from what is kept
        graph = loaded([f"graphs/toy/{name}.yaml", *FAST], None)[0]
        forecast = predict(graph, load(out / f"profile_{name}.json"), options=Options(changes=False))
        assert forecast.pace.step == pytest.approx(figures["own_forecast_seconds"])


@pytest.mark.parametrize(("repeat", "at"), [(1, 4), (0, 2)])
def test_stopped_topologies_show_those_that_have_run(monkeypatch: pytest.MonkeyPatch, repeat: int, at: int) -> None:
    monkeypatch.setattr(compare, "run", stopping(compare.run, at))
    result = called("topologies", TOY[0], TOY[1], *FAST, "--repeat", repeat)
    assert result.exit_code == 130
    assert "\nStopped after 1 of 1 timed run of each, before overlapped. sequential: " in result.output


def test_what_ran_before_a_run_that_fails_is_shown(tmp_path: Path) -> None:
    """Runs at real sizes take minutes, and one that finds no room for its tensors must not cost the others."""
    messages = 0

    def fails_in_the_second_run(number: Any) -> None:
        nonlocal messages
        messages += 1
        if messages > 4 * 4:
            raise MemoryError("no room")

    HOOKS["target"] = fails_in_the_second_run
    with pytest.RaisesGroup(pytest.RaisesExc(MemoryError, match="no room"), flatten_subgroups=True):
        called("topologies", *TOY, *FAST, HOOKED, "--steps", 4, "--repeat", 0, "--out", tmp_path)
    kept = json.loads((tmp_path / "topologies.json").read_text())
    assert kept["stopped"] and list(kept["topologies"]) == ["sequential"]


def test_topologies_stopped_while_changes_are_forecast_show_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.topologies.predict", stopping(topologies.predict, 1))
    result = called("topologies", *TOY[:2], *FAST, "--repeat", 0)
    assert result.exit_code == 130 and "Stopped before changes were forecast. overlapped is the " in result.output


def test_topologies_stopped_while_stages_run_alone_show_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.topologies.alone", stopping(lambda graph: {}, 1))
    result = called("topologies", TOY[0], *FAST, "--repeat", 1, "--profile-stages")
    assert result.exit_code == 130 and "Stopped before every stage had run alone. sequential: " in result.output


def test_a_stopped_ladder_shows_the_runs_that_all_rungs_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "run", stopping(compare.run, len(ladder.RUNGS) + 3))
    result = called("ladder", "--scale", 0.005, "--steps", 4, "--repeat", 3, "--out", tmp_path)
    assert result.exit_code == 130 and "Stopped after 1 of 3 runs of each rung." in result.output
    kept = json.loads((tmp_path / "ladder.json").read_text())
    assert kept["stopped"] and kept["repeats"] == 1 and len(kept["rungs"]) == len(ladder.RUNGS)


def test_stopped_verdicts_are_of_the_graphs_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = verdicts.Verdict("made", 10.0, {"named": 5.0, "other": 6.0}, "named")
    monkeypatch.setattr(verdicts, "verdict_of", stopping(lambda seed: made, 4))
    result = called("verdicts", "--graphs", 9, "--out", tmp_path)
    assert result.exit_code == 130 and "Stopped after 3 of 9 graphs." in result.output
    kept = json.loads((tmp_path / "verdicts.json").read_text())
    assert kept["stopped"] and len(kept["graphs"]) == 3 and kept["share"] == 1


@pytest.mark.parametrize(
    ("words", "what", "at"),
    [
        (["topologies", TOY[0], TOY[1], *FAST], "compare.run", 1),
        (["ladder", "--scale", "0.001", "--steps", "4"], "compare.run", 7),
        (["verdicts"], "verdicts.verdict_of", 1),
        (["recording", TOY[1], *FAST], "recording.step_seconds", 3),
        (["sync", "--numbers", "64000"], "sync.factors", 1),
        (["rows", "--rows", "200", "--tokens", "20"], "rows.measure", 2),
        (["loop"], "loop._graph", 1),
    ],
)
def test_stopped_before_there_is_anything_to_show_it_says_so(
    words: list[str], what: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = what.partition(".")
    target = __import__(f"benchmarks.{module}", fromlist=[name])
    monkeypatch.setattr(target, name, stopping(getattr(target, name), at))
    result = called(*words, "--out", tmp_path / "new" / "figures")
    assert result.exit_code == 130
    assert result.stderr.endswith("stopped before there was anything to show\n") and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_in_a_pipe_is_as_wide_as_it_is_or_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of any of them ends in blanks: `called` looks."""
    words = ("topologies", TOY[0], TOY[1], *FAST, "--repeat", 2)
    monkeypatch.delenv("COLUMNS", raising=False)
    heads = "topology step times as fast forecast measured / forecast overlap efficiency"
    assert heads in [" ".join(line.split()) for line in called(*words).stdout.splitlines()]
    monkeypatch.setenv("COLUMNS", "72")
    table, _, _ = called(*words).stdout.partition("\n\n")
    assert max(map(len, table.splitlines()[1:])) <= 72


def test_the_ladder_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table, _, rest = called("ladder", "--scale", 0.002, "--steps", 4).stdout.partition("\n\n")
    assert max(map(len, table.splitlines()[1:])) <= 80 and "…" not in table
    assert len(table.splitlines()) == 2 + 2 + len(ladder.RUNGS)  # machine, title, heads on two lines, a line each
    assert "\n  v5 (bound): " in rest

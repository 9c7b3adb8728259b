"""`python -m benchmarks topologies`: what is compared, what is refused, and what is said of it."""

from __future__ import annotations

import gc
import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import findings
from benchmarks.alone import alone
from benchmarks.compare import Topology, Trial, clear, difference, run, run_in_turns
from benchmarks.graphs import loaded, on_devices_of
from benchmarks.interval import Estimate, estimate
from dflash_pipe import BadInput
from dflash_pipe.forecast_table import duration, figure, unit_of
from dflash_pipe.graph import Graph
from dflash_pipe.profile import Profile, Samples
from stages.toy import WaitStep
from tests.called import FAST, TOY, called
from tests.pipeline import HOOKS, Gate
from tests.training import write_rows

REAL = [f"graphs/{name}.yaml" for name in ("sequential", "overlapped", "parallel_target")]


@pytest.fixture(autouse=True)
def no_hooks() -> Iterator[None]:
    yield
    HOOKS.clear()


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """What makes the real graphs small."""
    data = write_rows(tmp_path / "train.arrow", vocabulary=300)
    few = ["data.max_tokens=192", "window=2", "threads=1", "data.epochs=3"]
    return ["graphs/targets/tiny_qwen3.yaml", f"data.path={data}", *few]


def variant(folder: Path, name: str, of: str, text: str) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(f"extends: graphs/toy/{of}.yaml\n{text}\n")
    return file


# --- figures ----------------------------------------------------------------------------------------------------------

values = st.lists(st.floats(0.1, 10), min_size=2, max_size=12)


@given(values, st.floats(0.1, 10))
def test_an_interval_holds_its_median_and_scales_with_its_values(drawn: list[float], scale: float) -> None:
    found, scaled = estimate(drawn), estimate([scale * value for value in drawn])
    assert found.low is not None and found.high is not None and scaled.low is not None
    assert min(drawn) <= found.low <= found.median <= found.high <= max(drawn)
    assert scaled.median == pytest.approx(scale * found.median) and scaled.low == pytest.approx(scale * found.low)


def test_a_95_percent_interval_misses_the_true_median_about_once_in_twenty() -> None:
    draw = np.random.default_rng(3)
    found = [estimate(draw.normal(5.0, 1.0, 15).tolist()) for _ in range(200)]
    inside = sum(e.low is not None and e.high is not None and e.low <= 5.0 <= e.high for e in found)
    assert 0.90 <= inside / 200 <= 0.99


def test_one_value_has_no_interval_and_none_is_an_error() -> None:
    assert estimate([2.0]) == Estimate(2.0, None, None) and estimate([2.0]).range() == ""
    with pytest.raises(ValueError, match="no values"):
        estimate([])


@given(st.floats(1e-6, 1e9))
def test_seconds_and_numbers_are_said_to_three_digits_and_without_an_exponent(seconds: float) -> None:
    number, unit = duration(seconds).split()
    assert "e+" not in number and unit == unit_of(seconds)[0]
    assert float(number.replace(",", "")) * unit_of(seconds)[1] == pytest.approx(seconds, rel=0.006)
    assert "e+" not in figure(seconds) and "e+" not in estimate([seconds, 3 * seconds]).range(1000)


def test_the_next_unit_is_taken_where_the_last_would_be_rounded_up_to_it() -> None:
    seconds = (0.9994, 0.9996, 1.15, 119.4, 119.9, 3599, 1e8)
    said = ["999 ms", "1 s", "1.15 s", "119 s", "2 min", "1 h", "1,157 days"]
    assert [duration(each) for each in seconds] == said


# --- what may be compared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stages: {target: {with: {seconds: 0.5}}}", "stages.target.with.seconds is 0.011 in {first}, 0.5 in {file}"),
        ("channels: {params: {initial: 2}}", "channels.params.initial is 1 in {first}, 2 in {file}"),
        ("seed: 21", "seed is 20 in {first}, 21 in {file}"),
    ],
)
def test_graphs_of_other_dataflows_are_refused_before_anything_runs(text: str, told: str, tmp_path: Path) -> None:
    HOOKS["target"] = lambda index: pytest.fail("something ran")
    file = variant(tmp_path, "other", "overlapped", text)
    with pytest.raises(BadInput) as error:
        called("topologies", TOY[0], TOY[1], file, "stages.target.use=tests.pipeline:HookedTarget")
    expected = told.format(first=TOY[0], file=file)
    assert f"different dataflows, so nothing was run: {expected} (" in str(error.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["graphs/targets/tiny_qwen3.yaml"], "no topology given"),
        (["graphs/toy/sequentail.yaml"], "no such file: graphs/toy/sequentail.yaml"),
        ([TOY[0], "targt.seconds=1"], "did you mean 'target'"),
        ([TOY[0], TOY[1], "target.replicas=2"], "a variant of one is a file that extends it"),
        ([TOY[0], "graphs/targets/tiny_qwen3.yaml"], "the graph's target is stages.toy:Wait (graphs/toy/dataflow.yaml"),
        (["graphs/regenerate.yaml", "graphs/targets/tiny_qwen3.yaml"], "the graph has no stage 'drafter'"),
        ([TOY[0], "--report", "nowhere/page.html"], "--report: nowhere/page.html cannot be written"),
        ([TOY[0], "--report", "."], "--report: . cannot be written"),
        ([TOY[0], "--out", "README.md"], "--out: nothing can be written into README.md"),
    ],
)
def test_bad_input_is_told_in_one_line(words: list[object], told: str) -> None:
    with pytest.raises(BadInput) as error:
        called("topologies", *words)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_key_that_fits_no_graph_is_not_taken_for_a_variant() -> None:
    with pytest.raises(BadInput, match=r"no key, stage, worker or channel 'targt' \(did you mean 'target'\?\)$"):
        loaded([*TOY, "targt.seconds=1"], None)


def test_steps_of_a_source_without_a_length_are_refused(tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.write_text("""
stages:
  data:   {use: "tests.called:Endless"}
  target: {use: "stages.toy:Wait"}
channels: {batches: {from: data, to: target}}
workers: {main: {stages: [data, target]}}
""")
    with pytest.raises(BadInput, match="stage data has neither 'steps' nor 'count'"):
        called("topologies", endless, "--steps", 4)


def test_a_run_that_is_all_warm_up_measures_nothing() -> None:
    with pytest.raises(BadInput, match="sequential: all of its steps are warm-up: give more --steps"):
        called("topologies", TOY[0], *FAST, "data.count=8", "--repeat", 1)


@pytest.mark.parametrize("target", ["random_tiny_qwen3", "random_qwen3_8b", "random_qwen3_6_27b"])
def test_an_overlay_may_extend_an_overlay_and_bring_a_stage(target: str) -> None:
    graphs = loaded([*REAL, f"graphs/targets/{target}.yaml"], 7)
    assert [graph.name for graph in graphs] == ["sequential", "overlapped", "parallel_target"]
    for graph in graphs:
        assert graph.stages["data"].use == "stages.random_rows:RandomTokens"
        assert graph.stages["data"].parameters["steps"] == 7


def test_every_graph_has_a_name_of_its_own(tmp_path: Path) -> None:
    other = variant(tmp_path, "overlapped", "overlapped", "workers: {target: {replicas: 2}}")
    assert [graph.name for graph in loaded([TOY[1], TOY[1], TOY[0]], None)] == [
        "overlapped", "overlapped #2", "sequential",
    ]  # fmt: skip
    assert [graph.name for graph in loaded([TOY[1], str(other)], None)] == [TOY[1], str(other)]


# --- the same devices -------------------------------------------------------------------------------------------------


def placed(graph: Graph, **where: tuple[str, ...]) -> Graph:
    changed = {
        name: replace(worker, device=dict.fromkeys(worker.stages, where.get(name, ("cpu",))))
        for name, worker in graph.workers.items()
    }
    return replace(graph, workers=changed)


def devices(graph: Graph, worker: str) -> set[str]:
    return {name for names in graph.workers[worker].device.values() for name in names}


def test_the_same_devices_are_those_of_the_first() -> None:
    first, other = loaded([TOY[1], TOY[2]], None)
    first = placed(first, loader=("cuda:0",), target=("cuda:0",), drafter=("cuda:1",), optim=("cpu",))
    three = ("cuda:0", "cuda:1", "cuda:2")
    other = placed(other, loader=("cuda:7",), target=three, drafter=("cuda:3",), optim=("cuda:3",))
    moved = on_devices_of(first, other)
    assert devices(moved, "target") == {"cuda:0", "cuda:1"}
    assert devices(moved, "drafter") == devices(moved, "optim") == {"cuda:1"}  # a GPU's work stays on a GPU
    assert devices(moved, "loader") == {"cuda:0"}  # it computes on the host: where it is said to be makes no GPU more
    assert on_devices_of(first, first) == first
    assert (Topology(first).gpus, Topology(other).gpus, Topology(moved).gpus) == (2, 4, 2)
    on_cpu = on_devices_of(placed(first), other)
    assert Topology(on_cpu).gpus == 0


# --- running ----------------------------------------------------------------------------------------------------------


def test_toy_topologies_compute_the_same_and_are_as_forecast_from_one_profile(tmp_path: Path) -> None:
    slower = ["target.seconds=0.033", "drafter.seconds=0.018", "optimizer.seconds=0.006"]
    result = called("topologies", *TOY, *slower, "--steps", 8, "--repeat", 3, "--out", tmp_path)
    assert result.exit_code == 0
    assert "All 12 runs computed the same: 8 digests and the final weights are equal." in result.output
    assert "parallel_target is the fastest" in result.output
    assert "overlapped: bound by target" in result.output
    kept = json.loads((tmp_path / "topologies.json").read_text())
    assert kept["same"] and kept["repeats"] == 3
    assert {"machine", "versions", "command", "time"} <= set(kept) and kept["versions"]["python"]
    for name, found in kept["topologies"].items():
        assert found["step"]["median"] == pytest.approx(found["forecast_seconds"], rel=0.03), name
        assert found["weights"] and len(found["digests"]) == 8
        stage, busy = re.findall(r"^bound by (\w+): busy (\d+%) as measured, \d+% of the forecast's", found["verdict"])[
            0
        ]
        own = {"sequential": "main"}.get(name, stage)
        assert busy == f"{max(seen[0] for each, seen in found['workers'].items() if each.partition('[')[0] == own):.0%}"
    gain = kept["topologies"]["parallel_target"]["times_as_fast"]
    assert gain["low"] <= gain["median"] <= gain["high"] and gain["median"] == pytest.approx(2.67, rel=0.05)


def test_staleness_is_caught_in_its_first_window(tmp_path: Path) -> None:
    """The command refuses it, but the comparison of results does not rely on that."""
    stale = variant(tmp_path, "stale", "overlapped", "channels: {params: {initial: 2, capacity: 2}}")
    fresh, late = (run(*loaded([str(file), *FAST], None)) for file in (TOY[0], stale))
    said = difference(fresh, late)
    assert said is not None and said.startswith("step 2: digest")


def test_completion_order_is_caught(tmp_path: Path) -> None:
    """A target replica holds back the first message until one of the next window has passed."""
    gate = Gate()

    def held(index: int) -> None:
        if threading.current_thread().name.startswith("target[") and index in (0, 4):
            gate.wait() if index == 0 else gate.open()

    HOOKS["target"] = held
    completion = variant(tmp_path, "completion", "parallel_target", "workers: {target: {order: completion}}")
    hooked = "stages.target.use=tests.pipeline:HookedTarget"
    result = called("topologies", TOY[0], completion, hooked, *FAST, "--repeat", 1)
    assert result.exit_code == 1
    assert result.output.count("completion differs from sequential in run 1, first in step 1: digest") == 1
    assert "No topology can be called the fastest.\n" in result.output
    assert "window" not in result.output


def test_the_real_graphs_compute_the_same_on_a_tiny_target(tiny: list[str], tmp_path: Path) -> None:
    options = ["--steps", 5, "--repeat", 1, "--profile-stages", "--out", tmp_path]
    result = called("topologies", *REAL, *tiny, *options)
    assert result.exit_code == 0
    assert "All 6 runs computed the same: 5 digests and the final weights are equal." in result.output
    heads = ("rows/s", "supervised tokens/s", "padding", "all rows in", "most steps/s")
    assert [head for head in heads if head not in result.output] == []
    assert "exported" not in result.output  # what a stage prints of a folder that is gone
    found = json.loads((tmp_path / "topologies.json").read_text())["topologies"]["overlapped"]
    rates = found["a_second"]
    assert rates["supervised"] < rates["tokens"] < rates["padded"] and rates["rows"] < rates["tokens"]


def test_only_the_run_that_is_not_timed_makes_digests(tiny: list[str]) -> None:
    """At real sizes they take seconds a step."""
    (topology,) = run_in_turns(loaded([REAL[0], *tiny], 4), 1, lambda said: None, checked=True)
    (timed,) = topology.trials
    assert topology.checked is not None
    assert len(topology.checked.digests) == 4 and timed.digests == {}
    assert timed.weights == topology.checked.weights
    assert difference(topology.checked, timed) is None
    assert difference(topology.checked, replace(timed, weights="other")) is not None


def test_a_single_run_of_each_makes_the_digests_and_is_timed(tmp_path: Path) -> None:
    result = called("topologies", *TOY[:2], *FAST, "--repeat", 0, "--out", tmp_path)
    assert result.exit_code == 0
    assert re.search(r"All 2 runs computed the same: \d+ digests and the final weights are equal\.", result.output)
    for found in json.loads((tmp_path / "topologies.json").read_text())["topologies"].values():
        assert len(found["step_seconds"]) == 1 and found["digests"] and found["weights"]


def test_what_cannot_fit_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.compare.run", None)
    with pytest.raises(BadInput, match="cuda:0 needs about 1"):
        overlays = ["graphs/targets/random_qwen3_8b.yaml", "transport=tests.test_footprints:TwoDevices", "data.rows=20"]
        called("topologies", *REAL[:2], *overlays)


def test_another_transport_is_no_control_and_is_forecast_from_its_own_profile(tmp_path: Path) -> None:
    """What it does to the times is in no other profile."""
    other = variant(tmp_path, "other", "overlapped", 'transport: "tests.test_behind:Noted"')
    result = called("topologies", TOY[1], other, *FAST, "--repeat", 0)
    assert "other has another transport than overlapped: its forecast is from its own profile" in result.output
    assert "a control" not in result.output


def test_what_is_compared_writes_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real drafter's state is tens of GB."""
    monkeypatch.setattr("dflash_pipe.snapshot.write", None)
    (graph,) = loaded([TOY[0], *FAST], None)
    assert len(run(graph).weights) == 64


def alive(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def test_nothing_of_a_run_is_left_when_the_next_begins() -> None:
    (graph,) = loaded([TOY[0], *FAST], None)
    clear()
    gc.disable()
    try:
        run(graph)
        assert alive(WaitStep) == 1  # in a circle of references: on a GPU the next run would find no room
        clear()
        assert alive(WaitStep) == 0
    finally:
        gc.enable()


def test_each_stage_alone_takes_what_it_takes() -> None:
    (graph,) = loaded([TOY[2]], None)
    seconds = alone(graph)
    assert list(seconds) == ["data", "target", "drafter", "optimizer"]
    for stage, least in {"target": 4 * 0.011, "drafter": 4 * 0.006, "optimizer": 0.002}.items():
        assert least <= seconds[stage] < 3 * least, stage


# --- what is said -----------------------------------------------------------------------------------------------------


def ran(graph: Graph, *steps: float) -> Topology:
    """As if it had run so often, with so many seconds a step."""
    nothing: Any = None
    profiles = (Profile("", 1, "", 2, Samples(1, step, (2,), (step,)), {}) for step in steps)
    return Topology(graph, [Trial(profile, nothing, nothing, {}, "same") for profile in profiles])


def headline(compared: Sequence[Topology]) -> str:
    return findings._headline(compared, [])


def test_the_headline_calls_nothing_the_fastest_that_is_not() -> None:
    one, again, other, third = loaded([TOY[0], TOY[0], TOY[1], TOY[2]], None)
    slow = ran(one, 1.0, 1.02, 0.98)
    assert headline([slow]) == headline([slow, ran(again, 1.0, 0.9, 1.1)]) == "sequential: 1 s a step."
    assert headline([slow, ran(other, 0.5, 0.51, 0.49)]) == (
        "overlapped is the fastest: 2.00 times as fast as sequential (2.00 to 2.00)."
    )
    assert headline([slow, ran(other, 2.0, 2.04, 1.96)]).startswith("sequential is the fastest: 2.00 times as fast as")
    assert headline([ran(one, 1.0), ran(other, 0.994)]).startswith("overlapped is the fastest: 1.01 times as fast as")
    for seconds in (0.996, 1.0, 1.004):  # which is not to be seen in the ratio
        unseen = headline([ran(one, 1.0), ran(other, seconds)])
        assert "cannot be told apart by 1 run each" in unseen and unseen.endswith(" is 1.00 times as fast.")
    assert "told apart" in headline([slow, ran(other, 0.98, 0.99, 0.976)])  # 1.02, and at least 1.004
    alike = headline([slow, ran(other, 0.5, 0.52, 0.48), ran(third, 0.5, 0.5, 0.5)])
    assert alike == (
        "overlapped and parallel_target cannot be told apart by 3 runs each: overlapped is 0.96 to 1.04 times as fast."
    )
    assert findings._headline([slow], ["b differs"]).startswith("No topology can be called the fastest")


def test_one_graph_is_compared_with_nothing_and_the_same_again_is_a_control() -> None:
    result = called("topologies", TOY[1], *FAST, "--repeat", 1)
    assert result.exit_code == 0 and "note: one graph, so nothing is compared" in result.output
    assert "fastest" not in result.output
    result = called("topologies", TOY[1], TOY[1], *FAST, "--repeat", 2, "--rows", 100)
    assert result.exit_code == 0 and "fastest" not in result.output
    assert "note: overlapped #2 is the same graph as overlapped, a control: its ratio should be 1" in result.output
    assert "note: no stage of these graphs measures rows" in result.output

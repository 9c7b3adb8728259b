"""The forecast: the published ladder, critical cycles by name, what-ifs, and when it refuses."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from dflash_pipe.check import check
from dflash_pipe.errors import BadInput
from dflash_pipe.forecast import Options, predict
from dflash_pipe.forecast_table import duration, rendered
from dflash_pipe.graph import dump, load
from dflash_pipe.plan import plan as lay_out
from dflash_pipe.profile import Host, Recorder
from dflash_pipe.runtime import Run
from dflash_pipe.service import replicas_busy, sped_up

RUNGS = {"v1": 8.88, "v2": 3.0, "v3": 3.0, "v3_without_barrier": 2.2, "v4": 1.9, "v4_fitted": 2.15, "v5": 1.1}
BARRIER = "grads → optim → credit (windows) → loader"
CYCLES = {
    "v2": f"loader → batches → target[0] → turn targets → target[1] → features → drafter[0] → {BARRIER}",
    "v3": f"loader → batches → target[0] → turn targets → target[1] → features → drafter[1] → {BARRIER}",
    "v3_without_barrier": "target[0] → turn targets → target[1] → turn targets → target[0]",
    "v4": f"loader → batches → target[0] → features → drafter[0] → {BARRIER}",
    "v5": "target[0] → target[0]",
}


def graph_of(*files, **overrides):
    graph = load(files, [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()])
    check(graph)
    return graph


def ladder(rung):
    return graph_of(f"graphs/ladder/{rung}.yaml", data__scale=1)


def profile_of(graph, step, spread=0.0, windows=40, measures=None):
    """What a run of the graph would have recorded. spread: of service times, as a share. measures: of message i."""
    recorder = Recorder(graph.window, warm_up=1, keep=4000)
    draw = np.random.default_rng(7)
    for index in range(windows * graph.window):
        for stage in graph.stages.values():
            seconds = stage.parameters.get("seconds", 0.0) * stage.parameters.get("scale", 1.0)
            part = "read" if stage.signature.source else "process"
            if stage.name == "optimizer" and (index + 1) % graph.window:
                continue
            held = measures(index) if measures and stage.name != "optimizer" else None
            recorder.record(stage.name, part, index, seconds * draw.uniform(1 - spread, 1 + spread), held)
    for window in range(windows):
        recorder.window_done(window, window * step)
    return recorder.profile(dump(graph), "a test")


# --- the ladder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_is_forecast_as_published(rung):
    forecast = predict(ladder(rung), profile_of(ladder(rung), RUNGS[rung]), options=Options(changes=False))
    assert forecast.pace.step == pytest.approx(RUNGS[rung], rel=1e-6)
    assert forecast.own == pytest.approx(forecast.pace.step) and not forecast.refusal


@pytest.mark.parametrize("rung", CYCLES)
def test_the_critical_cycle_of_every_rung_has_its_name(rung):
    pace = predict(ladder(rung), profile_of(ladder("v2"), 3.0), options=Options(changes=False)).pace
    assert str(pace.cycle) == CYCLES[rung] and pace.cycle.share > 0.9


def test_from_the_profile_of_one_rung_come_the_others():
    rungs = ["v3", "v4", "v5", "v3_without_barrier"]
    what_ifs = [f"graphs/ladder/{rung}.yaml data.scale=1" for rung in rungs]
    what_ifs += ["target.turn=null", "target.turn=null credits=null"]
    forecast = predict(ladder("v2"), profile_of(ladder("v2"), 3.0), what_ifs)
    steps = [outcome.pace.step for outcome in forecast.outcomes[: forecast.asked]]
    assert steps == pytest.approx([3.0, 1.9, 1.1, 2.2, 1.9, 1.1], rel=1e-6)
    assert forecast.outcomes[1].speedup == pytest.approx(3.0 / 1.9)


def test_a_third_target_helps_v5_and_a_fourth_does_not():
    what_ifs = ["target.replicas=3 target.take=first_free", "target.replicas=4 target.take=first_free"]
    third, fourth = predict(ladder("v5"), profile_of(ladder("v2"), 3.0), what_ifs).outcomes[:2]
    assert third.pace.step == pytest.approx(0.8) and fourth.pace.step == pytest.approx(0.8)
    assert str(third.pace.cycle) == "drafter[0] → grads → optim → params → drafter[0]"


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_runs_as_long_as_published(rung, tmp_path):
    """At a twentieth of the published seconds; the first window fills the pipeline."""
    windows = 4 if rung == "v1" else 8
    graph = graph_of(f"graphs/ladder/{rung}.yaml", data__count=2 * windows + 8)
    ended = []
    running = Run(lay_out(graph), tmp_path)
    running.on_report = lambda metrics: ended.append(time.perf_counter())
    running.execute()
    measured = (ended[windows - 1] - ended[1]) / (windows - 2) / 0.05
    assert measured == pytest.approx(RUNGS[rung], rel=0.05)


# --- what it says -----------------------------------------------------------------------------------------------------


def toy(topology="sequential"):
    return graph_of(f"graphs/toy/{topology}.yaml")


SEQUENTIAL = 4 * (0.011 + 0.006) + 0.002


TOPOLOGIES = ("sequential", "overlapped", "parallel_target")


def test_a_sequential_profile_forecasts_every_topology():
    """Overlapped: the target alone. Three targets: the drafter and the optimizer, one after the other."""
    profile = profile_of(toy(), SEQUENTIAL)
    steps = {t: predict(toy(t), profile).pace for t in TOPOLOGIES}
    assert steps["sequential"].step == pytest.approx(SEQUENTIAL) and steps["sequential"].exact
    assert steps["overlapped"].step == pytest.approx(4 * 0.011) and steps["overlapped"].exact
    assert steps["parallel_target"].step == pytest.approx(4 * 0.006 + 0.002, rel=1e-3)
    assert str(steps["overlapped"].cycle) == "target → target"
    assert str(steps["parallel_target"].cycle) == "drafter → grads → optim → params → drafter"


def test_varying_times_give_an_interval_and_a_slower_step():
    """Both targets at once: a step waits for the slower one, 1/6 of the spread's whole width later than the mean."""
    even = predict(ladder("v4"), profile_of(ladder("v4"), 1.9), options=Options(changes=False)).pace
    profile = profile_of(ladder("v4"), 1.9, spread=0.6, windows=500)
    uneven = predict(ladder("v4"), profile, options=Options(changes=False)).pace
    assert even.low == pytest.approx(even.high) and uneven.low < uneven.median < uneven.high
    assert uneven.step == pytest.approx(1.9 + (1.1 + 0.6) * 2 * 0.6 / 6, rel=0.03)


def test_the_verdict_names_what_binds_and_what_would_help_most():
    verdict = predict(toy("overlapped"), profile_of(toy(), SEQUENTIAL)).verdict
    assert verdict.startswith("bound by target: busy 100%, 100% of the critical path; a second target replica would")
    assert verdict.endswith("give 1.69x")  # 44 ms -> 26 ms, the drafter and the optimizer


def test_how_busy_what_binds_is_is_measured_where_that_is_known_and_else_forecast():
    """Targets that were busy for 44 of 47 ms: their own forecast has them busy all the time."""
    graph, other = toy("overlapped"), graph_of("graphs/toy/overlapped.yaml", features__capacity=3)
    profile = profile_of(graph, 0.047)
    for same in (graph, graph_of("graphs/toy/overlapped.yaml", name="x", data__count=400)):
        verdict = predict(same, profile).verdict
        assert verdict.startswith("bound by target: busy 94% as measured, 100% of the critical path; a second target")
    assert predict(other, profile).verdict.startswith("bound by target: busy 100%, 100% of the critical path; ")
    two = graph_of("graphs/toy/data_parallel.yaml", drafter__seconds=0.02)
    assert "bound by drafter: busy 89% as measured" in predict(two, profile_of(two, 0.045)).verdict


def test_what_each_replica_does_at_the_end_of_a_window_counts_as_busy():
    graph = toy("data_parallel")
    recorder = Recorder(graph.window, warm_up=0)
    for index in range(80):
        recorder.record("drafter", "process", index, 0.01)
        if index % 4 == 3:
            for _ in range(2):
                recorder.record("drafter", "end_window", index, 0.015)
            recorder.window_done(index // 4, 0.05 * index)
    profile = recorder.profile(dump(graph), "")
    assert replicas_busy(profile, lay_out(graph), "drafter") == pytest.approx((4 * 0.01 + 2 * 0.015) / 0.2)


def test_of_a_change_only_what_keeps_the_result_is_recommended():
    graph = graph_of("graphs/toy/parallel_target.yaml", optimizer__seconds=0.05)
    forecast = predict(graph, profile_of(graph, 0.074))
    staleness = next(o for o in forecast.outcomes if o.change.name == "params: staleness 1")
    assert staleness.speedup == pytest.approx(0.074 / 0.05, rel=1e-3) and not staleness.change.same_result
    assert "staleness" not in forecast.verdict and "drafter" in forecast.verdict


def test_what_speeds_up_a_stage_off_the_cycle_brings_nothing():
    outcomes = {o.change.name: o for o in predict(toy("overlapped"), profile_of(toy(), SEQUENTIAL)).outcomes}
    assert outcomes["drafter 10 % faster"].speedup == pytest.approx(1.0)
    assert outcomes["target 10 % faster"].speedup == pytest.approx(1 / 0.9)
    assert outcomes["batches: capacity 16"].speedup == pytest.approx(1.0)
    assert outcomes["credits: windows: 1"].speedup < 1.0


def test_it_says_nothing_about_changes_if_it_misses_the_profiled_run():
    forecast = predict(toy("overlapped"), profile_of(toy(), 1.2 * SEQUENTIAL), ["target.replicas=2"])
    assert "more than 10% off" in forecast.refusal and not forecast.outcomes
    assert "would give" not in forecast.verdict
    assert not predict(toy("overlapped"), profile_of(toy(), 1.08 * SEQUENTIAL)).refusal


def test_stages_that_are_told_to_share_something_exclude_each_other():
    together = Options(together={"target": "interpreter", "drafter": "interpreter"}, changes=False)
    forecast = predict(toy("overlapped"), profile_of(toy(), SEQUENTIAL), options=together)
    assert forecast.pace.step == pytest.approx(4 * 0.017, rel=1e-3)
    with pytest.raises(BadInput, match=r"no stage 'targt' .did you mean 'target'"):
        predict(toy(), profile_of(toy(), SEQUENTIAL), options=Options(together={"targt": "x"}))


def on_cores(profile, cores):
    return replace(profile, host=Host(cores, ("data", "target", "drafter", "optimizer")))


def test_cpu_stages_get_no_more_cores_than_there_are():
    """Each takes one core. A sequential run has one worker; three targets and the others do not fit on two cores."""
    sequential, overlapped, parallel = (graph_of(f"graphs/toy/{t}.yaml", threads=1) for t in TOPOLOGIES)
    profile = profile_of(sequential, SEQUENTIAL)
    steps = {
        cores: [
            predict(g, on_cores(profile, cores), options=Options(changes=False)).pace.step
            for g in (overlapped, parallel)
        ]
        for cores in (1, 2, 8)
    }
    assert steps[8] == pytest.approx([0.044, 0.026], rel=1e-3)
    assert steps[2][1] == pytest.approx(SEQUENTIAL / 2, rel=0.03)
    assert steps[1] == pytest.approx([SEQUENTIAL, SEQUENTIAL], rel=0.03)
    crowded = predict(overlapped, on_cores(profile, 1))
    assert "10 % off target would give 1.0" in crowded.verdict
    assert crowded.pace.remarks[0].startswith("more workers than 1 CPU cores have room for (threads: 1): they take")
    assert predict(overlapped, on_cores(profile, 8), options=Options(changes=False)).pace.remarks == ()


def test_times_measured_on_cores_that_were_shared_are_without_the_waits_for_them():
    """One core, four workers: the target was never idle, and had the core for 44 of 70 ms."""
    overlapped, sequential = (graph_of(f"graphs/toy/{t}.yaml", threads=1) for t in ("overlapped", "sequential"))
    longer = SEQUENTIAL / (4 * 0.011)
    crowded = profile_of(overlapped, SEQUENTIAL)
    for stage in ("target", "drafter", "optimizer"):
        crowded = sped_up(crowded, stage, longer)
    for graph in (overlapped, sequential):
        forecast = predict(graph, on_cores(crowded, 1), options=Options(changes=False))
        assert (forecast.own, forecast.pace.step) == pytest.approx((SEQUENTIAL, SEQUENTIAL), rel=0.02)
    alone = predict(overlapped, on_cores(crowded, 4), options=Options(changes=False))
    assert alone.pace.step == pytest.approx(SEQUENTIAL, rel=0.02)  # cores enough: these are the times it takes


def test_a_profile_of_another_dataflow_is_refused():
    profile = profile_of(toy(), SEQUENTIAL)
    other = replace(profile, stages={"target": profile.stages["target"]})
    with pytest.raises(BadInput, match="the profile has no stage 'data'"):
        predict(toy(), other)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "--what-if is empty"),
        ("target.replicas=0", "workers.target.replicas"),
        ("targt.replicas=2", "did you mean 'target'"),
        ("no_such.yaml", "no such file: no_such.yaml"),
        ("window=3 drafter.replicas=2 drafter.take=round_robin", "cannot be dealt evenly"),
    ],
)
def test_a_what_if_that_makes_no_graph_is_told_in_one_line(text, told):
    with pytest.raises(BadInput) as error:
        predict(toy("overlapped"), profile_of(toy(), SEQUENTIAL), [text])
    assert told in str(error.value) and "\n" not in str(error.value) and "/tmp" not in str(error.value)


def test_an_overlay_file_changes_the_graph_and_a_whole_file_replaces_it(tmp_path):
    overlay = tmp_path / "three.yaml"
    overlay.write_text("workers: {target: {replicas: 3}}\n")
    what_ifs = [str(overlay), "graphs/toy/sequential.yaml"]
    over, whole = predict(toy("overlapped"), profile_of(toy(), SEQUENTIAL), what_ifs).outcomes[:2]
    assert over.pace.step == pytest.approx(0.026, rel=1e-3) and whole.pace.step == pytest.approx(SEQUENTIAL)


# --- on a terminal ----------------------------------------------------------------------------------------------------


def shown(forecast):
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(rendered(forecast))
    return console.export_text()


def test_the_table_says_all_of_it():
    what_ifs = ["graphs/ladder/v4.yaml data.scale=1"]
    text = shown(predict(ladder("v2"), profile_of(ladder("v2"), 3.0), what_ifs, Options(rows=10)))
    for line in (
        "v2: 3 s a step (mean, simulated; median 3 s)",
        "critical cycle: loader → batches → target[0] → turn targets",
        "the profiled run: measured 3 s, its own forecast 3 s (100.0%)",
        "no turn targets",
        "1.58x",
        "another result",
        "bound by target: busy 37% as measured",
    ):
        assert line in text
    refused = shown(predict(toy("overlapped"), profile_of(toy(), 2 * SEQUENTIAL)))
    assert "nothing is said about changes" in refused and "what if" not in refused


def test_durations_as_a_person_says_them():
    seconds = [0.0552, 3.01, 90.0, 600.0, 7200.0, 881_280.0]
    assert [duration(s) for s in seconds] == ["55.2 ms", "3.01 s", "90 s", "10 min", "2 h", "10.2 days"]

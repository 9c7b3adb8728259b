"""What a comparison of topologies says of time that was lost, beside its forecasts: from hand-made profiles."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import findings, topologies
from benchmarks.compare import Topology, Trial
from benchmarks.graphs import loaded
from dflash_pipe import Transport
from dflash_pipe.forecast import Forecast, Options, predict
from dflash_pipe.graph import Graph, dump
from dflash_pipe.profile import Profile, Samples
from dflash_pipe.trace import Span, Timeline
from stages.toy import Partials
from tests.called import FAST, TOY, called

WORK = {"data": 0.0001, "target": 0.1, "drafter": 0.05, "optimizer": 0.1}


def made(graph: Graph, step: float, work: Mapping[str, float] = WORK, timeline: Timeline | None = None) -> Topology:
    """As if the graph had run 6 steps of a window of 4 after its warm-up; work: seconds of a stage's firing."""
    stages: dict[str, Any] = {}
    for stage, seconds in work.items():
        index = tuple(range(11, 32, 4)) if stage == "optimizer" else tuple(range(8, 32))
        part = "read" if stage == "data" else "process"
        stages[stage] = {part: Samples(len(index), seconds * len(index), index, (seconds,) * len(index))}
    steps = Samples(6, 6 * step, tuple(range(2, 8)), (step,) * 6)
    nothing: Any = None
    profile = Profile(dump(graph), graph.window, "hand-made", 2, steps, stages)
    return Topology(graph, [Trial(profile, timeline or nothing, nothing, {}, "same")])


def pair(step: float, work: Mapping[str, float]) -> tuple[list[Topology], list[Forecast], list[float]]:
    """`sequential` as written, which takes 0.7 s, and `overlapped` with another step and other work."""
    one, other = loaded(TOY[:2], None)
    compared = [made(one, 0.7004), made(other, step, work)]
    forecasts, own, _ = topologies._forecasts(compared)
    return compared, forecasts, own


def slower(step: float, work: Mapping[str, float]) -> list[str]:
    return list(findings._slower(*pair(step, work)))


def test_stages_that_took_longer_are_named_where_they_explain_the_miss() -> None:
    compared, forecasts, own = pair(0.44, WORK | {"target": 0.11})
    expected = predict(compared[1].graph, compared[0].middle.profile, options=Options(changes=False)).pace.step
    assert forecasts[1].pace.step == expected and own[1] == pytest.approx(1.1 * expected, rel=0.01)
    assert own[0] == forecasts[0].pace.step
    longer = WORK | {"target": 0.11, "drafter": 0.052, "optimizer": 0.1019, "data": 0.0002}
    assert slower(0.44, longer) == [
        "overlapped: its stages took longer than in sequential: target 1.10x, drafter 1.04x"
    ]
    assert slower(0.36, WORK | {"target": 0.09, "drafter": 0.052}) == [
        "overlapped: its stages took less time than in sequential: target 0.90x"
    ]


@pytest.mark.parametrize(
    ("step", "work"),
    [
        (0.44, WORK),  # lost between stages
        (0.405, WORK | {"target": 0.1015, "drafter": 0.052}),  # the forecast is right
        (0.5, WORK | {"target": 0.11}),  # it explains less than half of the miss
    ],
)
def test_stages_are_not_blamed_for_what_they_do_not_explain(step: float, work: dict[str, float]) -> None:
    assert slower(step, work) == []


def test_a_profile_of_its_own_is_forecast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def counted(graph: Graph, profile: Profile, options: Options | None = None) -> Forecast:
        asked.append((graph.name, options is None))
        return predict(graph, profile, options=options)

    monkeypatch.setattr("benchmarks.topologies.predict", counted)
    compared, forecasts, own = pair(0.44, WORK)
    assert asked == [("sequential", True), ("overlapped", True), ("overlapped", False)]
    asked.clear()
    monkeypatch.setattr("benchmarks.topologies.telling", lambda topology, first: topology.middle.profile)
    forecasts, own, _ = topologies._forecasts(compared)  # as with another transport
    assert asked == [("sequential", True), ("overlapped", True)]
    assert own == [forecast.pace.step for forecast in forecasts]


# --- the table --------------------------------------------------------------------------------------------------------


def test_what_a_run_lost_beside_its_stages_is_in_the_table_and_the_figures(tmp_path: Path) -> None:
    slow = ["target.seconds=0.02", "drafter.seconds=0.01"]
    result = called("topologies", *TOY[:2], *slow, "--steps", 8, "--repeat", 1, "--out", tmp_path)
    heads = " ".join(result.stdout.splitlines()[1].split())
    assert heads.endswith("measured / forecast overlap efficiency") and "GPU" not in heads
    for found in json.loads((tmp_path / "topologies.json").read_text())["topologies"].values():
        assert found["overlap_efficiency"] == pytest.approx(found["own_forecast_seconds"] / found["step_seconds"][0])
        assert 0.9 < found["overlap_efficiency"] < 1.03 and found["device_busy"] == {}


def test_a_time_that_no_stage_explains_lowers_the_efficiency_and_the_busiest_gpu_is_named() -> None:
    compared, forecasts, own = pair(0.5, WORK)
    _, other = compared
    workers = {
        name: replace(worker, device=dict.fromkeys(worker.stages, (f"cuda:{int(name != 'target')}",)))
        for name, worker in other.graph.workers.items()
    }
    spans = [Span("target", "target", "process", n, n, 0.5 * n, 0.5 * n + 0.4) for n in range(8)]
    spans += [Span("optim", "optimizer", "process", n, n, 0.5 * n + 0.4, 0.5 * n + 0.5) for n in range(8)]
    on_gpus = made(
        replace(other.graph, workers=workers), 0.5, timeline=Timeline(("target", "optim"), tuple(spans), (), (), 2)
    )
    assert findings.gpus_busy(on_gpus) == pytest.approx({"cuda:0": 0.8, "cuda:1": 0.2})
    row = dict(zip(findings._HEADS, findings._row(on_gpus, forecasts[1], own[1], on_gpus, None), strict=True))
    assert row["busiest GPU"] == ("80.0%", "cuda:0")
    assert row["overlap efficiency"] == (f"{own[1] / 0.5:.1%}", "") and 0.7 < own[1] / 0.5 < 0.9


def test_topologies_stopped_while_own_profiles_are_forecast_show_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def stopped(*words: Any, options: Options | None = None) -> Forecast:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return predict(*words, options=options)

    monkeypatch.setattr("benchmarks.topologies.predict", stopped)
    result = called("topologies", *TOY[:2], *FAST, "--repeat", 0)
    assert result.exit_code == 130 and "Stopped before changes were forecast. overlapped is the " in result.output


class SlowGradients(Transport):
    """Keeps whoever sends gradients."""

    def on_send(self, payload: Any, device: str, to: str | None) -> Any:
        if isinstance(payload, Partials):
            time.sleep(0.02)
        return payload


def test_a_hand_off_that_binds_is_named_though_no_worker_is_busy_with_it() -> None:
    result = called("topologies", TOY[1], "transport=tests.test_findings:SlowGradients", *FAST, "--repeat", 0)
    assert result.exit_code == 0
    assert "overlapped: bound by hand-off of grads: " in result.output and "busy" not in result.output


def test_a_hand_off_that_the_first_graph_does_not_have_explains_the_miss() -> None:
    """One worker hands nothing over; so its profile forecasts the others without what that takes."""
    slow = "transport=tests.test_findings:SlowGradients"
    result = called("topologies", *TOY[:2], slow, *FAST, "--repeat", 0)
    said = next(line for line in result.stdout.splitlines() if line.startswith("overlapped: takes "))
    assert (
        ", and what its hand-offs take explains it: bound by hand-off of grads: " in said and "interpreter" not in said
    )

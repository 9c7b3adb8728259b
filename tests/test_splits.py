"""How GPUs are split among workers: every way, ranked, who sits where, and what memory that needs."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from dflash_pipe.check import check
from dflash_pipe.errors import BadInput
from dflash_pipe.forecast import Options
from dflash_pipe.graph import dump, load
from dflash_pipe.profile import DeviceMemory, Recorder
from dflash_pipe.splits import ranked, splits_table, written
from tests.test_forecast import SEQUENTIAL, profile_of
from tests.test_forecast import toy as toy_graph
from tests.test_memory import GIB, GRAPH, OVERLAPPED

ROOT = Path(__file__).parent.parent


THREE = """
window: 1
stages:
  a: {use: "tests.timed_graphs:Items", with: {count: 9, seconds: [0.0]}}
  b: {use: "tests.timed_graphs:Through", with: {seconds: [1.0]}}
  c: {use: "tests.timed_graphs:Through", with: {seconds: [1.0]}}
  d: {use: "tests.timed_graphs:Sink", with: {seconds: [1.0]}}
channels: {ab: {from: a, to: b}, bc: {from: b, to: c}, cd: {from: c, to: d}}
workers: {a: {stages: [a]}, b: {stages: [b]}, c: {stages: [c]}, d: {stages: [d]}}
"""


def split_by(profile, gpus, **options):
    return ranked(toy_graph("overlapped"), profile, gpus, Options(**options))


def test_every_split_is_ranked_and_what_the_laws_refuse_comes_last():
    """The target takes 11 ms, the drafter 6; its two partials cannot be shared by three."""
    splits = split_by(profile_of(toy_graph(), SEQUENTIAL), 4)
    assert [str(split) for split in splits] == [
        "target x2, drafter x2",
        "target x3, drafter x1",
        "target x1, drafter x3",
    ]
    assert [s.forecast.pace.step for s in splits[:2]] == pytest.approx([0.022, 0.026], rel=1e-3)
    assert splits[2].forecast is None and "partials: 2 is not a multiple of 3, the replicas" in splits[2].refusal


def test_gpus_that_bring_nothing_are_not_given_out():
    """Two drafters need four targets to be busy all the time: 6 * 4 / 2 + 2 = 14 ms."""
    first, second, *_ = split_by(profile_of(toy_graph(), SEQUENTIAL), 64)
    assert (str(first), str(second)) == ("target x4, drafter x2", "target x62, drafter x2")
    assert first.step == pytest.approx(0.014, rel=1e-2) and first.step == pytest.approx(second.step, rel=5e-3)
    assert first.graph.workers["drafter"].device["drafter"] == ("cuda:4", "cuda:5")
    console = Console(width=200, record=True, file=StringIO())
    console.print(splits_table([first, second]))
    assert "as fast with 6 GPUs as with 64" in console.export_text()


def test_more_ways_to_split_than_can_be_looked_at_are_refused(tmp_path):
    file = tmp_path / "three.yaml"
    file.write_text(THREE)
    graph = load([file])
    with pytest.raises(BadInput, match="--gpus is 64: 1,953 ways to split them among b, c, d, expected at most 1024"):
        ranked(graph, profile_of(toy_graph(), SEQUENTIAL), 64, Options())


def test_who_sits_where():
    split = split_by(profile_of(toy_graph(), SEQUENTIAL), 4)[0]
    devices = {worker.name: next(iter(worker.device.values())) for worker in split.graph.workers.values()}
    assert devices == {
        "loader": ("cpu",),
        "target": ("cuda:0", "cuda:1"),
        "drafter": ("cuda:2", "cuda:3"),
        "optim": ("cuda:2",),
    }


def test_one_gpu_is_shared_and_time_on_it_adds_up():
    (split,) = split_by(profile_of(toy_graph(), SEQUENTIAL), 1)
    assert split.forecast.pace.step == pytest.approx(SEQUENTIAL, rel=0.05)
    assert "device cuda:0" in str(split.forecast.pace.cycle)


def test_memory_is_checked_against_what_the_profile_held():
    held = {
        "cuda:0": DeviceMemory(60 * GIB, 139 * GIB, ("target",)),
        "cuda:1": DeviceMemory(90 * GIB, 139 * GIB, ("drafter", "optimizer")),
    }
    profile = replace(profile_of(toy_graph(), SEQUENTIAL), memory=held)
    assert [split.memory for split in split_by(profile, 2)] == [90 * GIB]
    assert split_by(profile, 2)[0].doubt == "memory is as the profile measured it: no stage says what memory it needs"
    (alone,) = split_by(profile, 1)
    assert alone.forecast is None and alone.refusal.startswith(
        "cuda:0 needs about 150.0 GiB, has 139.0 GiB: the largest part is what cuda:1 held (90.0 GiB)"
    )


@pytest.fixture
def footed(tmp_path):
    """A graph whose stages say what memory they need, rows at 1 GiB each, and a profile of it."""
    file = tmp_path / "footed.yaml"
    file.write_text(GRAPH.replace("tests.test_memory:SmallDevices", "stages.devices:DeviceTransport") + OVERLAPPED)
    graph = load([file], ["target.device=cpu", "drafter.device=cpu", "optim.device=cpu"])
    recorder = Recorder(graph.window, warm_up=0)
    for index in range(40 * graph.window):
        recorder.record("target", "process", index, 1.0)
        for stage in graph.stages:
            recorder.record(stage, "read" if stage == "data" else "process", index, 0.0)
        if index % graph.window == graph.window - 1:
            recorder.window_done(index // graph.window, index + 1.0)
    return graph, recorder.profile(dump(graph), "a test")


def test_memory_is_what_the_stages_say_wherever_the_gpus_are(footed):
    """The profile held far more than they say, and it was of other GPUs: only how large those are counts."""
    graph, profile = footed
    held = {"cuda:0": DeviceMemory(12 * GIB, 13 * GIB, tuple(graph.stages))}
    for measured in (profile, replace(profile, memory=held)):
        apart = ranked(graph, measured, 2, Options())[0]
        assert apart.doubt == "" and 3 * GIB < apart.memory < 4 * GIB
        (alone,) = ranked(graph, measured, 1, Options())
        assert alone.doubt == "" and apart.memory < alone.memory < 12 * GIB
    small = {"cuda:0": DeviceMemory(1, 3 * GIB, tuple(graph.stages))}
    (alone,) = ranked(graph, replace(profile, memory=small), 1, Options())
    assert alone.forecast is None and "cuda:0 needs about" in alone.refusal and "has 3.0 GiB" in alone.refusal


def test_where_a_stage_cannot_say_what_it_needs_the_measured_memory_counts_and_that_is_told(footed):
    graph, profile = footed
    held = {"cuda:0": DeviceMemory(12 * GIB, 13 * GIB, tuple(graph.stages))}
    devices = ["target.device=cpu", "drafter.device=cpu", "optim.device=cpu"]
    unreadable = load(graph.files, [*devices, "data.rows=-1"])
    split = ranked(unreadable, replace(profile, graph=dump(unreadable), memory=held), 2, Options())[0]
    assert split.memory == 12 * GIB and split.doubt.startswith("memory is as the profile measured it: ")
    assert split.doubt.endswith(": stages.data: no data there")


def test_a_profile_that_forecasts_itself_badly_ranks_nothing():
    with pytest.raises(BadInput, match="more than 10% off"):
        split_by(profile_of(toy_graph(), 2 * SEQUENTIAL), 2)


def test_what_is_written_says_only_what_differs(tmp_path):
    """The graph of two drafters that take turns, on one GPU each, beside one target."""
    files = ["graphs/toy/data_parallel.yaml"]
    splits = ranked(load(files), profile_of(toy_graph(), SEQUENTIAL), 4, Options())
    split = next(split for split in splits if split.replicas == {"target": 2, "drafter": 2})
    text = written(split, files, ROOT)
    assert yaml.safe_load(text)["workers"] == {
        "loader": {"device": "cpu"},
        "target": {"device": ["auto:0", "auto:1"]},
        "drafter": {"device": ["auto:2", "auto:3"]},
        "optim": {"device": "auto:2"},
    }
    (one,) = ranked(load(files), profile_of(toy_graph(), SEQUENTIAL), 1, Options())
    workers = yaml.safe_load(written(one, files, ROOT))["workers"]
    assert workers["drafter"] == {"replicas": 1, "device": "auto:0"}
    (tmp_path / "g.yaml").write_text(text.replace("graphs/", f"{ROOT}/graphs/"))
    check(load([tmp_path / "g.yaml"]))

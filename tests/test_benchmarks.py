"""The comparisons: `python -m benchmarks topologies | ladder | rows | sync`, and the page that they write."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from benchmarks import figures, ladder, rows, sync
from benchmarks.__main__ import app
from benchmarks.alone import alone
from benchmarks.compare import loaded, on_devices_of
from benchmarks.interval import Estimate, estimate
from benchmarks.verdicts import Verdict, verdict_of
from dflash_pipe import BadInput
from dflash_pipe.graph import Graph
from dflash_pipe.trace import Depth, Span, Timeline, Wait
from tests.pipeline import HOOKS, Gate
from tests.training import write_rows

TOY = [f"graphs/toy/{name}.yaml" for name in ("sequential", "overlapped", "parallel_target")]
FAST = ["target.seconds=0.002", "drafter.seconds=0.001", "optimizer.seconds=0.001"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    HOOKS.clear()


def called(*words: object) -> Result:
    """What the command printed and how it ended; a failure that is no exit code is raised."""
    result: Any = CliRunner().invoke(app, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# --- intervals --------------------------------------------------------------------------------------------------------

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


# --- topologies -------------------------------------------------------------------------------------------------------


def test_toy_topologies_compute_the_same_and_are_as_forecast_from_one_profile(tmp_path: Path) -> None:
    slower = ["target.seconds=0.033", "drafter.seconds=0.018", "optimizer.seconds=0.006"]
    result = called("topologies", *TOY, *slower, "--steps", 8, "--repeat", 3, "--out", tmp_path)
    assert result.exit_code == 0
    assert "All 9 runs computed the same: 8 digests and the final weights are equal." in result.output
    assert "parallel_target is the fastest" in result.output
    assert "overlapped: bound by target" in result.output
    kept = json.loads((tmp_path / "topologies.json").read_text())
    assert kept["same"] and kept["repeats"] == 3
    assert {"machine", "versions", "command", "time"} <= set(kept) and kept["versions"]["python"]
    for name, found in kept["topologies"].items():
        assert found["step"]["median"] == pytest.approx(found["forecast_seconds"], rel=0.03), name
        assert found["weights"] and len(found["digests"]) == 8
    gain = kept["topologies"]["parallel_target"]["times_as_fast"]
    assert gain["low"] <= gain["median"] <= gain["high"] and gain["median"] == pytest.approx(2.67, rel=0.05)


def test_staleness_is_caught_in_its_first_window(tmp_path: Path) -> None:
    stale = tmp_path / "stale.yaml"
    stale.write_text("extends: graphs/toy/overlapped.yaml\nchannels: {params: {initial: 2, capacity: 2}}\n")
    result = called("topologies", TOY[0], stale, *FAST, "--repeat", 1)
    assert result.exit_code == 1
    assert "stale differs from sequential in run 1, first in window 1: digest" in result.output


def test_completion_order_is_caught(tmp_path: Path) -> None:
    """A target holds back the first message until one of the next window has passed."""
    gate = Gate()
    HOOKS["target"] = lambda index: gate.wait() if index == 0 else gate.open() if index == 4 else None
    completion = tmp_path / "completion.yaml"
    hooked = 'stages: {target: {use: "tests.pipeline:HookedTarget"}}\nworkers: {target: {order: completion}}\n'
    completion.write_text(f"extends: graphs/toy/parallel_target.yaml\n{hooked}")
    result = called("topologies", TOY[0], completion, *FAST, "--repeat", 1)
    assert result.exit_code == 1
    assert "completion differs from sequential in run 1, first in window 0: digest" in result.output


def test_the_real_graphs_compute_the_same_on_a_tiny_target(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "train.arrow", vocabulary=300)
    graphs = [f"graphs/{name}.yaml" for name in ("sequential", "overlapped", "parallel_target")]
    few = ["graphs/targets/tiny_qwen3.yaml", f"data.path={data}", "data.max_tokens=192", "window=2", "threads=1"]
    options = ["--steps", 5, "--repeat", 1, "--profile-stages", "--out", tmp_path]
    result = called("topologies", *graphs, *few, "data.epochs=3", *options)
    assert result.exit_code == 0
    assert "All 3 runs computed the same: 5 digests and the final weights are equal." in result.output
    heads = ("rows/s", "supervised tokens/s", "padding", "all rows in", "most steps/s")
    assert [head for head in heads if head not in result.output] == []
    assert "exported" not in result.output  # what a stage prints of a folder that is gone
    found = json.loads((tmp_path / "topologies.json").read_text())["topologies"]["overlapped"]
    rates = found["a_second"]
    assert rates["supervised"] < rates["tokens"] < rates["padded"] and rates["rows"] < rates["tokens"]


def test_each_stage_alone_takes_what_it_takes() -> None:
    (graph,) = loaded([TOY[2]], None)
    seconds = alone(graph, windows=2)
    assert list(seconds) == ["data", "target", "drafter", "optimizer"]
    for stage, least in {"target": 4 * 0.011, "drafter": 4 * 0.006, "optimizer": 0.002}.items():
        assert least <= seconds[stage] < 3 * least, stage


def devices(graph: Graph, worker: str) -> set[str]:
    return {name for names in graph.workers[worker].device.values() for name in names}


def test_the_same_devices_are_those_of_the_first() -> None:
    first, other = loaded([TOY[1], TOY[2]], None)

    def placed(graph: Graph, **where: tuple[str, ...]) -> Graph:
        changed = {
            name: replace(worker, device=dict.fromkeys(worker.stages, where.get(name, ("cpu",))))
            for name, worker in graph.workers.items()
        }
        return replace(graph, workers=changed)

    first = placed(first, loader=("cuda:0",), target=("cuda:0",), drafter=("cuda:1",), optim=("cuda:1",))
    other = placed(
        other, loader=("cuda:0",), target=("cuda:0", "cuda:1", "cuda:2"), drafter=("cuda:3",), optim=("cuda:3",)
    )
    moved = on_devices_of(first, other)
    assert devices(moved, "target") == {"cuda:0", "cuda:1"} and devices(moved, "drafter") == {"cuda:1"}
    assert devices(on_devices_of(first, first), "target") == {"cuda:0"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["graphs/targets/tiny_qwen3.yaml"], "no topology given"),
        (["graphs/toy/sequentail.yaml"], "no such file: graphs/toy/sequentail.yaml"),
        ([TOY[0], "targt.seconds=1"], "did you mean 'target'"),
    ],
)
def test_bad_input_is_told_in_one_line(words: list[object], told: str) -> None:
    with pytest.raises(BadInput) as error:
        called("topologies", *words)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_steps_of_a_source_without_a_length_are_refused(tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.write_text("""
stages:
  data:   {use: "tests.timed_graphs:Sized", with: {max_tokens: 10}}
  target: {use: "tests.timed_graphs:Wait", with: {seconds: 0.1}}
channels: {batches: {from: data, to: target}}
workers: {main: {stages: [data, target]}}
""")
    with pytest.raises(BadInput, match="stage data has neither 'steps' nor 'count'"):
        called("topologies", endless, "--steps", 4)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on the three toy topologies."""
    interval, file = sys.getswitchinterval(), tmp_path_factory.mktemp("report") / "report.html"
    assert called("topologies", *TOY, "--steps", 12, "--repeat", 2, "--report", file).exit_code == 0
    sys.setswitchinterval(interval)
    return file


class Page(HTMLParser):
    """Tags, attributes, and whether every tag that was opened was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_holds_all_it_shows(page: Path) -> None:
    text = page.read_text()
    read = Page(text)
    assert read.open == [] and "script" not in read.tags and "img" not in read.tags
    loads = [value or "" for name, value in read.attributes if name in ("src", "href", "xlink:href")]
    assert [value for value in loads if not value.startswith(("#", "data:"))] == []
    assert not re.search(r"@import|url\((?!#)", text)
    ids = [value for name, value in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))  # pictures on one page share its ids
    pictures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]
    assert len(pictures) == 4
    shown = ["".join(element.itertext()).strip() for element in pictures[0].iter() if element.tag.endswith("text")]
    assert {"main", "loader", "target[0]", "target[2]", "drafter", "optim"} <= set(shown)
    assert "time in ms, from the end of a step" in shown


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here")
def test_a_browser_shows_the_page_without_a_complaint(page: Path, tmp_path: Path) -> None:
    flags = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync "
        "disable-component-update hide-scrollbars enable-logging=stderr window-size=1150,1200"
    )
    picture = tmp_path / "page.png"
    command = ["chromium", *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={tmp_path / 'profile'}"]
    ended = subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0 and "CONSOLE" not in ended.stderr
    seen = Image.open(picture).convert("RGB")
    colours = {f"#{r:02X}{g:02X}{b:02X}" for _, (r, g, b) in seen.getcolors(1 << 24) or []}
    assert set(figures.COLOURS[:4]) - colours == set()  # every stage's bars
    assert set(figures.WAITS.values()) - colours == set()


def panel(**changes: Any) -> figures.Panel:
    """Two workers, hand-made: a target that works all the time, a drafter that waits in between."""
    spans = [Span("target", "target", "process", n, n // 2, 0.1 * n, 0.1 * n + 0.1) for n in range(8)]
    spans += [Span("drafter", "drafter", "process", n, n // 2, 0.1 * n + 0.1, 0.1 * n + 0.15) for n in range(8)]
    waits = tuple(Wait("drafter", "starved", "input", 0.1 * n + 0.15, 0.1 * n + 0.2) for n in range(7))
    depths = tuple(Depth("features", 0.1 * n + 0.1, n % 2, 0) for n in range(8))
    made = Timeline(("target", "drafter"), tuple(spans), waits, depths)
    shares = {"target": (1.0, 0.0, 0.0), "drafter": (0.5, 0.5, 0.0)}
    colours = figures.stage_colours(["target", "drafter"])
    ends = (0.25, 0.45, 0.65, 0.85)
    step = estimate([0.2, 0.21])
    shown = figures.Panel("made", made, 0.25, ends, shares, {"features": 2}, (0.2, 0.21), step, 0.2, colours)
    return replace(shown, **changes)


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext()).strip() for element in ET.fromstring(svg).iter() if element.tag.endswith("text")
    ]


def test_a_timeline_shows_what_lies_in_its_window() -> None:
    shown = texts(figures.timelines([panel()], 0.4))
    assert "made: 2 steps end in this time" in shown  # those at 0.45 and 0.65
    # the target works on 2 (from before) to 6 (beyond the end), the drafter on 2 to 5; the axis begins at 0
    assert sorted(word for word in shown if re.fullmatch(r"\d", word)) == sorted("0" + "23456" + "2345")


def test_a_graph_without_channels_has_no_picture_of_depths() -> None:
    assert figures.channel_depths([panel(capacities={})], 0.4) == ""
    assert "features" in texts(figures.channel_depths([panel()], 0.4))


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


def test_sync_says_what_it_did_not_run(tmp_path: Path) -> None:
    result = called("sync", "--numbers", 64_000, "--repeats", 1, "--out", tmp_path)
    assert result.exit_code == 0
    assert "not run: NCCL, flat (needs 2 GPUs, this machine has 0)" in result.output
    kept = json.loads((tmp_path / "sync.json").read_text())
    assert len(kept["grid"]) == 2 * 3 * 2 and kept["gain"] is None
    with pytest.raises(BadInput, match="at least 16,000"):
        called("sync", "--numbers", 100)


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

"""The page that `python -m benchmarks topologies --report` writes, and its pictures."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import figures, report
from benchmarks.compare import run_in_turns
from benchmarks.graphs import loaded
from benchmarks.interval import estimate
from dflash_pipe.forecast import predict
from dflash_pipe.profile import HAND_OFF
from dflash_pipe.trace import Depth, Span, Timeline, Wait
from tests.called import TOY, called


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on the three toy topologies."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    assert called("topologies", *TOY, "--steps", 12, "--repeat", 2, "--report", file).exit_code == 0
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


def test_step_times_have_the_unit_that_a_person_would_take() -> None:
    slow = panel(steps=(1.14, 1.16), step=estimate([1.14, 1.16]), forecast=1.2)
    shown = texts(figures.step_times([panel(), slow]))
    assert {"205 ms (forecast 200 ms)", "1.15 s (forecast 1.2 s)", "s a step"} <= set(shown)
    assert not [word for word in shown if "e+" in word]


def test_a_worker_with_several_stages_shows_what_each_took() -> None:
    spans = [Span("main", "target", "process", 0, 0, 0.0, 0.3), Span("main", "drafter", "process", 0, 0, 0.3, 0.4)]
    one = panel(timeline=Timeline(("main",), tuple(spans), (), ()), shares={"main": (0.8, 0.2, 0.0)})
    assert {"target 60%", "drafter 20%", "starved 20%"} <= set(texts(figures.worker_shares([one])))
    assert {"busy 100%", "busy 50%", "starved 50%"} <= set(texts(figures.worker_shares([panel()])))


def test_a_hand_off_is_no_work_of_its_stage() -> None:
    spans = [Span("main", "target", "process", 0, 0, 0.0, 0.3), Span("main", "target", "hand-off of x", 0, 0, 0.3, 0.4)]
    colours = panel().colours | {HAND_OFF: figures.HANDED}
    one = panel(timeline=Timeline(("main",), tuple(spans), (), ()), shares={"main": (0.8, 0.2, 0.0)}, colours=colours)
    assert {"target 60%", "hand-off 20%", "starved 20%"} <= set(texts(figures.worker_shares([one])))
    assert figures.HANDED.lower() in figures.timelines([replace(one, begin=0.0)], 0.4)


def test_every_timeline_begins_behind_the_warm_up_and_is_full_to_its_end() -> None:
    compared = run_in_turns(loaded(TOY, 9), 1, lambda said: None)
    forecast = predict(compared[0].graph, compared[0].middle.profile)
    shown, seconds = report.panels(compared, [forecast] * 3)
    for topology, each in zip(compared, shown, strict=True):
        timeline = topology.middle.timeline
        warm = [span.end for span in timeline.spans if span.window < timeline.warm_up]
        assert each.begin == pytest.approx(max(warm))
        assert each.begin + seconds <= max(span.end for span in timeline.spans) + 1e-9

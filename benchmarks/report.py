"""One HTML page about compared topologies. It holds all it shows: no script runs and no request leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from benchmarks import figures
from benchmarks.busy import warm, window_ends
from benchmarks.compare import Topology
from benchmarks.figures import Panel
from benchmarks.findings import Findings
from benchmarks.machine import described, record
from dflash_pipe.forecast import Forecast
from dflash_pipe.profile import HAND_OFF

__all__ = ["is_report", "panels", "rendered"]

# The timelines show this many steps of the slowest topology, but no more work than a reader can tell apart.
_STEPS, _SPANS = 3.1, 1500


def rendered(
    topologies: Sequence[Topology],
    forecasts: Sequence[Forecast],
    findings: Findings,
    ceilings: Sequence[Sequence[str]] = (),
) -> str:
    """The page. ceilings: each stage by itself, heads first; none if that was not measured."""
    shown, seconds = panels(topologies, forecasts)
    first = topologies[0]
    about = record()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    words: dict[str, Any] = {
        "title": f"Topologies compared: {', '.join(topology.name for topology in topologies)}",
        **vars(findings),
        "ceilings": ceilings,
        "repeats": len(first.trials),
        "warm_up": first.middle.profile.warm_up,
        "profiled": first.name,
        "key": shown[0].colours | {state: colour for state, colour in figures.WAITS.items()},
        "timelines": Markup(figures.timelines(shown, seconds)),
        "steps": Markup(figures.step_times(shown)),
        "shares": Markup(figures.worker_shares(shown)),
        "depths": Markup(figures.channel_depths(shown, seconds)),
        "machine": described(),
        "versions": versions,
        "command": about["command"],
    }
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_template()).render(words)


def is_report(file: Path) -> bool:
    """Whether a file is such a page: its first line tells."""
    expected = _template().partition("\n")[0].encode()
    with file.open("rb") as opened:
        return opened.readline(len(expected) + 2).rstrip() == expected


def _template() -> str:
    return (files("benchmarks") / "report.html.j2").read_text()


def panels(topologies: Sequence[Topology], forecasts: Sequence[Forecast]) -> tuple[list[Panel], float]:
    """What the pictures show, and how many seconds of the timelines."""
    ends = [window_ends(topology.middle.timeline) for topology in topologies]
    begins = [warm(own, topology.middle.timeline.warm_up) for topology, own in zip(topologies, ends, strict=True)]
    counted = (max(own.values()) - begin for begin, own in zip(begins, ends, strict=True))
    seconds = min(_STEPS * max(topology.middle.step for topology in topologies), *counted)
    spans = sum(len(topology.middle.timeline.spans) / _length(topology) for topology in topologies) * seconds
    seconds /= max(1.0, spans / _SPANS)
    colours = figures.stage_colours(list(topologies[0].graph.stages))
    if any(span.work == HAND_OFF for topology in topologies for span in topology.middle.timeline.spans):
        colours[HAND_OFF] = figures.HANDED
    shown = []
    for topology, forecast, own, begin in zip(topologies, forecasts, ends, begins, strict=True):
        trial = topology.middle
        panel = Panel(
            name=topology.name,
            timeline=trial.timeline,
            begin=begin,
            ends=tuple(own.values()),
            shares={w.name: (w.busy, w.starved, w.blocked) for w in trial.view.workers},
            capacities={channel.name: channel.capacity for channel in trial.view.channels},
            steps=tuple(each.step for each in topology.trials),
            step=topology.step,
            forecast=forecast.pace.step,
            colours=colours,
        )
        shown.append(panel)
    return shown, seconds


def _length(topology: Topology) -> float:
    spans = topology.middle.timeline.spans
    return max(span.end for span in spans) - min(span.begin for span in spans)

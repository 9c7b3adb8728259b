"""Which of several graphs is fastest, by how much and why, and whether all of them computed the same."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.alone import alone
from benchmarks.compare import Findings, Topology, difference, loaded, on_devices_of, ratio, run_in_turns, source
from benchmarks.interval import Estimate
from benchmarks.machine import described, keep
from dflash_pipe import BadInput
from dflash_pipe.forecast import Forecast, Options, predict
from dflash_pipe.forecast_table import duration
from dflash_pipe.graph import Graph
from stages.arrow_rows import ArrowRows

__all__ = ["topologies"]

# As `dflash-pipe run` sets it.
_SWITCH_INTERVAL = 0.0005
# So many times the messages that are worked on ahead have to be measured; a step as forecast needs no doubt.
_MANY, _CLOSE = 5, 0.05
# A forecast that misses what was measured by more than this has nothing to advise.
_TRUSTED = 0.10


def topologies(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="GRAPH... [OVERLAY]... [KEY=VALUE]...", help="graphs, then what is laid over each"),
    ],
    steps: Annotated[int | None, typer.Option(help="optimizer steps in a run (as the graph says)", min=4)] = None,
    repeat: Annotated[int, typer.Option(help="runs of each graph, in turns", min=1)] = 5,
    same_devices: Annotated[
        bool, typer.Option("--same-devices", help="all on the devices that the first uses")
    ] = False,
    rows: Annotated[int | None, typer.Option(help="rows to train on, for the ETA (epochs x rows of data.path)")] = None,
    profile_stages: Annotated[
        bool, typer.Option("--profile-stages", help="also each stage alone: its ceiling")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="write the HTML page to this file")] = None,
    out: Annotated[Path | None, typer.Option(help="write topologies.json into this folder")] = None,
) -> None:
    """Run graphs of one dataflow in turns and compare them; exit 1 if they computed different things."""
    if report and not report.absolute().parent.is_dir():
        raise BadInput(f"--report: there is no folder {report.absolute().parent}", "command line")
    if (report and report.is_dir()) or (out and out.is_file()):
        raise BadInput("--report takes a file, --out a folder", "command line")
    if report and not importlib.util.find_spec("matplotlib"):
        raise BadInput("--report needs matplotlib: pip install 'dflash-pipe[bench]'", "command line")
    graphs = loaded(arguments, steps)
    if same_devices:
        graphs = [on_devices_of(graphs[0], graph) for graph in graphs]
    console = Console() if Console().is_terminal else Console(width=150)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    with console.status("running") as status:
        compared = run_in_turns(graphs, repeat, status.update)
        ceilings = _alone(compared[0]) if profile_stages else ()
        status.update("forecasting")
        forecasts = _forecasts(compared, rows or _rows(graphs[0]))
    differences = _differences(compared)
    findings = replace(_findings(compared, forecasts, differences), alone=ceilings)
    _print(console, findings)
    if report:
        from benchmarks.report import rendered  # it needs what only a report needs

        report.write_text(rendered(compared, forecasts, findings))
        console.print(f"report: {report}", highlight=False)
    if out:
        console.print(
            f"results: {keep(out, 'topologies', _figures(compared, forecasts, differences))}", highlight=False
        )
    if differences:
        raise typer.Exit(1)


# --- what was found


def _forecasts(compared: Sequence[Topology], rows: int | None) -> list[Forecast]:
    """Of every topology, from the one profile of the first."""
    profile = compared[0].middle.profile
    return [predict(topology.graph, profile, options=Options(rows=rows)) for topology in compared]


def _rows(graph: Graph) -> int | None:
    """Rows that the whole training reads: those of the source's file, times epochs; None if it has no file."""
    parameters = {key: default for key, (_, default) in source(graph).signature.parameters.items()}
    parameters |= source(graph).parameters
    if not {"path", "epochs"} <= set(parameters) or parameters["epochs"] is None:
        return None
    return len(ArrowRows(parameters["path"])) * int(parameters["epochs"])


def _differences(compared: Sequence[Topology]) -> list[str]:
    """One line for each topology that did not compute what the first did, and for each that differs from itself."""
    expected = compared[0].trials[0]
    if not expected.digests and not expected.weights:
        raise BadInput("no stage reports a digest or holds a state: nothing tells whether results are the same")
    found = []
    for topology in compared:
        for number, trial in enumerate(topology.trials):
            if said := difference(expected, trial):
                found.append(f"{topology.name} differs from {compared[0].name} in run {number + 1}, first in {said}")
                break
    return found


def _findings(compared: Sequence[Topology], forecasts: Sequence[Forecast], differences: Sequence[str]) -> Findings:
    first = compared[0]
    gains = {topology.name: ratio(topology, first) for topology in compared[1:]}
    best = max(gains, key=lambda name: gains[name].median, default=None)
    if best is None or gains[best].median <= 1.0:
        headline = f"{first.name} is the fastest: {duration(first.step.median)} a step."
    else:
        sure = f" ({gains[best].range()})" if gains[best].range() else ""
        headline = f"{best} is the fastest: {gains[best].median:.3g} times as fast as {first.name}{sure}."
    if differences:
        headline = f"No topology can be called the fastest: {differences[0]}."
    steps = len(first.trials[0].digests)
    count = f"All {sum(len(t.trials) for t in compared)} runs computed the same: "
    same = f"{count}{steps} digests and the final weights are equal." if steps else f"{count}equal final weights."
    sameness = "The topologies did NOT compute the same." if differences else same
    rows = [_row(topology, forecast, first) for topology, forecast in zip(compared, forecasts, strict=True)]
    heads = [head for number, head in enumerate(_HEADS) if any(row[number][0] != "-" for row in rows)]
    kept = [[cell for cell, head in zip(row, _HEADS, strict=True) if head in heads] for row in rows]
    return Findings(
        headline, sameness, differences, heads, kept, _verdicts(compared, forecasts), _remarks(compared, forecasts)
    )


_HEADS = (
    "topology",
    "GPUs",
    "step",
    "times as fast",
    "forecast",
    "measured / forecast",
    "rows/s",
    "rows/s per GPU",
    "supervised tokens/s",
    "padding",
    "all rows in",
)


def _row(topology: Topology, forecast: Forecast, first: Topology) -> list[tuple[str, str]]:
    step, gain, rates = topology.step, ratio(topology, first), _rates(topology)
    rows = rates.get("rows")
    eta = forecast.eta and rows and forecast.rows_per_second and forecast.eta * forecast.rows_per_second / rows
    return [
        (topology.name, ""),
        (str(topology.gpus) if topology.gpus else "-", ""),
        (duration(step.median), _bracketed(step, 1.0 if step.median >= 1 else 1000.0)),
        ("1" if topology is first else f"{gain.median:.3g}", "" if topology is first else _bracketed(gain)),
        (duration(forecast.pace.step), ""),
        (f"{step.median / forecast.pace.step:.1%}", ""),
        (_number(rows) if rows else "-", ""),
        (_number(rows / topology.gpus) if rows and topology.gpus else "-", ""),
        (_number(rates["supervised"]) if "supervised" in rates else "-", ""),
        (f"{1 - rates['tokens'] / rates['padded']:.1%}" if {"tokens", "padded"} <= set(rates) else "-", ""),
        (duration(eta) if eta else "-", ""),
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _bracketed(value: Estimate, scale: float = 1.0) -> str:
    return f"[{value.range(scale)}]" if value.range() else ""


def _rates(topology: Topology) -> dict[str, float]:
    """measure -> amount a second: what the messages held on average, and how many were computed a second."""
    profile = topology.middle.profile
    held: dict[str, float] = {}
    for parts in profile.stages.values():
        for samples in parts.values():
            for name, values in samples.measures.items():
                held.setdefault(name, float(np.mean(values)))
    return {name: amount * profile.window / topology.step.median for name, amount in held.items()}


def _remarks(compared: Sequence[Topology], forecasts: Sequence[Forecast]) -> list[str]:
    """One line for each topology that is not as forecast, and was measured over too few messages to be sure of it."""
    found = []
    for topology, forecast in zip(compared, forecasts, strict=True):
        ahead, measured = topology.ahead, topology.middle.profile.steps.count * topology.graph.window
        if measured < _MANY * ahead and abs(topology.step.median / forecast.pace.step - 1) > _CLOSE:
            found.append(
                f"{topology.name} was measured over {measured} messages, and up to {ahead} may have been worked on "
                "before that: it may look faster than it is (more --steps)"
            )
    return found


def _verdicts(compared: Sequence[Topology], forecasts: Sequence[Forecast]) -> dict[str, str]:
    """What each forecast says of its topology, where it was right; else by how much not, and whether a shared processor
    explains it."""
    profile = compared[0].middle.profile
    said = {}
    for topology, forecast in zip(compared, forecasts, strict=True):
        off = topology.step.median / forecast.pace.step
        said[topology.name] = forecast.verdict
        if off > 1 + _TRUSTED:
            said[topology.name] = f"takes {off:.2f} times its forecast, so what that advises is left out"
            together = dict.fromkeys(topology.graph.stages, "one processor")
            shared = predict(topology.graph, profile, options=Options(together=together, changes=False)).pace.step
            if shared > 1.05 * forecast.pace.step:
                said[topology.name] += (
                    "; if no two stages ever computed at the same time (one interpreter, or too few cores), "
                    f"it would be {duration(shared)} a step"
                )
        elif off < 1 - _TRUSTED:
            said[topology.name] = f"takes only {off:.2f} times its forecast, so what that advises is left out"
    return said


def _alone(first: Topology) -> list[tuple[str, ...]]:
    """Each stage by itself, beside what it took in the first topology; heads first."""
    seen = first.middle.profile
    lines: list[tuple[str, ...]] = [("stage", "alone, a step", f"in {first.name}", "most steps/s")]
    for stage, seconds in alone(first.graph).items():
        spent = sum(samples.total for samples in seen.stages[stage].values()) / seen.steps.count
        lines.append((stage, duration(seconds), duration(spent), _number(1 / seconds) if seconds > 1e-6 else "-"))
    return lines


# --- what is shown and kept


def _print(console: Console, findings: Findings) -> None:
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(findings.heads):
        table.add_column(head, justify="left" if number == 0 else "right")
    for row in findings.rows:
        table.add_row(*(" ".join(filter(None, cell)).replace("[", "\\[") for cell in row))
    console.print(described(), highlight=False, soft_wrap=True)
    console.print(table)
    if findings.alone:
        ceilings = Table(*findings.alone[0], box=None, pad_edge=False)
        for line in findings.alone[1:]:
            ceilings.add_row(*line)
        console.print("", ceilings)
    console.print(f"\n{findings.headline}", highlight=False)
    for name, verdict in findings.verdicts.items():
        console.print(f"{name}: {verdict}", highlight=False, markup=False, soft_wrap=True)
    for line in findings.remarks:
        console.print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)
    for line in (findings.sameness, *findings.differences):
        console.print(
            line, highlight=False, markup=False, soft_wrap=True, style="bold red" if findings.differences else ""
        )


def _figures(compared: Sequence[Topology], forecasts: Sequence[Forecast], differences: Sequence[str]) -> dict[str, Any]:
    def about(topology: Topology, forecast: Forecast) -> dict[str, Any]:
        return {
            "files": topology.graph.files,
            "window": topology.graph.window,
            "gpus": topology.gpus,
            "parameters": {name: stage.parameters for name, stage in topology.graph.stages.items()},
            "step_seconds": [trial.step for trial in topology.trials],
            "step": vars(topology.step),
            "times_as_fast": vars(ratio(topology, compared[0])),
            "a_second": _rates(topology),
            "forecast_seconds": forecast.pace.step,
            "verdict": forecast.verdict,
            "workers": {w.name: [w.busy, w.starved, w.blocked] for w in topology.middle.view.workers},
            "digests": topology.trials[0].digests,
            "weights": topology.trials[0].weights,
        }

    each = {t.name: about(t, f) for t, f in zip(compared, forecasts, strict=True)}
    return {"repeats": len(compared[0].trials), "same": not differences, "differences": differences, "topologies": each}

"""Which of several graphs is fastest, by how much and why, and whether all of them computed the same."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.alone import alone
from benchmarks.compare import Interrupted, Topology, clear, ratio, run_in_turns
from benchmarks.findings import Findings, found, gpus_busy, rates, telling
from benchmarks.graphs import inputs, loaded, on_devices_of, source
from benchmarks.machine import Out, described, keep
from benchmarks.terminal import output, progress
from dflash_pipe import BadInput
from dflash_pipe.counted import counted
from dflash_pipe.forecast import Forecast, Options, predict
from dflash_pipe.forecast_table import duration, figure
from dflash_pipe.graph import Graph
from dflash_pipe.memory import estimate, refuse
from dflash_pipe.plan import plan
from dflash_pipe.profile import save
from dflash_pipe.writable import writable
from stages.arrow_rows import ArrowRows

__all__ = ["topologies"]

# As `dflash-pipe run` sets it.
_SWITCH_INTERVAL = 0.0005
_NAME = "topologies"  # of the file with the figures


def topologies(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="GRAPH... [OVERLAY]... [KEY=VALUE]...", help="graphs, then what is laid over all"),
    ],
    steps: Annotated[int | None, typer.Option(help="optimizer steps in a run (as the graph says)", min=4)] = None,
    repeat: Annotated[int, typer.Option(help="timed runs of each graph, in turns", min=0)] = 5,
    same_devices: Annotated[bool, typer.Option("--same-devices", help="all on the GPUs that the first uses")] = False,
    rows: Annotated[
        int | None, typer.Option(help="rows of the whole training, for its time (epochs x rows of data.path)", min=1)
    ] = None,
    profile_stages: Annotated[
        bool, typer.Option("--profile-stages", help="also each stage of the first alone: its ceiling")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="write the HTML page to this file")] = None,
    out: Out = None,
) -> None:
    """Compare graphs of one dataflow: speed, why, and results.

    They run in turns; the exit code is 1 if they computed different things, or if a run failed. Before the timed runs
    each runs once for what has to be compiled or tuned, and for a digest of every step. --repeat 0 takes the times of
    that one run, after its warm-up and with the digests in it: for graphs whose runs take minutes.

    key=value and overlay files are laid over every graph alike. For a variant of one graph write a small file, say
    two.yaml with `extends: graphs/overlapped.yaml` and `workers: {target: {replicas: 2}}`, and name both. The same
    graph twice is a control: its ratio should be 1.
    """
    graphs = loaded(arguments, steps)
    _refuse_to_overwrite(graphs, report, out)
    if same_devices:
        graphs = [on_devices_of(graphs[0], graph) for graph in graphs]
    for graph in graphs:
        refuse(estimate(plan(graph)))
    rows = rows or _rows(graphs[0])
    console = output()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    with progress(console) as told:
        compared, ceilings, stopped, failure = _measured(graphs, repeat, profile_stages, told)
        _keep_profiles(compared, out)
        told("forecasting")
        forecasts, own, hurried = _forecasts(compared)
        stopped = stopped or hurried
    findings = found(compared, forecasts, own, rows)
    findings = replace(findings, headline=" ".join(filter(None, (stopped, findings.headline))))
    _print(console, findings, ceilings)
    if report:
        from benchmarks.report import rendered  # it needs what only a report needs

        report.write_text(rendered(compared, forecasts, findings, ceilings))
        console.print(f"report: {report}", highlight=False)
    if out:
        figures = _figures(compared, forecasts, own, findings) | {"stopped": bool(stopped)}
        console.print(f"results: {keep(out, _NAME, figures)}", highlight=False)
    if failure:
        raise failure
    if stopped:
        raise typer.Exit(128 + signal.SIGINT)
    if findings.differences:
        raise typer.Exit(1)


def _forecasts(compared: Sequence[Topology]) -> tuple[list[Forecast], list[float], str]:
    """One for each; seconds a step of each from its own profile; and in words what Ctrl-C left out, or ''."""
    pairs = [(topology.graph, telling(topology, compared[0])) for topology in compared]
    try:
        forecasts = [predict(*pair) for pair in pairs]
        return forecasts, _own(compared, forecasts), ""
    except KeyboardInterrupt:
        options = Options(changes=False)
        forecasts = [predict(*pair, options=options) for pair in pairs]
        return forecasts, _own(compared, forecasts), "Stopped before changes were forecast."


def _own(compared: Sequence[Topology], forecasts: Sequence[Forecast]) -> list[float]:
    """Seconds a step of each as forecast from its own profile: what its schedule makes of its stages' times."""
    options, steps = Options(changes=False), []
    for topology, forecast in zip(compared, forecasts, strict=True):
        profile = topology.middle.profile
        same = telling(topology, compared[0]) is profile
        steps.append((forecast if same else predict(topology.graph, profile, options=options)).pace.step)
    return steps


def _measured(
    graphs: Sequence[Graph], repeat: int, profile_stages: bool, told: Callable[[str], None]
) -> tuple[list[Topology], list[tuple[str, ...]], str, BaseExceptionGroup[BaseException] | None]:
    """The graphs' runs; each stage of the first alone, if asked for; in words what Ctrl-C or a failure left out, or '';
    and the failure."""
    try:
        compared = run_in_turns(graphs, repeat, told, checked=True)
    except Interrupted as early:
        ran = early.topologies
        left = ", ".join(graph.name for graph in graphs if graph not in [topology.graph for topology in ran])
        of_each = f"{counted(max(repeat, 1), 'timed run')} of each{left and f', before {left}'}"
        said = f"Stopped after {len(ran[0].trials)} of {of_each}"
        return ran, [], said + (", because a run failed." if early.failure else "."), early.failure
    try:
        if profile_stages:
            told("each stage alone")
        return compared, _alone(compared[0]) if profile_stages else [], "", None
    except KeyboardInterrupt:
        return compared, [], "Stopped before every stage had run alone.", None


def _refuse_to_overwrite(graphs: Sequence[Graph], report: Path | None, out: Path | None) -> None:
    """Raise BadInput where a result would take the place of what is read, or a report that of what is none."""
    if report and not importlib.util.find_spec("matplotlib"):
        raise BadInput("--report needs matplotlib: pip install 'dflash-pipe[bench]'", "command line")
    writable("--report", report, inputs(graphs))
    if report and report.is_file():
        from benchmarks.report import is_report

        if report.stat().st_size and not is_report(report):
            raise BadInput(f"--report: {report} is there and is no report of this command", "command line")
    for kept in (out / f"{_NAME}.json", *(_profile(out, graph) for graph in graphs)) if out else ():
        if kept.exists():
            writable("--out", kept, inputs(graphs))


def _keep_profiles(compared: Sequence[Topology], out: Path | None) -> None:
    """Before anything is forecast, which takes time and may be stopped."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        for topology in compared:
            save(topology.middle.profile, _profile(out, topology.graph))


def _profile(out: Path, graph: Graph) -> Path:
    """Where the profile of a graph's run is kept, for forecasts on any machine. A graph's name can be a path."""
    return out / f"profile_{re.sub(r'[^A-Za-z0-9_.-]+', '_', graph.name)}.json"


def _rows(graph: Graph) -> int | None:
    """Rows that the whole training reads: those of the source's file, times epochs; None if it has no file."""
    parameters = {key: default for key, (_, default) in source(graph).signature.parameters.items()}
    parameters |= source(graph).parameters
    if not {"path", "epochs"} <= set(parameters) or parameters["epochs"] is None:
        return None
    return len(ArrowRows(parameters["path"])) * int(parameters["epochs"])


def _alone(first: Topology) -> list[tuple[str, ...]]:
    """Each stage by itself, beside what it took in the first topology; heads first."""
    clear()
    seen = first.middle.profile
    lines: list[tuple[str, ...]] = [("stage", "alone, a step", f"in {first.name}", "most steps/s")]
    for stage, seconds in alone(first.graph).items():
        spent = sum(samples.total for samples in seen.stages[stage].values()) / seen.steps.count
        lines.append((stage, duration(seconds), duration(spent), figure(1 / seconds) if seconds > 1e-6 else "-"))
    return lines


def _print(console: Console, findings: Findings, ceilings: Sequence[Sequence[str]]) -> None:
    rows = [[" ".join(filter(None, cell)) for cell in row] for row in findings.rows]
    console.print(described(), highlight=False, soft_wrap=True)
    for lines in filter(None, ([findings.heads, *rows], ceilings)):
        table = Table(box=None, pad_edge=False)
        for number, head in enumerate(lines[0]):
            table.add_column(head, justify="left" if number == 0 else "right")
        for line in lines[1:]:
            table.add_row(*map(escape, line))
        console.print(table, "")
    told = [findings.headline]
    told += [f"{name}: {verdict}" for name, verdict in findings.verdicts.items()]
    told += [f"note: {line}" for line in findings.remarks]
    for line in told:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    style = "bold red" if findings.differences else ""
    for line in (findings.sameness, *findings.differences):
        console.print(line, highlight=False, markup=False, soft_wrap=True, style=style)


def _figures(
    compared: Sequence[Topology], forecasts: Sequence[Forecast], own: Sequence[float], findings: Findings
) -> dict[str, Any]:
    def about(topology: Topology, forecast: Forecast, seconds: float) -> dict[str, Any]:
        checked = topology.checked or topology.trials[0]
        return {
            "files": topology.graph.files,
            "window": topology.graph.window,
            "gpus": topology.gpus,
            "parameters": {name: stage.parameters for name, stage in topology.graph.stages.items()},
            "step_seconds": [trial.step for trial in topology.trials],
            "step": vars(topology.step),
            "times_as_fast": vars(ratio(topology, compared[0])),
            "a_second": rates(topology),
            "peak_bytes": topology.memory,
            "forecast_seconds": forecast.pace.step,
            "own_forecast_seconds": seconds,
            "overlap_efficiency": seconds / topology.middle.step,
            "device_busy": gpus_busy(topology),
            "verdict": findings.verdicts[topology.name],
            "workers": {w.name: [w.busy, w.starved, w.blocked] for w in topology.middle.view.workers},
            "digests": checked.digests,
            "weights": checked.weights,
        }

    each = {t.name: about(t, f, seconds) for t, f, seconds in zip(compared, forecasts, own, strict=True)}
    same = {"same": not findings.differences, "differences": findings.differences}
    return {"repeats": len(compared[0].trials), **same, "topologies": each}

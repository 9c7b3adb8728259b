"""The command `dflash-pipe`: run, plan, check or predict a graph.

Exit codes: 0 done, 1 a stage failed, 2 bad input (one line says what), 129 / 130 / 143 stopped by SIGHUP / SIGINT /
SIGTERM.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from dflash_pipe.check import check as check_graph
from dflash_pipe.closing import closing_lines
from dflash_pipe.counted import counted
from dflash_pipe.display import Display
from dflash_pipe.errors import BadInput, BadSnapshot, Missing
from dflash_pipe.forecast import Options
from dflash_pipe.forecast import predict as forecast
from dflash_pipe.forecast_table import rendered
from dflash_pipe.graph import Graph, dump, load
from dflash_pipe.located import at, files_among, under
from dflash_pipe.located import read as read_tree
from dflash_pipe.memory import Need, estimate, memory_table, refuse, too_much
from dflash_pipe.picture import unpadded
from dflash_pipe.places import COMMAND_LINE
from dflash_pipe.plan import Plan
from dflash_pipe.plan import plan as lay_out
from dflash_pipe.profile import load as load_profile
from dflash_pipe.profile import save as save_profile
from dflash_pipe.run_folder import RunFolder, fresh
from dflash_pipe.runtime import Result, Run
from dflash_pipe.signals import leaving
from dflash_pipe.snapshot import has_snapshot, newest
from dflash_pipe.snapshot import read as read_snapshot
from dflash_pipe.splits import SPLIT_BEGINS, ranked, splits_table, written
from dflash_pipe.trace import TRACE_BEGINS, write_chrome
from dflash_pipe.writable import writable

__all__ = ["app", "execute", "failures_to_exit_codes", "main", "opened"]

# Python lets a thread that computes in pure Python keep the interpreter for 5 ms; with a stage that tokenises beside
# stages that hand off, a tenth of that costs the pipeline 1.5 % instead of 12 %.
_SWITCH_INTERVAL = 0.0005

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
Graphs = Annotated[
    list[str] | None, typer.Argument(metavar="FILE... [KEY=VALUE]...", help="graph files, then overrides")
]
# The error of a wrong command line. typer exports only what is made of it (and has its own click since 0.26).
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@app.command()
def run(
    graphs: Graphs = None,
    resume: Annotated[Path | None, typer.Option(help="go on after the newest snapshot of this run folder")] = None,
    runs: Annotated[Path, typer.Option(help="where run folders are made")] = Path("runs"),
    plain: Annotated[bool, typer.Option("--plain", help="plain progress lines instead of the live view")] = False,
    trace: Annotated[Path | None, typer.Option(help="write a timeline for ui.perfetto.dev to this file")] = None,
) -> None:
    """Run a graph to its end. With --resume and no FILE, the graph is the one in the run folder."""
    if resume is not None:
        newest(resume)  # there is one
    arguments = graphs or []
    graph = opened([str(resume / "graph.yaml"), *arguments] if resume and not files_among(arguments) else arguments)
    if resume is not None:
        _goes_on_in(resume, graph, files_among(arguments))
    writable("--trace", trace, graph.files, TRACE_BEGINS)
    chosen = graph.name not in {Path(file).stem for file in graph.files}
    folder = resume or fresh(runs, graph.name, chosen=chosen)
    console = Console(force_terminal=False) if plain else Console()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    result = execute(graph, folder, resume=resume is not None, console=console, signals=True, trace=trace)
    if result.stopped:
        _leave(128 + result.stopped)
    _leave(0)


def _goes_on_in(folder: Path, graph: Graph, files: list[str]) -> None:
    """Raise BadInput for a name, given beside the topology (the first file), that is not that of the resumed folder."""
    where, _ = at(graph.places.tree, ("name",))
    beside = where == COMMAND_LINE or where.rpartition(":")[0] in [os.path.normpath(file) for file in files[1:]]
    own = folder.resolve().name
    written = under(read_tree([folder / "graph.yaml"])[0]).get("name")
    if beside and graph.name not in (own, written and written.value):
        line = f"name is {graph.name!r}, but --resume goes on in {folder}: leave the name out (or name={own}), or copy "
        raise BadInput(f"{line}the folder to {folder.parent / graph.name} and resume the copy", where)


@app.command()
def plan(
    graphs: Graphs = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="a mermaid flowchart instead of tables")] = False,
) -> None:
    """Show what would run where, and how messages travel, without running anything."""
    laid_out: Plan = lay_out(opened(graphs or []))
    print(laid_out.mermaid() if mermaid else laid_out.table())
    if not mermaid and (needs := _estimated(laid_out)):
        print(f"\n{memory_table(needs)}")


@app.command()
def check(graphs: Graphs = None) -> None:
    """Check a graph without running anything."""
    graph = opened(graphs or [])
    laid_out = lay_out(graph)
    estimated = _estimated(laid_out)
    needs = estimated or []
    for need in needs:
        print(need)
    refuse([need for need in needs if need.device != "cpu"])
    # A graph for other machines, whose GPUs this one has not, may be checked here.
    cannot = "; ".join(filter(None, map(too_much, needs)))
    said = "all sound" if estimated is not None else "sound, as far as can be told without what is not here"
    said = f"sound, but it cannot run on this machine: {cannot}" if cannot else said
    stages, workers = counted(len(graph.stages), "stage"), counted(len(laid_out.workers), "worker")
    print(f"{', '.join(graph.files)}: {stages} on {workers}, {said}")


@app.command()
def predict(
    profile: Annotated[Path, typer.Option(help="profile.json of a run of the same dataflow")],
    graphs: Graphs = None,
    what_if: Annotated[
        list[str] | None, typer.Option(metavar="CHANGE", help='"key=value ..." or a graph file; may be repeated')
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="rank every split of so many GPUs among the workers")] = None,
    rows: Annotated[int | None, typer.Option(help="rows in the data set, times epochs, for the ETA")] = None,
    write: Annotated[Path | None, typer.Option(help="with --gpus: write the best split as a graph file")] = None,
) -> None:
    """Say how long a step of a graph will take, what decides that, and what changes would bring."""
    if gpus is None and write is not None:
        raise BadInput("--write needs --gpus", "command line")
    if gpus is not None and what_if:
        raise BadInput("--gpus and --what-if ask for different tables: give one of them", "command line")
    if rows is not None and rows < 1:
        raise BadInput(f"--rows is {rows}, expected at least 1", "command line")
    measured, options = load_profile(profile), Options(rows=rows)
    graph = opened(graphs or [], elsewhere=bool(measured.memory))
    writable("--write", write, [*graph.files, str(profile)], SPLIT_BEGINS)
    if rows is not None and not any("rows" in s.measures for parts in measured.stages.values() for s in parts.values()):
        raise BadInput("--rows: the profile measures no rows, so there is no ETA", str(profile))
    try:
        splits = ranked(graph, measured, gpus, options) if gpus is not None else []
        table = splits_table(splits) if splits else rendered(forecast(graph, measured, what_if or [], options))
    except BadInput as error:
        raise error.at(str(profile)) from error
    _show(table)
    if write is not None and gpus is not None:
        if splits[0].forecast is None:
            raise BadInput(f"no split of {counted(gpus, 'GPU')} is possible: {splits[0].refusal}", "command line")
        write.write_text(written(splits[0], files_among(graphs or []), write.parent))
        print(f"written: {write} ({splits[0]})")


def _estimated(laid_out: Plan) -> list[Need] | None:
    """What each device needs. Where that depends on a model or on data that is not here yet, say so: None. Raises
    BadInput for what is wrong in any case."""
    try:
        return estimate(laid_out)
    except Missing as error:
        print(f"memory is not estimated: {error}")
        return None


def _show(table: RenderableType) -> None:
    """Print it: as wide as the terminal, or, where there is none, as it is."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(table)
    else:
        print(unpadded(table, width=10_000))


def opened(arguments: list[str], *, elsewhere: bool = False) -> Graph:
    """Load and check the graph that these files and overrides give; elsewhere: as for `load`. Raises BadInput."""
    files = files_among(arguments)
    if not files:
        raise BadInput("no graph file given (for example graphs/overlapped.yaml)", "command line")
    with leaving():  # stages' modules are imported
        graph = load(files, [a for a in arguments if a not in files], elsewhere=elsewhere)
    check_graph(graph)
    return graph


def execute(
    graph: Graph,
    folder: Path,
    *,
    console: Console,
    resume: bool = False,
    signals: bool = False,
    seconds: float | None = None,
    trace: Path | None = None,
) -> Result:
    """Run a checked graph in its folder with a view on `console`; log how it ends. Raises what the run raises.

    resume: go on after the folder's newest snapshot. seconds: the source ends at the first window after so long, as
    on a signal. trace: file for the timeline.
    """
    laid_out = lay_out(graph)
    needs = estimate(laid_out)
    for need in needs:
        console.print(str(need), markup=False, highlight=False, soft_wrap=True)
    refuse(needs)
    with RunFolder(folder) as opened_folder:
        restored = read_snapshot(newest(folder)) if resume else None
        running = Run(laid_out, folder, restored)
        if restored is not None:
            opened_folder.forget_after(restored.window)
        running.on_report = opened_folder.report
        opened_folder.keep_graph(dump(graph))
        at = f"window {restored.window}" if restored else "the beginning"
        opened_folder.log(f"run {graph.name} ({', '.join(graph.files)}) from {at}")
        try:
            with Display(running.view, console), _stopping_after(seconds, running):
                result = running.execute(signals=signals)
        except BaseException as error:
            opened_folder.log(f"failed\n{traceback.format_exc()}")
            refused = isinstance(error, BaseExceptionGroup) and error.subgroup(BadSnapshot)  # it would be again
            for line in (f"failed; the log is in {folder / 'log.txt'}", *(() if refused else _resume_line(folder))):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            raise
        if result.profile is not None:
            save_profile(result.profile, folder / "profile.json")
        if result.timeline is not None and trace is not None:
            write_chrome(result.timeline, trace)
        for line in (*closing_lines(graph, result.profile, result.unmeasured), *_closing_lines(result, folder)):
            opened_folder.log(line)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return result


@contextmanager
def _stopping_after(seconds: float | None, running: Run) -> Iterator[None]:
    timer = threading.Timer(seconds, running.stop) if seconds is not None else None
    if timer is not None:
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()


def _closing_lines(result: Result, folder: Path) -> Iterator[str]:
    yield from result.account.splitlines()
    if result.unfinished:
        left = counted(result.unfinished, "micro-batch", "micro-batches")
        none = "" if result.cursor is not None else "; no step was made"
        yield f"not stepped: {left} of a last window that was not full{none}"
    if result.left_behind:
        yield f"still computing when the run was given up: {', '.join(result.left_behind)}"
    if result.cancelled:
        yield "cancelled; what was in flight is lost"
    elif result.stopped:
        yield f"stopped by {result.stopped.name} at the end of a window"
    if result.stopped or result.cancelled:
        yield from _resume_line(folder)
    yield f"run folder: {folder}"


def _resume_line(folder: Path) -> Iterator[str]:
    """How to go on, if there is a snapshot to go on from."""
    if has_snapshot(folder):
        yield f"resume: dflash-pipe run --resume {shlex.quote(str(folder))}"


def main() -> None:
    """Entry point: turns failures into exit codes."""
    with failures_to_exit_codes():
        _leave(app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0)


@contextmanager
def failures_to_exit_codes() -> Iterator[None]:
    """Say what failed on stderr and leave with the exit code of the module's docstring."""
    try:
        yield
    except BadInput as error:
        print(error, file=sys.stderr)
        _leave(2)
    except _UsageError as error:
        print(f"command line: {error.format_message()}", file=sys.stderr)  # type: ignore[attr-defined]
        _leave(2)
    except KeyboardInterrupt:  # before the run took the signals
        _leave(128 + signal.SIGINT)
    except BaseExceptionGroup as failures:
        bad, other = failures.split(BadInput)
        if bad is not None and other is None:
            lines: dict[tuple[object, ...], str] = {}
            for leaf in _leaves(bad):
                lines.setdefault(leaf.args, str(leaf))  # one for what several replicas met
            print(*lines.values(), sep="\n", file=sys.stderr)
            _leave(2)
        for failure in failures.exceptions:  # the group's own frames are only this command's
            traceback.print_exception(failure)
        _leave(1)
    except BrokenPipeError:  # whoever reads our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(128 + signal.SIGPIPE)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _leave(code: int) -> None:
    raise SystemExit(code)


if __name__ == "__main__":
    main()

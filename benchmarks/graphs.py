"""The graphs that a command line names: all of one dataflow, with what is laid over them, each under its own name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dflash_pipe import BadInput
from dflash_pipe.check import check
from dflash_pipe.graph import Graph, StageSpec, dataflow, load, transport_of
from dflash_pipe.graph import difference as dataflow_difference
from dflash_pipe.located import files_among
from dflash_pipe.signals import leaving
from dflash_pipe.what_if import is_whole

__all__ = ["ALL", "VARIANT", "gpus", "inputs", "is_control", "loaded", "on_devices_of", "source", "with_digests"]

ALL = "key=value and overlay files are laid over every graph"
VARIANT = f"{ALL}; a variant of one is a file that extends it"


def loaded(arguments: Sequence[str], steps: int | None) -> list[Graph]:
    """The graphs that are named, all of one dataflow. A file that extends another or says what stages use is a
    topology; any other file, and key=value, is laid over each of them. steps: how many optimizer steps the source is
    told to make.

    Raises BadInput.
    """
    files = files_among(arguments)
    overrides = [a for a in arguments if a not in files]
    whole = [file for file in files if is_whole(file)]
    overlays = [file for file in files if file not in whole]
    if not whole:
        raise BadInput("no topology given (for example graphs/sequential.yaml graphs/overlapped.yaml)", "command line")
    graphs, refused = [], {}
    for file in whole:
        try:
            graphs.append(_loaded([file, *overlays], overrides, steps))
        except BadInput as error:
            refused[file] = error
    for file, bad in refused.items():
        if graphs and bad.where == "command line":  # it fits some, and was perhaps meant for these only
            raise BadInput(f"{file}: {bad.message} ({VARIANT})", bad.where)
        raise bad
    _refuse_other_dataflows(whole, graphs)
    return _with_own_names(whole, graphs)


def _loaded(files: Sequence[str], overrides: Sequence[str], steps: int | None) -> Graph:
    with leaving():  # stages' modules are imported
        length = _length(load(files, overrides), steps)
    graph = load(files, [*overrides, "snapshot=null", *length])
    check(graph)
    return graph


def _length(graph: Graph, steps: int | None) -> list[str]:
    if steps is None:
        return []
    stage = source(graph)
    lengths = {"steps": steps, "count": steps * graph.window}
    known = [key for key in lengths if key in stage.signature.parameters]
    if not known:
        raise BadInput(f"--steps: stage {stage.name} has neither 'steps' nor 'count': give its length as key=value")
    return [f"stages.{stage.name}.with.{known[0]}={lengths[known[0]]}"]


def _refuse_other_dataflows(files: Sequence[str], graphs: Sequence[Graph]) -> None:
    first = dataflow(graphs[0])
    for file, graph in zip(files, graphs, strict=True):
        if said := dataflow_difference(first, dataflow(graph), (f"in {files[0]}", f"in {file}")):
            raise BadInput(f"different dataflows, so nothing was run: {said} ({ALL})", "command line")


def _with_own_names(files: Sequence[str], graphs: Sequence[Graph]) -> list[Graph]:
    """Each graph under a name of its own: of two files with one name their paths, of a file again which time it is."""
    names = [graph.name for graph in graphs]
    if len(set(zip(names, files, strict=True))) > len(set(names)):
        names = list(files)
    times = [names[:number].count(name) + 1 for number, name in enumerate(names)]
    named = (name if time == 1 else f"{name} #{time}" for name, time in zip(names, times, strict=True))
    return [replace(graph, name=name) for graph, name in zip(graphs, named, strict=True)]


def is_control(graph: Graph, first: Graph) -> bool:
    """Whether it is the same graph again, whatever it is called: running both shows what the machine alone does."""
    alike = replace(graph, name=first.name, resolved=first.resolved) == first
    return alike and transport_of(graph) == transport_of(first)


def source(graph: Graph) -> StageSpec:
    """The graph's source."""
    return next(stage for stage in graph.stages.values() if stage.signature.source)


def inputs(graphs: Sequence[Graph]) -> list[str]:
    """Every file that the graphs were read from, overlays and what is extended among them, or that a key names."""

    def words(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list | tuple):
            for each in value.values() if isinstance(value, dict) else value:
                yield from words(each)

    told = (word for graph in graphs for stage in graph.stages.values() for word in words(stage.parameters))
    read = (file for graph in graphs for file in graph.files)
    return [file for file in dict.fromkeys((*read, *told)) if os.path.isfile(file)]


def with_digests(graph: Graph) -> Graph:
    """The graph with stages that report digests only when asked, which takes time, asked for them."""
    asked = {
        name: replace(stage, parameters={**stage.parameters, "digest": True})
        for name, stage in graph.stages.items()
        if stage.signature.parameters.get("digest", (None,))[0] is bool
    }
    return replace(graph, stages={**graph.stages, **asked})


def on_devices_of(first: Graph, graph: Graph) -> Graph:
    """The graph on the GPUs that `first` uses: its own are mapped onto them, one after the other; on none, the CPU."""
    pool, own = gpus(first) or ["cpu"], gpus(graph)
    place = {"cpu": "cpu"} | {name: pool[number % len(pool)] for number, name in enumerate(own)}
    workers = {
        name: replace(
            worker, device={stage: tuple(place.get(d, pool[0]) for d in used) for stage, used in worker.device.items()}
        )
        for name, worker in graph.workers.items()
    }
    return replace(graph, workers=workers)


def gpus(graph: Graph) -> list[str]:
    """In the order in which the graph names them; a source computes on the host, wherever it is said to be."""
    placed = (item for worker in graph.workers.values() for item in worker.device.items())
    places = (names for stage, names in placed if not graph.stages[stage].signature.source)
    return [name for name in dict.fromkeys(itertools.chain(*places)) if name != "cpu"]

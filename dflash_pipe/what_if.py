"""Changes to a graph that a forecast tries: the usual ones for every graph, and those that a user asks for."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dflash_pipe.check import check, rate
from dflash_pipe.errors import BadInput
from dflash_pipe.graph import Capacity, ChannelSpec, Credits, Graph, WorkerSpec, dataflow, dump, load
from dflash_pipe.located import dumps, under
from dflash_pipe.located import read as read_files
from dflash_pipe.plan import plan
from dflash_pipe.transport import Elsewhere

__all__ = ["TAKES", "Change", "asked", "check_laws", "graph_of", "is_lawful", "is_whole", "usual"]

TAKES: tuple[Literal["first_free"], Literal["round_robin"]] = ("first_free", "round_robin")

_DATA_PARALLEL = "data_parallel="
_COMPUTED = ("seed", "window", "threads", "stages")  # keys that say what is computed, whatever the topology


@dataclass(frozen=True)
class Change:
    """name: as the table shows it. wording: as a sentence has it ("a second target replica"). graph: what it makes.
    times: stage -> factor on all its times. free: a channel that is handed over in no time. same_result: whether a run
    would still compute the same."""

    name: str
    wording: str
    graph: Graph
    times: Mapping[str, float] = field(default_factory=dict)
    free: str = ""
    same_result: bool = True


def graph_of(yaml_text: str, where: str, *, elsewhere: bool = False) -> Graph:
    """A graph from its text (`dflash_pipe.graph.dump`); elsewhere: as for `load`. Raises BadInput, `where` says whose
    text it is."""
    try:
        with _as_file(yaml_text) as file:
            return load([file], elsewhere=elsewhere)
    except BadInput as error:
        raise BadInput(error.message, where) from error


# --- what a user asks for ---------------------------------------------------------------------------------------------


def asked(graph: Graph, text: str) -> Change:
    """`key=value` overrides and overlay files, separated by spaces, as one change of `graph`.

    A file that is a graph by itself (`is_whole`) takes the place of `graph`; any other file is laid over it.
    `data_parallel=N` means N replicas of every worker that sums gradients over a window.
    Raises BadInput.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{str(error).lower()} (expected key=value or a file)", f"--what-if {text!r}") from None
    if not words:
        raise BadInput("--what-if is empty (expected key=value or a file)", "command line")
    if comma := next((word for word in words if word.endswith(",")), ""):
        hint = f"{comma!r} ends in a comma: changes are separated by spaces (and a list that has any is quoted)"
        raise BadInput(hint, f"--what-if {text!r}")
    files = [word for word in words if "=" not in word or Path(word).exists()]
    parallel = [word for word in words if word not in files and word.startswith(_DATA_PARALLEL)]
    overrides = [word for word in words if word not in files and word not in parallel]
    try:
        changed = (_other if any(map(is_whole, files)) else _laid_over)(graph, files, overrides)
        for word in parallel:
            changed = _data_parallel(changed, word.removeprefix(_DATA_PARALLEL))
        check_laws(changed, changed.workers if parallel else ())
        if other := sorted(changed.stages.keys() ^ graph.stages.keys()):
            raise BadInput(f"it is of another dataflow (stage {other[0]!r} is only in one of the two)")
    except (BadInput, ValueError) as error:
        said = error if isinstance(error, BadInput) else BadInput(str(error))
        known = Path(said.where.rpartition(":")[0]).is_file()  # not the graph's own text, which lay in no file
        raise BadInput(said.message, said.where if known else f"--what-if {text!r}") from error
    return Change(text, text, changed, same_result=_computes_alike(graph, changed))


def is_whole(file: str) -> bool:
    """Whether a file, with what it extends, is a graph by itself: it says what stages use and which workers own them.
    An overlay may extend another overlay, and may put another stage in the place of one."""
    tree, _ = read_files([file])
    used = any("use" in under(tree, "stages", stage) for stage in under(tree, "stages"))
    return used and any("stages" in under(tree, "workers", worker) for worker in under(tree, "workers"))


def _laid_over(graph: Graph, files: list[str], overrides: list[str]) -> Graph:
    with _as_file(dump(graph)) as text:
        return load([text, *files], overrides, elsewhere=_is_elsewhere(graph))


def _other(graph: Graph, files: list[str], overrides: list[str]) -> Graph:
    """Another graph. What it leaves open, such as the target's model, it takes from the stages of `graph`."""
    try:
        return load(files, overrides, elsewhere=_is_elsewhere(graph))
    except BadInput as error:
        try:
            with _as_file(dumps({key: graph.resolved[key] for key in _COMPUTED if key in graph.resolved})) as text:
                return load([*files, text], overrides, elsewhere=_is_elsewhere(graph))
        except BadInput:
            raise error from None


def _is_elsewhere(graph: Graph) -> bool:
    """A change is for the machine that the graph is for."""
    return isinstance(graph.transport, Elsewhere)


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.yaml"
        path.write_text(text)
        yield str(path)


def _computes_alike(one: Graph, other: Graph) -> bool:
    """Whether both are certain to compute the same."""
    orders = [any(w.order == "completion" for w in graph.workers.values()) for graph in (one, other)]
    return dataflow(one) == dataflow(other) and orders[0] == orders[1]


def _data_parallel(graph: Graph, written: str) -> Graph:
    """The graph with so many of every worker that sums gradients: one that works on every message and sends once a
    window. Each takes its turn at the messages, on devices of its own."""
    if not (written.isdecimal() and int(written)):
        raise BadInput(f"data_parallel is {written!r}, expected a number of at least 1")
    if not _summing(graph):
        raise BadInput("no worker of this graph sums gradients over a window")
    replicas, workers = int(written), dict(graph.workers)
    for worker in _summing(graph):
        devices = {stage: _more(names[:replicas], replicas) for stage, names in worker.device.items()}
        take = TAKES[replicas > 1]
        workers[worker.name] = replace(worker, replicas=replicas, take=take, device=devices)
    return replace(graph, workers=workers)


def _summing(graph: Graph) -> list[WorkerSpec]:
    def sums(stage: str) -> bool:
        return graph.stages[stage].signature.window_output is not None and rate(graph, stage) == "message"

    return [worker for worker in graph.workers.values() if any(map(sums, worker.stages))]


# --- the usual ones ---------------------------------------------------------------------------------------------------


def usual(graph: Graph, sizes: Iterable[tuple[str, str, int]] = (), handed: Iterable[str] = ()) -> Iterator[Change]:
    """Everything worth asking of any graph; what its laws refuse is left out. sizes: keys (stage, key, what it is) to
    ask half and twice as much of. handed: channels to ask what their hand-off costs."""
    for stage in graph.stages:
        yield Change(f"{stage} 10 % faster", f"10 % off {stage}", graph, times={stage: 0.9})
    for name in handed:
        yield Change(f"{name}: handed over in no time", f"handing {name} over in no time", graph, free=name)
    for worker in graph.workers.values():
        yield from _one_more_replica(graph, worker)
    placed = {stage: worker.name for worker in graph.workers.values() for stage in worker.stages}
    if any(worker.replicas > 1 for worker in _summing(graph)):
        yield Change(f"{_DATA_PARALLEL}1", "no data parallelism", _data_parallel(graph, "1"))
    for channel in graph.channels.values():
        if any(placed[to.stage] != placed[channel.sender] for to in channel.receivers) and channel.per == "message":
            room = Capacity(2 * channel.capacity.items, channel.capacity.bytes and 2 * channel.capacity.bytes)
            changed = _with_channel(graph, replace(channel, capacity=room))
            yield Change(f"{channel.name}: capacity {room.items}", f"twice the room in {channel.name}", changed)
        if channel.group > 1:
            yield Change(
                f"{channel.name}: no group",
                f"no group on {channel.name}",
                _with_channel(graph, replace(channel, group=1)),
            )
        if channel.initial:
            tokens = channel.initial + 1
            room = replace(channel.capacity, items=max(channel.capacity.items, tokens))
            late = _with_channel(graph, replace(channel, initial=tokens, capacity=room))
            yield Change(f"{channel.name}: staleness {tokens - 1}", f"staleness {tokens - 1}", late, same_result=False)
    for turn in dict.fromkeys(w.turn for w in graph.workers.values() if w.turn):
        free = {n: replace(w, turn=None if w.turn == turn else w.turn) for n, w in graph.workers.items()}
        yield Change(f"no turn {turn}", f"{turn} without a turn", replace(graph, workers=free))
    if graph.credits == Credits():
        yield Change("credits: windows: 1", "one window in flight", replace(graph, credits=Credits(windows=1)))
    else:
        yield Change("no credits", "no limit of credits", replace(graph, credits=Credits()))
    for stage, key, value in sizes:
        for other in (value // 2, 2 * value):
            try:
                yield asked(graph, f"{stage}.{key}={other}")
            except BadInput:  # against the stage's own laws
                continue


def _one_more_replica(graph: Graph, worker: WorkerSpec) -> Iterator[Change]:
    """The next number of replicas that the graph's laws allow; the first free takes, where the laws allow that."""
    for replicas in range(worker.replicas + 1, 2 * worker.replicas + 1):
        for take in TAKES:
            devices = {stage: _more(names, replicas) for stage, names in worker.device.items()}
            more = replace(worker, replicas=replicas, device=devices, take=take)
            changed = replace(graph, workers={**graph.workers, worker.name: more})
            if is_lawful(changed, [worker.name]):
                how = "" if worker.replicas > 1 and take == worker.take else f", {take.replace('_', ' ')}"
                wording = f"{_ordinal(replicas)} {worker.name} replica"
                yield Change(f"{worker.name}: {replicas} replicas{how}", wording, changed)
                return


def _more(devices: tuple[str, ...], replicas: int) -> tuple[str, ...]:
    """Devices for more replicas: further ones of the same kind, which nobody else uses."""
    further = (f"a further {devices[0].partition(':')[0]} {n}" for n in range(len(devices), replicas))
    return (*devices, *(devices[0] if devices[0] == "cpu" else name for name in further))


def is_lawful(graph: Graph, workers: Iterable[str]) -> bool:
    """Whether the laws allow the graph, and these workers' stages their replicas."""
    try:
        check_laws(graph, workers)
    except (BadInput, ValueError):
        return False
    return True


def check_laws(graph: Graph, workers: Iterable[str]) -> None:
    """Raise BadInput or ValueError where the laws do not allow the graph, or these workers' stages their replicas."""
    check(graph)
    plan(graph)
    for worker in workers:
        for stage in graph.workers[worker].stages:
            graph.stages[stage].check(graph.workers[worker].replicas)


def _with_channel(graph: Graph, channel: ChannelSpec) -> Graph:
    return replace(graph, channels={**graph.channels, channel.name: channel})


def _ordinal(number: int) -> str:
    words = {2: "a second", 3: "a third", 4: "a fourth", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth"}
    return words.get(number, f"a {number}th")

"""Graphs of stages that wait for written times, for tests of the forecast: random ones, and how long each takes."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from dflash_pipe import Context, Source, Stage, Stamp
from dflash_pipe.check import check
from dflash_pipe.errors import BadInput
from dflash_pipe.graph import Graph, dump, load
from dflash_pipe.located import dumps
from dflash_pipe.plan import Plan, plan
from dflash_pipe.profile import Part, Profile, Recorder
from dflash_pipe.runtime import Run
from dflash_pipe.simulate import Times


@dataclass(frozen=True)
class Item:
    """Nothing but something to hand on."""


class Timed:
    """Waits, and tells the recorder that a test has put here how long that took."""

    recorder: ClassVar[Recorder | None] = None

    def open(self, ctx: Context) -> None:
        self._ctx = ctx

    def wait(self, part: Part, index: int, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        if Timed.recorder is not None:
            Timed.recorder.record(self._ctx.stage, part, index, time.perf_counter() - began)


class Items(Timed, Source[Item]):
    """count items; seconds: for each in turn."""

    count: int
    seconds: list[float]

    def read(self, cursor: Any) -> Iterator[tuple[Any, Item | None]]:
        for index in range(cursor or 0, self.count):
            self.wait("read", index, self.seconds[index % len(self.seconds)])
            yield index + 1, Item()


class Through(Timed, Stage):
    """seconds: for each message in turn."""

    seconds: list[float]

    def process(self, item: Item, stamp: Stamp) -> Item:
        self.wait("process", stamp.index, self.seconds[stamp.index % len(self.seconds)])
        return Item()


class Sink(Timed, Stage):
    """The end of a chain. Reports the window that each message belongs to, and when it was done."""

    seconds: list[float]

    def process(self, item: Item, stamp: Stamp) -> None:
        self.wait("process", stamp.index, self.seconds[stamp.index % len(self.seconds)])
        self._ctx.report({"window": stamp.window, "at": time.perf_counter()})


class Step(Timed, Stage):
    """The drafter: once a message, and once a window. end: seconds at a window's end."""

    seconds: list[float]
    end: float

    def process(self, item: Item, params: Item, stamp: Stamp) -> None:
        self._index = stamp.index
        self.wait("process", stamp.index, self.seconds[stamp.index % len(self.seconds)])

    def end_window(self) -> Item:
        self.wait("end_window", self._index, self.end)
        return Item()


class Update(Timed, Stage):
    """The optimizer. seconds: for each window in turn. Reports each window, and when it was done."""

    seconds: list[float]

    def initial(self) -> Item:
        return Item()

    def process(self, grads: tuple[Item, ...], stamp: Stamp) -> Item:
        self.wait("process", stamp.index, self.seconds[stamp.window % len(self.seconds)])
        self._ctx.report({"window": stamp.window, "at": time.perf_counter()})
        return Item()


def times(graph: Graph) -> Times:
    """What the stages of such a graph will wait for."""
    seconds: dict[tuple[str, str], Any] = {}
    for name, stage in graph.stages.items():
        seconds[name, "read" if stage.signature.source else "process"] = stage.parameters["seconds"]
        if "end" in stage.parameters:
            seconds[name, "end_window"] = [stage.parameters["end"]]
    return Times(seconds)


def run(plan: Plan, folder: Path, warm_up: int) -> Profile:
    """Really run a plan, its messages counted; every service time is kept."""
    recorder = Recorder(plan.graph.window, warm_up=warm_up, keep=100_000)
    ended: dict[int, float] = {}
    running = Run(plan, folder)
    running.on_report = lambda said: ended.update({said["window"]: max(said["at"], ended.get(said["window"], 0.0))})
    Timed.recorder = recorder
    try:
        running.execute()
    finally:
        Timed.recorder = None
    for window, at in sorted(ended.items()):
        recorder.window_done(window, at)
    return recorder.profile(dump(plan.graph), "here")


def laid_out(tree: dict[str, Any]) -> Plan:
    """The plan of a graph given as a mapping. Raises BadInput."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timed.yaml"
        path.write_text(dumps(tree))
        graph = load([path])
    check(graph)
    return plan(graph)


@lru_cache(maxsize=512)
def random_plan(seed: int, *, steady: bool = False, scale: float = 1.0, windows: int = 10**6) -> Plan:
    """A plan of a random graph: a chain of 1 to 3 stages, then a sink or a drafter and its optimizer. steady: constant
    times. scale: mean seconds of a message's work. windows: how many the source has."""
    draw = random.Random(seed)
    while True:
        tree = _tree(draw, steady, scale)
        tree["stages"]["data"]["with"]["count"] = windows * tree["window"]
        try:
            return laid_out(tree)
        except BadInput:
            continue


def _tree(draw: random.Random, steady: bool, scale: float) -> dict[str, Any]:
    constant = steady or draw.random() < 0.4

    def seconds(mean: float) -> list[float]:
        mean *= scale * draw.uniform(0.3, 1.7)
        return [round(mean if constant else mean * draw.uniform(0.2, 1.8), 6) for _ in range(1 if constant else 97)]

    trains = draw.random() < 0.6
    window = draw.choice([1, 2, 3, 4, 6])
    chain = [f"s{n}" for n in range(draw.randint(1, 3))]
    stages: dict[str, Any] = {"data": stage("Items", seconds=seconds(0.1))}
    stages |= {name: stage("Through", seconds=seconds(1.0)) for name in chain}
    channels: dict[str, Any] = {}
    ends = [*chain, "last"]
    for before, after in zip(["data", *chain], ends, strict=True):
        group = draw.choice([1, 1, 1, 1, 2])
        capacity = max(group, draw.choice([1, 1, 2, 3, 4]))
        channels[f"to_{after}"] = {"from": before, "to": f"{after}.item", "capacity": capacity, "group": group}
    if trains:
        stages["last"] = stage("Step", seconds=seconds(0.7), end=round(scale * draw.uniform(0.0, 0.5), 6))
        stages["update"] = stage("Update", seconds=seconds(draw.choice([0.2, 1.0])))
        channels["grads"] = {"from": "last", "to": "update.grads", "per": "window"}
        tokens = draw.choice([1, 1, 2])
        channels["params"] = {"from": "update", "to": "last.params", "per": "window", "broadcast": True}
        channels["params"] |= {"initial": tokens, "capacity": draw.randint(tokens, 3)}
    else:
        stages["last"] = stage("Sink", seconds=seconds(0.7))
    workers = _workers(draw, [*stages], window)
    tree = {"window": window, "stages": stages, "channels": channels, "workers": workers}
    if draw.random() < 0.3:
        tree["credits"] = draw.choice([{"windows": draw.randint(1, 3)}, {"messages": window * draw.randint(1, 3) + 2}])
    return tree


def stage(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"use": f"tests.timed_graphs:{kind}", "with": parameters}


def _workers(draw: random.Random, stages: list[str], window: int) -> dict[str, Any]:
    """Neighbours share a worker now and then; the others may be replicated, and two of them may take turns."""
    groups: list[list[str]] = [["data"]]
    for stage in stages[1:]:
        if draw.random() < 0.2:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    workers: dict[str, Any] = {}
    for number, group in enumerate(groups):
        worker: dict[str, Any] = {"stages": group}
        if "data" not in group and "update" not in group and draw.random() < 0.5:
            worker |= {"replicas": draw.choice([2, 2, 3]), "take": draw.choice(["first_free", "round_robin"])}
            if worker["take"] == "first_free" and draw.random() < 0.15:
                worker["order"] = "completion"
        workers[f"w{number}"] = worker
    computing = [worker for name, worker in workers.items() if name != "w0"]
    if computing and draw.random() < 0.25:
        for worker in draw.sample(computing, min(len(computing), 2)):
            worker["turn"] = "gpu"
    return workers


class Sized(Source[Item]):
    """A source whose messages hold up to so many tokens, and rows."""

    untimed = ("count",)
    max_tokens: int
    max_rows: int | None = None
    buckets: list[int] | None = None
    weight: int = 1
    count: int = 400

    def read(self, cursor: Any) -> Iterator[tuple[Any, Item | None]]:
        raise NotImplementedError


class Anchored(Stage):
    """A stage with up to so many anchors in a row."""

    num_anchors: int

    def process(self, item: Item) -> Item:
        raise NotImplementedError

"""No run has more payloads at once than are estimated: real workers in simulated time, every payload counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from types import coroutine
from typing import Any, ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash_pipe import BadInput, Context, Footprint, Message, Source, Stage, Stamp, Transport, wiring
from dflash_pipe.check import check
from dflash_pipe.clock import Channel, Clock, Process
from dflash_pipe.graph import load
from dflash_pipe.located import dumps
from dflash_pipe.memory import estimate
from dflash_pipe.plan import Plan, plan
from dflash_pipe.wiring import Origin

DEVICES = ["cpu", "gpu:0", "gpu:1"]


class Payload(int):
    """Its bytes, with a device where it lies; counted as long as it is there."""

    alive: ClassVar[Counter[str]] = Counter()
    most: ClassVar[Counter[str]] = Counter()
    hand_off: ClassVar[None] = None  # in simulated time it takes none
    device: str

    @property
    def nbytes(self) -> int:
        return int(self)

    @staticmethod
    def on(device: str, size: int) -> Payload:
        made = Payload(size)
        made.device = device
        Payload.alive[device] += size
        Payload.most[device] = max(Payload.most[device], Payload.alive[device])
        return made

    def __del__(self) -> None:
        Payload.alive[self.device] -= int(self)


class Copies(Transport):
    """Brings a payload to where it is needed as `stages.devices.DeviceTransport` does."""

    def accelerators(self) -> list[str]:
        return DEVICES[1:]

    def on_send(self, payload: Any, device: str, to: str | None) -> Any:
        return payload if to in (None, payload.device) else Payload.on(to, int(payload))

    def on_receive(self, payload: Any, device: str) -> Any:
        if isinstance(payload, tuple):
            return tuple(self.on_receive(each, device) for each in payload)
        return self.on_send(payload, device, device)


@coroutine
def pause(seconds: float) -> Generator[float, None, None]:
    yield seconds


class Timed:
    """Sends payloads of up to `size` bytes (0: nothing that counts); works for some of the times `pace`."""

    size: int = 0
    pace: list[int]
    seed: int = 0

    def open(self, ctx: Context) -> None:
        self._ctx = ctx
        self._draw = random.Random(f"{self.seed} {ctx.stage} {ctx.replica}")

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        return Footprint(sent=self.size, window_sent=self.size, told=True)

    def payload(self) -> Payload:
        return Payload.on(self._ctx.device, self._draw.choice((self.size, self.size, self.size - self.size // 3)))

    async def work(self) -> None:
        await pause(self._draw.choice(self.pace))

    async def made(self) -> Payload:
        await self.work()
        return self.payload()


class Rows(Timed, Source[Payload]):
    size: int = 0
    pace: list[int]
    seed: int = 0

    def read(self, cursor: Any) -> Iterator[tuple[Any, Payload | None]]:
        for index in range(60):
            yield index, self.payload()


class Through(Timed, Stage):
    size: int = 0
    pace: list[int]
    seed: int = 0

    def process(self, item: Payload) -> Payload:
        return self.made()  # type: ignore[return-value]  # awaited by the worker


class Drafter(Timed, Stage):
    size: int = 0
    pace: list[int]
    seed: int = 0

    def process(self, features: Payload, params: Payload) -> None:
        return self.work()  # type: ignore[return-value]

    def end_window(self) -> Payload:
        return self.payload()


class Optimizer(Timed, Stage):
    size: int = 0
    pace: list[int]
    seed: int = 0

    def initial(self) -> Payload:
        return self.payload()

    def process(self, grads: tuple[Payload, ...]) -> Payload:
        return self.made()  # type: ignore[return-value]


class Sink(Timed, Stage):
    size: int = 0
    pace: list[int]
    seed: int = 0

    def process(self, item: Payload) -> None:
        return self.work()  # type: ignore[return-value]


class Late(Sink):
    """Takes what it sees of a window when that window is over."""

    size: int = 0
    pace: list[int]
    seed: int = 0

    def process(self, item: Payload, metrics: Payload) -> None:  # type: ignore[override]
        return self.work()  # type: ignore[return-value]


CHANNELS: dict[str, dict[str, Any]] = {
    "batches": {"from": "data", "to": "first"},
    "items": {"from": "first", "to": "second"},
    "features": {"from": "second", "to": "drafter.features"},
    "grads": {"from": "drafter", "to": "optimizer", "per": "window"},
    "params": {"from": "optimizer", "to": "drafter.params", "per": "window", "broadcast": True},
    "metrics": {"from": "optimizer", "to": "track", "per": "window"},
    "seen": {"from": "first", "to": "watch"},
}
USES = {"data": "Rows", "first": "Through", "second": "Through", "drafter": "Drafter", "optimizer": "Optimizer"}
STAGES = ("data", "first", "second", "drafter", "optimizer", "track", "watch")


@st.composite
def graphs(draw: Any) -> dict[str, Any]:
    """The training's dataflow, with two stages before the drafter and one that watches, in any layout."""
    heavy = draw(st.sampled_from(STAGES[:5]))  # the one whose payloads count
    used = {}
    watched = draw(st.booleans())
    for name in STAGES if watched else STAGES[:-1]:
        pace = draw(st.sampled_from(([0], [1], [0, 1, 30], [0, 0, 0, 0, 0, 0, 500])))
        keys = {"pace": pace, "seed": draw(st.integers(0, 9)), "size": 9 if name == heavy else 0}
        used[name] = {"use": f"tests.test_payloads_alive:{USES.get(name, 'Sink')}", "with": keys}
    channels = {name: dict(keys) for name, keys in CHANNELS.items()}
    if not watched:
        del channels["seen"]
    if late := watched and draw(st.booleans()):
        used["watch"]["use"] = "tests.test_payloads_alive:Late"
        channels["seen"]["to"] = "watch.item"
        channels["late"] = {"from": "optimizer", "to": "watch.metrics", "per": "window", "broadcast": True}
    for keys in channels.values():
        keys["capacity"] = {"items": draw(st.integers(1, 4))}
        if late and keys["from"] == "first":
            keys["capacity"] = {"items": 8}
        if draw(st.integers(0, 4)) == 0:
            keys["capacity"]["bytes"] = draw(st.integers(1, 40))
        if keys.get("per") != "window" and draw(st.booleans()):
            keys["group"] = draw(st.integers(1, keys["capacity"]["items"]))
    channels["params"]["initial"] = draw(st.integers(1, channels["params"]["capacity"]["items"]))
    devices = draw(st.sampled_from((DEVICES, DEVICES[1:], DEVICES[:1])))
    workers: dict[str, Any] = {}
    rest = list(used)
    while rest:
        together = [name for name in rest[1:] if draw(st.integers(0, 4)) == 0]
        worker: dict[str, Any] = {"stages": [rest[0], *together]}
        rest = [name for name in rest if name not in worker["stages"]]
        replicas = draw(st.sampled_from((1, 2, 3)))
        if replicas > 1 and {"first", "second", "drafter", "watch"} >= set(worker["stages"]):
            worker["replicas"] = replicas
            windowed = "drafter" in worker["stages"] or (late and "watch" in worker["stages"])
            worker["take"] = "round_robin" if windowed else draw(st.sampled_from(("first_free", "round_robin")))
            worker["order"] = "input" if windowed else draw(st.sampled_from(("input", "input", "completion")))
        places = st.lists(st.sampled_from(devices), min_size=replicas, max_size=replicas)
        worker["device"] = {
            name: draw(places) if "replicas" in worker else draw(places)[0] for name in worker["stages"]
        }
        workers[f"w{len(workers)}"] = worker
    return {
        "window": draw(st.sampled_from((1, 2, 3, 4, 6))),
        "partial_window": draw(st.sampled_from(("drop", "keep"))),
        "transport": "tests.test_payloads_alive:Copies",
        "credits": draw(st.sampled_from(({}, {}, {"messages": 8}))),
        "stages": used,
        "channels": channels,
        "workers": workers,
    }


def run(plan: Plan) -> dict[str, int]:
    """Real workers with their gates, inlets and outlets, in simulated time; the most bytes on each device."""
    clock = Clock()
    Payload.alive, Payload.most = Counter(), Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "Channel", partial(Channel, clock))
        wired = wiring.wire(plan, Origin(Path()), {})

    class Waits(Process):
        async def receive(self, receiver: Channel) -> Message:  # type: ignore[override]
            message = await receiver.receive(self)
            self.__dict__.pop("handed", None)  # which a real channel does not keep
            return message

    async def live(worker: Any, waits: Waits) -> None:
        await worker.send_first_tokens(wired.feedback[worker.name], Stamp(-1, -1, plan.graph.window - 1, True))
        await worker.run()
        await pause(None)  # type: ignore[arg-type]  # for ever

    for worker in wired.workers:
        worker._waits = waits = Waits(worker.name, clock)
        worker.open(None)
        clock.start(waits, live(worker, waits))
    clock.run(lambda: False)
    return dict(Payload.most)


def both(folder: Path, graph: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Device -> bytes that a run had at most, and that were estimated. Raises `BadInput`."""
    file = folder / "graph.yaml"
    file.write_text(dumps(graph))
    loaded = load([file])
    check(loaded)
    laid_out = plan(loaded)
    return run(laid_out), {need.device: need.total for need in estimate(laid_out)}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs())
def test_no_run_has_more_than_is_estimated(tmp_path_factory: pytest.TempPathFactory, graph: dict[str, Any]) -> None:
    try:
        had, said = both(tmp_path_factory.getbasetemp(), graph)
    except BadInput:
        assume(False)
    assert all(size <= said.get(device, 0) for device, size in had.items()), (had, said)


@pytest.mark.parametrize(
    ("stuck", "second", "keys", "most"),
    [  # a capacity of 2, one in the hands of each sender, one in those of each receiver
        ("drafter", {}, {}, {"gpu:1": 2 + 1 + 1}),
        ("drafter", {"replicas": 3, "order": "completion"}, {}, {"gpu:1": 2 + 3 + 1}),
        ("drafter", {"replicas": 3, "order": "completion"}, {"group": 2}, {"gpu:1": 2 + 3 + 2}),
        ("drafter", {"device": "gpu:0"}, {}, {"gpu:1": 2 + 1 + 1}),
        ("second", {"replicas": 3}, {}, {"gpu:1": 2 + 1 + 3}),
        ("second", {"replicas": 3, "device": "gpu:0"}, {}, {"gpu:0": 2 + 1 + 3}),
    ],
)
def test_what_is_estimated_is_reached(
    tmp_path: Path, stuck: str, second: dict[str, Any], keys: dict[str, Any], most: dict[str, int]
) -> None:
    """Before a stage that never ends its first message everything is as full as it can be."""
    heavy, channel = ("second", "features") if stuck == "drafter" else ("first", "items")
    used = {
        name: {
            "use": f"tests.test_payloads_alive:{USES.get(name, 'Sink')}",
            "with": {"pace": [10**9 if name == stuck else 0], "size": 2 if name == heavy else 0},
        }
        for name in STAGES[:-1]
    }
    channels = {name: dict(of) for name, of in CHANNELS.items() if name != "seen"}
    channels["params"]["initial"] = 1
    channels[channel] |= keys
    workers = {name: {"stages": [name], "device": "gpu:1", **(second if name == "second" else {})} for name in used}
    graph = {"window": 2, "transport": "tests.test_payloads_alive:Copies"}
    had, said = both(tmp_path, {**graph, "stages": used, "channels": channels, "workers": workers})
    in_messages = [{device: of.get(device, 0) // 2 for device in most} for of in (had, said)]
    assert in_messages == [most, most]

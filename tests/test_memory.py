"""Memory is added up per device before anything is loaded: stages, messages on their way, and what cannot coincide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_pipe import BadInput, Context, Footprint, Source, Stage, Transport
from dflash_pipe.check import check
from dflash_pipe.errors import Missing
from dflash_pipe.graph import load
from dflash_pipe.memory import Need, estimate, memory_table, refuse
from dflash_pipe.plan import plan
from tests.test_cli import called

GIB = 2**30


class SmallDevices(Transport):
    """Two accelerators of 10 GiB that no program can reach."""

    def accelerators(self) -> list[str]:
        return ["gpu:0", "gpu:1"]

    def memory(self, device: str) -> tuple[int, int] | None:
        return None if device == "cpu" else (0, 10 * GIB)


@dataclass(frozen=True)
class Item:
    pass


class Data(Source[Item]):
    rows: int = 3

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        if self.rows < 0:
            raise BadInput("no data there")
        return Footprint(sent=1, told=self.rows)

    def read(self, cursor: Any) -> Iterator[tuple[Any, Item | None]]:
        yield from ()


class Target(Stage):
    weights: int = 2 * GIB

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        rows = told["item"]
        return Footprint({"weights": self.weights}, {"forward": GIB}, sent=rows * 1000, told=rows)

    def process(self, item: Item) -> Item:
        return item


class Drafter(Stage):
    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        assert set(told) == {"features"}
        share = 1024 // ctx.replicas
        return Footprint({"weights": 7}, {"step": told["features"] * GIB}, window_sent=share)

    def process(self, features: Item, params: Item) -> None: ...

    def end_window(self) -> Item:
        return Item()


class Optimizer(Stage):
    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        return Footprint({"masters": 70}, {"gradient": 2 * GIB}, sent=500)

    def initial(self) -> Item:
        return Item()

    def process(self, grads: tuple[Item, ...]) -> Item:
        return grads[0]


def sink(params: Item) -> None: ...


GRAPH = """\
window: 4
transport: "tests.test_memory:SmallDevices"
stages:
  data: {use: "tests.test_memory:Data"}
  target: {use: "tests.test_memory:Target"}
  drafter: {use: "tests.test_memory:Drafter"}
  optimizer: {use: "tests.test_memory:Optimizer"}
  track: {use: "tests.test_memory:sink"}
channels:
  batches: {from: data, to: target}
  features: {from: target, to: drafter.features}
  grads: {from: drafter, to: optimizer, per: window}
  params: {from: optimizer, to: drafter.params, per: window, broadcast: true, initial: 1}
  metrics: {from: optimizer, to: track, per: window}
"""
SEQUENTIAL = "workers: {main: {stages: [data, target, drafter, optimizer, track], device: gpu:0}}\n"
OVERLAPPED = """\
workers:
  loader: {stages: [data], device: cpu}
  target: {stages: [target], device: "gpu:0"}
  drafter: {stages: [drafter], device: "gpu:1"}
  optim: {stages: [optimizer, track], device: "gpu:1"}
"""


def needs(folder: Path, workers: str, *overrides: str, graph: str = GRAPH) -> dict[str, Need]:
    file = folder / "graph.yaml"
    file.write_text(graph + workers)
    loaded = load([file], overrides)
    check(loaded)
    return {need.device: need for need in estimate(plan(loaded))}


def sizes(need: Need) -> dict[str, int]:
    """Part -> bytes, messages without their words."""
    return {name.partition(" message")[0]: size for name, size in need.parts}


def test_parts_and_messages_lie_where_they_are_needed(tmp_path: Path) -> None:
    found = needs(tmp_path, OVERLAPPED)
    assert sizes(found["cpu"]) == {"batches: 3": 3}  # one is made while the last is copied, one is read ahead
    assert sizes(found["gpu:0"]) == {
        "target: weights": 2 * GIB,
        "target: forward, at work": GIB,
        "features: 2": 6000,  # being made, being copied
        "batches: 4": 4,  # a capacity of 2, one about to be put in, one in use
    }
    assert sizes(found["gpu:1"]) == {
        "drafter: step, at work": 3 * GIB,  # and not the optimizer's gradient: the two wait for each other
        "features: 4": 12000,
        "grads: 1": 1024,  # one token goes round: the sums are there once, wherever they are
        "params: 2": 1000,  # the newest, and those that were held; the same payload goes to track
        "optimizer: masters": 70,
        "drafter: weights": 7,
    }
    assert found["gpu:1"].total == 3 * GIB + 12000 + 1024 + 1000 + 77
    assert found["gpu:1"].has == 10 * GIB


def test_stages_of_one_worker_work_one_after_the_other(tmp_path: Path) -> None:
    parts = sizes(needs(tmp_path, SEQUENTIAL)["gpu:0"])
    assert [name for name in parts if name.endswith("at work")] == ["drafter: step, at work"]
    assert parts["features: 1"] == 3000 and parts["grads: 1"] == 1024
    assert parts["params: 2"] == 1000  # the drafter keeps the last ones until it is given those that are made now
    parts = sizes(needs(tmp_path, SEQUENTIAL, "data.rows=0")["gpu:0"])
    assert [name for name in parts if name.endswith("at work")] == ["optimizer: gradient, at work"]


def test_a_worker_of_two_devices_has_what_it_hands_over_on_both(tmp_path: Path) -> None:
    found = needs(tmp_path, SEQUENTIAL, 'main.device={"*": "gpu:0", optimizer: "gpu:1"}')
    here, there = sizes(found["gpu:0"]), sizes(found["gpu:1"])
    assert here["grads: 1"] == there["grads: 1"] == 1024
    assert there["params: 1"] == 500 and here["params: 2"] == 1000
    assert here["metrics: 1"] == 500  # where it was made it is the payload of params, too


def test_what_may_run_ahead_is_added(tmp_path: Path) -> None:
    """Two tokens: the drafter computes the next window while the optimizer steps. The target always may."""
    parts = sizes(needs(tmp_path, OVERLAPPED, "params.initial=2", "target.device=gpu:1")["gpu:1"])
    working = {name for name in parts if name.endswith("at work")}
    assert working == {"drafter: step, at work", "optimizer: gradient, at work", "target: forward, at work"}
    assert parts["grads: 2"] == 2048 and parts["params: 3"] == 1500


def test_bounds_of_channels_and_of_credits(tmp_path: Path) -> None:
    def features(*overrides: str) -> set[str]:
        return {name for name in sizes(needs(tmp_path, OVERLAPPED, *overrides)["gpu:1"]) if "features" in name}

    assert features("features.capacity=5") == {"features: 7"}
    assert features("features.capacity={items: 5, bytes: 6000}") == {"features: 4"}
    assert features("features.capacity={items: 5, bytes: 7000}") == {"features: 5"}  # others may be smaller
    assert features("credits={messages: 1}") == {"features: 2"}
    assert features("target.replicas=2") == {"features: 7"}  # two of them may be 6 ahead of the merge
    # Each of two has brought one and waits for room.
    two = ("target.replicas=2", "target.order=completion")
    assert features(*two) == {"features: 5"}
    assert features(*two, "features.group=2") == {"features: 6"}
    # Both were dealt 4 while one works on its first, 4 are in the channel or about to be, and one is in use.
    assert features("target.replicas=2", "target.take=round_robin") == {"features: 13"}
    # One of them gets 2 of a window's 3 messages, the other up to 3 between two of its own.
    assert features("target.replicas=2", "target.take=round_robin", "window=3") == {"features: 17"}
    apart = needs(
        tmp_path, OVERLAPPED, "drafter.replicas=2", "drafter.take=round_robin", "drafter.device=[gpu:0, gpu:1]"
    )
    assert sizes(apart["gpu:0"])["grads: 1"] == 512 and sizes(apart["gpu:1"])["grads: 2"] == 1024
    assert "drafter[0]: step, at work" in sizes(apart["gpu:0"])


def test_each_channel_copies_for_itself(tmp_path: Path) -> None:
    """What goes to another device in two channels lies there twice, and once where it was made."""
    workers = OVERLAPPED.replace("[optimizer, track]", "[optimizer]") + "  track: {stages: [track], device: gpu:1}\n"
    found = needs(tmp_path, workers, "optim.device=gpu:0")
    assert sizes(found["gpu:1"])["params: 2"] == 1000
    assert sizes(found["gpu:1"])["metrics: 4"] == 2000  # a capacity of 2, one about to be put in, one in use
    assert sizes(found["gpu:0"])["metrics: 2"] == 1000 and "params: 1" not in sizes(found["gpu:0"])
    here = sizes(needs(tmp_path, workers)["gpu:1"])
    assert here["metrics: 4"] == 2000 and not [name for name in here if name.startswith("params")]


class Late(Stage):
    def process(self, item: Item, metrics: Item) -> None: ...


def test_replicas_are_not_in_step_and_the_last_of_a_window_is_kept(tmp_path: Path) -> None:
    """What two replicas send to two stages need not be the same payloads, though all lie on one device."""
    late = '  late: {use: "tests.test_memory:Late"}\nchannels:\n  seen: {from: target, to: late.item, capacity: 8}\n'
    graph = GRAPH.replace("channels:\n", late) + "  late: {from: optimizer, to: late.metrics, per: window}\n"
    workers = OVERLAPPED + '  late: {stages: [late], device: "gpu:0"}\n'
    found = needs(tmp_path, workers, "target.replicas=2", "drafter.device=gpu:0", graph=graph)
    here = sizes(found["gpu:0"])
    assert here["seen: 7"] == 21000 and here["features: 7"] == 21000
    assert here["late: 5"] == 2500  # a capacity of 2, about to be put in, just received, and kept until now
    assert "params: 3" in sizes(needs(tmp_path, SEQUENTIAL, "params.initial=2")["gpu:0"])


def test_what_waits_for_whoever_is_free_lies_where_it_was_made(tmp_path: Path) -> None:
    found = needs(tmp_path, OVERLAPPED, "target.replicas=2", "target.device=[gpu:0, gpu:1]")
    # A capacity of 2, one about to be put in, one in the hands of each that takes, and one that is read ahead.
    assert sizes(found["cpu"])["batches: 6"] == 6
    assert sizes(found["gpu:0"])["batches: 1"] == sizes(found["gpu:1"])["batches: 1"] == 1


@pytest.mark.timeout(30)  # and not longer with each
def test_many_replicas_of_one_device_are_added_up_at_once(tmp_path: Path) -> None:
    many = ("drafter.replicas=48", "drafter.take=round_robin", "window=48")
    found = needs(tmp_path, OVERLAPPED, *many)["gpu:1"]
    at_work = [name for name, _ in found.parts if name.endswith("at work")]
    assert at_work == [f"drafter[{k}]: step, at work" for k in range(48)]
    less = needs(tmp_path, OVERLAPPED, *many, "data.rows=0")["gpu:1"]
    assert [name for name, _ in less.parts if name.endswith("at work")] == ["optimizer: gradient, at work"]


class Reads(Target):
    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        return replace(super().footprint(ctx, {"item": told["item"] or 0}), host={"weights, as they are read": 3})


class Silent(Data):
    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        return Footprint(sent=1)


def test_who_does_not_say_what_it_needs_is_named(tmp_path: Path) -> None:
    found = needs(tmp_path, OVERLAPPED)
    assert [found[device].unknown for device in found] == [(), (), ("track",)]
    silent = GRAPH.replace("memory:Data", "memory:Silent").replace("memory:Target", "memory:Reads")
    silent = silent.replace("memory:Drafter", "memory:Blind")
    found = needs(tmp_path, OVERLAPPED, "target.replicas=2", graph=silent)
    assert found["gpu:0"].unknown == ("target[0]", "target[1]") and found["gpu:1"].unknown == ("drafter", "track")
    assert str(found["gpu:1"]).endswith("; not known: what else is needed by drafter, track")
    assert "    not known  what else is needed by drafter" in memory_table(list(found.values())).splitlines()


class Blind(Drafter):
    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        return super().footprint(ctx, {"features": 0})


def test_what_is_on_the_host_is_added_up_there(tmp_path: Path) -> None:
    graph = GRAPH.replace("memory:Target", "memory:Reads")
    found = needs(tmp_path, OVERLAPPED, "target.replicas=2", graph=graph)
    host = {name: size for name, size in found["cpu"].parts if name.endswith("on the host")}
    assert host == {f"target[{k}]: weights, as they are read, on the host": 3 for k in range(2)}
    assert list(found) == ["cpu", "gpu:0", "gpu:1"]
    everything_away = needs(tmp_path, SEQUENTIAL, graph=graph)
    assert list(everything_away) == ["gpu:0", "cpu"] and everything_away["cpu"].total == 3


class Staged(SmallDevices):
    def through_host(self, device: str, to: str) -> bool:
        return device != to and "cpu" not in (device, to)


def test_what_goes_through_the_host_lies_there_too(tmp_path: Path) -> None:
    found = needs(tmp_path, OVERLAPPED, graph=GRAPH.replace("memory:SmallDevices", "memory:Staged"))
    assert sizes(found["cpu"]) == {"batches: 3": 3, "features: 4": 12000}


class Norms(Stage):
    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        return Footprint({}, {"squares": 4 * GIB}, sent=1)

    def process(self, grads: Item) -> Item:
        return grads


class Scaled(Optimizer):
    def process(self, grads: tuple[Item, ...], first: Item, second: Item) -> Item:  # type: ignore[override]
        return grads[0]


def test_stages_that_do_not_wait_for_each_other_are_added(tmp_path: Path) -> None:
    """Two stages that take the same window's sums work side by side, though one token goes round through both."""
    norms = "".join(f'  {name}: {{use: "tests.test_memory:Norms"}}\n' for name in ("first", "second"))
    ways = "".join(
        f"  to_{name}: {{from: drafter, to: {name}, per: window}}\n"
        f"  from_{name}: {{from: {name}, to: optimizer.{name}, per: window}}\n"
        for name in ("first", "second")
    )
    graph = GRAPH.replace("memory:Optimizer", "memory:Scaled").replace("to: optimizer,", "to: optimizer.grads,")
    graph = graph.replace("channels:\n", f"{norms}channels:\n") + ways
    workers = "".join(f'  {name}: {{stages: [{name}], device: "gpu:1"}}\n' for name in ("first", "second"))
    at_work = {
        name for name, _ in needs(tmp_path, OVERLAPPED + workers, graph=graph)["gpu:1"].parts if "at work" in name
    }
    assert {"first: squares, at work", "second: squares, at work"} <= at_work
    assert "optimizer: gradient, at work" not in at_work


def test_a_plan_that_cannot_fit_is_refused_with_its_largest_part(tmp_path: Path) -> None:
    refuse(list(needs(tmp_path, OVERLAPPED).values()))
    too_much = needs(tmp_path, OVERLAPPED, "data.rows=11")
    with pytest.raises(BadInput) as caught:
        refuse(list(too_much.values()))
    assert str(caught.value) == (
        "gpu:1 needs about 11.0 GiB, has 10.0 GiB: the largest part is drafter: step, at work (11.0 GiB); "
        "expected less of it, or a part of the stages on another device"
    )
    assert str(too_much["gpu:0"]) == (
        "gpu:0 needs about 3.0 GiB of 10.0 GiB, the largest part is target: weights (2.0 GiB)"
    )
    lines = memory_table(list(too_much.values())).splitlines()
    assert "  gpu:0  3.0 GiB of 10.0 GiB" in lines and "      2.0 GiB  target: weights" in lines


def test_the_cpu_is_refused_only_what_is_clearly_too_much() -> None:
    parts = (("target: weights", 12 * GIB),)
    refuse([Need("cpu", parts, 10 * GIB), Need("gpu:0", parts, None)])
    with pytest.raises(BadInput, match="cpu needs about 12"):
        refuse([Need("cpu", parts, 7 * GIB)])
    with pytest.raises(BadInput, match="gpu:0 needs about 12"):
        refuse([Need("gpu:0", parts, 10 * GIB)])


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        ("footprint", BadInput("odd"), "graph.yaml:4: stages.data: odd"),
        ("footprint", BadInput("odd", "rows: 3"), "rows: 3: odd; in stage data (worker main, footprint)"),
        ("footprint", TypeError("odd"), "odd\nin worker main: data footprint"),
        ("check", TypeError("odd"), "odd\nin stage data: check"),
    ],
)
def test_a_stage_that_cannot_answer_is_named(
    method: str, error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the line of wrong input, and else in a note."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(Data, method, fail)
    with pytest.raises(type(error)) as caught:
        needs(tmp_path, SEQUENTIAL)
    notes = [] if isinstance(error, BadInput) else error.__notes__
    assert "\n".join([str(caught.value), *notes]).removeprefix(f"{tmp_path}/") == said


class Absent(Target):
    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        raise Missing("no model here")


def test_check_ends_with_whether_it_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too much for this machine's own memory is told at the end, for the graph may be another machine's; too much for a
    GPU that is here is refused."""
    (tmp_path / "graph.yaml").write_text(GRAPH + SEQUENTIAL)
    sound = f"{tmp_path / 'graph.yaml'}: 5 stages on 1 worker, "
    assert called("check", tmp_path / "graph.yaml", "main.device=cpu") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{sound}all sound"
    (tmp_path / "absent.yaml").write_text(GRAPH.replace("memory:Target", "memory:Absent") + SEQUENTIAL)
    assert called("check", tmp_path / "absent.yaml") == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("stages.target: no model here") and last.endswith("told without what is not here")
    monkeypatch.setattr("dflash_pipe.memory.os.sysconf", lambda name: 1024)
    assert called("check", tmp_path / "graph.yaml", "main.device=cpu") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{sound}sound, but it cannot run on this machine: cpu needs about")
    assert called("check", tmp_path / "graph.yaml", "data.rows=100") == 2
    said = capsys.readouterr()
    assert "sound" not in said.out and said.err.startswith("gpu:0 needs about")


def test_a_graph_that_says_nothing_needs_nothing() -> None:
    graph = load(["graphs/toy/overlapped.yaml"])
    assert estimate(plan(graph)) == []

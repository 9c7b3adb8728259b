"""Every topology of the dataflow in miniature ends in the same digest; what should differ does."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipe.snapshot import newest, read
from tests.pipeline import HOOKS, SEEN, Gate, executed, run_of, toy

TOPOLOGIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sequential": ("sequential", ()),
    "overlapped": ("overlapped", ()),
    "parallel_target": ("parallel_target", ()),
    "data_parallel": ("data_parallel", ()),
    "fused in pairs": (
        "sequential",
        ("main.stages=[data, optimizer]", "workers.gpu={stages: [target, drafter]}"),
    ),
    "fused apart": (
        "sequential",
        ("main.stages=[optimizer, target]", "workers.gpu={stages: [drafter, data]}"),
    ),
    "fused and dealt": (
        "sequential",
        ("main.stages=[optimizer, data]", "workers.gpu={stages: [target, drafter], replicas: 2, take: round_robin}"),
    ),
    "dealt targets": ("data_parallel", ("workers.target.take=round_robin",)),
    "a message at a time": ("parallel_target", ("credits={messages: 1}",)),
    "a window at a time": ("data_parallel", ("credits={windows: 1}",)),
    "in turns": ("parallel_target", ("workers.target.turn=gpu", "workers.drafter.turn=gpu")),
    "in groups": ("parallel_target", ("batches.group=3", "features.group=3", "batches.capacity=3")),
    "tight": ("data_parallel", ("batches.capacity=1", "features.capacity=1")),
    "by bytes": ("parallel_target", ("features.capacity={items: 4, bytes: 33}",)),
}  # fmt: skip


def digest(folder: Path, name: str, *overrides: str) -> str:
    topology, own = TOPOLOGIES[name]
    run = toy(folder, topology, *own, *overrides)
    executed(run)
    return str(run.metrics["digest"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest(tmp_path_factory.mktemp("sequential"), "sequential")


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_ends_in_the_same_digest(name: str, expected: str, tmp_path: Path) -> None:
    assert digest(tmp_path, name) == expected


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_so_does_a_partial_last_window(policy: str, tmp_path: Path) -> None:
    partial = ("data.count=30", f"partial_window={policy}")
    assert len({digest(tmp_path, name, *partial) for name in TOPOLOGIES}) == 1


def test_staleness_is_caught(expected: str, tmp_path: Path) -> None:
    stale = ("params.initial=2", "params.capacity=2")
    assert len({digest(tmp_path, name, *stale) for name in ("sequential", "data_parallel")} | {expected}) == 2


@pytest.mark.parametrize("order", ["input", "completion"])
def test_completion_order_is_caught(order: str, expected: str, tmp_path: Path) -> None:
    """A target holds back the first message until one of the next window has passed."""
    gate = Gate()
    HOOKS["target"] = lambda index: gate.wait() if index == 0 else gate.open() if index == 4 else None
    run = toy(tmp_path, "parallel_target", 'stages.target.use="tests.pipeline:HookedTarget"', f"target.order={order}")
    executed(run)
    assert run.metrics["step"] == 8
    assert (run.metrics["digest"] == expected) is (order == "input")


def test_killed_between_any_two_windows_and_resumed_in_another_topology(expected: str, tmp_path: Path) -> None:
    """A run that fails right after any step goes on elsewhere, and on, and ends in the same digest."""
    names = itertools.cycle(TOPOLOGIES)
    for step in range(1, 8):
        folder = tmp_path / str(step)
        restored = None
        for last in (step, 8):
            topology, own = TOPOLOGIES[next(names)]
            run = toy(folder, topology, *own, "snapshot=1", restored=restored)

            def die(metrics: dict[str, Any], last: int = last) -> None:
                if metrics["step"] == last < 8:
                    raise InterruptedError

            run.on_report = die
            if last == 8:
                executed(run)
                assert run.metrics["digest"] == expected
            else:
                with pytest.raises(ExceptionGroup):
                    executed(run)
                if last == 1:  # it died before its first snapshot: from the beginning
                    continue
                restored = read(newest(folder))
                assert (restored.window, restored.index, restored.cursor) == (last - 1, 4 * last - 4, 4 * last - 4)


# --- any graph


@st.composite
def graphs(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A line src -> a -> b -> (sum -> total, sink), the same graph on any workers, and what it has to drop."""
    window = draw(st.integers(1, 4))
    replicas = {name: draw(st.integers(1, 4)) for name in ("a", "b")}
    sums = draw(st.sampled_from([n for n in (1, 2, 3, 4) if window % n == 0]))
    take = st.sampled_from(["first_free", "round_robin"])
    count = draw(st.integers(0, 18))
    holes = draw(st.lists(st.integers(0, 17), max_size=4))
    drop = draw(st.lists(st.integers(0, 17), max_size=4))
    capacity = [draw(st.integers(1, 4)) for _ in range(4)]
    group = draw(st.integers(1, capacity[0]))
    credit = draw(st.sampled_from(["{}", f"{{messages: {draw(st.integers(max(4, window), 9))}}}", "{windows: 2}"]))
    credit = "{}" if "windows" in credit and group > window else credit
    later = draw(st.integers(1, capacity[2])) if credit == "{}" else 1
    turn = draw(st.sampled_from(["null", "t"]))
    text = f"""
window: {window}
partial_window: {draw(st.sampled_from(["keep", "drop"]))}
stall_after: 4
credits: {credit}
stages:
  data: {{use: (Count), with: {{count: {count}, holes: {holes}}}}}
  a: {{use: (Step), with: {{name: a, drop: {drop}}}}}
  b: {{use: (Step), with: {{name: b}}}}
  sum: {{use: (Sum)}}
  total: {{use: (Totals)}}
  sink: {{use: (Collect)}}
channels:
  one: {{from: data, to: a, capacity: {capacity[0]}, group: {group}}}
  two: {{from: a, to: b, capacity: {capacity[1]}}}
  three: {{from: b, to: [sum, sink], capacity: {capacity[2]}, group: {later}}}
  sums: {{from: sum, to: total, per: window, capacity: {capacity[3]}}}
"""
    apart = f"""
workers:
  loader: {{stages: [data]}}
  a: {{stages: [a], replicas: {replicas["a"]}, take: {draw(take)}, turn: {turn}}}
  b: {{stages: [b], replicas: {replicas["b"]}, take: {draw(take)}, turn: {turn}}}
  sum: {{stages: [sum], replicas: {sums}, take: round_robin}}
  total: {{stages: [total]}}
  sink: {{stages: [sink]}}
"""
    fused = f"""
workers:
  ab: {{stages: [b, a], replicas: {replicas["a"]}, take: {draw(take)}}}
  rest: {{stages: [total, sink, data]}}
  sum: {{stages: [sum]}}
"""
    # Lock-step fused workers cannot fill a group.
    layouts = [apart, fused] if group == later == 1 and credit == "{}" else [apart]
    if turn == "t" and replicas == {"a": 1, "b": 1}:
        layouts = [layout.replace("turn: t", "turn: null") for layout in layouts]
    return text, layouts


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    HOOKS.clear()
    SEEN.clear()
    yield
    HOOKS.clear()


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_any_graph_loses_nothing_and_keeps_the_order(drawn: tuple[str, list[str]]) -> None:
    text, layouts = drawn
    results = []
    for workers in ("\nworkers: {main: {stages: [data, a, b, sum, total, sink]}}\n", *layouts):
        SEEN.clear()
        alone = text if workers in layouts else text.replace(text[text.index("credits:") : text.index("stages:")], "")
        with tempfile.TemporaryDirectory() as folder:
            result = executed(run_of(Path(folder), alone + workers))
        totals = [sum(values) for values in SEEN.get("totals", [])]
        results.append((SEEN.get("sink", []), totals, result.unfinished))
    assert all(other == results[0] for other in results[1:])

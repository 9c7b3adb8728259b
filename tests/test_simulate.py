"""The simulation against simpy, closed forms, the exact cycle ratio, and real runs of waiting stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dflash_pipe.critical import critical_cycle
from dflash_pipe.cycles import Arc, Operation, events, is_marked, maximum_ratio
from dflash_pipe.errors import Stalled
from dflash_pipe.exclusive import shared_cores, shared_devices
from dflash_pipe.plan import plan as lay_out
from dflash_pipe.simulate import Times, simulate
from tests.simpy_model import Model
from tests.timed_graphs import laid_out, random_plan, run, stage, times


def line(seconds, capacity=2, **workers):
    """data -> s0 -> last, each on a worker of its own; seconds: of those three."""
    read, first, last = ([each] for each in seconds)
    tree = {
        "window": 1,
        "stages": {
            "data": stage("Items", count=10**6, seconds=read),
            "s0": stage("Through", seconds=first),
            "last": stage("Sink", seconds=last),
        },
        "channels": {
            "items": {"from": "data", "to": "s0.item", "capacity": capacity},
            "results": {"from": "s0", "to": "last.item", "capacity": capacity},
        },
        "workers": {name: {"stages": [name]} | workers.get(name, {}) for name in ("data", "s0", "last")},
    }
    return laid_out(tree)


# --- against others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(8))
def test_it_agrees_with_simpy_on_random_graphs(block):
    for seed in range(25 * block, 25 * block + 25):
        plan = random_plan(seed)
        theirs = Model(plan, times(plan.graph)).run(40)
        ours = simulate(plan, times(plan.graph), windows=40, skip=10)
        assert ours.finished == pytest.approx(theirs, abs=1e-6), f"seed {seed}\n{plan.table()}"


def with_hand_offs(plan, seed, *, steady=False):
    """A random plan on random devices, and its times with those of hand-offs: about as long as its work."""
    draw = np.random.default_rng(seed)
    devices = {worker.name: str(draw.choice(["cuda:0", "cuda:1"])) for worker in plan.workers}
    placed = [replace(w, stations=tuple(replace(s, device=devices[w.name]) for s in w.stations)) for w in plan.workers]
    some = lambda: [tuple(draw.exponential(1.0, 2) * draw.integers(0, 2, 2)) for _ in range(1 if steady else 3)]  # noqa: E731
    handed = {(name, way): some() for name in plan.graph.channels for way in ("within", "between")}
    return replace(plan, workers=tuple(placed)), replace(times(plan.graph), handed=handed)


@pytest.mark.parametrize("block", range(4))
def test_it_agrees_with_simpy_where_hand_offs_take_time(block):
    for seed in range(25 * block, 25 * block + 25):
        plan, taken = with_hand_offs(random_plan(seed), seed)
        theirs = Model(plan, taken).run(40)
        ours = simulate(plan, taken, windows=40, skip=10)
        assert ours.finished == pytest.approx(theirs, abs=1e-6), f"seed {seed}\n{plan.table()}\n{taken.handed}"
        path = ours.path()
        assert all(after.before is before and after.start == before.end for before, after in pairwise(path))


def test_the_random_graphs_have_every_rule_in_them():
    plans = [random_plan(seed) for seed in range(200)]
    routes = [route for plan in plans for route in plan.routes]
    assert {route.kind for route in routes} == {"local", "shared", "dealt", "broadcast", "gathered"}
    for rule in ("merge", "restamp", "unordered", "feedback"):
        assert any(getattr(route, rule) for route in routes), rule
    assert any(route.channel.group > 1 for route in routes)
    assert any(worker.reorder for plan in plans for worker in plan.workers)
    turns = [plan.in_order(worker) for plan in plans for worker in plan.workers if worker.spec.turn]
    assert {True, False} == set(turns)
    assert any(plan.graph.credits.windows for plan in plans) and any(plan.graph.credits.messages for plan in plans)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_two_exponential_stations_have_the_throughput_of_the_closed_form(room):
    draw = np.random.default_rng(5)
    seconds = {(name, "process"): draw.exponential(1.0, 60_000).tolist() for name in ("s0", "last")}
    plan = line((0.0, 1.0, 1.0), capacity=room)
    seen = simulate(plan, Times(seconds), windows=60_000, skip=1000)
    assert 1 / seen.step_seconds == pytest.approx((room + 2) / (room + 3), rel=0.01)


def test_constant_times_without_choice_give_exactly_the_maximum_cycle_ratio():
    marked = 0
    for seed in range(120):
        plan = random_plan(seed, steady=True)
        if is_marked(plan):
            marked += 1
            operations, arcs, windows = events(plan, times(plan.graph))
            ratio, _ = maximum_ratio(operations, arcs)
            seen = simulate(plan, times(plan.graph), windows=220, skip=100)
            assert seen.step_seconds == pytest.approx(ratio / windows, rel=1e-9), f"seed {seed}"
    assert marked > 20


def test_with_hand_offs_the_exact_ratio_is_that_of_the_simulation_too():
    longer = 0
    for seed in range(120):
        plan = random_plan(seed, steady=True)
        if is_marked(plan):
            plan, taken = with_hand_offs(plan, seed, steady=True)
            (ratio, _), (without, _) = (maximum_ratio(*events(plan, each)[:2]) for each in (taken, times(plan.graph)))
            seen = simulate(plan, taken, windows=220, skip=100)
            assert seen.step_seconds == pytest.approx(ratio / events(plan, taken)[2], rel=1e-9), f"seed {seed}"
            longer += ratio > 1.01 * without
    assert longer > 10


@pytest.mark.parametrize("seed", [3, 30, 64])
def test_real_runs_of_waiting_stages_take_as_long_as_forecast(seed, tmp_path):
    """Compared in the middle of the run: at its end stages that share a turn have less to wait for."""
    window = random_plan(seed).graph.window
    count = max(10, 36 // window)
    plan = random_plan(seed, scale=0.03, windows=count + 3 + 12 // window)
    profile = run(plan, tmp_path, warm_up=0)
    measured = sum(profile.steps.seconds[3:count]) / (count - 3)
    seconds = {(name, part): s.seconds for name, parts in profile.stages.items() for part, s in parts.items()}
    forecast = simulate(plan, Times(seconds), windows=count + 1, skip=4).step_seconds
    assert measured == pytest.approx(forecast, rel=0.03), plan.table()


# --- laws -------------------------------------------------------------------------------------------------------------


def test_more_room_is_never_slower_where_nobody_chooses():
    gains = 0
    for seed in range(150):
        plan = random_plan(seed)
        if not is_marked(plan):
            continue
        roomy = {
            name: replace(c, capacity=replace(c.capacity, items=c.capacity.items + 1))
            for name, c in plan.graph.channels.items()
        }
        before, after = (
            simulate(p, times(plan.graph), windows=40, skip=1).finished
            for p in (plan, lay_out(replace(plan.graph, channels=roomy)))
        )
        assert all(late <= early + 1e-9 for early, late in zip(before, after, strict=True))
        gains += after[-1] < before[-1] - 1e-9
    assert gains > 3


def test_the_shares_sum_to_one_and_the_critical_path_has_no_gap():
    for seed in range(40):
        seen = simulate(random_plan(seed), times(random_plan(seed).graph), windows=40, skip=10)
        for shares in seen.workers.values():
            assert shares.busy + shares.starved + shares.blocked == pytest.approx(1.0)
        path = seen.path()
        assert path[-1].end == seen.finished[-1]
        for before, after in pairwise(path):
            assert after.before is before and after.start == before.end


def test_a_worker_is_starved_behind_a_slow_one_and_blocked_in_front_of_it():
    seen = simulate(line((1.0, 4.0, 2.0)), times(line((1.0, 4.0, 2.0)).graph), windows=60, skip=20)
    assert seen.step_seconds == pytest.approx(4.0)
    assert seen.workers["s0"].busy == pytest.approx(1.0)
    assert (seen.workers["data"].busy, seen.workers["data"].blocked) == pytest.approx((0.25, 0.75))
    assert (seen.workers["last"].busy, seen.workers["last"].starved) == pytest.approx((0.5, 0.5))
    assert str(critical_cycle(seen.path(), list(seen.workers))) == "s0 → s0"


def test_stages_on_one_device_share_it():
    plan = line((0.0, 1.0, 2.0))
    both = {
        name: replace(w, device={s: ("cuda:0" if name != "data" else "cpu",) for s in w.stages})
        for name, w in plan.graph.workers.items()
    }
    plan = lay_out(replace(plan.graph, workers=both))
    apart = simulate(plan, times(plan.graph), windows=60, skip=20)
    together = simulate(plan, times(plan.graph), windows=60, skip=20, exclusive=shared_devices(plan))
    assert (apart.step_seconds, together.step_seconds) == pytest.approx((2.0, 3.0))
    assert "device cuda:0" in str(critical_cycle(together.path(), list(together.workers)))


def test_stages_on_the_cpu_share_its_cores():
    """Three workers with 2 s of work a step each, two threads at work: cores for one of them, two, three."""
    plan = line((2.0, 2.0, 2.0))
    plan = lay_out(replace(plan.graph, threads=2))
    steps = []
    for cores in (1, 2, 5, 6, 8):
        shared = shared_cores(plan, cores, plan.graph.stages)
        steps.append(simulate(plan, times(plan.graph), windows=60, skip=20, exclusive=shared).step_seconds)
    assert steps == pytest.approx([6.0, 6.0, 3.0, 2.0, 2.0])
    assert shared_cores(plan, 2, ["s0"]) == {} == shared_cores(lay_out(replace(plan.graph, threads=None)), 1, ["s0"])
    elsewhere = {n: replace(w, device=dict.fromkeys(w.stages, ("cuda:0",))) for n, w in plan.graph.workers.items()}
    assert shared_cores(lay_out(replace(plan.graph, workers=elsewhere)), 2, plan.graph.stages) == {}


def test_a_limit_in_bytes_counts():
    plan = line((0.0, 1.0, 1.0), capacity=8)
    tight = replace(plan.graph.channels["results"].capacity, bytes=100)
    channels = {**plan.graph.channels, "results": replace(plan.graph.channels["results"], capacity=tight)}
    limited = lay_out(replace(plan.graph, channels=channels))
    seconds = {("s0", "process"): [0.1, 0.1, 0.1, 3.7], ("last", "process"): [1.0]}
    small, large = (simulate(limited, Times(seconds, {"s0": [n]}), windows=81, skip=41).step_seconds for n in (10, 90))
    assert small == pytest.approx(1.0) and large > 1.2


def test_what_cannot_move_is_a_stall_that_says_who_waits():
    plan = line((0.0, 1.0, 1.0))
    channels = {**plan.graph.channels, "items": replace(plan.graph.channels["items"], group=4)}
    reader = replace(plan.graph.credits, messages=2)
    with pytest.raises(Stalled, match="s0 waits for the rest of its group on 'items'"):
        broken = lay_out(replace(plan.graph, channels=channels, credits=reader))
        simulate(broken, times(plan.graph), windows=5, skip=1)


# --- the cycle ratio by itself ----------------------------------------------------------------------------------------


def test_the_largest_of_two_cycles_wins_by_seconds_for_each_token():
    operations = [Operation("a", "a", "process", 3.0), Operation("b", "b", "process", 4.0)]
    around = [Arc(0, 1, 0, "there"), Arc(1, 0, 2, "back")]
    assert maximum_ratio(operations, [*around, Arc(1, 1, 1, "")])[0] == 4.0
    ratio, chain = maximum_ratio(operations, [*around, Arc(1, 1, 2, "")])
    assert ratio == 3.5
    assert str(critical_cycle(chain * 3, ["a", "b"])) == "a → there → b → back → a"


def test_a_cycle_without_a_token_is_refused():
    operations = [Operation("a", "a", "process", 1.0), Operation("b", "b", "process", 1.0)]
    with pytest.raises(ValueError, match="nothing could ever move"):
        maximum_ratio(operations, [Arc(0, 1, 0, "x"), Arc(1, 0, 0, "y")])

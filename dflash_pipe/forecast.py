"""How long a step of a graph will take, what decides that, and what each change would bring: before it is built.

The service times come from the profile of any run of the same dataflow. Constant times and a plan in which nobody
chooses: the exact maximum cycle ratio. Otherwise the plan is simulated, varying times drawn from the profile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_pipe import hand_offs
from dflash_pipe.critical import Cycle, critical_cycle, seconds_by_stage
from dflash_pipe.cycles import events, is_marked, maximum_ratio
from dflash_pipe.errors import BadInput, Stalled, nearest
from dflash_pipe.exclusive import Exclusive, Resource, shared_cores, shared_devices
from dflash_pipe.graph import Graph, transport_of
from dflash_pipe.plan import Plan
from dflash_pipe.plan import plan as lay_out
from dflash_pipe.profile import Profile, hand_off
from dflash_pipe.service import constant_times, drawn_times, replicas_busy, sped_up, uncontended, varies
from dflash_pipe.simulate import Simulated, Times, simulate
from dflash_pipe.sizes import Sizes, resized, sizes, telling_keys
from dflash_pipe.stats import WorkerShares
from dflash_pipe.what_if import Change, asked, graph_of, usual

__all__ = ["TRUSTED", "Forecast", "Options", "Outcome", "Pace", "predict"]

# A forecast that misses the measured step by more than this says nothing about changes.
TRUSTED = 0.10
# How many messages, times stages, a simulation looks at: enough for a median within a percent, and soon done.
_FIRINGS = 30_000
# Below this speedup a change of the graph is not worth a word.
_WORTH = 1.02


@dataclass(frozen=True)
class Options:
    """rows: in the data set, times epochs, for the ETA. seed: of the drawn times. together: stage -> name; stages with
    one name never compute at the same time (one GPU, or one interpreter); workers on one GPU have one name already.
    changes: whether the usual changes are tried. windows: how many to simulate (None: enough for 1 %)."""

    rows: int | None = None
    seed: int = 0
    together: Mapping[str, str] | None = None
    changes: bool = True
    windows: int | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds for a step: mean, median, and the interval that holds 90 % of the steps. exact: not simulated.

    cycle: what decides it. stages: share of the critical path, most first. workers: shares of their time. remarks: what
    is extrapolated, or left out. off: share by which the step may be off because sizes differ from what was measured.
    """

    step: float
    median: float
    low: float
    high: float
    exact: bool
    cycle: Cycle
    stages: dict[str, float]
    workers: dict[str, WorkerShares]
    remarks: tuple[str, ...]
    off: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What a change would bring. speedup: in messages' worth of work a second (above 1: faster). pace: None if the
    change was asked for and cannot be forecast; the refusal says why. remarks: of its pace, if the graph's own pace has
    them not."""

    change: Change
    pace: Pace | None
    speedup: float
    refusal: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """measured: mean seconds of a step of the profiled run. own: what this forecast says about that run. doubts: about
    the profile. refusal: why no change was tried (its miss of the profiled run), or ''. rows_per_second, eta: None
    where rows are not known. outcomes: the first `asked` of them are of the what-ifs that were asked for."""

    graph: str
    pace: Pace
    measured: float
    own: float
    doubts: tuple[str, ...]
    messages_per_second: float
    rows_per_second: float | None
    eta: float | None
    outcomes: tuple[Outcome, ...]
    asked: int
    refusal: str
    verdict: str


def predict(graph: Graph, profile: Profile, what_ifs: Sequence[str] = (), options: Options | None = None) -> Forecast:
    """Forecast a checked graph from a profile. what_ifs: see `dflash_pipe.what_if.asked`.

    Raises BadInput if the profile is not of this dataflow or does not tell what a key does that differs, if the graph
    would stall, or if there are what-ifs and none can be forecast (several: an ExceptionGroup of them).
    """
    return _Prediction(profile, options or Options()).of(graph, what_ifs)


class _Prediction:
    def __init__(self, profile: Profile, options: Options) -> None:
        self.options = options
        self.profiled = graph_of(profile.graph, "the profile's graph", elsewhere=bool(profile.memory))
        self.doubts = tuple(profile.doubts())
        if not profile.steps.mean > 0:
            raise BadInput("the profile's steps took no time")
        self.profiled_plan = lay_out(self.profiled)
        self.measured, self.profile = profile, uncontended(profile, self.profiled_plan)
        self.varies = varies(profile)

    def of(self, graph: Graph, what_ifs: Sequence[str]) -> Forecast:
        _same_stages(graph, self.profile)
        pace = self._pace(graph)
        outcomes = tuple(self._asked(graph, pace, what_ifs))
        measured, own = self.profile.steps.mean, self._pace(self.profiled).step
        refusal = ""
        if abs(own / measured - 1) > TRUSTED:
            refusal, outcomes = (
                (
                    f"the forecast of the profiled run itself is {own:.4g} s a step, measured were {measured:.4g} s: "
                    f"more than {TRUSTED:.0%} off, so nothing is said about changes"
                ),
                (),
            )
        asked_for = len(outcomes)
        if self.options.changes and not refusal:
            outcomes += tuple(self._usual(graph, pace, {outcome.change.name for outcome in outcomes}))
        rows = self._rows(graph)
        per_second = rows * graph.window / pace.step if rows else None
        return Forecast(
            graph=graph.name,
            pace=pace,
            measured=measured,
            own=own,
            doubts=self.doubts,
            messages_per_second=graph.window / pace.step,
            rows_per_second=per_second,
            eta=self.options.rows / per_second if per_second and self.options.rows else None,
            outcomes=outcomes,
            asked=asked_for,
            refusal=refusal,
            verdict="; ".join(filter(None, (self._bound(graph, pace), "" if refusal else _advice(outcomes, pace)))),
        )

    def _asked(self, graph: Graph, pace: Pace, what_ifs: Sequence[str]) -> Iterator[Outcome]:
        errors = []
        for text in what_ifs:
            where = f"--what-if {text!r}"
            try:
                yield self._outcome(graph, pace, asked(graph, text))
            except BadInput as error:
                errors.append(error if error.where else BadInput(f"not forecast: {error.message}", where))
                why = str(error).removeprefix(f"{where}: ")
                yield Outcome(Change(text, text, graph), None, 1.0, why)
        if errors and len(errors) == len(what_ifs):
            raise errors[0] if len(errors) == 1 else ExceptionGroup("no what-if can be forecast", errors)

    def _usual(self, graph: Graph, pace: Pace, names: set[str]) -> Iterator[Outcome]:
        """The usual changes that can be forecast, without those of these names."""
        for change in usual(graph, telling_keys(graph, self.profile), hand_offs.slow(graph, self.profile, pace.step)):
            if change.name not in names:
                with contextlib.suppress(BadInput):
                    yield self._outcome(graph, pace, change)

    def _outcome(self, graph: Graph, pace: Pace, change: Change) -> Outcome:
        changed = self._pace(change.graph, change.times, change.free)
        work = change.graph.window * self._growth(change.graph) / (graph.window * self._growth(graph))
        remarks = tuple(remark for remark in changed.remarks if remark not in pace.remarks)
        return Outcome(change, changed, work * pace.step / changed.step, remarks=remarks)

    def _bound(self, graph: Graph, pace: Pace) -> str:
        """What binds. How busy it is: of the profiled graph as measured, of any other as forecast."""
        stage, share = next(iter(pace.stages.items()))
        worker = next((w for w in graph.workers.values() if stage in w.stages), None)
        if worker is None:
            return f"bound by {stage}: {share:.0%} of the critical path"
        if self._is_profiled(graph):
            work = sum(replicas_busy(self.measured, self.profiled_plan, each) for each in worker.stages)
            busy = f"{min(1.0, work / worker.replicas):.0%} as measured"
        else:
            replicas = (
                [worker.name] if worker.replicas == 1 else [f"{worker.name}[{r}]" for r in range(worker.replicas)]
            )
            busy = f"{max(pace.workers[name].busy for name in replicas):.0%}"
        return f"bound by {stage}: busy {busy}, {share:.0%} of the critical path"

    def _is_profiled(self, graph: Graph) -> bool:
        same = ("window", "credits", "channels", "workers")
        alike = all(getattr(graph, key) == getattr(self.profiled, key) for key in same)
        return alike and sizes(self.profiled, graph, self.profile) == Sizes()

    # --- one graph

    def _pace(self, graph: Graph, faster: Mapping[str, float] | None = None, free: str = "") -> Pace:
        """faster: stage -> factor on its times. free: a channel that is handed over in no time."""
        if (other := transport_of(graph)) != (measured := transport_of(self.profiled)):
            was, now = (name or "none at all" for name in (measured, other))
            raise BadInput(f"the profile was measured with transport {was}; it does not tell what {now} does")
        size = sizes(self.profiled, graph, self.profile)
        profile, remarks, off = resized(self.profile, size)
        for stage, factor in (faster or {}).items():
            profile = sped_up(profile, stage, factor)
        profile = hand_offs.in_no_time(profile, free)
        plan = lay_out(graph)
        pace = self._timed(plan, profile)
        for stage, share in off.items():
            profile = sped_up(profile, stage, 1.0 + share)
        # A step is convex in the times: it grows with longer ones by no less than it shrinks with shorter ones.
        slower = self._timed(plan, profile).step / pace.step - 1.0 if off else 0.0
        if slower > 1.0:
            raise BadInput(f"the profile tells the step only within ± {slower:.0%}; measure nearer to it")
        remarks += [*hand_offs.sized(graph, self.profile, pace.step)] if size.everywhere != 1.0 else []
        remarks += [*self._left_out(plan), *hand_offs.unknown(plan, self.profile, pace.cycle)]
        return replace(pace, remarks=tuple(remarks), off=slower)

    def _timed(self, plan: Plan, profile: Profile) -> Pace:
        graph = plan.graph
        exclusive = self._exclusive(plan)
        stations = sum(len(worker.stations) for worker in plan.workers)
        windows = self.options.windows or max(60, min(400, _FIRINGS // (graph.window * stations)))
        skip = max(2, windows // 6)
        if self.varies:
            times = drawn_times(profile, plan, windows=windows + skip, seed=self.options.seed)
        else:
            times = constant_times(profile)
        try:
            seen = simulate(plan, times, windows=windows + skip, skip=skip, exclusive=exclusive)
        except Stalled as error:
            raise BadInput(f"{graph.name} would stall: {error}") from None
        exact = not self.varies and not exclusive and is_marked(plan)
        return _paced(plan, seen, times if exact else None)

    def _left_out(self, plan: Plan) -> list[str]:
        """What the profile cannot know of other devices, and of workers that crowd each other, in words."""
        host, found = self.profile.host, list[str]()
        if host is None:
            return found
        stations = (station for worker in plan.workers for station in worker.stations)
        if moved := dict.fromkeys(s.stage for s in stations if s.stage in host.stages and s.device != "cpu"):
            found.append(f"measured on a CPU, not on a GPU: {', '.join(moved)}")
        if self._cores(plan) and not self._cores(self.profiled_plan):
            found.append(
                f"more workers than {host.cores} CPU cores have room for (threads: {plan.graph.threads}): "
                "they take turns, and what they cost each other beyond that is not in the profile"
            )
        return found

    def _growth(self, graph: Graph) -> float:
        return sizes(self.profiled, graph, self.profile).everywhere

    def _rows(self, graph: Graph) -> float | None:
        """Mean rows in a message, if any stage measures them."""
        for parts in self.profile.stages.values():
            for samples in parts.values():
                if "rows" in samples.measures:
                    return float(np.mean(samples.measures["rows"])) * self._growth(graph)
        return None

    def _exclusive(self, plan: Plan) -> Exclusive:
        together = self.options.together or {}
        known = [station.stage for worker in plan.workers for station in worker.stations]
        for stage in together:
            if stage not in known:
                raise BadInput(f"no stage {stage!r}{nearest(stage, known)}", "command line")
        named = {
            (station.stage, worker.replica): Resource(together[station.stage])
            for worker in plan.workers
            for station in worker.stations
            if station.stage in together
        }
        return {**shared_devices(plan), **self._cores(plan), **named}

    def _cores(self, plan: Plan) -> Exclusive:
        host = self.profile.host
        return shared_cores(plan, host.cores, host.stages) if host is not None else {}


def _same_stages(graph: Graph, profile: Profile) -> None:
    for stage in graph.stages:
        if stage not in profile.stages:
            raise BadInput(
                f"the profile has no stage {stage!r}{nearest(stage, profile.stages)}: it is of another dataflow"
            )


def _paced(plan: Plan, seen: Simulated, times: Times | None) -> Pace:
    """The pace of a simulated plan; times: if they are constant and the plan is marked, for the exact step."""
    low, median, high = np.quantile(seen.steps(), (0.05, 0.5, 0.95)).tolist()
    step, path = seen.step_seconds, seen.path()
    if times is not None:
        operations, arcs, windows = events(plan, times)
        ratio, chain = maximum_ratio(operations, arcs)
        step, path = ratio / windows, chain * 3  # walked three times, it goes round at least twice
    cycle = critical_cycle(path, [worker.name for worker in plan.workers])
    seconds = seconds_by_stage(path)
    total = sum(seconds.values()) or 1.0
    shares = {stage: spent / total for stage, spent in seconds.items()}
    return Pace(step, median, low, high, times is not None, cycle, shares, seen.workers, ())


def _advice(outcomes: Sequence[Outcome], pace: Pace) -> str:
    """The one change that would help most; where a hand-off binds, what it costs."""
    kept = [outcome for outcome in outcomes if outcome.pace is not None and outcome.change.same_result]
    binding = [outcome for outcome in kept if hand_off(outcome.change.free) == next(iter(pace.stages))]
    kept = binding or [outcome for outcome in kept if not outcome.change.free]
    changes = [outcome for outcome in kept if not outcome.change.times] or kept
    best = max(changes, key=lambda outcome: outcome.speedup, default=None)
    if best is not None and best.speedup < _WORTH:
        best = max(kept, key=lambda outcome: outcome.speedup)
    return "" if best is None else f"{best.change.wording} would give {best.speedup:.2f}x"

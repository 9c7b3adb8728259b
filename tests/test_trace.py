"""The trace keeps the rules of the trace-event format; the critical path is the one that the timeline was made with."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipe.trace import Depth, Span, Timeline, Wait, critical, write_chrome
from tests.pipeline import executed, toy

# --- the rules of the format ("Trace Event Format", and what ui.perfetto.dev binds flows to) --------------------------


def broken_rules(trace):
    """What is wrong with a trace, as a list of words."""
    events = trace["traceEvents"]
    wrong = [f"{event}: {said}" for event in events for said in _of_one(event)]
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and "dur" in event:
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track, own in slices.items():
        open_until = []
        for begin, end in sorted(own, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            if open_until and end > open_until[-1] + 1e-6:
                wrong.append(f"{track}: slices overlap without nesting at {begin}")
            open_until.append(end)
    return [*wrong, *_of_flows(events, slices)]


def _of_one(event):
    needed = {"ph": str, "pid": int, "tid": int, "name": str}
    yield from (f"{key} is missing" for key, kind in needed.items() if not isinstance(event.get(key), kind))
    phase = event.get("ph")
    if phase not in ("X", "M", "C", "s", "t", "f"):
        yield f"phase {phase}"
    if phase != "M" and not (isinstance(event.get("ts"), int | float) and event["ts"] >= 0):
        yield "no time stamp in microseconds"
    if phase == "X" and not (isinstance(event.get("dur"), int | float) and event["dur"] > 0):
        yield "a slice needs a duration"
    if phase in ("s", "t", "f") and not ("id" in event and event.get("cat")):
        yield "a flow needs an id and a category"
    if phase == "C" and not (event["args"] and all(isinstance(v, int | float) for v in event["args"].values())):
        yield "a counter needs numbers"
    arguments = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
    if phase == "M" and arguments.get(event["name"]) not in event["args"]:
        yield "metadata of no known kind"


def _of_flows(events, slices):
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            flows[event["cat"], event["name"], event["id"]].append(event)
            own = slices[event["pid"], event["tid"]]
            if not any(begin <= event["ts"] <= end for begin, end in own):
                yield f"{event}: no slice encloses it"
            if event["ph"] == "f" and event.get("bp") != "e":
                yield f"{event}: binds to the next slice"
    for flow, own in flows.items():
        phases = "".join(event["ph"] for event in sorted(own, key=lambda event: event["ts"]))
        if phases[0] != "s" or phases[-1] != "f" or phases.strip("sf").strip("t") or len(phases) < 2:
            yield f"{flow}: {phases}"
        if phases.count("s") != 1 or phases.count("f") != 1:
            yield f"{flow}: {phases}"


def event(phase="X", ts=0.0, **keys):
    base = {"ph": phase, "pid": 1, "tid": 1, "ts": ts, "name": "n", "cat": "c"}
    return base | ({"dur": 5.0} if phase == "X" else {}) | ({"id": 1} if phase in "stf" else {}) | keys


@pytest.mark.parametrize(
    "events",
    [
        [event(), event(ts=4.0)],
        [event(dur=0)],
        [event(), event("s", 1.0), event("f", 6.0, bp="e")],
        [event(), event("s", 1.0), event("f", 2.0)],
        [event(), event("s", 3.0), event("f", 2.0, bp="e")],
        [event(), event("s", 1.0)],
        [event("C", args={"a": "1"})],
        [event("Q")],
        [event(tid="main")],
    ],
)
def test_the_check_itself_finds_what_is_wrong(events):
    good = [event(), event(ts=5.0), event("s", 1.0), event("t", 5.5), event("f", 6.0, bp="e")]
    assert broken_rules({"traceEvents": good}) == []
    assert broken_rules({"traceEvents": events})


# --- traces -----------------------------------------------------------------------------------------------------------


def traced(timeline, tmp_path):
    path = tmp_path / "trace.json"
    write_chrome(timeline, path)
    assert [file.name for file in tmp_path.iterdir() if "trace" in file.name] == ["trace.json"]
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize("topology", ["sequential", "overlapped", "parallel_target", "data_parallel"])
def test_the_trace_of_a_run_keeps_the_rules_of_the_format(topology, tmp_path):
    result = executed(toy(tmp_path / "run", topology))
    trace = traced(result.timeline, tmp_path)
    assert broken_rules(trace) == []
    events = trace["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tuple(tracks.values()) == result.timeline.workers
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "wait"]
    assert len(slices) == len(result.timeline.spans)
    assert {e["cat"] for e in slices} == {"warm-up", "work"}

    def at(flow):
        own = [s for s in slices if s["tid"] == flow["tid"] and s["ts"] <= flow["ts"] <= s["ts"] + s["dur"]]
        assert len(own) == 1
        return own[0]["name"]

    flows = defaultdict(list)
    for each in sorted((e for e in events if e["ph"] in "stf"), key=lambda e: e["ts"]):
        flows[each["id"]].append(at(each))
    assert flows == {index: ["data read", "target", "drafter", "optimizer"] for index in range(32)}
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {f"{c.name}: {what}" for c in result.view.channels for what in ("messages", "bytes")}


def span(worker, index, begin, end, stage=None, what="process", window=None):
    return Span(worker, stage or worker, what, index, index if window is None else window, begin, end)


def test_work_on_two_devices_at_once_gets_a_track_of_its_own(tmp_path):
    spans = (span("w", 0, 0.0, 2.0), span("w", 1, 1.0, 3.0), span("w", 2, 3.0, 4.0))
    trace = traced(Timeline(("w",), spans, (), ()), tmp_path)
    assert broken_rules(trace) == []
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {1: "w", 2: "w (at the same time)"}
    assert [e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"] == [1, 2, 1]


def test_a_message_that_only_one_stage_saw_has_no_arrow(tmp_path):
    trace = traced(Timeline(("w",), (span("w", 0, 0.0, 1.0),), (), ()), tmp_path)
    assert broken_rules(trace) == [] and not [e for e in trace["traceEvents"] if e["ph"] in "stf"]


def test_times_begin_at_zero_and_are_microseconds(tmp_path):
    trace = traced(Timeline(("w",), (span("w", 0, 7.25, 7.5),), (), (Depth("c", 7.0, 1, 8),)), tmp_path)
    assert [(e["ts"], e.get("dur")) for e in trace["traceEvents"] if e["ph"] in "XC"] == [
        (250_000.0, 250_000.0),
        (0.0, None),
        (0.0, None),
    ]


times = st.floats(0.0, 1.0).map(lambda value: round(value, 7))
entries = st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 9), times, times)


@settings(max_examples=60, deadline=None)
@given(st.lists(entries, max_size=40), st.lists(st.tuples(st.sampled_from("abc"), times, times), max_size=10))
def test_every_timeline_makes_a_trace_that_keeps_the_rules(tmp_path_factory, work, waits):
    spans = tuple(Span(w, s, "process", i, i // 3, min(t), max(t)) for w, s, i, *t in dict.fromkeys(work))
    waited = tuple(Wait(w, "starved", "input", min(t), max(t)) for w, *t in waits)
    timeline = Timeline(("a", "b", "c"), spans, waited, ())
    assert broken_rules(traced(timeline, tmp_path_factory.mktemp("trace"))) == []
    critical(timeline)


# --- the critical path ------------------------------------------------------------------------------------------------


def input_wait(worker, begin, end):
    return Wait(worker, "starved", "input from 'c'", begin, end)


def shares(timeline):
    return {each.worker: (round(each.seconds, 6), each.times, round(each.share, 6)) for each in critical(timeline)}


def test_a_worker_that_never_waits_is_the_path():
    """The drafter waits for each message of the slower target; only its last work is on the path."""
    spans, waits = [], []
    for i in range(5):
        spans += [span("target", i, 1.0 * i, i + 1.0), span("drafter", i, i + 1.0, i + 1.4)]
        waits.append(input_wait("drafter", i + 0.4, i + 1.0))
    assert shares(Timeline(("target", "drafter"), tuple(spans), tuple(waits), ())) == {
        "target": (5.0, 1, round(5 / 5.4, 6)),
        "drafter": (0.4, 1, round(0.4 / 5.4, 6)),
    }


def test_a_barrier_puts_everybody_on_the_path_in_turn():
    """A window at a time: the target waits for the credit that the optimizer's step gives back."""
    spans, waits = [], []
    for i in range(4):
        begin = 2.0 * i
        spans += [span("target", i, begin, begin + 1.0), span("optim", i, begin + 1.0, begin + 2.0)]
        waits.append(input_wait("optim", begin, begin + 1.0))
        if i:
            waits.append(Wait("target", "starved", "a credit (windows)", begin - 1.0, begin))
    assert shares(Timeline(("target", "optim"), tuple(spans), tuple(waits), ())) == {
        "target": (4.0, 4, 0.5),
        "optim": (4.0, 4, 0.5),
    }


def test_of_two_that_end_during_a_wait_for_input_the_one_with_the_message_counts():
    """Another worker ends just before the wait is over; the message came from the target."""
    spans = (span("target", 0, 0.0, 1.0), span("other", 7, 0.0, 0.99995), span("drafter", 0, 1.0001, 2.0))
    path = shares(Timeline(("target", "other", "drafter"), spans, (input_wait("drafter", 0.0, 1.00005),), ()))
    assert path.keys() == {"target", "drafter"}


def test_the_warm_up_is_not_on_the_path():
    spans = tuple(span("w", i, float(i), i + 1.0) for i in range(6))
    assert shares(Timeline(("w",), spans, (), (), warm_up=4)) == {"w": (2.0, 1, 1.0)}
    assert critical(Timeline(("w",), spans, (), (), warm_up=6)) == ()
    assert critical(Timeline((), (), (), ())) == ()


def test_work_without_length_does_not_send_the_path_round_in_circles():
    spans = tuple(span(worker, 0, 1.0, 1.0) for worker in "abc")
    waits = tuple(input_wait(worker, 0.5, 1.0) for worker in "abc")
    assert sum(each.times for each in critical(Timeline(tuple("abc"), spans, waits, ()))) <= 3

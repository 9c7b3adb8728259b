"""Recording service times, the file they are kept in, what makes them doubtful, and drawing them again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_pipe.errors import BadInput
from dflash_pipe.profile import Host, Recorder, load, save
from dflash_pipe.service import constant_times, drawn_times, varies
from tests.timed_graphs import random_plan


def recorded(messages=40, window=4, **options):
    """A recorder that has seen two stages work on messages of different length, and an optimizer."""
    recorder = Recorder(window, **options)
    for index in range(messages):
        tokens = 100.0 + 37 * index % 800
        recorder.record("target", "process", index, 0.01 + tokens * 1e-4, {"tokens": tokens, "padding": 5.0})
        recorder.record("drafter", "process", index, tokens * 2e-4, {"tokens": tokens})
        if index % window == window - 1:
            recorder.record("optimizer", "process", index, 0.5)
            recorder.window_done(index // window, float(index))
    return recorder


# --- recording --------------------------------------------------------------------------------------------------------


def test_the_warm_up_is_left_out():
    profile = recorded(warm_up=3).profile("", "a machine")
    assert profile.stages["target"]["process"].index[0] == 12
    assert profile.stages["optimizer"]["process"].index[0] == 15
    assert profile.steps.index == tuple(range(3, 10)) and set(profile.steps.seconds) == {4.0}


def test_the_warm_up_of_a_resumed_run_begins_where_it_resumed():
    recorder = Recorder(2, start=10, warm_up=1)
    for index in range(20, 26):
        recorder.record("target", "process", index, 1.0)
    for window in (10, 11, 12):
        recorder.window_done(window, float(window))
    profile = recorder.profile("", "")
    assert profile.stages["target"]["process"].index == (22, 23, 24, 25) and profile.steps.count == 2


def test_a_run_that_was_only_warm_up_is_measured_by_that_and_says_so():
    profile = recorded(messages=8).profile("", "")
    assert (profile.warm_up, profile.steps.index, profile.steps.seconds) == (0, (1,), (4.0,))
    assert profile.stages["target"]["process"].count == 8
    assert profile.doubts() == [
        "the profile rests on 1 measured step of the warm-up: 5 are needed (a run of 7 windows or more)"
    ]


def test_the_only_window_of_a_run_takes_from_its_first_firing_on():
    profile = recorded(messages=4).profile("", "", began=1.0)
    assert (profile.steps.index, profile.steps.seconds) == ((0,), (2.0,))
    assert recorded(messages=8).profile("", "", began=1.0).steps.seconds == (4.0,)
    for unfinished in (recorded(messages=3), recorded(messages=4)):
        with pytest.raises(BadInput, match="of 4 messages was full"):
            unfinished.profile("", "")


@given(st.integers(1, 3000), st.integers(1, 50))
def test_the_sample_is_bounded_and_the_counts_are_of_all(messages, keep):
    samples = recorded(messages + 4, window=1, warm_up=1, keep=keep).profile("", "").stages["target"]["process"]
    assert samples.count == messages + 3
    assert min(samples.count, keep) <= len(samples.index) < max(2 * keep, 2)
    assert samples.index == tuple(sorted(samples.index)) and not samples.fault()


def test_all_stages_keep_the_same_messages_and_they_are_spread_over_the_run():
    stages = recorded(messages=4000, keep=64).profile("", "").stages
    assert stages["target"]["process"].index == stages["drafter"]["process"].index
    quarters = np.histogram(stages["target"]["process"].index, bins=4, range=(0, 4000))[0]
    assert quarters.min() > 0.6 * quarters.mean()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_profile_reads_back_as_it_was(tmp_path):
    profile = recorded().profile("stages: {}", "8 GPUs")
    save(profile, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == profile


def test_what_is_no_profile_is_told_in_one_line(tmp_path):
    path = tmp_path / "profile.json"
    with pytest.raises(BadInput, match=r"profile.json: cannot be read as a profile: No such file"):
        load(path)
    path.write_text("{ not json")
    with pytest.raises(BadInput, match=r"no profile of a run: invalid JSON"):
        load(path)
    save(recorded().profile("", ""), path)
    good = json.loads(path.read_text())
    for change, told in [
        ({"format": "dflash-pipe profile 9"}, "format: expected 'dflash-pipe profile 1'"),
        ({"window": "four"}, "window: input should be a valid integer"),
        ({"window": 0}, "window is 0 and warm_up 2, expected at least 1 and 0"),
        ({"warm_up": -1}, "window is 4 and warm_up -1, expected"),
        (
            {"steps": {**good["steps"], "seconds": [1.0]}},
            "steps: index, seconds, own and measures have different lengths",
        ),
        ({"steps": {**good["steps"], "total": -1}}, "steps: a number is negative or not finite"),
        ({"steps": {**good["steps"], "total": float("nan")}}, "steps: a number is negative or not finite"),
        ({"steps": {**good["steps"], "total": float("inf")}}, "steps: a number is negative or not finite"),
        ({"steps": {**good["steps"], "total": 1e308}}, "steps: a time is 1e+308 s, longer than any run"),
        ({"steps": {**good["steps"], "total": 9}}, "steps: total is 9 s, but the samples add up to"),
        ({"steps": {"count": 0, "total": 0, "index": [], "seconds": []}}, "steps: count is 0"),
        ({"memory": {"cuda:0": {"peak": -1, "total": 1, "stages": []}}}, "memory: a number is negative"),
        ({"steps": {**good["steps"], "own": [1.0]}}, "steps: index, seconds, own and measures have different lengths"),
        ({"steps": {**good["steps"], "own": [1e9] * len(good["steps"]["index"])}}, "steps: own is longer than what"),
        ({"steps": {**good["steps"], "own": [-1.0] * len(good["steps"]["index"])}}, "steps: a number is negative"),
        ({"host": {"cores": 0, "stages": []}}, "host: expected at least 1 core"),
        ({"host": {"cores": 1, "stages": [], "others": float("nan")}}, "host: expected at least 1 core"),
    ]:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(BadInput) as error:
            load(path)
        assert told in str(error.value) and "\n" not in str(error.value)


# --- doubts -----------------------------------------------------------------------------------------------------------


def test_a_quiet_run_of_many_steps_leaves_no_doubt():
    profile = recorded(4000).profile("", "")
    assert replace(profile, host=Host(8, ("target",), 0.03)).doubts() == []
    assert replace(profile, host=Host(8, ("target",))).doubts() == []


def test_other_programs_and_times_that_drift_are_doubts():
    recorder = Recorder(1, warm_up=1)
    for index in range(401):
        recorder.record("target", "process", index, 1.0 if index <= 200 else 1.25)
        recorder.record("optimizer", "process", index, 1e-3)
        recorder.window_done(index, index)
    profile = recorder.profile("", "")
    assert replace(profile, host=Host(2, (), 0.34)).doubts() == [
        "the machine was not quiet: other programs used 34% of its CPU time",
        "service times were 25% longer in the second half of the run than in the first",
    ]


def test_stages_that_slowed_each_other_are_named_where_their_time_matters():
    profile = recorded(4000).profile("", "")
    (samples,) = profile.stages["target"].values()

    def slowed(times):
        own = tuple(seconds / times for seconds in samples.seconds)
        return replace(profile, stages={**profile.stages, "target": {"process": replace(samples, own=own)}})

    assert "target 1.80; reckoned with is what each takes alone" in slowed(1.8).doubts()[-1]
    longer = replace(profile.steps, total=1e6 * profile.steps.total)
    assert replace(slowed(1.8), steps=longer).doubts() == slowed(1.01).doubts() == []


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_drawn_times_keep_long_messages_long_for_every_stage():
    plan = random_plan(0)
    first, second = [stage for stage in plan.graph.stages if stage != "data"][:2]
    profile = recorded(400).profile("", "")
    profile = replace(profile, stages={first: profile.stages["target"], second: profile.stages["drafter"], "gone": {}})
    drawn = drawn_times(profile, plan, windows=50, seed=3).seconds
    assert np.corrcoef(drawn[first, "process"], drawn[second, "process"])[0, 1] == pytest.approx(1.0)
    assert drawn == drawn_times(profile, plan, windows=50, seed=3).seconds
    assert drawn != drawn_times(profile, plan, windows=50, seed=4).seconds


def test_constant_times_are_means_of_all_that_was_measured():
    profile = recorded().profile("", "")
    assert constant_times(profile).seconds["optimizer", "process"] == (0.5,)
    assert varies(profile)
    assert not varies(replace(profile, stages={"optimizer": profile.stages["optimizer"]}))

"""Recording service times, the file they are kept in, and the fit to measures."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_pipe.errors import BadInput
from dflash_pipe.profile import Recorder, Samples, load, save
from dflash_pipe.service import constant_times, drawn_times, fit, resized, varies
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


def test_a_run_that_was_only_warm_up_has_no_profile():
    with pytest.raises(BadInput, match="more than 2 windows"):
        recorded(messages=8).profile("", "")


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
        ({"steps": {**good["steps"], "seconds": [1.0]}}, "steps: index, seconds and measures have different lengths"),
        ({"steps": {**good["steps"], "total": -1}}, "steps: a number is negative or not finite"),
        ({"steps": {"count": 0, "total": 0, "index": [], "seconds": []}}, "steps: count is 0"),
    ]:
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(BadInput) as error:
            load(path)
        assert told in str(error.value) and "\n" not in str(error.value)


# --- fitting and drawing ----------------------------------------------------------------------------------------------


def samples(seconds, **measures):
    return Samples(len(seconds), sum(seconds), tuple(range(len(seconds))), tuple(seconds), measures)


def test_the_fit_finds_what_each_measure_costs():
    draw = np.random.default_rng(1)
    tokens, padding = draw.uniform(1000, 6000, 200), draw.uniform(0, 500, 200)
    found = fit(samples(0.05 + 2e-4 * tokens + 5e-5 * padding, tokens=tuple(tokens), padding=tuple(padding)))
    assert found.at_zero == pytest.approx(0.05)
    assert found.slopes == pytest.approx({"tokens": 2e-4, "padding": 5e-5})


def test_more_work_never_takes_less_time():
    tokens = (1.0, 2.0, 3.0, 4.0)
    assert fit(samples((4.0, 3.0, 2.0, 1.0), tokens=tokens)).slopes == {}


def test_a_resized_sample_keeps_its_deviation_and_says_when_it_was_never_measured():
    original = samples((1.1, 1.9, 3.2, 3.8), tokens=(1.0, 2.0, 3.0, 4.0))
    smaller, remark = resized(original, {"tokens": 0.5, "unknown": 3.0})
    slope = fit(original).slopes["tokens"]
    assert smaller.seconds == pytest.approx([1.1 - slope / 2, 1.9 - slope, 3.2 - 1.5 * slope, 3.8 - 2 * slope])
    assert remark == "extrapolated (tokens 1 to 4 was measured)"
    assert smaller.mean == pytest.approx(np.mean(smaller.seconds))
    assert resized(original, {"tokens": 1.0}) == (original, "")


def test_what_never_varied_cannot_be_resized():
    with pytest.raises(ValueError, match="anchors was always 512"):
        resized(samples((1.0, 2.0), anchors=(512.0, 512.0)), {"anchors": 0.5})


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

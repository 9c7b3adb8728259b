"""What changed keys do to the size of messages, and sizes to times: the fit, the limits in a row, what is not known."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from dflash_pipe.errors import BadInput
from dflash_pipe.forecast import Options, predict
from dflash_pipe.graph import dump
from dflash_pipe.profile import Profile, Recorder, Samples
from dflash_pipe.sizes import Fit, Sizes, fit, resized, sizes, telling_keys
from dflash_pipe.stage import signature
from docs.generate_keys import shipped_stages
from stages.batches import Cut
from tests.test_forecast import graph_of

SIZED = """
window: 2
stages:
  data:   {use: "tests.timed_graphs:Sized", with: {max_tokens: 4000}}
  target: {use: "tests.timed_graphs:Anchored", with: {num_anchors: 100}}
  after:  {use: "tests.timed_graphs:Anchored", with: {num_anchors: "${target.num_anchors}"}}
channels: {batches: {from: data, to: target}, more: {from: target, to: after}}
workers: {loader: {stages: [data]}, target: {stages: [target]}, after: {stages: [after]}}
"""
SAME = Sizes()


def samples(seconds, **measures):
    return Samples(len(seconds), sum(seconds), tuple(range(len(seconds))), tuple(seconds), measures)


def profile_of(**stages):
    steps = samples([1.0] * 10)
    return Profile("", 1, "", 1, steps, {name: {"process": part} for name, part in stages.items()})


def limits(**of_stage):
    return replace(SAME, limits={"x": of_stage})


@pytest.fixture
def sized(tmp_path):
    """A graph whose source has max_tokens, and its profile: a target that takes 0.1 ms a token and 1 ms an anchor, of
    which it has 100 in each row of even messages and 40 in each of the others."""
    path = tmp_path / "sized.yaml"
    path.write_text(SIZED)
    graph = graph_of(path)
    recorder = Recorder(2, warm_up=0, keep=4000)
    for index in range(200):
        rows = 4.0 + index // 2 % 3
        held = {"tokens": 2000.0 + 10 * (index % 17), "rows": rows}
        anchors = rows * (40.0 if index % 2 else 100.0)
        recorder.record("data", "read", index, 0.0, held)
        recorder.record(
            "target", "process", index, held["tokens"] * 1e-4 + anchors * 1e-3, {**held, "anchors": anchors}
        )
        recorder.record("after", "process", index, 0.0, held)
        if index % 2:
            recorder.window_done(index // 2, index // 2 * 1.116)
    return graph, recorder.profile(dump(graph), "")


# --- the fit ----------------------------------------------------------------------------------------------------------


def test_the_fit_finds_what_each_measure_costs():
    draw = np.random.default_rng(1)
    tokens, padding = draw.uniform(1000, 6000, 200), draw.uniform(0, 500, 200)
    seconds = 0.05 + 2e-4 * tokens + 5e-5 * padding
    found = fit(
        samples(seconds, tokens=tuple(tokens), padding=tuple(padding), rows=tuple(tokens), sent_bytes=tuple(tokens))
    )
    assert found.at_zero == pytest.approx(0.05)
    assert found.slopes == pytest.approx({"tokens": 2e-4, "padding": 5e-5})


def test_more_work_never_takes_less_time_and_none_no_less_than_none():
    tokens = (1.0, 2.0, 3.0, 4.0)
    assert fit(samples((4.0, 3.0, 2.0, 1.0), tokens=tokens)) == Fit(pytest.approx(2.5), {})
    through_zero = fit(samples((1.0, 4.0, 9.0, 16.0), tokens=tokens))
    assert through_zero.at_zero == 0.0 and through_zero.slopes == {"tokens": pytest.approx(100 / 30)}


def test_a_resized_sample_keeps_its_deviation_and_says_when_it_was_never_measured():
    tokens = tuple(map(float, range(1, 101)))
    seconds = [n + 0.1 * (-1) ** int(n) for n in tokens]
    profile = profile_of(x=samples(seconds, tokens=tokens))
    smaller, remarks, _ = resized(profile, replace(SAME, everywhere=0.5))
    slope = fit(profile.stages["x"]["process"]).slopes["tokens"]
    expected = np.array(seconds) - slope * np.array(tokens) / 2
    assert smaller.stages["x"]["process"].seconds == pytest.approx(expected)
    assert remarks == ["extrapolated: measured were 1 to 100 tokens a message"]
    assert smaller.stages["x"]["process"].mean == pytest.approx(np.mean(smaller.stages["x"]["process"].seconds))
    assert resized(profile, SAME) == (profile, [], {})


def test_a_limit_cuts_rows_that_had_more_and_fills_those_that_were_full():
    held, rows = (20.0, 12.0, 30.0, 7.0), (2.0, 2.0, 3.0, 1.0)
    profile = profile_of(x=samples([0.1 * n + 1.0 for n in held], anchors=held, rows=rows))
    for now, expected in [(5.0, (10.0, 10.0, 15.0, 5.0)), (20.0, (40.0, 12.0, 60.0, 7.0))]:
        changed = resized(profile, limits(anchors=(10.0, now)))[0].stages["x"]["process"]
        assert changed.measures["anchors"] == expected
        assert changed.seconds == pytest.approx([0.1 * n + 1.0 for n in expected])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (samples((1.0, 2.0, 1.5), anchors=(512.0,) * 3), "x: anchors was always 512 in the profile"),
        (samples((1.0, 2.0), anchors=(1.0, 2.0)), r"x: too few messages \(2\) to tell the effect of anchors"),
        (
            samples([1.0, 2.0, 3.0, 4.0, 5.0], anchors=(1.0, 2.0, 3.0, 4.0, 5.0), tokens=(2.0, 4.0, 6.0, 8.0, 10.0)),
            "x: anchors only varied together with others",
        ),
        (samples([1.0, 9.0] * 6, anchors=(1.0, 2.0, 2.0) * 4), "the measured times do not tell its effect from noise"),
    ],
)
def test_an_effect_that_the_times_do_not_tell_is_refused(part, said):
    with pytest.raises(BadInput, match=said):
        resized(profile_of(x=part), limits(anchors=(512.0, 256.0)))


def test_what_went_together_can_be_scaled_together():
    both = samples([1.0, 2.0, 3.0, 4.0, 5.0], anchors=(1.0, 2.0, 3.0, 4.0, 5.0), tokens=(2.0, 4.0, 6.0, 8.0, 10.0))
    changed, _, off = resized(profile_of(x=both), replace(SAME, everywhere=2.0))
    assert changed.stages["x"]["process"].seconds == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0])
    assert off.get("x", 0.0) == pytest.approx(0.0)  # twice the message is no more work than two of them


def test_how_far_off_a_noisy_fit_may_be_is_told_and_holds_nineteen_times_in_twenty():
    within = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        tokens = draw.uniform(1000, 2000, 300)
        noisy = samples(1e-3 * tokens * draw.uniform(0.7, 1.3, 300), tokens=tuple(tokens))
        changed, _, off = resized(profile_of(x=noisy), limits(tokens=(2000.0, 1500.0)))
        now = changed.stages["x"]["process"]
        within += abs(now.total - 1e-3 * sum(now.measures["tokens"])) < off["x"] * now.total
    assert within >= 190


def test_work_that_hardly_counts_is_taken_as_it_is():
    tokens = tuple(map(float, range(1, 101)))
    slight = samples((1e-3,) * 4, tokens=(7.0,) * 4)
    changed, *_ = resized(profile_of(x=samples(tokens, tokens=tokens), y=slight), replace(SAME, everywhere=0.5))
    assert changed.stages["y"]["process"].seconds == slight.seconds
    assert changed.stages["y"]["process"].measures == {"tokens": (3.5,) * 4}


# --- keys -------------------------------------------------------------------------------------------------------------


def test_larger_messages_take_longer_and_hold_more_rows(sized):
    graph, profile = sized
    forecast = predict(graph, profile, ["data.max_tokens=8000"], Options(rows=90_000, changes=False))
    assert forecast.pace.step == pytest.approx(1.116, rel=0.02)
    assert forecast.rows_per_second == pytest.approx(10 / 1.116, rel=0.02)
    assert forecast.eta == pytest.approx(90_000 / forecast.rows_per_second)
    (outcome,) = forecast.outcomes
    assert outcome.pace.step == pytest.approx(2 * 1.116, rel=0.02) and outcome.speedup == pytest.approx(1.0, rel=0.02)
    assert outcome.remarks == (
        "extrapolated: measured were 160 to 600 anchors a message, 2000 to 2160 tokens a message",
    )
    assert not outcome.change.same_result


def test_fewer_anchors_take_less_time(sized):
    """Half as many: 50 in each row of even messages, still 40 in the others."""
    graph, profile = sized
    outcomes = predict(graph, profile, ["target.num_anchors=50"]).outcomes
    by_name = {outcome.change.name: outcome for outcome in outcomes}
    assert len(by_name) == len(outcomes)
    assert by_name["target.num_anchors=50"].pace.step == pytest.approx(1.116 - 5 * 0.05, rel=0.03)
    assert by_name["target.num_anchors=200"].pace.step == pytest.approx(1.116 + 5 * 0.1, rel=0.03)
    assert {"data.max_tokens=2000", "data.max_tokens=8000"} < by_name.keys()
    assert not by_name["target.num_anchors=50"].change.same_result


def test_a_key_that_refers_to_another_is_not_told_twice(sized):
    graph, profile = sized
    path = graph.files[0]
    found = sizes(graph, graph_of(path, target__num_anchors=50), profile)
    assert found == Sizes(1.0, {"target": {"anchors": (100, 50)}})
    assert list(telling_keys(graph, profile)) == [("data", "max_tokens", 4000), ("target", "num_anchors", 100)]


LIMITED = {"max_tokens": 12288, "max_rows": 6, "buckets": [512, 1024, 1536, 2048, 3072]}  # as for Qwen3-8B
FREE = {**LIMITED, "max_rows": None}


def cut(max_tokens, max_rows, buckets):
    """Mean tokens in a message as the data stage cuts them: log-normal lengths, up to 3072."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.8, 0.7, 20_000), 2, 3072).astype(int)
    made = Cut(max_tokens, max_rows, buckets=tuple(buckets or ()))
    return lengths.sum() / len(made.epoch(np.arange(len(lengths)), lengths, (20, 0)))


@pytest.mark.parametrize("buckets", [LIMITED["buckets"], None])
@pytest.mark.parametrize(
    ("before", "change", "unknown"),
    [
        (LIMITED, {"max_tokens": 24576}, ["max_tokens"]),
        (LIMITED, {"max_tokens": 6144}, ["max_tokens"]),
        (LIMITED, {"max_rows": 12}, ["max_rows"]),
        (LIMITED, {"max_rows": None}, ["max_rows"]),
        (LIMITED, {"max_rows": None, "max_tokens": 24576}, ["max_rows", "max_tokens"]),
        (LIMITED, {"max_rows": 12, "max_tokens": 18432}, ["max_rows", "max_tokens"]),
        (LIMITED, {"max_rows": 12, "max_tokens": 24576}, []),
        (LIMITED, {"max_rows": 9, "max_tokens": 18432}, []),
        (LIMITED, {"max_rows": 3, "max_tokens": 6144}, []),
        (LIMITED, {"buckets": [768, 3072]}, ["buckets"]),
        (FREE, {"max_tokens": 24576}, []),
        (FREE, {"max_tokens": 6144}, []),
        (FREE, {"max_rows": 6}, ["max_rows"]),
        (FREE, {"buckets": [768, 3072]}, ["buckets"]),
        (FREE, {"buckets": [768, 3072], "max_tokens": 24576}, ["buckets"]),
    ],
)
def test_what_is_told_of_messages_is_what_the_cutter_makes_of_them(before, change, unknown, buckets, sized):
    """Where one of several limits is changed, the cutter's messages grow by anything, and nothing is told."""
    graph, profile = sized
    before = {**before, "buckets": buckets}
    graphs = [graph_of(graph.files[0], **with_keys(keys)) for keys in (before, {**before, **change})]
    if unknown:
        with pytest.raises(BadInput) as error:
            sizes(*graphs, profile)
        assert sorted(re.findall(r"data\.(\w+) \(", str(error.value))) == sorted(unknown)
    else:
        found = sizes(*graphs, profile)
        assert found.everywhere != 1.0
        assert cut(**{**before, **change}) / cut(**before) == pytest.approx(found.everywhere, rel=0.06)


def with_keys(keys):
    return {f"data__{key}": "null" if value is None else value for key, value in keys.items()}


def test_of_two_limits_one_is_refused_both_are_forecast_and_neither_is_tried(sized):
    graph, profile = sized
    limited = graph_of(graph.files[0], data__max_rows=6)
    profile = replace(profile, graph=dump(limited))
    for text in (
        "data.max_tokens=8000",
        "data.max_rows=12",
        "data.buckets=[512]",
        "data.max_tokens=8000 data.max_rows=9",
    ):
        with pytest.raises(BadInput, match="not forecast: the profile does not tell what data"):
            predict(limited, profile, [text])
    outcome, *others = predict(limited, profile, ["data.max_tokens=8000 data.max_rows=12"]).outcomes
    assert outcome.pace.step == pytest.approx(2 * 1.116, rel=0.02) and outcome.speedup == pytest.approx(1.0, rel=0.02)
    assert not any("data.max" in other.change.name for other in others)


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        ({"after__num_anchors": 50}, "after.num_anchors (100 -> 50)"),
        ({"data__weight": 3}, "data.weight (1 -> 3)"),
        ({"threads": 2}, "threads (None -> 2)"),
    ],
)
def test_what_the_profile_does_not_know_is_refused_in_a_graph_and_in_any_change_of_it(change, unknown, sized):
    graph, profile = sized
    (text,) = (f"{key.replace('__', '.')}={value}" for key, value in change.items())
    said = f"the profile does not tell what {unknown} does to the time; profile a run with it"
    with pytest.raises(BadInput) as error:
        predict(graph_of(graph.files[0], **change), profile)
    assert str(error.value) == said
    for what_if in (text, f"{text} target.replicas=2"):
        with pytest.raises(BadInput) as error:
            predict(graph, profile, [what_if])
        assert str(error.value) == f"--what-if {what_if!r}: not forecast: {said}"


def test_how_long_a_run_is_changes_no_forecast(sized):
    graph, profile = sized
    longer = graph_of(graph.files[0], data__count=4000)
    assert predict(longer, profile).pace == predict(graph, profile).pace


@pytest.mark.parametrize(("use", "make"), [each for each in shipped_stages() if getattr(each[1], "untimed", ())])
def test_the_keys_that_a_stage_says_change_no_time_are_its_own(use, make):
    assert set(make.untimed) <= signature(make).parameters.keys(), use


def test_how_far_off_is_told_of_the_step_and_not_of_all_work(sized):
    """The target alone decides the step; that another stage works as long makes its step no surer."""
    graph, profile = sized
    (alone,) = predict(graph, profile, ["target.num_anchors=50"], Options(changes=False)).outcomes
    beside = {**profile.stages, "after": {"process": replace(profile.stages["target"]["process"], measures={})}}
    (both,) = predict(
        graph, replace(profile, stages=beside), ["target.num_anchors=50"], Options(changes=False)
    ).outcomes
    assert alone.pace.off == pytest.approx(0.3 * 0.25 / (1.116 - 0.25), rel=0.1)
    assert both.pace.step == pytest.approx(1.116, rel=0.03) and both.pace.off < 0.01  # the other one decides now
    assert predict(graph, profile, options=Options(changes=False)).pace.off == 0.0


def test_no_number_is_told_where_it_may_be_twice_as_much(sized, monkeypatch):
    graph, profile = sized
    monkeypatch.setattr("dflash_pipe.sizes._TRUSTED", 5.0)
    with pytest.raises(BadInput, match=r"the profile tells the step only within ± 1\d\d%; measure nearer to it"):
        predict(graph, profile, ["target.num_anchors=50"])


def test_a_size_that_never_varied_is_refused_if_nothing_else_is_asked(sized):
    graph, profile = sized
    always = {"tokens": (3.0,) * 200}
    even = {s: {p: replace(v, measures=always) for p, v in ps.items()} for s, ps in profile.stages.items()}
    even = replace(profile, stages=even)
    with pytest.raises(BadInput, match=r"--what-if 'data.max_tokens=8000': not forecast: .*tokens was always 3"):
        predict(graph, even, ["data.max_tokens=8000"])
    both, replicas = predict(graph, even, ["data.max_tokens=8000 target.replicas=2", "target.replicas=2"]).outcomes[:2]
    assert "tokens was always 3" in both.refusal and both.pace is None and replicas.speedup > 1.5

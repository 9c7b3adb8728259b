"""The optimizer stage: its step, its schedule, its policies, and the state that a run resumes from."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_pipe import BadInput, Context
from dflash_pipe.stage import signature
from stages.dflash_loss import Sums
from stages.dflash_model import DFlashModel, initial_parameters, parameter_layout
from stages.messages import Gradients, Parameters, Partial
from stages.optimizer import AdamW, learning_rate
from stages.splitmix import digest
from tests.drafters import normal

DRAFTER: dict[str, Any] = {
    "target": "tiny:llama", "layers": 2, "num_layers": 1, "block_size": 4, "num_anchors": 5, "gamma": 2.0
}  # fmt: skip
WINDOWS = 6


def opened(**keys: Any) -> AdamW:
    stage = AdamW(**({"drafter": DRAFTER, "lr": 1e-2} | keys))
    stage.check(1)
    stage.open(Context(seed=20))
    return stage


SIZE = opened().initial().flat.numel()


def partial(seed: int, scale: float = 1.0, weight: float = 2.0) -> Partial:
    sums = Sums.zeros(4)
    sums.loss.fill_(3.0 * weight)
    sums.weight.fill_(weight)
    sums.hits.copy_(torch.tensor([0.0, 3.0, 2.0, 1.0]))
    sums.counts.copy_(torch.tensor([0.0, 4.0, 4.0, 4.0]))
    return Partial(normal(SIZE, seed=seed) * scale, sums.vector)


def window(number: int, *seeds: int, **keys: float) -> tuple[Gradients, ...]:
    """One replica's gradients, with one partial a seed."""
    progress = (number / WINDOWS, (number + 1) / WINDOWS)
    return (Gradients({i: partial(seed, **keys) for i, seed in enumerate(seeds or (number,))}, progress),)


def test_ports() -> None:
    found = signature(AdamW)
    assert found.inputs["grads"].gather and found.inputs["grads"].type is Gradients
    assert found.output is Parameters and found.stateful and found.has_initial


def test_initial_weights_are_published_first() -> None:
    stage = opened()
    first = stage.initial()
    assert (first.step, first.metrics) == (0, {})
    assert torch.equal(first.flat, initial_parameters(stage.config, 20))
    assert first.flat.data_ptr() != stage.initial().flat.data_ptr()  # given away: never the masters themselves
    assert opened(drafter=DRAFTER | {"dtype": "bfloat16"}).initial().flat.dtype == torch.bfloat16


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_steps_are_those_of_torch_adamw(max_norm: float | None) -> None:
    stage = opened(max_norm=max_norm, weight_decay=0.1, betas=(0.8, 0.99), warmup=0.3)
    layout = parameter_layout(DFlashModel(stage.config, device="meta"))
    start = initial_parameters(stage.config, 20)
    weights = {name: torch.nn.Parameter(slot.of(start).clone()) for name, slot in layout.items()}
    groups = [
        {"params": [p for p in weights.values() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in weights.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.99), foreach=False)
    for number in range(WINDOWS):
        published = stage.process(window(number))
        for name, slot in layout.items():
            weights[name].grad = slot.of(normal(SIZE, seed=number)).clone() / 2.0
        norm = torch.nn.utils.get_total_norm([p.grad for p in weights.values() if p.grad is not None])
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)
        for group in reference.param_groups:
            group["lr"] = learning_rate(1e-2, 0.3, number / WINDOWS, (number + 1) / WINDOWS)
        reference.step()
        expected = torch.cat([p.detach().flatten() for p in weights.values()])
        torch.testing.assert_close(published.flat, expected, atol=2e-6, rtol=1e-5)
        assert published.step == number + 1
        assert published.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert published.metrics["lr"] == group["lr"]


def test_norms_do_not_decay() -> None:
    stage = opened(weight_decay=0.5)
    layout = parameter_layout(DFlashModel(stage.config, device="meta"))
    nothing = Gradients({0: Partial(torch.zeros(SIZE), partial(0).sums)}, (0.5, 0.6))
    before, after = stage.initial().flat, stage.process((nothing,)).flat
    for name, slot in layout.items():
        assert torch.equal(slot.of(before), slot.of(after)) == (len(slot.shape) == 1), name


@given(st.floats(0, 0.9), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_schedule(warmup: float, windows: int) -> None:
    rates = [learning_rate(1.0, warmup, i / windows, (i + 1) / windows) for i in range(windows)]
    peak = rates.index(max(rates))
    assert all(0.0 < rate <= 1.0 for rate in rates)  # neither the first nor the last is wasted
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_schedule_by_hand() -> None:
    assert learning_rate(1.0, 0.04, 0.0, 0.01) == pytest.approx(0.25)
    assert learning_rate(1.0, 0.04, 0.03, 0.04) == 1.0
    assert learning_rate(1.0, 0.04, 0.52, 0.53) == pytest.approx(0.5)
    assert learning_rate(1.0, 0.0, 0.0, 0.1) == 1.0
    assert learning_rate(1.0, 0.04, 1.0, 1.0) == pytest.approx(0.0)


def _split(gradients: Gradients, replicas: int) -> tuple[Gradients, ...]:
    return tuple(
        Gradients({i: p for i, p in gradients.partials.items() if i % replicas == k}, gradients.progress)
        for k in range(replicas)
    )


def test_partials_give_the_same_bits_whoever_held_them() -> None:
    results = []
    for replicas in (1, 2, 4):
        stage = opened(digest=True)
        for number in range(3):
            whole = window(number, *range(10 * number, 10 * number + 4))[0]
            last = stage.process(tuple(reversed(_split(whole, replicas))))  # nor does the order of replicas matter
        results.append((last.flat.numpy().tobytes(), last.metrics))
    assert results[0] == results[1] == results[2]


def test_partials_are_added_in_order_of_their_number() -> None:
    gradients = [partial(seed, scale=10.0**seed).gradient for seed in range(4)]
    stage = opened(digest=True)
    given_ = Gradients({i: Partial(gradients[i], partial(0).sums) for i in (3, 1, 0, 2)}, (0.0, 1.0))
    found = stage.process((given_,)).metrics["digest"]
    expected = ((gradients[0] + gradients[1]) + gradients[2]) + gradients[3]
    assert found == digest(expected)
    other = ((gradients[3] + gradients[2]) + gradients[1]) + gradients[0]
    assert found != digest(other)


def test_what_was_received_is_not_written_to() -> None:
    received = window(0, 1, 2, 3)
    before = [(p.gradient.clone(), p.sums.clone()) for p in received[0].partials.values()]
    opened().process(received)
    for (gradient, sums), p in zip(before, received[0].partials.values(), strict=True):
        assert torch.equal(gradient, p.gradient) and torch.equal(sums, p.sums)


@pytest.mark.parametrize("numbers", [(1,), (0, 2), ()])
def test_a_missing_partial_is_an_error(numbers: tuple[int, ...]) -> None:
    gradients = Gradients({i: partial(i) for i in numbers}, (0.0, 1.0))
    with pytest.raises(RuntimeError, match=r"expected 0\.\.n-1, each once"):
        opened().process((gradients,))


def test_a_partial_that_came_twice_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="each once"):
        opened().process(window(0) + window(0))


def test_a_replica_without_a_micro_batch_does_not_bend_the_schedule() -> None:
    idle = Gradients({1: Partial(torch.zeros(SIZE), Sums.zeros(4).vector)}, (math.inf, -math.inf))
    metrics = opened(warmup=0.0).process((*window(2), idle)).metrics
    assert metrics["lr"] == learning_rate(1e-2, 0.0, 2 / WINDOWS, 3 / WINDOWS)


def test_the_gradient_is_divided_by_the_weight_of_the_whole_window() -> None:
    """Two partials of weight 2 are one of weight 4 whose sum is theirs."""
    both = window(0, 1, 2)
    added = Partial(
        both[0].partials[0].gradient + both[0].partials[1].gradient,
        both[0].partials[0].sums + both[0].partials[1].sums,
    )
    apart = opened(max_norm=None).process(both)
    whole = opened(max_norm=None).process((Gradients({0: added}, both[0].progress),))
    assert torch.equal(apart.flat, whole.flat) and apart.metrics == whole.metrics
    assert apart.metrics["loss"] == 3.0
    assert apart.metrics["grad_norm"] == pytest.approx(float((added.gradient / 4.0).norm()), rel=1e-5)


def test_metrics_are_numbers_that_json_takes() -> None:
    metrics = opened(digest=True).process(window(0)).metrics
    assert json.loads(json.dumps(metrics)) == metrics
    expected = {"loss", "accuracy", "estimated_acceptance", "covered", "grad_norm", "lr", "digest", "skipped", "empty"}
    assert expected | {f"accuracy_slot_{k}" for k in (1, 2, 3)} <= set(metrics)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_not_finite_halts_and_names_the_step(bad: float, where: str) -> None:
    stage = opened()
    stage.process(window(0))
    with pytest.raises(FloatingPointError, match="step 2: loss is"):
        stage.process(_poisoned(bad, where))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_skip_leaves_everything_and_counts(bad: float, where: str) -> None:
    stage, other = opened(nonfinite="skip"), opened(nonfinite="skip")
    before = stage.process(window(0))
    skipped = stage.process(_poisoned(bad, where))
    assert torch.equal(before.flat, skipped.flat)
    assert (skipped.step, skipped.metrics["skipped"]) == (1, 1)
    other.process(window(0))
    following = stage.process(window(2))
    assert torch.equal(following.flat, other.process(window(2)).flat)  # the moments were left alone too
    assert (following.step, following.metrics["skipped"]) == (2, 1)


def _poisoned(bad: float, where: str) -> tuple[Gradients, ...]:
    gradients = window(1)
    target: Tensor = gradients[0].partials[0].gradient if where == "gradient" else gradients[0].partials[0].sums
    target[0] = bad
    return gradients


@pytest.mark.parametrize("weight", [0.0, 8.0])
def test_a_window_without_supervised_tokens_changes_nothing(weight: float) -> None:
    """Also where the weight is that of sequences, as D-PACE's: neither decay nor momentum moves anything."""
    stage = opened(weight_decay=0.5)
    before = stage.process(window(0))
    sums = Sums.zeros(4)
    sums.weight.fill_(weight)
    empty = Gradients({0: Partial(torch.zeros(SIZE), sums.vector)}, (0.2, 0.4))
    after = stage.process((empty,))
    assert torch.equal(before.flat, after.flat) and after.step == 1
    assert (after.metrics["empty"], after.metrics["grad_norm"], after.metrics["loss"]) == (1, 0.0, 0.0)


@pytest.mark.parametrize("broken_at", range(WINDOWS + 1))
def test_resumed_run_equals_the_unbroken_one(broken_at: int) -> None:
    """lr, loss and weights at every step, for a break at every step; through the form that a snapshot keeps."""
    unbroken, broken = opened(), opened()
    expected = [unbroken.process(window(i)) for i in range(WINDOWS)]
    for number in range(broken_at):
        broken.process(window(number))
    state = broken.state()
    broken.process(window(0))  # what comes after the snapshot must not reach it
    state = {k: v if isinstance(v, np.ndarray) else json.loads(json.dumps(v)) for k, v in state.items()}
    resumed = opened()
    resumed.restore(state)
    first = resumed.initial()
    assert first.step == broken_at
    if broken_at:
        assert torch.equal(first.flat, expected[broken_at - 1].flat)
    for number in range(broken_at, WINDOWS):
        found = resumed.process(window(number))
        assert torch.equal(found.flat, expected[number].flat)
        assert (found.step, found.metrics) == (expected[number].step, expected[number].metrics)
    assert all(np.array_equal(resumed.state()[key], value) for key, value in unbroken.state().items())


def test_state_is_float32_even_for_a_bfloat16_drafter() -> None:
    stage = opened(drafter=DRAFTER | {"dtype": "bfloat16"})
    stage.process(window(0))
    state = stage.state()
    for name in ("masters", "exp_avg", "exp_avg_sq"):
        assert state[name].dtype == np.float32 and state[name].shape == (SIZE,)
    assert not np.array_equal(state["masters"], torch.from_numpy(state["masters"]).bfloat16().float().numpy())


def test_the_digest_of_the_state_differs_wherever_the_state_does() -> None:
    stage = opened()
    stage.process(window(0))
    before, state = stage.state_digest(), stage.state()
    assert before == stage.state_digest()
    for name in ("masters", "exp_avg", "exp_avg_sq", "step", "skipped", "empty"):
        changed = dict(state)
        changed[name] = np.nextafter(state[name], np.float32(9.0)) if isinstance(state[name], np.ndarray) else 7
        stage.restore(changed)
        assert stage.state_digest() != before
    stage.restore(state)
    assert stage.state_digest() == before


def test_a_state_that_does_not_fit_is_refused() -> None:
    stage = opened()
    good = stage.state()
    with pytest.raises(BadInput, match="lacks exp_avg, masters"):
        stage.restore({k: v for k, v in good.items() if k not in ("exp_avg", "masters")})
    with pytest.raises(BadInput, match="of another drafter: its num_hidden_layers is 1, here it is 2"):
        opened(drafter=DRAFTER | {"num_layers": 2}).restore(good)
    with pytest.raises(BadInput, match=r"saved exp_avg is float16\[\d+\], expected float32"):
        stage.restore(good | {"exp_avg": good["exp_avg"].astype(np.float16)})
    with pytest.raises(BadInput, match=r"saved masters is float32\[3\], expected float32"):
        stage.restore(good | {"masters": good["masters"][:3]})


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"warmup": 1.0}, "warmup is 1.0"),
        ({"max_norm": 0.0}, "max_norm is 0.0"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"drafter": {"layers": 2}}, "lack 'target'"),
        ({"drafter": DRAFTER | {"num_layers": 0}}, "num_layers is 0"),
    ],
)
def test_wrong_parameters_are_refused(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        AdamW(**({"drafter": DRAFTER} | keys)).check(1)


def test_replicas_are_refused() -> None:
    with pytest.raises(BadInput, match="expected 1 replica"):
        AdamW(drafter=DRAFTER).check(2)

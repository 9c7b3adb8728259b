"""The drafter stage: sums over a window, its partials, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dflash_pipe import BadInput, Context, Stamp
from dflash_pipe.stage import signature
from stages.anchors import draw_anchors
from stages.dflash_loss import LossConfig, Sums, Supervision, block_inputs
from stages.dflash_model import DFlashModel, flatten, initial_parameters, parameter_layout
from stages.drafter import DrafterStep
from stages.frozen import load_frozen
from stages.messages import FeatureBatch, Gradients, Parameters
from stages.optimizer import AdamW
from tests.drafters import batch, features, normal

KEYS: dict[str, Any] = {
    "target": "tiny:llama", "layers": 2, "num_layers": 2, "block_size": 4, "num_anchors": 5, "gamma": 2.0
}  # fmt: skip
SEED = 20


def opened(replica: int = 0, replicas: int = 1, **keys: Any) -> DrafterStep:
    if keys.get("loss") == "dpace":
        keys = {"gamma": "auto", **keys}  # which is of the other loss
    stage = DrafterStep(**(KEYS | keys))
    stage.check(replicas)
    stage.open(Context(replica=replica, replicas=replicas, seed=SEED))
    return stage


@pytest.fixture(scope="module")
def start() -> Parameters:
    """Weights large enough that every slot has an opinion of its own."""
    flat = initial_parameters(DrafterStep(**KEYS).architecture().resolve(), seed=1)
    return Parameters(flat.where(flat == 1.0, flat * 4.0), step=0)


def micro_batch(slot: int) -> FeatureBatch:
    stage = DrafterStep(**KEYS)
    size = stage.architecture().resolve().feature_size
    tokens = batch(rows=2, length=20 + slot, vocab=500, seed=slot, first_sample=10 * slot)
    return features(tokens, size, seed=slot)


def stamp(slot: int, window: int = 0, size: int = 4) -> Stamp:
    return Stamp(window * size + slot, window, slot, slot == size - 1)


def window(stage: DrafterStep, params: Parameters, slots: range = range(4)) -> Gradients:
    for slot in slots:
        assert stage.process(micro_batch(slot), params, stamp(slot)) is None
    return stage.end_window()


@pytest.mark.parametrize(("num_anchors", "slots"), [(5, 5), (50, 15)])
def test_it_says_with_how_many_anchors_it_computed(num_anchors: int, slots: int, start: Parameters) -> None:
    """Two rows with 16 supervised tokens behind each other: 15 may be anchors."""
    stage = opened(num_anchors=num_anchors)
    stage.process(micro_batch(0), start, stamp(0))
    assert stage.measures == {"anchors": 2.0 * slots}


def test_ports() -> None:
    found = signature(DrafterStep)
    assert list(found.inputs) == ["features", "params"] and found.stamp == "stamp"
    assert found.output is None and found.window_output is Gradients and not found.stateful


def test_a_window_is_the_gradient_of_the_summed_loss(start: Parameters) -> None:
    """Against autograd over all micro-batches at once, with a full-vocabulary cross entropy."""
    found = window(opened(), start).partials[0]
    config = DrafterStep(**KEYS).architecture().resolve()
    model = DFlashModel(config, device="meta")
    flat = flatten(model)
    flat.load(start.flat)
    frozen = load_frozen("tiny:llama", None, torch.float32, "cpu")
    total, weight = torch.zeros(()), 0.0
    for slot in range(4):
        data = micro_batch(slot)
        t = data.tokens
        anchors, keep = draw_anchors(t.loss_mask, t.lengths, t.sample, 0, SEED, 5)
        what = Supervision.of(t.input_ids, t.loss_mask, anchors, keep, 4, LossConfig("dflash", 2.0))
        ids = block_inputs(t.input_ids, anchors, config.mask_token_id, 4)
        hidden = model(F.embedding(ids.flatten(1), frozen.embed), data.hidden, anchors, keep, "eager")
        logits = hidden.unflatten(1, (-1, 4)) @ frozen.head.t()
        total = total + (what.weights * F.cross_entropy(logits.movedim(-1, 1), what.labels, reduction="none")).sum()
        weight += float(what.weights.double().sum())
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(found.gradient, expected, atol=1e-4, rtol=1e-4)
    sums = Sums(found.sums)
    assert float(sums.loss) == pytest.approx(float(total.detach()), rel=1e-5)
    assert float(sums.weight) == pytest.approx(weight)
    assert float(sums.blocks) == 4 * 2 * 5


def test_partials_are_the_same_bits_whoever_holds_them(start: Parameters) -> None:
    alone = window(opened(partials=2), start)
    first = window(opened(0, 2, partials=2), start, range(0, 4, 2))
    second = window(opened(1, 2, partials=2), start, range(1, 4, 2))
    assert set(alone.partials) == {0, 1} and set(first.partials) == {0} and set(second.partials) == {1}
    for number, partial in (first.partials | second.partials).items():
        assert torch.equal(partial.gradient, alone.partials[number].gradient)
        assert torch.equal(partial.sums, alone.partials[number].sums)


def test_partials_add_up_to_the_window(start: Parameters) -> None:
    one, four = window(opened(), start).partials, window(opened(partials=4), start).partials
    torch.testing.assert_close(sum(p.gradient for p in four.values()), one[0].gradient, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sum(p.sums for p in four.values()), one[0].sums)


def test_a_window_is_given_away_and_the_next_begins_at_zero(start: Parameters) -> None:
    stage = opened()
    first = window(stage, start)
    kept = first.partials[0].gradient.clone()
    second = window(stage, start)
    assert torch.equal(first.partials[0].gradient, kept) and torch.equal(second.partials[0].gradient, kept)
    assert first.partials[0].gradient.data_ptr() != second.partials[0].gradient.data_ptr()
    empty = stage.end_window()
    assert not empty.partials[0].gradient.any() and not empty.partials[0].sums.any()


def test_new_weights_are_taken_when_the_step_changes(start: Parameters) -> None:
    stage = opened()
    before = window(stage, start)
    newer = Parameters(start.flat * 1.5, step=1)
    after = window(stage, newer)
    assert not torch.equal(before.partials[0].gradient, after.partials[0].gradient)
    assert torch.equal(window(opened(), newer).partials[0].gradient, after.partials[0].gradient)


def test_padding_and_company_change_nothing_but_rounding(start: Parameters) -> None:
    """A row trains the same way alone, padded, and beside another row."""
    stage = opened()
    pair = micro_batch(0)
    stage.process(pair, start, stamp(0))
    together = stage.end_window().partials[0]
    for row in range(2):
        t = pair.tokens
        alone = batch(rows=1, length=20, vocab=500)
        tokens = type(alone)(
            F.pad(t.input_ids[row : row + 1], (0, 9)),
            F.pad(t.loss_mask[row : row + 1], (0, 9)),
            t.lengths[row : row + 1],
            t.sample[row : row + 1],
        )
        stage.process(
            FeatureBatch(tokens, F.pad(pair.hidden[row : row + 1], (0, 0, 0, 9), value=7.0)), start, stamp(row)
        )
    apart = stage.end_window().partials[0]
    torch.testing.assert_close(apart.gradient, together.gradient, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(apart.sums, together.sums)


def unsupervised() -> FeatureBatch:
    data = micro_batch(0)
    return FeatureBatch(
        dataclasses.replace(data.tokens, loss_mask=torch.zeros_like(data.tokens.loss_mask)), data.hidden
    )


def test_a_row_without_anchors_changes_nothing(start: Parameters) -> None:
    stage = opened()
    stage.process(unsupervised(), start, stamp(0))
    nothing = stage.end_window().partials[0]
    assert not nothing.gradient.any() and not nothing.sums.any()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"alpha": 0.3}, "alpha and dpace are of loss: dpace"),
        ({"dpace": "ratio"}, "alpha and dpace are of loss: dpace"),
        ({"loss": "dpace", "gamma": 4.0}, "gamma is of loss: dflash"),
    ],
)
def test_keys_of_the_other_loss_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        DrafterStep(**{**KEYS, "gamma": "auto", **keys}).check(1)


@pytest.mark.parametrize("loss", ["dflash", "dpace"])
def test_a_window_without_supervised_tokens_is_no_step(loss: str) -> None:
    stage, optimizer = opened(loss=loss), AdamW(drafter=KEYS | {"loss": loss}, lr=5e-3)
    optimizer.open(Context(seed=SEED))
    stepped = optimizer.process((window(stage, optimizer.initial()),))
    stage.process(unsupervised(), stepped, stamp(0, window=1, size=1))
    after = optimizer.process((stage.end_window(),))
    assert (stepped.step, stepped.metrics["empty"]) == (1, 0)
    assert (after.step, after.metrics["empty"]) == (1, 1) and torch.equal(after.flat, stepped.flat)


def test_progress_spans_the_window(start: Parameters) -> None:
    stage = opened()
    for slot in range(2):
        data = micro_batch(slot)
        tokens = batch(rows=2, length=20 + slot, vocab=500)
        moved = type(tokens)(
            tokens.input_ids, tokens.loss_mask, tokens.lengths, tokens.sample, progress=(0.1 * slot, 0.1 * slot + 0.1)
        )
        stage.process(FeatureBatch(moved, data.hidden), start, stamp(slot))
    assert stage.end_window().progress == (0.0, 0.2)


def test_a_fresh_drafter_knows_nothing() -> None:
    """The loss of a drafter with small predictions is close to ln V."""
    stage = opened(final_norm_init=0.01)
    config = stage.config
    params = Parameters(initial_parameters(config, 0, final_norm_init=0.01), 0)
    metrics = Sums(window(stage, params).partials[0].sums).metrics()
    assert metrics["loss"] == pytest.approx(float(torch.tensor(config.vocab_size).log()), rel=0.02)


@pytest.mark.parametrize("keys", [{"dtype": "bfloat16"}, {"loss": "dpace"}, {"ce_chunk": 3}, {"attention": "eager"}])
def test_variants_stay_near_the_reference(start: Parameters, keys: dict[str, Any]) -> None:
    reference = window(opened(**({"loss": "dpace"} if "loss" in keys else {}), ce_chunk=1000), start).partials[0]
    found = window(opened(**keys), start).partials[0]
    assert found.gradient.dtype == torch.float32
    error = (found.gradient - reference.gradient).norm() / reference.gradient.norm()
    assert float(error) < (0.1 if "dtype" in keys else 1e-4)


def test_dpace_divides_by_sequences(start: Parameters) -> None:
    sums = Sums(window(opened(loss="dpace"), start).partials[0].sums)
    assert float(sums.weight) == 8.0


def test_a_micro_batch_of_another_replica_is_refused(start: Parameters) -> None:
    stage = opened(1, 2, partials=2)
    with pytest.raises(RuntimeError, match=r"belongs to partial 0.*deal the drafter round robin"):
        stage.process(micro_batch(0), start, stamp(0))


@pytest.mark.parametrize(
    ("keys", "replicas", "complaint"),
    [
        ({"partials": 3}, 2, "expected a multiple of 2, the drafter's replicas"),
        ({"partials": 0}, 1, "partials is 0"),
        ({"num_anchors": 0}, 1, "num_anchors is 0"),
        ({"num_anchors": 1 << 40}, 1, r"num_anchors is 1099511627776, expected 1\.\.1048576"),
        ({"num_layers": 100_000}, 1, r"num_layers is 100000, expected 1\.\.100"),
        ({"ce_chunk": 0}, 1, "ce_chunk is 0"),
        ({"gamma": -1.0}, 1, "gamma is -1.0"),
        ({"block_size": 1}, 1, "block_size is 1"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_read(
    keys: dict[str, Any], replicas: int, complaint: str
) -> None:
    stage = DrafterStep(**(KEYS | {"target": "/nowhere"} | keys))
    with pytest.raises(BadInput, match=complaint):
        stage.check(replicas)


@pytest.mark.parametrize(("attention", "used"), [("auto", "sdpa"), ("eager", "eager")])
def test_the_first_replica_says_what_it_trains(attention: str, used: str, capsys: pytest.CaptureFixture[str]) -> None:
    stage = opened(attention=attention)
    size = sum(slot.size for slot in parameter_layout(DFlashModel(stage.config, device="meta")).values())
    said = capsys.readouterr().out
    assert said == f"drafter: {size:,} parameters, MASK is token 3, target layers 1, 5, {used} attention\n"
    opened(1, 2, partials=2)
    assert capsys.readouterr().out == ""


def test_features_of_another_width_are_refused(start: Parameters) -> None:
    stage = opened()
    data = micro_batch(0)
    with pytest.raises(BadInput, match=r"hidden states are 3 wide, expected 2 x 64 "):
        stage.process(FeatureBatch(data.tokens, normal(*data.tokens.input_ids.shape, 3)), start, stamp(0))


def test_a_drafter_and_its_optimizer_learn_a_batch_by_heart() -> None:
    stage, optimizer = opened(num_anchors=100), AdamW(drafter=KEYS, lr=5e-3, weight_decay=0.0)
    optimizer.open(Context(seed=SEED))
    params = optimizer.initial()
    data, steps = micro_batch(0), 60
    for step in range(steps):
        tokens = dataclasses.replace(data.tokens, progress=(step / steps, (step + 1) / steps))
        stage.process(FeatureBatch(tokens, data.hidden), params, stamp(0, window=step, size=1))
        params = optimizer.process((stage.end_window(),))
    assert params.metrics["loss"] < 0.05 and params.metrics["accuracy"] > 0.99
    assert params.metrics["estimated_acceptance"] > 3.9  # of 4

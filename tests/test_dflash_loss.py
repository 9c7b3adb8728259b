"""Block inputs, labels, weights, and the chunked cross entropy against a frozen head."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_pipe import BadInput
from stages.dflash_loss import (
    DpaceWeight,
    LossConfig,
    Sums,
    Supervision,
    auto_gamma,
    block_inputs,
    block_loss,
    dpace_weights,
    frozen_head_cross_entropy,
    labels_and_weights,
)
from tests.drafters import normal

IDS = torch.arange(10, 22)[None]  # token at position p is 10 + p
ANCHORS = torch.tensor([[1, 5, 9, 0]])
KEEP = torch.tensor([[True, True, True, False]])


def test_block_is_the_anchor_then_mask() -> None:
    assert block_inputs(IDS, ANCHORS, 99, 4).tolist() == [
        [[11, 99, 99, 99], [15, 99, 99, 99], [19, 99, 99, 99], [10, 99, 99, 99]]
    ]


def test_slot_k_predicts_the_token_at_a_plus_k() -> None:
    labels, weights = labels_and_weights(IDS, torch.ones_like(IDS), ANCHORS, KEEP, 4, None)
    assert labels[0, :2].tolist() == [[11, 12, 13, 14], [15, 16, 17, 18]]
    assert weights[0].tolist() == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]  # past the end; unused


def test_unsupervised_tokens_weigh_nothing() -> None:
    mask = torch.ones_like(IDS)
    mask[0, 3] = 0
    _, weights = labels_and_weights(IDS, mask, ANCHORS, KEEP, 4, None)
    assert weights[0, 0].tolist() == [0, 1, 0, 1]


def test_decay_by_slot() -> None:
    _, weights = labels_and_weights(IDS, torch.ones_like(IDS), ANCHORS, KEEP, 4, 2.0)
    torch.testing.assert_close(weights[0, 0], torch.tensor([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)]))


def test_auto_gamma_passes_through_the_published_values() -> None:
    assert [auto_gamma(b) for b in (8, 10, 16)] == [4.0, 5.0, 7.0]
    rising = [auto_gamma(b) for b in range(2, 40)]
    assert rising == sorted(rising) and rising[0] > 0


rows = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(2, 50), st.integers(1, 50), st.integers(0, 2**31))


@settings(max_examples=40, deadline=None)
@given(rows)
def test_chunked_cross_entropy_is_the_plain_one(drawn: tuple[int, int, int, int, int]) -> None:
    """Loss, hits and the gradient for any upstream weight, whatever the chunk."""
    count, width, vocab, chunk, seed = drawn
    hidden, head = normal(count, width, seed=seed), normal(vocab, width, seed=seed + 1)
    labels = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))
    weight = normal(count, seed=seed + 2)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, hit = frozen_head_cross_entropy(ours, head, labels, chunk)
    logits = theirs @ head.t()
    plain = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(hit, logits.argmax(1) == labels)
    (loss * weight).sum().backward()
    (plain * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_cross_entropy_survives_extreme_logits() -> None:
    head = torch.tensor([[300.0], [-300.0], [0.0]])
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss, hit = frozen_head_cross_entropy(hidden, head, torch.tensor([1, 1]), 8)
    assert loss.tolist() == [600.0, 0.0] and hit.tolist() == [False, True]
    loss.sum().backward()
    assert torch.isfinite(hidden.grad).all()  # type: ignore[arg-type]


def test_bfloat16_gradient_is_close_to_the_exact_one() -> None:
    hidden, head = normal(64, 32), normal(500, 32, seed=1) / 4
    labels = torch.arange(64)
    exact, rounded = hidden.clone().requires_grad_(), hidden.bfloat16().requires_grad_()
    F.cross_entropy(exact @ head.t(), labels, reduction="sum").backward()
    loss, _ = frozen_head_cross_entropy(rounded, head.bfloat16(), labels, 10)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    error = (rounded.grad.float() - exact.grad).norm() / exact.grad.norm()  # type: ignore[union-attr]
    assert float(error) < 0.02


def test_no_rows_is_no_loss() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    loss, hit = frozen_head_cross_entropy(hidden, torch.zeros(9, 4), torch.zeros(0, dtype=torch.int64), 8)
    assert len(loss) == len(hit) == 0
    loss.sum().backward()


def test_logits_of_all_rows_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest product with the head is as long as a chunk."""
    seen = []
    plain = torch.mm

    def recorded(a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
        seen.append(len(a))
        return plain(a, b, **out)

    monkeypatch.setattr(torch, "mm", recorded)
    frozen_head_cross_entropy(normal(100, 4).requires_grad_(), normal(9, 4), torch.zeros(100, dtype=torch.int64), 7)
    assert max(seen) == 7 and sum(seen) == 200  # forward and gradient


def _supervision(loss: LossConfig, mask: Tensor | None = None) -> Supervision:
    return Supervision.of(IDS, torch.ones_like(IDS) if mask is None else mask, ANCHORS, KEEP, 4, loss)


def _plain_loss(hidden: Tensor, head: Tensor, what: Supervision) -> tuple[Tensor, Tensor]:
    """([B, N, b] cross entropy, [B, N, b] predictions), all slots at once."""
    logits = hidden.unflatten(1, (4, 4)) @ head.t()
    return F.cross_entropy(logits.movedim(-1, 1), what.labels, reduction="none"), logits.argmax(-1)


def test_block_loss_and_its_counters() -> None:
    loss = LossConfig("dflash", 2.0)
    what, hidden, head = _supervision(loss), normal(1, 16, 8).requires_grad_(), normal(30, 8, seed=1)
    total, sums = block_loss(hidden.flatten(0, 1)[what.rows], head, what, loss, chunk=3)
    entropy, predicted = _plain_loss(hidden, head, what)
    torch.testing.assert_close(total, (what.weights * entropy).sum())
    assert float(sums.loss) == pytest.approx(float(total.detach()), rel=1e-6)
    assert float(sums.weight) == pytest.approx(float(what.weights.double().sum()))
    assert float(sums.blocks) == 3
    valid = what.weights > 0
    assert sums.counts.tolist() == [0, 3, 3, 2]
    assert sums.hits.tolist() == ((predicted == what.labels) & valid).sum((0, 1)).tolist()
    assert (float(sums.supervised), float(sums.covered)) == (12, 8)


def test_only_supervised_rows_meet_the_head() -> None:
    what = _supervision(LossConfig("dflash", None))
    assert len(what.rows) == 8 and 0 not in (what.rows % 4)


def test_overlapping_blocks_cover_a_token_once() -> None:
    anchors = torch.tensor([[1, 2, 3, 0]])
    what = Supervision.of(IDS, torch.ones_like(IDS), anchors, KEEP, 4, LossConfig())
    _, sums = block_loss(normal(len(what.rows), 8), normal(30, 8, seed=1), what, LossConfig(), 16)
    assert (float(sums.supervised), float(sums.covered)) == (12, 5)


def _reference_dpace(entropy: list[float], valid: list[bool], alpha: float, kind: str) -> list[float]:
    """By the formulas, one slot after the other, in float64. P_j / P_k is q_(k+1) ... q_j, also where both are 0."""
    q = [(1 - alpha) * math.exp(-x) + alpha if v else 1.0 for x, v in zip(entropy, valid, strict=True)]

    def weight(k: int) -> float:
        if kind == "prefix":
            return math.prod(q[: k + 1])
        start = 0 if kind == "suffix" else k + 1
        return sum(math.prod(q[start : j + 1]) for j in range(k, len(q)) if valid[j])

    return [weight(k) if v else 0.0 for k, v in enumerate(valid)]


# Cross entropies from certain to hopeless: in float32 exp(-104) is 0, and so is a product of some of them much earlier.
entropies = st.one_of(st.floats(0, 5), st.floats(0, 200))
blocks = st.lists(st.tuples(entropies, st.booleans()), min_size=2, max_size=40)
alphas = st.one_of(st.just(0.0), st.floats(0, 1), st.floats(0, 1e-6))


@settings(max_examples=60, deadline=None)
@given(blocks, alphas)
@pytest.mark.parametrize("kind", ["suffix", "prefix", "ratio"])
def test_dpace_weights(kind: DpaceWeight, slots: list[tuple[float, bool]], alpha: float) -> None:
    entropy, valid = [x for x, _ in slots], [False, *(v for _, v in slots[1:])]
    exact = torch.tensor(_reference_dpace(entropy, valid, alpha, kind), dtype=torch.float64)
    given_, where = torch.tensor(entropy, dtype=torch.float64), torch.tensor(valid)
    torch.testing.assert_close(dpace_weights(given_, where, alpha, kind), exact, rtol=1e-12, atol=1e-300)
    ours = dpace_weights(given_.float(), where, alpha, kind)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, exact.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(16,), (3, 2, 64)])
def test_the_ratio_is_the_quotient_where_there_is_one(shape: tuple[int, ...]) -> None:
    """For many blocks at once, with alpha large enough for every P_k to be above 0."""
    entropy, valid = normal(*shape).abs(), normal(*shape, seed=1) > -0.5
    valid[..., 0] = False
    ratio, suffix, prefix = (dpace_weights(entropy, valid, 0.5, kind) for kind in ("ratio", "suffix", "prefix"))
    torch.testing.assert_close(ratio[valid], (suffix / prefix)[valid], rtol=1e-5, atol=0)
    assert not ratio[~valid].any()


@pytest.mark.parametrize("kind", ["suffix", "prefix", "ratio"])
def test_weights_of_a_hopeless_block_are_finite(kind: DpaceWeight) -> None:
    loss = LossConfig("dpace", alpha=0.0, dpace=kind)
    what, head = _supervision(loss), normal(30, 8, seed=1)
    hidden = (normal(len(what.rows), 8) * 1000).requires_grad_()
    total, sums = block_loss(hidden, head, what, loss, chunk=3)
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(sums.loss) and torch.isfinite(hidden.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["suffix", "prefix", "ratio"])
def test_dpace_loss_is_per_sequence_and_its_weights_are_detached(kind: str) -> None:
    loss = LossConfig("dpace", gamma=2.0, alpha=0.3, dpace=kind)  # gamma has no meaning here
    what, head = _supervision(loss), normal(30, 8, seed=1)
    hidden = normal(1, 16, 8).requires_grad_()
    total, sums = block_loss(hidden.flatten(0, 1)[what.rows], head, what, loss, chunk=3)
    total.backward()
    plain = hidden.detach().clone().requires_grad_()
    entropy, _ = _plain_loss(plain, head, what)
    weights = dpace_weights(entropy.detach(), what.weights > 0, 0.3, kind)
    (weights * entropy).sum().backward()
    torch.testing.assert_close(total, (weights * entropy).sum())
    torch.testing.assert_close(hidden.grad, plain.grad, atol=1e-5, rtol=1e-4)
    assert float(sums.weight) == 1.0  # one sequence


def test_masked_row_among_good_ones_changes_nothing_else() -> None:
    loss = LossConfig("dflash", 2.0)
    head, hidden = normal(30, 8, seed=1), normal(1, 16, 8)
    one = _supervision(loss)
    alone, sums = block_loss(hidden.flatten(0, 1)[one.rows], head, one, loss, 16)
    two = Supervision.of(
        IDS.repeat(2, 1),
        torch.stack([torch.ones_like(IDS[0]), torch.zeros_like(IDS[0])]),
        torch.cat((ANCHORS, torch.zeros_like(ANCHORS))),
        torch.cat((KEEP, torch.zeros_like(KEEP))),
        4,
        loss,
    )
    pair = torch.cat((hidden, normal(1, 16, 8, seed=9))).flatten(0, 1)
    both, more = block_loss(pair[two.rows], head, two, loss, 16)
    assert torch.equal(alone, both) and torch.equal(sums.vector, more.vector)


def test_metrics_of_sums() -> None:
    sums = Sums.zeros(4)
    assert sums.metrics()["loss"] == 0.0 and sums.metrics()["estimated_acceptance"] == 1.0  # nothing: no division by 0
    sums.vector.copy_(torch.tensor([6.0, 4.0, 5.0, 0.0, 5.0, 2.0, 1.0, 0.0, 10.0, 8.0, 4.0, 20.0, 15.0]))
    metrics = sums.metrics()
    assert metrics["loss"] == 1.5 and metrics["covered"] == 0.75 and metrics["blocks"] == 5
    assert [metrics[f"accuracy_slot_{k}"] for k in (1, 2, 3)] == [0.5, 0.25, 0.25]
    assert metrics["accuracy"] == 8 / 22  # counts are added before they are divided
    assert metrics["estimated_acceptance"] == 1 + 0.5 + 0.5 * 0.25 + 0.5 * 0.25 * 0.25


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"type": "dflsh"}, "did you mean 'dflash'"),
        ({"gamma": 0.0}, "gamma is 0.0"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"alpha": 1.5}, "alpha is 1.5"),
    ],
)
def test_wrong_loss_settings_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        LossConfig(**changes)  # type: ignore[arg-type]

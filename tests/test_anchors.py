"""Anchors depend on (seed, epoch, sample, supervised positions) and on nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.anchors import draw_anchors


def draw(mask: Tensor, sample: Tensor | None = None, epoch: int = 0, seed: int = 20, n: int = 4) -> list[list[int]]:
    """The used anchors of every row."""
    rows, length = mask.shape
    ids = torch.arange(rows) if sample is None else sample
    anchors, keep = draw_anchors(mask, torch.full((rows,), length), ids, epoch, seed, n)
    return [row[used].tolist() for row, used in zip(anchors, keep, strict=True)]


masks = st.integers(1, 60).flatmap(
    lambda length: st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=5)
)


@settings(max_examples=60, deadline=None)
@given(masks, st.integers(1, 70), st.integers(-(2**62), 2**62), st.integers(0, 9), st.integers(0, 2**64))
def test_laws(rows: list[list[bool]], n: int, first: int, epoch: int, seed: int) -> None:
    mask = torch.tensor(rows)
    ids = torch.arange(len(rows)) + first
    anchors, keep = draw_anchors(mask, torch.full((len(rows),), mask.shape[1]), ids, epoch, seed, n)
    assert anchors.shape == keep.shape == (len(rows), max(1, min(n, mask.shape[1] - 1)))
    for row, used, supervised in zip(anchors, keep, mask, strict=True):
        eligible = {a for a in range(len(supervised) - 1) if supervised[a] and supervised[a + 1]}
        chosen = row[used].tolist()
        assert len(chosen) == min(n, len(eligible))  # exactly
        assert set(chosen) <= eligible and chosen == sorted(set(chosen))
        assert not row[~used].any() and not used.tolist()[len(chosen) :].count(True)


@settings(max_examples=30, deadline=None)
@given(masks, st.integers(1, 8), st.integers(0, 50), st.randoms(use_true_random=False))
def test_batch_padding_and_order_do_not_matter(rows: list[list[bool]], n: int, padding: int, random: object) -> None:
    mask = torch.tensor(rows)
    together = draw(mask, n=n)
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    padded = F.pad(mask, (0, padding), value=True)  # beyond the length: not even a set mask may count
    lengths = torch.full((len(rows),), mask.shape[1])
    anchors, keep = draw_anchors(padded[order], lengths, torch.tensor(order), 0, 20, n)
    for place, row in enumerate(order):
        assert anchors[place][keep[place]].tolist() == together[row]
        assert draw(mask[row : row + 1], torch.tensor([row]), n=n) == [together[row]]


def test_seed_epoch_and_sample_each_change_the_draw() -> None:
    mask = torch.ones(1, 500, dtype=torch.bool)
    reference = draw(mask, torch.tensor([3]), epoch=1, seed=5, n=8)
    assert reference == draw(mask, torch.tensor([3]), epoch=1, seed=5, n=8)
    assert reference != draw(mask, torch.tensor([4]), epoch=1, seed=5, n=8)
    assert reference != draw(mask, torch.tensor([3]), epoch=2, seed=5, n=8)
    assert reference != draw(mask, torch.tensor([3]), epoch=1, seed=6, n=8)


def test_the_draw_is_the_same_for_ever() -> None:
    """Frozen: another version of the program must not train on other blocks after a resume."""
    mask = torch.ones(2, 40, dtype=torch.bool)
    assert draw(mask, n=5) == FROZEN


FROZEN = [[9, 11, 14, 36, 37], [4, 6, 8, 11, 14]]


def test_more_anchors_keep_the_fewer() -> None:
    mask = torch.ones(1, 200, dtype=torch.bool)
    assert set(draw(mask, n=5)[0]) < set(draw(mask, n=20)[0])


def test_anchors_are_uniform() -> None:
    rows, length, n = 4000, 41, 8
    mask = torch.ones(rows, length, dtype=torch.bool)
    anchors, _ = draw_anchors(mask, torch.full((rows,), length), torch.arange(rows), 0, 1, n)
    counts = torch.bincount(anchors.flatten(), minlength=length)[:-1].float()
    expected = rows * n / (length - 1)
    # Chi-square with 39 degrees of freedom: 73 is passed with probability 1e-3, and the draw is fixed.
    assert float(((counts - expected) ** 2 / expected).sum()) < 73


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    draw(torch.ones(2, 30, dtype=torch.bool))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("row", [[True], [False] * 5, [True, False] * 4])
def test_a_row_without_neighbours_has_no_anchor(row: list[bool]) -> None:
    assert draw(torch.tensor([row])) == [[]]

"""Random tokens for measurements: the same for a seed wherever the stream is entered, and refused where they differ."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dflash_pipe import BadInput, Context
from stages.messages import TokenBatch
from stages.random_rows import RandomTokens


def source(seed: int = 3, **fields: Any) -> RandomTokens:
    given = {"vocabulary": 50, "rows": 3, "length": 20, "steps": 4, "window": 2, **fields}
    stage = RandomTokens(**given)
    stage.check(1)
    stage.open(Context(seed=seed))
    return stage


def batches(stage: RandomTokens, cursor: Any = None) -> list[TokenBatch]:
    return [batch for _, batch in stage.read(cursor) if batch]


def test_every_batch_has_the_shape_and_its_place() -> None:
    sent = batches(source(supervised=0.25))
    assert len(sent) == 8
    for number, batch in enumerate(sent):
        assert batch.input_ids.shape == batch.loss_mask.shape == (3, 20)
        assert int(batch.input_ids.min()) >= 0 and int(batch.input_ids.max()) < 50
        assert batch.loss_mask.sum(1).tolist() == [5, 5, 5] and bool(batch.loss_mask[:, 15:].all())
        assert batch.lengths.tolist() == [20, 20, 20] and (batch.real, batch.supervised) == (60, 15)
        assert batch.sample.tolist() == [3 * number, 3 * number + 1, 3 * number + 2]
        assert batch.progress == (number / 8, (number + 1) / 8)
    assert len(set(sent[0].input_ids.flatten().tolist())) > 25
    assert not torch.equal(sent[0].input_ids, sent[1].input_ids)


def test_the_seed_decides_what_is_drawn() -> None:
    first, again, other = (next(iter(batches(source(seed=seed)))).input_ids for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_cursor_goes_on_where_it_stopped() -> None:
    everything = list(source().read(None))
    cursor = json.loads(json.dumps(everything[2][0]))
    rest = list(source(steps=9).read(cursor))
    assert len(rest) == 18 - 3
    for (_, expected), (_, batch) in zip(everything[3:], rest, strict=False):
        assert expected and batch and torch.equal(expected.input_ids, batch.input_ids)
    assert source().account(everything[7][0], everything[5][0]) == "rows: 24 random = 18 finished + 6 in flight"


@pytest.mark.parametrize("other", [{"seed": 4}, {"rows": 2}, {"length": 21}, {"vocabulary": 51}, {"supervised": 0.5}])
def test_a_cursor_of_others_is_refused(other: dict[str, Any]) -> None:
    cursor, _ = next(source().read(None))
    with pytest.raises(BadInput, match="cannot go on"):
        next(source(**other).read(cursor))


@pytest.mark.usefixtures("model_cache")
def test_more_ids_than_the_target_has_are_refused_before_anything_runs() -> None:
    assert source(vocabulary=512, target="tiny:qwen3").footprint(Context(), {}).told == [(3, 20)]
    with pytest.raises(BadInput, match="vocabulary is 513, expected at most 512: target 'tiny:qwen3' has no more"):
        source(vocabulary=513, target="tiny:qwen3").footprint(Context(), {})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rows": 0}, "rows is 0, expected at least 1"),
        ({"length": 1}, "length is 1, expected at least 2"),
        ({"steps": 0}, "steps is 0, expected at least 1"),
        ({"supervised": 1.5}, "supervised is 1.5, expected a share of at least 2 of 20 tokens, at most 1"),
        ({"supervised": 0.05}, "supervised is 0.05, expected a share of at least 2 of 20 tokens, at most 1"),
    ],
)
def test_bad_values(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        source(**fields)
    assert str(caught.value) == said

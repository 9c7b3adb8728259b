"""The memory that stages say they work with holds what they then make, and is not far more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipe import Context, Footprint, Stamp
from stages import optimizer, splitmix
from stages.dflash_loss import Sums
from stages.drafter import DrafterStep
from stages.evaluate import AcceptanceWalk
from stages.footprints import feature_bytes, forward_bytes
from stages.messages import FeatureBatch, Gradients, Partial, TokenBatch
from stages.model_source import text_config
from stages.optimizer import AdamW
from stages.random_rows import RandomTokens
from stages.regenerate import Regenerate
from stages.statistics import FeatureStatistics
from stages.target import TargetForward
from tests.interpreted import interpreted, with_every_triton
from tests.live_bytes import LiveBytes

KEYS: dict[str, Any] = {
    "target": "tiny:qwen3", "layers": [1, 3, 5], "mask_token_id": 3, "block_size": 8, "num_layers": 1
}  # fmt: skip
BESIDE = 20_000  # bytes of masks and positions, which no table counts


pytestmark = pytest.mark.usefixtures("model_cache")


def tokens(rows: int, length: int) -> TokenBatch:
    source = RandomTokens(vocabulary=100, rows=rows, length=length, steps=1)
    source.open(Context())
    return next(batch for _, batch in source.read(None) if batch)


def working(said: Footprint) -> int:
    return sum(said.working.values())


def test_a_row_of_the_statistics(tmp_path: Path) -> None:
    stage = FeatureStatistics(target="tiny:qwen3", layers=[1, 3, 5])
    stage.open(Context(folder=tmp_path))
    batch = tokens(2, 300)
    features = FeatureBatch(batch, torch.randn(2, 300, 3 * 64))
    with LiveBytes() as live:
        stage.process(features)
    said = stage.footprint(Context(), {"features": [(2, 300)]})
    assert live.peak <= working(said) <= 1.2 * live.peak


def test_what_a_target_and_an_optimizer_have_on_the_host() -> None:
    target = TargetForward(model="tiny:qwen3", layers=[1, 3])
    said = target.footprint(Context(device="cuda:0"), {"batch": [(2, 300)]})
    assert said.host == {"weights, as they are read": said.held["weights"] + 512 * 64 * 2}  # with a head
    assert target.footprint(Context(), {"batch": [(2, 300)]}).host == {}
    stage = AdamW(drafter=KEYS)
    stage.open(Context())
    with LiveBytes() as live:
        stage.state()
    assert sum(stage.footprint(Context(), {}).host.values()) == live.peak


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("partials", [1, 3])
def test_a_step_of_the_optimizer(partials: int, digest: bool) -> None:
    stage = AdamW(drafter={**KEYS, "partials": partials}, digest=digest)
    stage.open(Context())
    sums = Sums.zeros(8)
    sums.weight.fill_(1.0)
    size = stage.initial().flat.numel()
    sent = Gradients({k: Partial(torch.ones(size), sums.vector.clone()) for k in range(partials)}, (0.0, 0.1))
    with LiveBytes() as live:
        stage.process((sent,))
    said = stage.footprint(Context(), {})
    assert 0.75 * working(said) < live.peak < working(said) + BESIDE
    assert set(said.working) == {"gradient", "digest"} if digest else {"gradient"}


def test_a_digest_takes_no_more_than_what_is_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((optimizer, "AT_ONCE"), (splitmix, "AT_ONCE")):
        monkeypatch.setattr(module, name, 1000)
    assert AdamW(drafter=KEYS, digest=True).footprint(Context(), {}).working["digest"] == 24_000
    values = torch.ones(10_500)
    with LiveBytes() as live:
        splitmix.digest(values)
    assert 24_000 <= live.peak < 24_100


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_forward_pass_of_the_target(name: str) -> None:
    stage = TargetForward(model=f"tiny:{name}", layers=[1, 3, 5], dtype="float32")
    batch = tokens(3, 200)
    stage.open(Context())
    with LiveBytes() as live:
        stage.process(batch)
    said = stage.footprint(Context(), {"batch": [(1, 300), (3, 200)]})
    assert list(said.working) == ["forward pass of 3 x 200 tokens"]
    most = working(said) + said.sent
    assert 0.9 * most < live.peak < most + 200 * 32 * 4 + BESIDE  # cos and sin, of 16 numbers each


@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5"])
def test_loading_the_target(name: str, weights: Any) -> None:
    """Where the lm_head is tied to the embedding, and where it is not."""
    stage = TargetForward(model=f"tiny:{name}", layers=[1, 3, 5], dtype="float32", weights=weights)
    stage.open(Context())  # what is made once: files, imports
    with LiveBytes() as live:
        stage.open(Context())
    said = stage.footprint(Context(), {"batch": [(1, 2)]})
    most = said.held["weights"] + said.working["matrices that loading drops again"]
    assert most <= live.peak < most + 1000


def test_shapes_in_graphs_are_held_and_others_computed_beside_them() -> None:
    gpu, config = Context(device="cuda:0"), text_config("tiny:qwen3")
    width = 3 * config.hidden_size

    def said(*batch: tuple[int, int], **keys: Any) -> tuple[dict[str, int], dict[str, int]]:
        found = TargetForward(model="tiny:qwen3", layers=[1, 3, 5], **keys).footprint(gpu, {"batch": list(batch)})
        assert found.held.pop("weights") > 0
        return found.held, found.working

    shapes = [[2, 200], [4, 300]]
    graphs = forward_bytes(config, (4, 300), 2) + 1200 * width * 2 + 8 * (1200 + 400)
    # A captured shape is held though no micro-batch is so large, and computed once before it is captured.
    held, working = said((1, 100), shapes=shapes)
    assert held == {"graphs of 4 x 300 tokens": graphs}
    assert working == {"forward pass of 2 x 200 tokens": forward_bytes(config, (2, 200), 2)}
    held, working = said((1, 100), (3, 300), (4, 300), shapes=shapes)
    assert held == {"graphs of 4 x 300 tokens": graphs}
    assert working == {"forward pass of 3 x 300 tokens": forward_bytes(config, (3, 300), 2)}
    for keys in ({}, {"forward": "plain", "shapes": shapes}, {"dtype": "float32", "shapes": shapes}):
        held, working = said((4, 300), **keys)
        assert held == {} and list(working) == ["forward pass of 4 x 300 tokens"]


def test_what_loading_needs_counts_where_it_is_more() -> None:
    matrix = 512 * 64 * 2
    said = TargetForward(model="tiny:qwen3", layers=[1, 3, 5], weights="random").footprint(
        Context(device="cuda:0"), {"batch": [(1, 5)]}
    )
    assert said.working == {"matrices that loading drops again": 2 * matrix}
    assert said.sent == feature_bytes((1, 5), 192, 2)
    said = TargetForward(model="tiny:qwen3", layers=[1, 3, 5]).footprint(Context(device="cuda:0"), {"batch": [(1, 5)]})
    assert list(said.working) == ["forward pass of 1 x 5 tokens"]  # a checkpoint is read on the CPU


@with_every_triton
def test_a_fused_step_of_the_drafter() -> None:
    interpreted("-m", "tests.fused_memory_cases")


@pytest.mark.parametrize(
    ("rows", "length", "anchors", "chunk"),
    [(2, 100, 50, None), (2, 100, 50, 800), (2, 300, 20, 10), (3, 40, 512, 900), (1, 3000, 1, 1)],
)
def test_a_step_of_the_drafter(rows: int, length: int, anchors: int, chunk: int | None) -> None:
    """The chunk of logits is the largest part in two cases."""
    target = TargetForward(model="tiny:qwen3", layers=[1, 3, 5], dtype="float32")
    drafter = DrafterStep(**KEYS, num_anchors=anchors, ce_chunk=chunk)
    for stage in (target, drafter):
        stage.open(Context())
    features, parameters = target.process(tokens(rows, length)), optimizer_of().initial()
    drafter._partial(0)  # the sums that are sent
    with LiveBytes() as live:
        drafter.process(features, parameters, Stamp(0, 0, 0, True))
    said = drafter.footprint(Context(), {"features": [(rows, length)]})
    assert 0.75 * working(said) < live.peak < working(said)
    if chunk and chunk > 100:
        assert live.peak > working(said) - said.working["logits"]


@pytest.mark.parametrize("responses", [[(150, 190)], [(20 * k, 20 * k + 18) for k in range(9)], [(0, 2), (10, 140)]])
@pytest.mark.parametrize("anchors", [3, 64])
def test_a_walk_of_the_evaluation(responses: list[tuple[int, int]], anchors: int) -> None:
    """Many short responses in a row, and a long one beside them. Half of the rows end early."""
    target = TargetForward(model="tiny:qwen3", layers=[1, 3, 5], dtype="float32")
    stage = AcceptanceWalk(path=None, target="tiny:qwen3", layers=[1, 3, 5], keys=KEYS, anchors=anchors)
    for each in (target, stage):
        each.open(Context())
    batch = tokens(4, 200)
    batch.loss_mask.zero_()
    for start, stop in responses:
        batch.loss_mask[:2, start:stop] = True
    batch.loss_mask[2:, 150:195] = True
    features = target.process(batch)
    stage._fit(features.hidden)
    with LiveBytes() as live:
        stage.process(features)
    said = stage.footprint(Context(), {"features": [(4, 200)]})
    assert live.peak < working(said)
    if anchors == 64 and responses[-1] == (10, 140):  # as many blocks in all rows
        assert 0.3 * working(said) < live.peak


def test_opening_the_evaluation() -> None:
    features = FeatureBatch(tokens(1, 10), torch.zeros(1, 10, 192))
    stage = AcceptanceWalk(path=None, target="tiny:qwen3", layers=[1, 3, 5], keys=KEYS)
    said = stage.footprint(Context(), {"features": [(1, 10)]})
    with LiveBytes() as live:
        stage.open(Context())
        stage._fit(features.hidden)
        held = sum(said.held.values())
        assert held <= live.now < held + 100  # and rotary frequencies
    assert live.peak <= held + sum(said.host.values())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(("rows", "new"), [(5, 24), (16, 100)])
def test_answers_of_the_target(name: str, rows: int, new: int) -> None:
    stage = Regenerate(model=f"tiny:{name}", max_new_tokens=new, max_prompt_tokens=60, dtype="float32")
    said = stage.footprint(Context(), {"conversations": rows})
    stage.open(Context())
    assert said.held["weights"] == 4 * sum(weight.numel() for weight in stage._model.parameters())
    stage._model.generation_config.eos_token_id = None  # no answer ends early
    with LiveBytes() as live:
        stage._generate([[5 + row] * 60 for row in range(rows)])
    assert 0.5 * working(said) < live.peak < working(said)
    assert not sum(said.host.values())
    on_gpu = stage.footprint(Context(device="cuda:0"), {"conversations": rows})
    assert on_gpu.host == {"weights, as they are read": said.held["weights"]}


def optimizer_of() -> AdamW:
    stage = AdamW(drafter=KEYS)
    stage.open(Context())
    return stage

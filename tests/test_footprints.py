"""What stages say they need is what they then have: weights, shapes, and what autograd keeps of the drafter's step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_pipe import BadInput, Context, Transport
from dflash_pipe.graph import load
from dflash_pipe.memory import Need, estimate, refuse
from dflash_pipe.plan import plan
from stages.data import TokenBatches
from stages.dflash_config import DrafterKeys
from stages.dflash_model import DFlashModel, flatten, initial_parameters
from stages.drafter import DrafterStep
from stages.footprints import drafter_step_bytes, feature_bytes, parameter_count, token_bytes
from stages.messages import FeatureBatch
from stages.model_source import text_config
from stages.optimizer import AdamW
from stages.random_rows import RandomTokens
from stages.sized_models import SIZED_MODELS
from stages.target import TargetForward
from stages.target_model import load_truncated, weight_count
from tests.training import write_rows

GIB = 2**30
KEYS: dict[str, Any] = {"target": "tiny:qwen3", "layers": [1, 3, 5], "mask_token_id": 3, "block_size": 8}


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5"])
def test_the_targets_weights_are_those_that_are_loaded(name: str) -> None:
    target = load_truncated(f"tiny:{name}", None, [1, 4], "float32", "cpu")
    loaded = sum(weight.numel() for weight in target.decoder.parameters())
    assert weight_count(f"tiny:{name}", None, [1, 4], "cpu") == loaded


@pytest.mark.parametrize("keys", [{}, {"buckets": [16, 40]}, {"max_rows": 2, "pad_to_multiple": 8}])
def test_the_shapes_are_those_that_are_sent(tmp_path: Path, keys: dict[str, Any]) -> None:
    fields = {"path": str(write_rows(tmp_path / "rows.arrow", 100)), "max_tokens": 192, "max_length": 48, **keys}
    said = TokenBatches(**fields).footprint(Context(seed=3), {})
    stage = TokenBatches(**fields)
    stage.open(Context(seed=3))
    batches = [batch for _, batch in stage.read(None) if batch]
    assert said.told == sorted({tuple(batch.input_ids.shape) for batch in batches})
    assert said.sent == max(batch.nbytes for batch in batches)


def saved(layers: int, batch: int, length: int, blocks: int) -> int:
    """Bytes that autograd keeps of a forward pass, weights and the features that came aside."""
    config = DrafterKeys(**KEYS, num_layers=layers).resolve()
    model = DFlashModel(config, device="meta")
    flatten(model).load(initial_parameters(config, seed=0))
    embeds, context = torch.randn(batch, blocks * 8, 64), torch.randn(batch, length, config.feature_size)
    anchors = torch.arange(blocks).expand(batch, -1) + 1
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), context)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(embeds, context, anchors, anchors > 0, "sdpa")
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(("batch", "length", "blocks"), [(2, 64, 40), (2, 300, 8), (1, 30, 20)])
def test_a_step_keeps_what_the_table_says(batch: int, length: int, blocks: int) -> None:
    def said(layers: int) -> int:
        config = DrafterKeys(**KEYS, num_layers=layers).sizes()
        shapes = [(1, 5), (batch, length)]
        return drafter_step_bytes(config, shapes, blocks, torch.float32, fused=False, dense=True)

    assert saved(3, batch, length, blocks) - saved(1, batch, length, blocks) == pytest.approx(
        said(3) - said(1), rel=0.02
    )
    assert saved(1, batch, length, blocks) < said(1) < 1.5 * saved(1, batch, length, blocks)


def test_messages_have_the_said_sizes() -> None:
    shape, context = (3, 20), Context()
    target = TargetForward(model="tiny:qwen3", layers=[1, 3, 5], dtype="float32")
    said = target.footprint(context, {"batch": [(1, 5), shape]})
    target.open(context)
    source = RandomTokens(vocabulary=100, rows=3, length=20, steps=1)
    source.open(context)
    batch = next(b for _, b in source.read(None) if b)
    sent = target.process(batch)
    assert isinstance(sent, FeatureBatch) and said.sent == sent.nbytes == feature_bytes(shape, 192, 4)
    assert batch.nbytes == token_bytes(shape) == source.footprint(context, {}).sent
    assert said.told == [(1, 5), shape]
    drafter = DrafterStep(**KEYS, num_layers=1, partials=3)
    size = parameter_count(drafter.architecture().sizes())
    first, second = (
        drafter.footprint(Context(replica=k, replicas=2), {"features": [shape]}).window_sent for k in (0, 1)
    )
    assert (first, second) == (8 * size, 4 * size)
    optimizer = AdamW(drafter={**KEYS, "num_layers": 1})
    optimizer.open(Context())
    assert optimizer.footprint(Context(), {}).sent == optimizer.initial().nbytes
    assert optimizer.footprint(Context(), {}).held == {"float32 weights and moments": 12 * size}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3_1_8b", 8.03), ("qwen3_1_7b", 1.72), ("qwen3_4b", 4.02), ("qwen3_6_27b", 26.9), ("qwen3_8b", 8.19)],
)
def test_full_sizes_are_those_that_were_published(name: str, billions: float) -> None:
    """Parameters of the whole model, out of those up to the last layer but one, and of four layers."""
    config = text_config(f"sizes:{name}")
    most, fewer = (weight_count(f"sizes:{name}", None, [config.num_hidden_layers - k], "cpu") for k in (2, 6))
    head = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    # The last layer is one of the kind of which every fourth is; a fourth of four layers is near enough.
    assert (most + (most - fewer) / 4 + head) / 1e9 == pytest.approx(billions, rel=0.005)


def test_every_size_is_tested() -> None:
    assert set(SIZED_MODELS) == {"llama3_1_8b", "qwen3_1_7b", "qwen3_4b", "qwen3_6_27b", "qwen3_8b"}


class TwoDevices(Transport):
    """Two accelerators, as large as those of the real ones in mind."""

    def accelerators(self) -> list[str]:
        return ["cuda:0", "cuda:1"]

    def memory(self, device: str) -> tuple[int, int] | None:
        return None if device == "cpu" else (0, 80 * GIB)


def needs(*overrides: str, target: str = "qwen3_8b") -> dict[str, Need]:
    files = ["graphs/overlapped.yaml", f"graphs/targets/random_{target}.yaml"]
    graph = load(files, ["transport=tests.test_footprints:TwoDevices", *overrides])
    return {need.device: need for need in estimate(plan(graph))}


def test_a_full_size_plan_fits_or_is_refused_before_anything_is_loaded() -> None:
    found = needs()
    parts = {device: dict(need.parts) for device, need in found.items()}
    assert parts["cuda:0"]["target: weights"] == 2 * weight_count("sizes:qwen3_8b", None, [33], "cpu")
    assert parts["cuda:1"]["drafter: weights"] == 2 * 1_048_626_432
    assert parts["cuda:1"]["optimizer: float32 weights and moments"] == 12 * 1_048_626_432
    assert 13 < found["cuda:0"].total / GIB < 20 and 35 < found["cuda:1"].total / GIB < 60
    refuse(list(found.values()))
    with pytest.raises(
        BadInput, match=r"cuda:1 needs about 1\d\d\.. GiB, has 80\.0 GiB: .* drafter: step of 512 blocks"
    ):
        refuse(list(needs("data.rows=20").values()))


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_run_that_was_measured_stayed_below(device: str) -> None:
    """The most that the allocator had given out in a run on two H200; what is written beside it is today's estimate."""
    written = json.loads(Path("benchmarks/results/h200/training_27b.json").read_text())["overlapped"]
    found = needs("window=2", "optimizer.digest=true", "target.shapes=[[3,2000]]", target="qwen3_6_27b")[device]
    assert written["memory_peak_bytes"][device] < found.total < 1.08 * written["memory_peak_bytes"][device]
    assert written["memory_estimated_gib"][device] == round(found.total / GIB, 1)

"""The fused forward is transformers' own, with its kernels replaced by plain PyTorch; and what it refuses."""

import copy

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from stages.fused_decoder import FusedDecoder, not_fused
from stages.target_model import load_truncated
from tests import fused_twins, tiny_targets
from tests.tiny_targets import FAMILIES, some_ids

LAYERS = [0, 3, 6]


models = tiny_targets.models  # the fixture


def lengths_of(ids):
    return torch.full((len(ids),), ids.shape[1])


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 70)])
@torch.no_grad()
def test_it_computes_what_transformers_computes(model, shape):
    target, ids = load_truncated(model, None, LAYERS, torch.float64, "cpu"), some_ids(*shape)
    before = target(ids, lengths_of(ids))
    fused = FusedDecoder(target.decoder, LAYERS, fused_twins)
    got = fused(ids)
    # the angles are float32, as in transformers, but not computed by the same operations
    for one, other in zip(got.split(64, -1), before.split(64, -1), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    assert got.dtype == torch.float64 and fused.features == got.shape[-1] == 3 * 64


@torch.no_grad()
def test_its_output_is_fresh_memory_or_what_it_is_given():
    target, ids = load_truncated("tiny:qwen3", None, LAYERS, "float32", "cpu"), some_ids(2, 9)
    fused = FusedDecoder(target.decoder, LAYERS, fused_twins)
    first, second = fused(ids), fused(ids)
    assert first.data_ptr() != second.data_ptr()
    given = torch.full_like(first, float("nan"))
    assert fused(ids, given) is given and torch.equal(given, first)


@pytest.mark.parametrize("model", FAMILIES)
@torch.no_grad()
def test_joined_weights_are_held_once_and_the_model_goes_on_to_work(model):
    target, ids = load_truncated(model, None, LAYERS, "float32", "cpu"), some_ids(2, 9)
    before = target(ids, lengths_of(ids))
    values = copy.deepcopy(dict(target.decoder.named_parameters()))
    one, other = (FusedDecoder(target.decoder, LAYERS, fused_twins) for _ in range(2))
    assert torch.equal(one(ids), other(ids))
    assert torch.equal(target(ids, lengths_of(ids)), before)
    weights = dict(target.decoder.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in values.items())
    q, k, v = (weights[f"layers.3.self_attn.{name}_proj.weight"] for name in "qkv")
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    joined = one._mixers[3]._in
    assert joined.data_ptr() == other._mixers[3]._in.data_ptr() == q.data_ptr()
    assert q.untyped_storage().nbytes() == joined.nbytes == sum(each.nbytes for each in (q, k, v))


SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LlamaConfig(**SIZES), None),
        (Qwen3Config(**SIZES), None),
        (MistralConfig(**SIZES), "no kernels for mistral"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "no kernels for gelu with default rotary embeddings"),
        (LlamaConfig(**SIZES, attention_bias=True), "no kernels for layer 0 with or without self_attn.k_proj.bias"),
        (LlamaConfig(**SIZES, mlp_bias=True), "no kernels for layer 0 with or without mlp.down_proj.bias"),
        (LlamaConfig(**SIZES | {"head_dim": 24}), "no kernels for attention's heads of 24"),
        (
            Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "no kernels for sliding_attention",
        ),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "no kernels for silu with dynamic rotary embeddings",
        ),
    ],
)
def test_what_it_does_not_know_is_left_to_transformers(tmp_path, config, why):
    config.save_pretrained(tmp_path)
    target = load_truncated(str(tmp_path), None, [1], "float32", "cpu", "random")
    assert not_fused(target.decoder) == why


def test_a_delta_net_has_heads_that_were_tried_on_a_gpu_and_needs_the_kernel_package():
    target = load_truncated("tiny:qwen3_5", None, LAYERS, "float32", "cpu")
    target.decoder.config.linear_value_head_dim = 32
    assert not_fused(target.decoder) == "no kernels for Gated DeltaNet's heads of 16 and 32"
    target.decoder.config.linear_value_head_dim = 16
    assert not_fused(target.decoder) == "flash-linear-attention cannot be imported here"


def test_on_a_cpu_the_target_runs_as_transformers_has_it():
    target = load_truncated("tiny:qwen3", None, LAYERS, "float32", "cpu")
    assert target.forward == "transformers' own forward (no GPU)"
    assert load_truncated("tiny:qwen3", None, [1], "float32", "cpu", plain=True).forward.endswith("(asked for)")
    assert target.prepare([(2, 9)]) == 0 and target.counted == (0, 0)

"""The truncated target computes what the whole one computes, and refuses what it cannot use with one line."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dflash_pipe import BadInput
from stages.frozen import load_frozen
from stages.target_model import load_full, load_truncated, resolve_dtype, resolve_layers
from tests import tiny_targets
from tests.tiny_targets import (
    FAMILIES,
    bad_json,
    change,
    copied,
    damaged,
    index,
    no_config,
    no_weights,
    some_ids,
    whole,
    without,
)

ALL = list(range(7))  # every id of an 8-layer target that can be captured


models = tiny_targets.models  # the fixture


@torch.no_grad()
def every_hidden_state(model, ids):
    return load_full(model, None, "float32", "cpu")(input_ids=ids, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("model", FAMILIES)
def test_a_captured_id_is_the_output_of_that_layer_and_of_no_neighbour(model):
    ids = some_ids(2, 33)
    hidden = load_truncated(model, None, ALL, "float32", "cpu")(ids, whole(ids, 2))
    states = every_hidden_state(model, ids)
    assert hidden.shape == (2, 33, 7 * 64) and len(states) == 9
    for i, captured in zip(ALL, hidden.split(64, dim=-1), strict=True):
        assert torch.equal(captured, states[i + 1])
        assert not torch.allclose(captured, states[i], atol=0.1)


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("layers", [[0], [1, 3], [2, 4, 5]])
def test_cutting_the_layers_above_changes_no_bit(model, layers):
    ids = some_ids(2, 21)
    deep = load_truncated(model, None, ALL, "float32", "cpu")(ids, whole(ids, 2)).split(64, dim=-1)
    target = load_truncated(model, None, layers, "float32", "cpu")
    assert torch.equal(target(ids, whole(ids, 2)), torch.cat([deep[i] for i in layers], -1))
    assert target.features == 64 * len(layers)
    names = [name for name, _ in target.decoder.named_parameters()]
    assert {int(name.split(".")[1]) for name in names if name.startswith("layers.")} == set(range(layers[-1] + 1))
    assert not [name for name in names if name.startswith(("norm", "lm_head"))]


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_right_padded_row_is_the_row_alone_whatever_the_padding_is(model, dtype):
    # A Gated DeltaNet's gated norm enlarges rounding at a row's first tokens; float64 shows that it is only that.
    tolerance = 1e-13 if dtype == torch.float64 else 1e-4 if model == "tiny:qwen3_5" else 1e-5
    target, lengths = load_truncated(model, None, [1, 3, 6], dtype, "cpu"), torch.tensor([40, 3, 17])
    for seed in (1, 2):
        ids = some_ids(3, 40, seed)
        ids[:, :17] = some_ids(3, 17)
        batch = target(ids, lengths)
        for row, length, got in zip(ids, lengths.tolist(), batch, strict=True):
            alone = target(row[None, :length], torch.tensor([length]))[0]
            assert (got[:length] - alone).abs().max() <= tolerance * alone.abs().max()
            assert not got[length:].any()


def test_the_result_can_be_saved_for_a_backward_and_is_nobody_elses_memory():
    target, ids = load_truncated("tiny:qwen3", None, [2], "float32", "cpu"), some_ids(1, 5)
    first, second = (target(ids, whole(ids, 1)) for _ in range(2))
    assert not first.is_inference() and not first.requires_grad
    weight = torch.ones(64, requires_grad=True)
    (first * weight).sum().backward()
    assert torch.equal(weight.grad, first.sum((0, 1)))
    assert first.data_ptr() != second.data_ptr()


def test_dtypes():
    target, ids = load_truncated("tiny:qwen3", None, [2], "bfloat16", "cpu"), some_ids(1, 5)
    assert target(ids, whole(ids, 1)).dtype == torch.bfloat16
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", "cuda:1") == torch.bfloat16
    with pytest.raises(BadInput, match=r"unknown dtype 'bfloat' \(did you mean 'bfloat16'\?\)"):
        resolve_dtype("bfloat", "cpu")


@pytest.mark.parametrize(
    ("layers", "total", "ids"),
    [
        (1, 36, [18]),
        (5, 36, [1, 9, 17, 25, 33]),
        (5, 64, [1, 16, 31, 46, 61]),
        (5, 30, [1, 8, 14, 20, 27]),
        (5, 8, [1, 2, 3, 4, 5]),
        ([0, 6], 8, [0, 6]),
    ],
)
def test_layer_ids(layers, total, ids):
    assert resolve_layers(layers, total) == ids


@given(st.integers(5, 200).flatmap(lambda total: st.tuples(st.just(total), st.integers(2, total - 3))))
def test_spread_layers_start_at_1_end_at_3_below_the_top_and_never_repeat(sizes):
    total, count = sizes
    ids = resolve_layers(count, total)
    assert len(set(ids)) == count and ids == sorted(ids) and ids[0] == 1 and ids[-1] == total - 3
    assert resolve_layers(ids, total) == ids


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ([7], r"id 7 is the target's last layer.*valid ids are 0\.\.6"),
        ([1, 8], r"no layer 8; valid ids are 0\.\.6"),
        ([-1], r"no layer -1.*0\.\.6"),
        ([3, 1], "increasing ids without duplicates"),
        ([1, 1], "increasing ids without duplicates"),
        ([], "expected a number of layers or a list"),
        ([1.0], "expected a number of layers or a list"),
        (True, "expected a number of layers or a list"),
        ("auto", "expected a number of layers or a list"),
        (0, r"0 layers cannot be spread over a target of 8; expected 1\.\.5"),
        (6, r"6 layers cannot be spread over a target of 8; expected 1\.\.5"),
    ],
)
def test_bad_layers_are_refused(layers, complaint):
    with pytest.raises(BadInput, match=complaint):
        load_truncated("tiny:qwen3", None, layers, "float32", "cpu")


@pytest.mark.parametrize("model", FAMILIES)
def test_random_weights_need_a_config_only_and_are_always_the_same(tmp_path, model):
    folder = copied(model, tmp_path)
    (folder / "model.safetensors").unlink()
    ids, before = some_ids(1, 9), torch.random.get_rng_state()
    one, two = (load_truncated(str(folder), None, [1, 4], "float32", "cpu", weights="random") for _ in range(2))
    assert torch.equal(one(ids, whole(ids, 1)), two(ids, whole(ids, 1)))
    assert one(ids, whole(ids, 1)).isfinite().all()
    assert torch.equal(torch.random.get_rng_state(), before)
    got = load_frozen(str(folder), None, torch.float32, "cpu", weights="random")
    assert torch.equal(got.embed, one.decoder.embed_tokens.weight)
    assert (got.head is got.embed) == (model == "tiny:llama")


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (no_config, "the directory has no config.json, so it is not a model"),
        (bad_json, "config.json cannot be read"),
        (change(model_type="qwen33"), r"knows no model type 'qwen33' \(did you mean 'qwen3'\?\)"),
        (change(model_type=None), "has no model_type"),
        (change(model_type="vit"), "Unrecognized configuration class .*ViTConfig"),
        (no_weights, "its weights cannot be loaded"),
        (index([]), r"model\.safetensors\.index\.json is not an index"),
        (index({"weight_map": []}), r"model\.safetensors\.index\.json is not an index"),
        (change(transformers_weights=5), "its weights cannot be loaded"),
        (damaged, "its weights cannot be loaded"),
        (change(intermediate_size=32), "its weights cannot be loaded"),
        (without("model.layers.1.mlp.up_proj.weight"), r"its checkpoint lacks .*layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_a_broken_model_directory_is_refused_in_one_line(tmp_path, broken, complaint):
    folder = copied("tiny:qwen3", tmp_path)
    broken(folder)
    with pytest.raises(BadInput, match=complaint) as caught:
        load_truncated(str(folder), None, [1, 3], "float32", "cpu")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_layers_above_may_be_missing_from_the_checkpoint(tmp_path):
    folder = copied("tiny:qwen3", tmp_path)
    ids, lengths = some_ids(1, 7), torch.tensor([7])
    before = load_truncated(str(folder), None, [3], "float32", "cpu")(ids, lengths)
    without(*(name for name in load_file(folder / "model.safetensors") if ".layers.5." in name))(folder)
    assert torch.equal(load_truncated(str(folder), None, [3], "float32", "cpu")(ids, lengths), before)

"""The network: what a block can see, its masks in every backend, its flat weights, its config."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_pipe import BadInput
from stages.dflash_config import resolve_mask_token
from stages.dflash_masks import BlockGeometry, build_mask, dense_mask, resolve_attention, tile_mask
from stages.dflash_model import DFlashModel, DrafterConfig, DrafterKeys, flatten, initial_parameters, parameter_layout
from stages.dflash_rope import inverse_frequencies
from tests.drafters import CONFIG, config, drafter, normal

ANCHORS = torch.tensor([[2, 7, 15, 0], [5, 6, 19, 20]])
KEEP = torch.tensor([[True, True, True, False], [True, True, True, True]])
LENGTH = 24


def run(of: DrafterConfig, embeds: Tensor, context: Tensor, attention: str = "auto", keep: Tensor = KEEP) -> Tensor:
    """[B, N, b, H]"""
    with torch.no_grad():
        out = drafter(of)(embeds, context, ANCHORS, keep, attention)
    return out.unflatten(1, (ANCHORS.shape[1], -1))


def inputs(of: DrafterConfig) -> tuple[Tensor, Tensor]:
    return normal(2, 4 * of.block_size, of.hidden_size), normal(2, LENGTH, of.feature_size, seed=1)


@pytest.mark.parametrize("sliding", [None, 6])
def test_features_at_or_after_the_anchor_change_nothing(sliding: int | None) -> None:
    of = config(sliding=sliding)
    embeds, context = inputs(of)
    before = run(of, embeds, context)
    for position in range(LENGTH):
        changed = context.clone()
        changed[:, position] += 100.0
        same = (run(of, embeds, changed) == before).flatten(2).all(-1)
        unseen = (ANCHORS <= position) | ~KEEP
        assert torch.equal(same, unseen), f"position {position}"


def test_every_feature_inside_a_sliding_window_is_seen_and_none_before_it() -> None:
    """One sliding layer with window W: slot k of a block at a sees a + k - W < position < a."""
    of = config(num_hidden_layers=1, layer_types=("sliding_attention",), sliding_window=6)
    embeds, context = inputs(of)
    before = run(of, embeds, context)
    slot = torch.arange(of.block_size)
    for position in range(LENGTH):
        changed = context.clone()
        changed[:, position] += 100.0
        differs = (run(of, embeds, changed) != before).any(-1)
        first = ANCHORS[..., None] + slot - 6
        seen = KEEP[..., None] & (position > first) & (position < ANCHORS[..., None])
        assert torch.equal(differs, seen), f"position {position}"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_blocks_never_see_each_other(attention: str) -> None:
    embeds, context = inputs(CONFIG)
    before = run(CONFIG, embeds, context, attention)
    for block in range(4):
        changed = embeds.clone().unflatten(1, (4, -1))
        changed[:, block] += 10.0
        differs = (run(CONFIG, changed.flatten(1, 2), context, attention) != before).flatten(2).any(-1)
        assert differs[:, block].all() and differs.sum() == 2


def test_inside_a_block_full_layers_look_both_ways_and_sliding_ones_back() -> None:
    embeds, context = inputs(CONFIG)
    changed = embeds.clone().unflatten(1, (4, -1))
    changed[:, :, -1] += 10.0  # the last slot of every block
    for of, expected in ((CONFIG, True), (config(sliding_window=6, layer_types=("sliding_attention",) * 2), False)):
        differs = run(of, embeds, context) != run(of, changed.flatten(1, 2), context)
        assert differs[..., -1, :].any(-1).all()
        assert bool(differs[..., :-1, :].any()) == expected


def test_padding_changes_nothing() -> None:
    embeds, context = inputs(CONFIG)
    padded = F.pad(context, (0, 0, 0, 40), value=1e4)
    torch.testing.assert_close(run(CONFIG, embeds, padded), run(CONFIG, embeds, context), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sliding", [None, 5])
def test_unused_blocks_give_no_nan_and_touch_no_other(attention: str, sliding: int | None) -> None:
    of = config(sliding=sliding)
    embeds, context = inputs(of)
    nothing = torch.zeros_like(KEEP)
    model = drafter(of)
    out = model(embeds, context, ANCHORS, nothing, attention)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(run(of, embeds, context, attention)[1], run(of, embeds, context, attention, KEEP | True)[1])


def test_gradients_of_sdpa_and_eager_agree() -> None:
    of = config(sliding=6)
    embeds, context = inputs(of)
    grads = []
    for attention in ("sdpa", "eager"):
        model = drafter(of)
        model(embeds, context, ANCHORS, KEEP, attention).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for ours, other in zip(*grads, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("sliding", [None, 6])
def test_backends_agree(sliding: int | None) -> None:
    of = config(sliding=sliding)
    embeds, context = inputs(of)
    results = [run(of, embeds, context, attention)[KEEP] for attention in ("sdpa", "eager", "flex")]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=0)


geometries = st.tuples(
    st.integers(1, 3),  # rows
    st.integers(1, 40),  # blocks
    st.sampled_from([2, 4, 7, 16]),  # block size
    st.integers(2, 500),  # positions
    st.one_of(st.none(), st.integers(16, 300)),  # window
    st.integers(0, 2**31),
)


@settings(max_examples=25, deadline=None)
@given(geometries)
def test_tiles_say_what_the_dense_mask_says(drawn: tuple[int, int, int, int, int | None, int]) -> None:
    """Tiles of flex attention: none that holds a visible pair is left out, and a full one hides no pair."""
    rows, blocks, b, length, window, seed = drawn
    draw = torch.Generator().manual_seed(seed)
    anchors = torch.randint(0, length - 1, (rows, blocks), generator=draw).sort(1).values
    keep = torch.rand(rows, blocks, generator=draw) < 0.8
    geometry = BlockGeometry(anchors, keep, length, b)
    dense = dense_mask(geometry, window)
    ours = tile_mask(geometry, window)
    shape = (rows, None, geometry.queries, length + geometry.queries)
    true = create_block_mask(lambda n, h, q, k: dense[n, 0, q, k], *shape, device="cpu")
    assert torch.equal(_evaluated(ours, geometry, rows), dense)
    visited, full = _tiles(ours.kv_num_blocks, ours.kv_indices), _tiles(ours.full_kv_num_blocks, ours.full_kv_indices)
    seen = _tiles(true.kv_num_blocks, true.kv_indices) | _tiles(true.full_kv_num_blocks, true.full_kv_indices)
    assert not (seen & ~(visited | full)).any()
    assert not (visited & full).any()
    padded = F.pad(dense, (0, full.shape[-1] * 128 - dense.shape[-1], 0, full.shape[-2] * 128 - dense.shape[-2]))
    whole = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).all(-1).all(-2)
    assert not (full & ~whole).any()


def _evaluated(mask: object, geometry: BlockGeometry, rows: int) -> Tensor:
    """The mask function of a BlockMask at every pair."""
    n, q = torch.arange(rows)[:, None, None, None], torch.arange(geometry.queries)[:, None]
    k = torch.arange(geometry.context + geometry.queries)
    return mask.mask_mod(n, torch.zeros((), dtype=torch.int64), q, k)  # type: ignore[attr-defined,no-any-return]


def _tiles(count: Tensor, index: Tensor) -> Tensor:
    """[B, 1, tiles of queries, tiles of keys] bool of a list of tiles."""
    listed = torch.arange(index.shape[-1]) < count[..., None]
    return torch.zeros_like(index, dtype=torch.bool).scatter(-1, index.long(), listed)


@settings(max_examples=15, deadline=None)
@given(geometries)
def test_no_query_is_without_keys(drawn: tuple[int, int, int, int, int | None, int]) -> None:
    rows, blocks, b, length, window, seed = drawn
    anchors = torch.randint(0, length - 1, (rows, blocks), generator=torch.Generator().manual_seed(seed))
    mask = build_mask(BlockGeometry(anchors, torch.zeros_like(anchors, dtype=torch.bool), length, b), window, "eager")
    assert mask.any(-1).all()
    assert not mask[..., :length].any()


def test_auto_attention_and_unknown_names() -> None:
    assert resolve_attention("auto", torch.device("cpu")) == "sdpa"
    assert resolve_attention("auto", torch.device("cuda")) == "flex"
    with pytest.raises(BadInput, match="did you mean 'eager'"):
        resolve_attention("eagr", torch.device("cpu"))


def test_a_checkpoint_has_the_names_that_servers_expect() -> None:
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        expected |= {f"layers.{i}.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")}
        expected |= {
            f"layers.{i}.self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        }
        expected |= {f"layers.{i}.mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    model = DFlashModel(CONFIG)
    assert set(model.state_dict()) == expected == set(parameter_layout(model))


def test_flat_parameters_are_views() -> None:
    model = DFlashModel(CONFIG)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = flatten(model)
    assert flat.size == sum(p.numel() for p in before.values())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and torch.equal(flat.layout[name].of(flat.values), p)
        assert p.untyped_storage().data_ptr() == flat.values.untyped_storage().data_ptr()
    flat.load(torch.zeros(flat.size))
    assert not any(p.any() for p in model.parameters())
    with pytest.raises(BadInput, match="3 parameters were given"):
        flat.load(torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_summed_in_float32_and_not_kept(dtype: torch.dtype) -> None:
    model = DFlashModel(CONFIG, device="meta")
    flat = flatten(model, dtype=dtype)
    flat.load(initial_parameters(CONFIG, 0))
    embeds, context = inputs(CONFIG)
    plain = []
    for scale in (1.0, 3.0):
        model(embeds, context, ANCHORS, KEEP).float().square().sum().mul(scale).backward()
        plain.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))  # type: ignore[union-attr]
        model.zero_grad()
    sums = torch.zeros(flat.size)
    flat.sum_gradients_into(sums)
    for scale in (1.0, 3.0):
        model(embeds, context, ANCHORS, KEEP).float().square().sum().mul(scale).backward()
    assert torch.equal(sums, plain[0] + plain[1])
    assert all(p.grad is None for p in model.parameters())


def test_initial_parameters_are_a_function_of_the_seed() -> None:
    first = initial_parameters(CONFIG, 20)
    assert torch.equal(first, initial_parameters(CONFIG, 20))
    assert not torch.equal(first, initial_parameters(CONFIG, 21))
    layout = parameter_layout(DFlashModel(CONFIG, device="meta"))
    for name, slot in layout.items():
        values = slot.of(first)
        assert (values == 1).all() if "norm" in name else 0.01 < float(values.std()) < 0.03
    small = initial_parameters(CONFIG, 20, final_norm_init=0.3)
    changed = (small != first).nonzero().flatten()
    norm = layout["norm.weight"]
    assert changed.tolist() == list(range(norm.start, norm.start + norm.size))
    assert (norm.of(small) == 0.3).all()


def test_feature_std_scales_the_columns_of_fc(tmp_path: Path) -> None:
    std = torch.rand(CONFIG.feature_size, generator=torch.Generator().manual_seed(0)) * 100 + 0.5
    std[3] = 0.0
    save_file({"std": std}, tmp_path / "std.safetensors")
    scaled, plain = initial_parameters(CONFIG, 1, tmp_path / "std.safetensors"), initial_parameters(CONFIG, 1)
    slot = parameter_layout(DFlashModel(CONFIG, device="meta"))["fc.weight"]
    ratio = slot.of(plain) / slot.of(scaled)
    torch.testing.assert_close(ratio[:, 4:], std[4:].expand_as(ratio[:, 4:]), rtol=1e-5, atol=0)
    assert torch.isfinite(scaled).all()
    assert torch.equal(scaled[slot.size :], plain[slot.size :])


@pytest.mark.parametrize("std", [torch.ones(3), torch.zeros(32), torch.full((32,), math.nan), -torch.ones(32)])
def test_feature_std_that_does_not_fit_is_refused(tmp_path: Path, std: Tensor) -> None:
    save_file({"std": std}, tmp_path / "std.safetensors")
    with pytest.raises(BadInput, match=r"expected \[32\] positive numbers"):
        initial_parameters(CONFIG, 1, tmp_path / "std.safetensors")


def test_feature_std_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected a .safetensors file with tensor 'std'"):
        initial_parameters(CONFIG, 1, tmp_path / "none.safetensors")
    save_file({"mean": torch.ones(32)}, tmp_path / "mean.safetensors")
    with pytest.raises(BadInput, match="expected a .safetensors file with tensor 'std'"):
        initial_parameters(CONFIG, 1, tmp_path / "mean.safetensors")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", **YARN, "attention_factor": 1.5},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(scaling: dict[str, object] | None) -> None:
    of = config(head_dim=32, rope_theta=500.0, rope_scaling=scaling)
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=128,
            num_attention_heads=4,
            head_dim=32,
            max_position_embeddings=256,
            rope_parameters={"rope_theta": 500.0, **(scaling or {"rope_type": "default"})},
        )
    )
    frequencies, factor = inverse_frequencies(of)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


def test_scaling_without_its_numbers_is_refused() -> None:
    with pytest.raises(BadInput, match="of type 'yarn' lacks 'original_max_position_embeddings'"):
        inverse_frequencies(config(rope_scaling={"rope_type": "yarn", "factor": 2.0}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, "even number"),
        ({"block_size": 1}, "at least 2"),
        ({"mask_token_id": 61}, r"outside the embedding \(0..60\)"),
        ({"layer_types": ("full_attention",)}, "1 entries for 2 layers"),
        ({"layer_types": ("full_attention", "slidng_attention")}, "did you mean 'sliding_attention'"),
        ({"sliding": 3}, "at least the block size"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"hidden_size": 0}, "hidden_size is 0"),
    ],
)
def test_numbers_that_cannot_be_a_drafter_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        config(**changes)


def test_keys_follow_the_target() -> None:
    of = DrafterKeys.pick({"target": "tiny:qwen3", "layers": [1], "num_layers": 3, "gamma": 7, "lr": 1}).resolve()
    from stages.target_model import load_tokenizer, text_config

    target = text_config("tiny:qwen3", None)
    assert (of.hidden_size, of.vocab_size, of.head_dim) == (target.hidden_size, target.vocab_size, target.head_dim)
    assert of.rope_theta == target.rope_parameters["rope_theta"] and of.rope_scaling is None
    assert of.num_hidden_layers == 3 and of.target_layer_ids == (1,)
    assert of.num_target_layers == target.num_hidden_layers
    assert load_tokenizer("tiny:qwen3", None).convert_ids_to_tokens(of.mask_token_id) == "<|mask|>"


def test_partial_and_multi_axis_rope_are_not_taken_over() -> None:
    of = DrafterKeys(target="tiny:qwen3_5", layers=1, sliding_window=32, num_layers=3).resolve()
    assert of.rope_scaling is None
    assert of.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    one = DrafterKeys(target="tiny:qwen3_5", layers=1, sliding_window=32, num_layers=1, block_size=8).resolve()
    assert one.layer_types == ("sliding_attention",)
    other = DrafterKeys(target="tiny:qwen3_5", layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=6)
    assert (other.resolve().num_attention_heads, other.resolve().num_key_value_heads) == (2, 1)
    assert other.resolve().head_dim == 6


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"block_size": 1}, "block_size is 1"),
        ({"mask_token_id": "mask"}, 'expected a token id or "auto"'),
        ({"mask_token_id": 512}, "outside the embedding"),
        ({"mask_token_id": 0}, "is the pad token"),
        ({"mask_token_id": 2}, "is the eos token"),
        ({"sliding_layers": 1}, "sliding_window is not"),
        ({"sliding_window": 64, "sliding_layers": 6}, "expected 1..5"),
        ({"sliding_window": 8}, "at least the block size"),
        ({"weights": "randm"}, "did you mean 'random'"),
        ({"dtype": "fp16"}, "dtype is 'fp16'"),
    ],
)
def test_wrong_keys_are_refused(keys: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        DrafterKeys.pick({"target": "tiny:llama", "layers": 1, **keys}).resolve()
    with pytest.raises(BadInput, match="lack 'target'"):
        DrafterKeys.pick(keys)


class Vocabulary:
    """The part of a tokenizer that is asked for MASK."""

    def __init__(self, added: dict[str, int], size: int, special: tuple[str, ...] = ()) -> None:
        self.added, self.size, self.all_special_tokens = added, size, list(special)

    def get_added_vocab(self) -> dict[str, int]:
        return self.added

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(self.size)} | self.added


@pytest.mark.parametrize("name", ["<|mask|>", "[MASK]", "<mask>", "<|MASK|>", "<MASK_>"])
def test_auto_mask_is_the_token_that_says_so(name: str) -> None:
    assert resolve_mask_token("auto", Vocabulary({"<|im_end|>": 7, name: 9}, 10), 20, {7: "eos"}) == 9


def test_auto_mask_is_otherwise_the_first_row_beyond_the_tokenizer() -> None:
    assert resolve_mask_token("auto", Vocabulary({"<|image_mask_pad|>": 9}, 10), 20, {}) == 10
    with pytest.raises(BadInput, match=r"give the id of a special token .* \(9 <empty_output>\)"):
        resolve_mask_token("auto", Vocabulary({"<|im_end|>": 7, "<empty_output>": 9}, 10), 10, {7: "eos"})


def test_config_reads_old_and_new_rope_keys() -> None:
    data = json.loads((Path(__file__).parent / "data" / "no_decay.json").read_text())
    old = DrafterConfig.from_json(data | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    del data["rope_theta"]
    new = DrafterConfig.from_json(data | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}})
    assert old == new
    with pytest.raises(BadInput, match="rope_theta is missing"):
        DrafterConfig.from_json(data)

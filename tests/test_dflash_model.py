"""The network: what a block can see, its masks in every backend, its flat weights."""

from __future__ import annotations

import math
import threading
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from dflash_pipe import BadInput
from stages.dflash_masks import BlockGeometry, build_mask, dense_mask, flex_kernel, resolve_attention, tile_mask
from stages.dflash_model import DFlashModel, DrafterConfig, flatten, initial_parameters, parameter_layout
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
        unseen = ~((position < ANCHORS) & KEEP)
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
    torch.testing.assert_close(
        run(of, embeds, context, attention)[1], run(of, embeds, context, attention, KEEP | True)[1]
    )


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


@pytest.mark.parametrize(("anchor", "full"), [(127, 0), (128, 1), (255, 1), (256, 2)])
def test_a_tile_is_full_from_its_last_feature_on(anchor: int, full: int) -> None:
    geometry = BlockGeometry(torch.full((1, 8), anchor), torch.ones(1, 8, dtype=torch.bool), 300, 16)
    assert tile_mask(geometry, None).full_kv_num_blocks.tolist() == [[[full]]]
    # The last slot sees from anchor + 15 - window + 1 on: a window that begins with the first tile, and one later.
    assert tile_mask(geometry, anchor + 16).full_kv_num_blocks.tolist() == [[[full]]]
    assert tile_mask(geometry, anchor + 15).full_kv_num_blocks.tolist() == [[[max(0, full - 1)]]]


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


def test_auto_attention_and_heads_that_a_kernel_does_not_take() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [resolve_attention("auto", device, 64) for device in (cpu, cuda)] == ["sdpa", "fused"]
    assert resolve_attention("auto", cuda, 80) == "flex"
    assert resolve_attention("auto", cuda, 8) == "sdpa" and resolve_attention("flex", cpu, 8) == "flex"
    with pytest.raises(BadInput, match="takes heads of 16 and more, not 8"):
        resolve_attention("flex", cuda, 8)


def test_flex_attention_may_have_many_kernels_in_whichever_thread_it_runs() -> None:
    """A drafter's replicas, and runs one after the other in one process, are threads of their own."""
    limits = []

    def body() -> None:
        flex_kernel()
        limits.append(torch._dynamo.config.recompile_limit)

    for _ in range(2):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert len(limits) == 2 and min(limits) >= 64


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
    alike = [slot.of(first).flatten()[:64] for slot in layout.values() if len(slot.shape) == 2]
    assert not any(torch.equal(a, b) for a, b in combinations(alike, 2))  # each matrix has a generator of its own
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
    with pytest.raises(BadInput, match=r"feature_std: no file .*none\.safetensors"):
        initial_parameters(CONFIG, 1, tmp_path / "none.safetensors")
    save_file({"mean": torch.ones(32)}, tmp_path / "mean.safetensors")
    with pytest.raises(BadInput, match=r"expected a \.safetensors file with tensor 'std'"):
        initial_parameters(CONFIG, 1, tmp_path / "mean.safetensors")

"""The fused target on a GPU: as exact as transformers, the same bits from CUDA graphs and threads; packed, no leaks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from benchmarks.target import exact_delta_rule
from dflash_pipe import BadInput
from stages.autotune import make_thread_safe
from stages.fused_decoder import FusedDecoder
from stages.leakage import refuse_leaks
from stages.target_model import load_truncated
from stages.truncated_target import TruncatedTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # compilers and kernel packages warn of what is not ours
]
SIZES = {
    "vocab_size": 512, "hidden_size": 384, "intermediate_size": 704, "num_hidden_layers": 10,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **DELTA, architectures=["Qwen3_5ForCausalLM"]),
}
# Few heads, but as wide as those of Qwen3.6-27B.
WIDE = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
PACKED = {
    **CONFIGS,
    "qwen3_5_wide": Qwen3_5TextConfig(**SIZES | DELTA | WIDE, architectures=["Qwen3_5ForCausalLM"]),
}
LAYERS = [1, 4, 8]
SHAPES = [(1, 64), (3, 200), (2, 333)]


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TruncatedTarget]:
    yield loaded(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def loaded(config: PretrainedConfig, folder: Path) -> TruncatedTarget:
    config.save_pretrained(folder)
    made = load_truncated(str(folder), None, LAYERS, "bfloat16", "cuda:0", "random")
    make_thread_safe()
    assert made.forward.startswith("fused")
    return made


def batch(shape: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 512, shape, generator=torch.Generator().manual_seed(seed + shape[1]))
    return ids.cuda(), torch.full((shape[0],), shape[1], device="cuda")


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_no_less_exact_than_transformers(target: TruncatedTarget, shape: tuple[int, int]) -> None:
    exact = TruncatedTarget(copy.deepcopy(target.decoder).float(), LAYERS, plain=True)
    plain = TruncatedTarget(copy.deepcopy(target.decoder), LAYERS, plain=True)
    with exact_delta_rule():
        expected = exact(*batch(shape)).split(target.hidden_size, -1)
    by_plain, by_fused = (each(*batch(shape)).split(target.hidden_size, -1) for each in (plain, target))
    for one, other, right in zip(by_plain, by_fused, expected, strict=True):
        assert error(other, right) <= 1.05 * error(one, right)
        assert error(other, right) < 0.05


def test_right_padding_changes_nothing_but_itself(target: TruncatedTarget) -> None:
    ids, _ = batch((3, 200))
    lengths = torch.tensor([200, 70, 1], device="cuda")
    other = torch.where(torch.arange(200, device="cuda") < lengths[:, None], ids, 7)
    states = target(ids, lengths)
    assert torch.equal(states, target(other, lengths))
    assert not states[1, 70:].any() and states[1, :70].any()


def test_a_graph_gives_the_bits_of_its_launches_in_memory_of_its_own(target: TruncatedTarget) -> None:
    graphs = TruncatedTarget(target.decoder, LAYERS)
    assert graphs.prepare(SHAPES[:2]) == 2
    kept = []
    for turn in range(3):
        for shape in SHAPES:
            states = graphs(*batch(shape, turn))
            assert torch.equal(states, target(*batch(shape, turn)))
            kept.append((states, states.clone()))
    assert all(torch.equal(states, before) for states, before in kept)
    assert graphs.counted == (6, 3)


def test_two_threads_on_one_gpu_compute_what_one_computes(target: TruncatedTarget) -> None:
    expected = {shape: target(*batch(shape)) for shape in SHAPES}
    targets = [TruncatedTarget(copy.deepcopy(target.decoder), LAYERS) for _ in range(2)]
    for each in targets:
        each.prepare(SHAPES[:2])
    torch.cuda.synchronize()
    wrong: list[tuple[int, int]] = []
    errors: list[BaseException] = []

    def forwards(own: TruncatedTarget, shapes: list[tuple[int, int]]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for shape in shapes * 10:
                    if not torch.equal(own(*batch(shape)), expected[shape]):
                        wrong.append(shape)
        except BaseException as error:
            errors.append(error)

    orders = [SHAPES, SHAPES[::-1]]
    threads = [threading.Thread(target=forwards, args=pair) for pair in zip(targets, orders, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, errors) == ([], [])
    assert all(each.counted == (20, 10) for each in targets)


# --- packed

LENGTHS = [700, 1, 333, 2, 64, 130]
REAL = sum(LENGTHS)


@pytest.fixture(scope="module", params=PACKED)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TruncatedTarget, ...]:
    """The same layers padded and packed; that it opens shows that in the test at the start nothing leaks."""
    padded = loaded(PACKED[request.param], tmp_path_factory.mktemp(request.param))
    packed = TruncatedTarget(padded.decoder, LAYERS)
    packed.pack()
    assert packed.forward.endswith("layers, packed (no leakage between rows)")
    return padded, packed


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids, _ = batch((len(LENGTHS), max(LENGTHS)), seed)
    return ids, torch.tensor(LENGTHS, device="cuda")


def test_packed_rows_are_no_less_exact_than_padded_ones(both: tuple[TruncatedTarget, ...]) -> None:
    ids, lengths = rows()
    exact = TruncatedTarget(copy.deepcopy(both[0].decoder).float(), LAYERS, plain=True)
    with exact_delta_rule():
        expected = exact(ids, lengths)
    padded, packed = both[0](ids, lengths), both[1](ids, lengths, REAL)
    size = both[0].hidden_size
    for one, other, right in zip(padded.split(size, -1), packed.split(size, -1), expected.split(size, -1), strict=True):
        assert error(other, right) <= 1.1 * error(one, right)
        for row, length in enumerate(LENGTHS):
            assert error(other[row, :length], right[row, :length]) < 0.1
            assert not other[row, length:].any()


def test_a_packed_row_changes_no_other_by_a_bit(both: tuple[TruncatedTarget, ...]) -> None:
    ids, lengths = rows()
    expected = both[1](ids, lengths, REAL)
    for row in range(len(LENGTHS)):
        changed = ids.clone()
        changed[row] = (ids[row] + 1) % 512
        got = both[1](changed, lengths, REAL)
        assert [other for other in range(len(LENGTHS)) if not torch.equal(got[other], expected[other])] == [row]


def test_packed_rows_have_the_same_bits_every_time(both: tuple[TruncatedTarget, ...]) -> None:
    ids, lengths = rows()
    expected = both[1](ids, lengths, REAL)
    for seed in range(1, 4):
        both[1](*rows(seed), REAL)
        both[1](*batch((2, 100 + seed)))  # another pack
        assert torch.equal(both[1](ids, lengths), expected)


def test_packed_rows_wait_for_nothing_and_take_less_memory(both: tuple[TruncatedTarget, ...]) -> None:
    ids, lengths = rows()
    peaks = []
    for each in both:
        each(ids, lengths, REAL)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            each(ids, lengths, REAL)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0]


def conv_over_rows(kernels: Any) -> Callable[..., Any]:
    return lambda x, weight, shape, tokens, positions, normed: kernels.short_conv(
        x, weight, shape, tokens, None, normed
    )


def rule_over_rows(kernels: Any) -> Callable[..., Any]:
    return lambda q, k, v, a, b, decay, pack: kernels.delta_rule(q, k, v, a, b, decay)


@pytest.mark.parametrize(
    ("name", "planted", "step"),
    [("short_conv", conv_over_rows, "convolution"), ("delta_rule", rule_over_rows, "Gated DeltaNet")],
)
def test_a_leak_is_found_and_named(tmp_path: Path, name: str, planted: Callable[..., Any], step: str) -> None:
    from stages import fused_kernels

    target = loaded(PACKED["qwen3_5_wide"], tmp_path)
    kernels = SimpleNamespace(**{**vars(fused_kernels), name: planted(fused_kernels)})
    with pytest.raises(RuntimeError, match=f"rows leak into each other in the {step} of layer 0"):
        refuse_leaks(FusedDecoder(target.decoder, LAYERS, kernels), 512, torch.device("cuda:0"))


def test_float32_is_not_packed(target: TruncatedTarget) -> None:
    with pytest.raises(BadInput, match="needs the fused layers; here: float32"):
        TruncatedTarget(copy.deepcopy(target.decoder).float(), LAYERS).pack()

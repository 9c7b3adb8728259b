"""The fused target on a GPU: as exact as transformers, the same bits from CUDA graphs, and from several threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from benchmarks.target import exact_delta_rule
from stages.autotune import make_thread_safe
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
LAYERS = [1, 4, 8]
SHAPES = [(1, 64), (3, 200), (2, 333)]


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TruncatedTarget]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    config: PretrainedConfig = CONFIGS[request.param]
    config.save_pretrained(folder)
    made = load_truncated(str(folder), None, LAYERS, "bfloat16", "cuda:0", "random")
    make_thread_safe()
    assert made.forward.startswith("fused")
    yield made


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

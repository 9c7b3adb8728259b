"""On a GPU too, every topology computes the same bits, and float32 there is what it is on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training import TINY, Trained, train, write_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # compilers and kernel packages warn of what is not ours
]
FLOAT32 = ("target.dtype=float32", "drafter.dtype=float32")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LARGE = "drafter.intermediate_size=16384"  # gradients whose copy takes a while


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.arrow", vocabulary=300)


def trained(topology: str, target: str, rows: Path, folder: Path, *overrides: str) -> Trained:
    return train([topology, f"targets/{target}"], [f"data.path={rows}", *TINY, *overrides], folder)


@pytest.mark.parametrize("target", ["tiny_llama", "tiny_qwen3", "tiny_qwen3_5"])
def test_every_topology_computes_the_same_bits(target: str, rows: Path, tmp_path: Path) -> None:
    expected = trained("sequential", target, rows, tmp_path / "sequential")
    assert len(expected.digests) >= 3
    for topology in ("overlapped", "parallel_target", "data_parallel", "published/v1", "published/v3"):
        got = trained(topology, target, rows, tmp_path / topology)
        assert got == expected, topology


@two_gpus
@pytest.mark.parametrize("target", ["tiny_qwen3", "tiny_qwen3_5"])
def test_one_worker_that_alternates_between_gpus_computes_the_same_bits(
    target: str, rows: Path, tmp_path: Path
) -> None:
    """Its stages hand payloads over without a channel; with either GPU as the drafter's, and as the target's."""
    expected = trained("sequential", target, rows, tmp_path / "one", "main.device=cuda:0")
    assert len(expected.digests) >= 3
    for one, other in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        devices = f'main.device={{target: "{one}", "*": "{other}"}}'
        assert trained("sequential", target, rows, tmp_path / one, devices) == expected, devices


@two_gpus
def test_the_way_between_devices_changes_nothing(rows: Path, tmp_path: Path) -> None:
    """Directly, and through the host."""
    direct, staged = (
        trained("data_parallel", "tiny_qwen3", rows, tmp_path / name, f"transport=stages.devices:{name}")
        for name in ("DeviceTransport", "HostStagedTransport")
    )
    assert direct == staged


def test_float32_is_what_it_is_on_the_cpu(rows: Path, tmp_path: Path) -> None:
    on_cpu = [f"{worker}.device=cpu" for worker in ("loader", "workers.target", "workers.drafter", "optim")]
    cpu = trained("overlapped", "tiny_llama", rows, tmp_path / "cpu", *FLOAT32, *on_cpu)
    gpu = trained("overlapped", "tiny_llama", rows, tmp_path / "gpu", *FLOAT32)
    assert gpu.losses == pytest.approx(cpu.losses, rel=1e-4)


def test_an_optimizer_on_the_cpu_gets_whole_gradients(rows: Path, tmp_path: Path) -> None:
    """What it is sent is copied to the CPU, and read there only when the copy is done."""
    on_gpu = trained("overlapped", "tiny_llama", rows, tmp_path / "gpu", *FLOAT32, LARGE)
    one, two = (
        trained("overlapped", "tiny_llama", rows, tmp_path / name, *FLOAT32, LARGE, "optim.device=cpu")
        for name in ("one", "two")
    )
    assert one == two
    assert one.losses == pytest.approx(on_gpu.losses, rel=1e-4)

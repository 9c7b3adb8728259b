"""The flagship: every topology computes the same bits, and what should differ does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training import TINY, Trained, train, write_rows

TOPOLOGIES = {
    "overlapped": ["overlapped"],
    "parallel_target": ["parallel_target"],
    "data_parallel": ["data_parallel"],
    "published v1": ["published/v1"],
    "published v3": ["published/v3"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.arrow", vocabulary=300)


def trained(graphs: list[str], target: str, rows: Path, folder: Path, *overrides: str) -> Trained:
    return train([*graphs, f"targets/{target}"], [f"data.path={rows}", *TINY, *overrides], folder)


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen3_5"])
def sequential(
    request: pytest.FixtureRequest, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Trained]:
    return request.param, trained(["sequential"], request.param, rows, tmp_path_factory.mktemp("sequential"))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_computes_the_same_bits(
    sequential: tuple[str, Trained], topology: str, rows: Path, tmp_path: Path
) -> None:
    target, expected = sequential
    got = trained(TOPOLOGIES[topology], target, rows, tmp_path)
    assert len(expected.digests) >= 3
    assert got == expected


@pytest.mark.parametrize("credit", ["credits={messages: 1}", "credits={windows: 1}"])
def test_without_overlap_the_result_is_the_same(
    sequential: tuple[str, Trained], credit: str, rows: Path, tmp_path: Path
) -> None:
    target, expected = sequential
    assert trained(["parallel_target"], target, rows, tmp_path, credit) == expected


def test_staleness_is_caught(sequential: tuple[str, Trained], rows: Path, tmp_path: Path) -> None:
    target, expected = sequential
    got = trained(["overlapped"], target, rows, tmp_path, "params.initial=2", "params.capacity=2")
    assert got.digests[0] == expected.digests[0]  # the first window has the initial weights either way
    assert got.digests[1:] != expected.digests[1:]
    assert got.weights != expected.weights and got.masters != expected.masters


GATED = ("target.replicas=3", 'stages.target.use="tests.gated:GatedTarget"', "batches.capacity=4")


def test_completion_order_is_caught(sequential: tuple[str, Trained], rows: Path, tmp_path: Path) -> None:
    target, expected = sequential
    ordered = trained(["parallel_target"], target, rows, tmp_path / "ordered", *GATED)
    assert ordered == expected
    got = trained(["parallel_target"], target, rows, tmp_path / "completion", *GATED, "target.order=completion")
    assert got.digests[0] != expected.digests[0]
    assert got.weights != expected.weights


def test_smollm2_computes_the_same_bits(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "train.arrow", vocabulary=49_000, rows=12, longest=40)
    few = (f"data.path={rows}", "window=2", "data.max_tokens=120", "data.epochs=1", "data.steps=2", "threads=2")
    runs = {
        name: train([name, "targets/smollm2_135m"], [*few, "drafter.num_anchors=4"], tmp_path / name)
        for name in ("sequential", "overlapped", "parallel_target", "data_parallel")
    }
    assert len(runs["sequential"].digests) == 2
    for name, got in runs.items():
        assert got == runs["sequential"], name

"""Comparing topologies on a GPU: runs in one process compile nothing twice, and each knows its own memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.compare import clear, run
from benchmarks.graphs import loaded
from tests.called import called
from tests.training import write_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # compilers and kernel packages warn of what is not ours
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = "drafter.intermediate_size=65536"
TINY = ["graphs/targets/tiny_llama.yaml", "window=2", "threads=1", "data.max_tokens=192", "data.epochs=4"]


def graph(rows: Path, *overrides: str):
    return loaded(["graphs/sequential.yaml", *TINY, f"data.path={rows}", *overrides], 6)[0]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.arrow", vocabulary=300)


def test_a_second_run_compiles_nothing(rows: Path) -> None:
    of = graph(rows, "drafter.attention=flex", "drafter.head_dim=16")
    first = run(of)
    compiled = dict(counters["stats"])
    assert compiled.get("unique_graphs", 0) > 0
    second = run(of)
    assert dict(counters["stats"]) == compiled
    assert second.weights == first.weights


def test_a_small_run_after_a_large_one_is_not_told_its_peak(rows: Path) -> None:
    clear()
    held = torch.cuda.memory_allocated()  # by tests before
    wide, narrow = (run(each).profile.memory["cuda:0"].peak - held for each in (graph(rows, WIDE), graph(rows)))
    assert narrow < wide / 4


def test_topologies_are_compared_on_the_gpus_of_the_first(rows: Path) -> None:
    graphs = ["graphs/sequential.yaml", "graphs/overlapped.yaml"]
    options = ["--steps", 6, "--repeat", 1, "--same-devices", "--profile-stages"]
    result = called("topologies", *graphs, *TINY, f"data.path={rows}", *options)
    assert result.exit_code == 0, result.output
    assert "All 4 runs computed the same" in result.output
    for head in ("GPUs", "rows/s per GPU", "GPU memory", "most steps/s"):
        assert head in result.output
    rows_of_table = re.findall(r"^(sequential|overlapped) +(\d+) ", result.output, re.MULTILINE)
    assert rows_of_table == [("sequential", "1"), ("overlapped", "1")]

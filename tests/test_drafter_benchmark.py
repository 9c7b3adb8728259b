"""The drafter benchmark: what its cases say, what work is counted, which goals are missed, what it refuses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from benchmarks.drafter import GOALS, SIZES, Case, Goal, Measured, work
from dflash_pipe import BadInput
from stages.dflash_config import DrafterKeys
from stages.dflash_model import DFlashModel, parameter_layout

FOUND = Measured(seconds=0.5, tflops=600.0, share=0.9, cool=0.8, gib=30.0, error=0.01, repeats=True)


def test_a_case_is_read_and_written_alike() -> None:
    case = Case.parse("qwen3_8b:2x768x256")
    assert case == Case("qwen3_8b", rows=2, length=768, anchors=256) and str(case) == "qwen3_8b:2x768x256"
    assert [str(Case.parse(text)) for text in GOALS] == list(GOALS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("qwen3_8b:2x768", "is not SIZES:ROWSxLENGTHxANCHORS"),
        ("qwen3_9b:2x768x256", "did you mean 'qwen3_8b'"),
        ("qwen3_8b:0x768x256", "expected a row"),
        ("qwen3_8b:1x256x256", "more tokens than anchors"),
    ],
)
def test_wrong_cases_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        Case.parse(text)


@pytest.mark.parametrize(("sizes", "parameters"), [("qwen3_6_27b", 1.73e9), ("qwen3_8b", 1.05e9)])
def test_the_sizes_are_the_published_ones(sizes: str, parameters: float) -> None:
    config = DrafterKeys(**SIZES[sizes], weights="random").resolve()
    found = sum(slot.size for slot in parameter_layout(DFlashModel(config, device="meta")).values())
    assert found == pytest.approx(parameters, rel=0.01)


def test_work_of_the_full_step() -> None:
    assert work(1_730_213_120, 3 * 512 * 16, 5120, 248320) == pytest.approx(380e12, rel=0.001)


def test_goals() -> None:
    assert Goal().missed(FOUND) == []
    assert Goal(seconds=0.5, gib=30, share=0.8).missed(FOUND) == []
    slow = dataclasses.replace(FOUND, seconds=0.6, gib=36.0, cool=0.7)
    assert Goal(seconds=0.55, gib=35, share=0.75).missed(slow) == [
        "0.6 s (goal 0.55)", "36 GiB (goal 35)", "0.7 of the cool card's matmul rate (goal 0.75)"
    ]  # fmt: skip


def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks", "drafter"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2 and "no GPU" in ended.stderr and ended.stderr.count("\n") == 1

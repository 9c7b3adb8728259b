"""The drafter's kernels compute what plain PyTorch does, by Triton's interpreter on the CPU, in their own process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dflash_pipe import BadInput
from stages.dflash_masks import resolve_attention
from stages.gradient_sums import GradientSums
from stages.stacked import stacked
from tests.interpreted import interpreted, with_every_triton

CASES = ["attention", "model", "norms heads swiglu cross_entropy kept nothing"]


@with_every_triton
@pytest.mark.parametrize("cases", CASES)
def test_kernels(cases: str) -> None:
    interpreted("-m", "tests.fused_drafter_cases", *cases.split())


def test_matrices_below_each_other_are_one_view() -> None:
    flat = torch.arange(30.0)
    first, second, other = flat[:6].view(2, 3), flat[6:18].view(4, 3), flat[21:30].view(3, 3)
    one = stacked(first, second)
    assert one.data_ptr() == first.data_ptr() and torch.equal(one, flat[:18].view(6, 3))
    assert torch.equal(stacked(first, other), torch.cat((first, other)))
    assert torch.equal(stacked(second, first), torch.cat((second, first)))
    assert torch.equal(stacked(first.t().contiguous().t(), second), torch.cat((first, second)))


def _pair(sums: torch.Tensor | None, gap: int = 0) -> list[nn.Parameter]:
    """Two matrices [2, 3] and [4, 3] of one buffer; their sums lie `gap` apart."""
    flat = torch.zeros(18)
    pair = [nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(4, 3))]
    if sums is not None:
        pair[0].gradient_sum = sums[:6].view(2, 3)  # type: ignore[attr-defined]
        pair[1].gradient_sum = sums[6 + gap : 18 + gap].view(4, 3)  # type: ignore[attr-defined]
    return pair


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_go_into_their_sums_or_are_returned(kept: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    given, x, more, y = (torch.randn(5, n, generator=draw) for n in (6, 3, 4, 3))
    expected = given.t() @ x
    expected[2:] += more.t() @ y
    into = torch.ones(18) if kept else None
    sums = GradientSums.of(*_pair(into))
    sums.add_product(given, x)
    sums.add_product(more, y, first=2)
    returned = list(sums.returned())
    if into is None:
        torch.testing.assert_close(torch.cat(returned), expected)  # type: ignore[arg-type]
    else:
        assert returned == [None, None]
        torch.testing.assert_close(into.view(6, 3), expected + 1.0)


def test_sums_that_are_apart_are_not_taken_for_one() -> None:
    into = torch.zeros(21)
    sums = GradientSums.of(*_pair(into, gap=3))
    sums.add(torch.ones(6, 3))
    assert not into.any() and [part.shape for part in sums.returned() if part is not None] == [(2, 3), (4, 3)]


def test_the_fused_backend_needs_a_gpu_and_heads_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_attention("fused", cuda, 128) == "fused"
    with pytest.raises(BadInput, match="need a CUDA device"):
        resolve_attention("fused", cpu, 128)
    with pytest.raises(BadInput, match="take heads of 16, 32, 64, 128, 256, not 80"):
        resolve_attention("fused", cuda, 80)

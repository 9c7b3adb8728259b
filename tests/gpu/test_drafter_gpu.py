"""The drafter's step on a GPU: its kernels are as exact as plain PyTorch, and give the same bits again and again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_pipe import Context, Stamp
from stages.dflash_loss import frozen_head_cross_entropy
from stages.dflash_masks import BlockGeometry, dense_mask
from stages.dflash_model import initial_parameters
from stages.drafter import DrafterStep
from stages.messages import FeatureBatch, Parameters
from stages.tensors import mapped
from tests.drafters import batch, features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # compilers and kernel packages warn of what is not ours
]
KEYS: dict[str, Any] = {"target": "tiny:llama", "layers": 2, "num_layers": 2, "num_anchors": 40, "gamma": 7.0}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("dtype", "size", "window"),
    [
        (torch.bfloat16, 128, None),
        (torch.bfloat16, 128, 300),
        (torch.bfloat16, 64, None),
        (torch.bfloat16, 256, 300),
        (torch.bfloat16, 16, None),
        (torch.float32, 128, 300),
    ],
)
def test_attention_of_blocks(dtype: torch.dtype, size: int, window: int | None) -> None:
    from stages.fused_attention import Keys, Sight, attention, attention_backward

    rows, blocks, b, length, heads, groups = 2, 70, 16, 700, 8, 2
    draw = torch.Generator("cuda").manual_seed(0)
    anchors = torch.randint(0, length - 1, (rows, blocks), generator=draw, device="cuda").sort(1).values
    keep = torch.arange(blocks, device="cuda") < torch.tensor([[70], [51]], device="cuda")
    geometry, slots = BlockGeometry(anchors, keep, length, b), blocks * b
    shapes = [(slots, heads), (length, groups), (slots, groups), (length, groups), (slots, groups), (slots, heads)]
    *inputs, given = (random(rows, t, n, size, seed=seed, dtype=dtype) for seed, (t, n) in enumerate(shapes))
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    k, v = (torch.cat(exact[at : at + 2], 1).repeat_interleave(heads // groups, 2).transpose(1, 2) for at in (1, 3))
    scores = exact[0].transpose(1, 2) @ k.transpose(-1, -2) * size**-0.5
    expected = (scores.masked_fill(~dense_mask(geometry, window), -torch.inf).softmax(-1) @ v).transpose(1, 2)
    expected.backward(given.double())
    sight = Sight(geometry.seen, b, length, window)
    query, keys, values = inputs[0], Keys(*inputs[1:3]), Keys(*inputs[3:])
    seen = []
    for _ in range(3):
        result = attention(query, keys, values, sight)
        blank = [torch.full_like(tensor, torch.nan) for tensor in inputs[1:]]
        d_keys, d_values = Keys(*blank[:2]), Keys(*blank[2:])
        d_query = attention_backward(query, keys, values, sight, result, given, d_keys, d_values)
        seen.append([result[0], d_query, *blank])
    for again in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], again, strict=True))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for got, right in zip(seen[0], (expected, *(leaf.grad for leaf in exact)), strict=True):
        assert error(got, right.detach()) < tolerance  # type: ignore[union-attr]


def test_cross_entropy_of_a_large_vocabulary() -> None:
    hidden, head = random(300, 64, seed=0), random(50_001, 64, seed=1)
    labels = torch.arange(300, device="cuda") * 150
    exact = hidden.double().requires_grad_()
    logits = (hidden @ head.t()).double() + (exact - exact.detach()) @ head.double().t()  # rounded as ours are
    expected = F.cross_entropy(logits, labels, reduction="none")
    expected.sum().backward()
    ours = hidden.clone().requires_grad_()
    loss, hit = frozen_head_cross_entropy(ours, head, labels, 128)
    loss.sum().backward()
    assert error(loss.detach(), expected.detach()) < 1e-5
    assert int((hit == (logits.argmax(1) == labels)).sum()) >= 298  # rounded logits may tie
    assert error(ours.grad, exact.grad) < 1e-2  # type: ignore[arg-type]


def gradient(repeat: int = 1, **keys: Any) -> list[Tensor]:
    """The gradient of one micro-batch, each time anew; weights large enough that every path matters."""
    stage = DrafterStep(**(KEYS | keys))
    stage.check(1)
    stage.open(Context(device="cuda:0", seed=1))
    flat = initial_parameters(stage.config, seed=1)
    params = Parameters(flat.where(flat == 1.0, flat * 4.0).bfloat16().cuda(), 0)
    tokens = batch(rows=3, length=333, vocab=500)
    given = mapped(features(tokens, stage.config.feature_size), lambda tensor: tensor.cuda())
    given = FeatureBatch(given.tokens, given.hidden.bfloat16())
    found = []
    for _ in range(repeat):
        stage.process(given, params, Stamp(0, 0, 0, True))
        found.append(stage.end_window().partials[0].gradient)
    return found


@pytest.mark.parametrize(
    "keys", [{}, {"sliding_window": 100}, {"loss": "dpace", "gamma": "auto"}, {"block_size": 7}, {"num_layers": 1}]
)
def test_the_step_is_as_exact_as_the_plain_one_and_repeats(keys: dict[str, Any]) -> None:
    (exact,) = gradient(dtype="float32", attention="eager", **keys)
    (plain,) = gradient(attention="eager", **keys)
    ours = gradient(repeat=3, **keys)
    assert all(torch.equal(ours[0], again) for again in ours[1:])
    assert error(ours[0], exact.double()) < 1.25 * error(plain, exact.double()) < 0.25
    (full,) = gradient(dtype="float32", attention="fused", **keys)
    assert error(full, exact.double()) < 1e-4


def test_auto_is_fused() -> None:
    assert torch.equal(gradient()[0], gradient(attention="fused")[0])

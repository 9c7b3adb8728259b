"""How many bytes the stages of a training need, at most, from shapes alone (`Stage.footprint`).

The shapes of the data stage are those of its first epoch; other epochs mix rows anew.

A micro-batch has a shape (rows B, padded length S). Its draft tokens are D = B · min(num_anchors, S - 1) · block_size.
H hidden size, K captured layers, I width of the MLP, Q = heads · head_dim of the queries, G that of the keys, P drafter
parameters, V vocabulary.

What a drafter's layer keeps for its backward pass, in numbers of the compute dtype:

    a draft token     computed by modules (on a CPU)        by fused functions (on a GPU)
      of width H      6: x, unit, normed; x, unit, normed   2: x, x (norms are computed again)
      of width Q      4: q, unit, rotated, out              3: q, rotated, out
      of width G      4: k, unit, rotated, v                3: k, rotated, v
      of width I      4: gate, silu, up, product            2: gate, up
    a context token, of width G: as many
    a row             a dense mask, (D / B) · (S + D / B)   tiles of a mask (not counted)

Beside its layers, a draft token: 5 H (its embedding, the last x, its norm, the supervised rows, their gradient), and
in the backward pass of one MLP 3 I (modules) or 1 I (fused). A context token: 4 H (what fc gives, its norm, in the
backward pass a layer's share of its gradient, and the sum) and the gradients of keys and values, as much as one more
layer keeps. Each: cos and sin, 2 head_dim. All this is tested against what autograd saves, and what a step allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.dflash_config import DrafterConfig
from stages.dflash_model import DFlashModel, parameter_layout

__all__ = ["Shape", "drafter_step_bytes", "feature_bytes", "forward_bytes", "parameter_count", "token_bytes"]

Shape = tuple[int, int]


@dataclass(frozen=True)
class _Kept:
    """How many numbers a layer keeps, by their width. transient: of one MLP's backward pass."""

    hidden: int
    query: int
    key: int
    mlp: int
    transient: int


_MODULES, _FUSED = _Kept(6, 4, 4, 4, 3), _Kept(2, 3, 3, 2, 1)


def parameter_count(config: DrafterConfig) -> int:
    """P, the parameters of a drafter."""
    return sum(slot.size for slot in parameter_layout(DFlashModel(config, device="meta")).values())


def token_bytes(shape: Shape) -> int:
    """Of a `TokenBatch`: an id and a mask a token, two numbers a row."""
    rows, length = shape
    return rows * length * 9 + rows * 16


def feature_bytes(shape: Shape, width: int, itemsize: int) -> int:
    """Of a `FeatureBatch` whose features are K·H = `width` wide."""
    rows, length = shape
    return token_bytes(shape) + rows * length * width * itemsize


def forward_bytes(config: Any, shape: Shape, itemsize: int) -> int:
    """Of a forward pass of the target without gradients: the embeddings, x, its norm (in float32, too), gate, up and
    product. transformers' reference code for Gated DeltaNet layers, which only a CPU takes, needs more."""
    rows, length = shape
    hidden = config.hidden_size
    mlp = getattr(config, "intermediate_size", None) or 4 * hidden
    return rows * length * (3 * (hidden + mlp) * itemsize + 4 * hidden)


def drafter_step_bytes(
    config: DrafterConfig, shapes: Sequence[Shape], num_anchors: int, dtype: torch.dtype, *, fused: bool, dense: bool
) -> int:
    """Of the drafter's forward and backward pass, for the micro-batch that needs the most; without the logits.

    fused: whether the layers are computed by fused functions. dense: whether attention takes dense masks.
    """
    kept = _FUSED if fused else _MODULES
    heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    layer = kept.hidden * hidden + kept.query * heads[0] + kept.key * heads[1] + kept.mlp * mlp
    draft = layers * layer + 5 * hidden + kept.transient * mlp + 2 * config.head_dim
    context = (layers + 1) * kept.key * heads[1] + 4 * hidden + 2 * config.head_dim

    def numbers(rows: int, length: int) -> int:
        slots = min(num_anchors, length - 1) * config.block_size
        mask = layers * slots * (length + slots) if dense else 0
        return rows * (slots * draft + length * context + mask)

    return max((numbers(*shape) for shape in shapes), default=0) * dtype.itemsize

"""Tiny drafters and batches that several tests build on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from stages.dflash_config import FULL, SLIDING
from stages.dflash_model import DFlashModel, DrafterConfig, flatten, initial_parameters
from stages.messages import FeatureBatch, TokenBatch

CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=256,
    attention_bias=False,
    layer_types=(FULL, FULL),
    sliding_window=None,
    block_size=4,
    num_target_layers=8,
    mask_token_id=60,
    target_layer_ids=(1, 5),
)


def config(**changes: Any) -> DrafterConfig:
    """The tiny config with other numbers; `sliding=W` makes the first layer sliding."""
    window = changes.pop("sliding", None)
    if window is not None:
        changes |= {"sliding_window": window, "layer_types": (SLIDING, FULL)}
    return dataclasses.replace(CONFIG, **changes)


def drafter(of: DrafterConfig = CONFIG, seed: int = 0) -> DFlashModel:
    """With matrices large enough that every path through the network matters."""
    model = DFlashModel(of, device="meta")
    flat = flatten(model)
    values = initial_parameters(of, seed)
    flat.load(values.where(values == 1.0, values * 8.0))
    return model


def batch(
    rows: int = 2, length: int = 24, prompt: int = 4, vocab: int = 61, seed: int = 0, first_sample: int = 0
) -> TokenBatch:
    """Random tokens without padding, all supervised after the prompt."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[:, :prompt] = False
    return TokenBatch(
        input_ids=torch.randint(0, vocab - 1, (rows, length), generator=draw),
        loss_mask=mask,
        lengths=torch.full((rows,), length),
        sample=torch.arange(first_sample, first_sample + rows),
        progress=(0.0, 1.0),
    )


def features(tokens: TokenBatch, size: int, seed: int = 0) -> FeatureBatch:
    return FeatureBatch(tokens, normal(*tokens.input_ids.shape, size, seed=seed + 1000))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

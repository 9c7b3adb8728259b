"""Rotary positions of the drafter: frequencies of plain and scaled RoPE, and their application.

Scalings: linear interpolation; Llama 3.1's by wavelength; YaRN (arXiv 2309.00071) with the defaults of its reference.
Others that transformers knows depend on the length of the input, and are refused by `DrafterConfig`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dflash_pipe import BadInput
from stages.dflash_config import DrafterConfig

__all__ = ["half_rotation", "inverse_frequencies", "rotate", "rotation"]


def inverse_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """([head_dim / 2] float32 radians per position, factor on cos and sin). Raises BadInput if a key is missing."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling or {}
    match scaling.get("rope_type", "default"):
        case "linear":
            return plain / _key(scaling, "factor"), 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, scaling, config), _yarn_attention_factor(scaling)
    return plain, 1.0


def _key(scaling: dict[str, Any], name: str) -> float:
    if scaling.get(name) is None:
        raise BadInput(f"rope_scaling of type {scaling['rope_type']!r} lacks {name!r}")
    return float(scaling[name])


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are slowed by the factor, short ones kept, those between blended."""
    factor, low, high = (_key(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = _key(scaling, "original_max_position_embeddings") * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain / factor * (1.0 - kept) + plain * kept


def _yarn(plain: Tensor, scaling: dict[str, Any], config: DrafterConfig) -> Tensor:
    """Pairs that turn often inside the original length are kept, slow ones interpolated, a linear ramp between."""
    length = _key(scaling, "original_max_position_embeddings")

    def pair(turns: float) -> float:
        return config.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair(scaling.get("beta_fast") or 32.0), pair(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(config.head_dim // 2).float() - low) / (high - low if high != low else 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    return plain / _key(scaling, "factor") * interpolated + plain * (1.0 - interpolated)


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    growth = math.log(max(1.0, _key(scaling, "factor")))
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return (0.1 * scaling["mscale"] * growth + 1.0) / (0.1 * scaling["mscale_all_dim"] * growth + 1.0)
    return 0.1 * growth + 1.0


def half_rotation(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """positions [B, T] -> cos, sin [B, T, head_dim / 2] float32, each angle once."""
    angle = positions[..., None].float() * frequencies
    return angle.cos() * factor, angle.sin() * factor


def rotation(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [B, T] -> cos, sin [B, 1, T, head_dim]: the same twice, rounded to `dtype`, as `rotate` takes them."""
    cos, sin = (turn[:, None].to(dtype) for turn in half_rotation(positions, frequencies, factor))
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, head_dim], rotated in pairs (i, i + head_dim / 2)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin

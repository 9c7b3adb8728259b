"""Where the blocks of a sequence begin, drawn by a keyed hash instead of a generator.

The rank of a position depends on (seed, epoch, sample id, position) only, so a sample gets the same anchors in any
batch, with any padding, on any worker and device, after any resume. The hash is SplitMix64's finaliser (Steele, Lea and
Flood, OOPSLA 2014) in wrapping 64-bit integers, which are the same on every machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_anchors"]

_STEP = 0x9E3779B97F4A7C15
_POSITION_BITS = 22  # sequences up to 4 M tokens
_LAST = (1 << 63) - 1


def draw_anchors(
    loss_mask: Tensor, lengths: Tensor, sample: Tensor, epoch: int, seed: int, num_anchors: int
) -> tuple[Tensor, Tensor]:
    """Draw exactly min(num_anchors, eligible) anchors a sequence, uniformly and without replacement.

    loss_mask: [B, S] bool. lengths: [B] int64, real tokens. sample: [B] int64. A position a is eligible if the tokens
    at a and a + 1 are both supervised. -> anchors [B, N] int64, ascending, 0 in unused slots at the end; keep [B, N]
    bool, False there. N = min(num_anchors, S - 1), at least 1.
    """
    batch, length = loss_mask.shape
    count = max(1, min(num_anchors, length - 1))
    position = torch.arange(length, device=loss_mask.device)
    supervised = loss_mask.bool() & (position < lengths[:, None])
    eligible = supervised & torch.cat((supervised[:, 1:], supervised.new_zeros(batch, 1)), 1)
    key = _mix(sample + _signed(_mix_int(_mix_int(seed) ^ (epoch * _STEP))))
    rank = _mix(key[:, None] + position * _signed(_STEP))
    # The position itself fills the low bits: no two ranks are equal, and the smallest ranks say where they came from.
    rank = (_shift(rank, 1) >> _POSITION_BITS << _POSITION_BITS) | position
    chosen = rank.where(eligible, _LAST).topk(count, dim=1, largest=False).values
    keep = chosen != _LAST
    anchors = (chosen & ((1 << _POSITION_BITS) - 1)).where(keep, length).sort(1).values
    keep = anchors < length
    return anchors.where(keep, 0), keep


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, elementwise."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    """The same on one unsigned number; the step is added so that 0 does not stay 0."""
    x = (x + _STEP) % (1 << 64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return x ^ (x >> 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    x %= 1 << 64
    return x - (1 << 64) if x >= 1 << 63 else x

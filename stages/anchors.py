"""Where the blocks of a sequence begin, drawn by a keyed hash instead of a generator.

The rank of a position depends on (seed, epoch, sample id, position) only, so a sample gets the same anchors in any
batch, with any padding, on any worker and device, after any resume.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.splitmix import STEP, mix, mix_int, shifted, signed

__all__ = ["draw_anchors"]

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
    key = mix(sample + signed(mix_int(mix_int(seed) ^ (epoch * STEP))))
    rank = mix(key[:, None] + position * signed(STEP))
    # The position itself fills the low bits: no two ranks are equal, and the smallest ranks say where they came from.
    rank = (shifted(rank, 1) >> _POSITION_BITS << _POSITION_BITS) | position
    chosen = rank.where(eligible, _LAST).topk(count, dim=1, largest=False).values
    keep = chosen != _LAST
    anchors = (chosen & ((1 << _POSITION_BITS) - 1)).where(keep, length).sort(1).values
    keep = anchors < length
    return anchors.where(keep, 0), keep

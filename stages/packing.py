"""Where the real tokens of a right-padded micro-batch lie when its rows are laid one after another, without padding.

Shape legend: B rows, S padded length, M real tokens, C entries of the list of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CHUNK", "Pack", "pack_rows"]

CHUNK = 64  # tokens in a chunk of the delta rule


@dataclass(frozen=True)
class Pack:
    """All int64, on the device that computes.

    starts: [B + 1], where each row begins in the pack; the last is M. positions: [M], of each token in its row.
    places: [M], where each lies in the padded rows, [B·S]. sources: [B·S], the token of the pack for each place of the
    padded rows; behind a row's end its last token. chunks: [C, 2], (row, number of a chunk in it): every chunk of
    every row in order, then entries behind the end of the last row.
    """

    starts: Tensor
    positions: Tensor
    places: Tensor
    sources: Tensor
    chunks: Tensor


def pack_rows(lengths: Tensor, padded: int, real: int) -> Pack:
    """lengths: [B] int64 on the device. padded: S. real: M, the sum of lengths, at least 1.

    Every shape follows from B, S and M, so nothing waits for the device: C is as many chunks as M tokens in B rows can
    have. Raises RuntimeError where `real` is not the sum; a GPU does so when it gets there.
    """
    ends = lengths.cumsum(0)
    torch._assert_async(ends[-1] == real, "the real tokens announced with a micro-batch are not those of its rows")
    token = torch.arange(real, device=lengths.device)
    row = torch.searchsorted(ends, token, right=True)
    positions = token - (ends - lengths)[row]
    within = torch.arange(padded, device=lengths.device)
    sources = (ends - lengths)[:, None] + torch.minimum(within, lengths[:, None] - 1)
    return Pack(
        starts=F.pad(ends, (1, 0)),
        positions=positions,
        places=row * padded + positions,
        sources=sources.clamp(min=0).flatten(),  # a first row without tokens has no last one
        chunks=_chunks(lengths, (real + (CHUNK - 1) * len(lengths)) // CHUNK),
    )


def _chunks(lengths: Tensor, most: int) -> Tensor:
    counts = (lengths + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    entry = torch.arange(most, device=lengths.device)
    row = torch.searchsorted(ends, entry, right=True).clamp(max=len(lengths) - 1)
    return torch.stack([row, entry - (ends - counts)[row]], dim=1)

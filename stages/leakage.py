"""A test at the start that rows which are packed one after another do not leak into each other.

Every row's tokens are changed in turn; what is computed of all other rows has to stay the same to the bit. It runs the
real layers with the real kernels on this machine: what leaks does so silently, with plausible numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.fused_decoder import FusedDecoder
from stages.packing import CHUNK, Pack, pack_rows

__all__ = ["LENGTHS", "refuse_leaks"]

# Of neighbours: more than a chunk, a single token, fewer than a convolution has taps, several chunks, a whole chunk.
LENGTHS = (CHUNK + 6, 1, 2, 2 * CHUNK + 1, CHUNK)


@torch.no_grad()
def refuse_leaks(decoder: FusedDecoder, vocab_size: int, device: torch.device) -> None:
    """Raises RuntimeError, which names the step and the rows, if any state of a row depends on another row's tokens.

    Forward passes of a few hundred tokens: one, and one for each row. Waits for the device.
    """
    pack = pack_rows(torch.tensor(LENGTHS, device=device), max(LENGTHS), sum(LENGTHS))
    shape = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    expected = decoder(ids, pack=pack)
    for row in range(len(LENGTHS)):
        changed = ids.clone()
        changed[row] = (ids[row] + 1) % vocab_size
        got = decoder(changed, pack=pack)
        differ = [other for other in range(len(LENGTHS)) if not _same(got[other], expected[other])]
        if row not in differ:
            raise RuntimeError(f"packed: the states of a row of {LENGTHS[row]} tokens do not depend on them")
        if differ != [row]:
            lengths = " and ".join(str(LENGTHS[other]) for other in differ if other != row)
            raise RuntimeError(
                f"packed: rows leak into each other in the {_where(decoder, (ids, changed), pack, row)}: with the"
                f" {LENGTHS[row]} tokens of row {row}, the states of the rows of {lengths} tokens change"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _where(decoder: FusedDecoder, ids: tuple[Tensor, Tensor], pack: Pack, changed: int) -> str:
    """The first step in which another row than the changed one has other values."""
    for (name, one), (_, other) in zip(*(decoder.steps(each, pack) for each in ids), strict=True):
        rows = zip(one.split(LENGTHS), other.split(LENGTHS), strict=True)
        if any(row != changed and not _same(*pair) for row, pair in enumerate(rows)):
            return name
    return "order in which rows are written"

"""Matrices that lie below each other in one buffer, taken as one: what meets the same input is multiplied once."""

from __future__ import annotations

from torch import Tensor, cat

__all__ = ["stacked"]


def stacked(*matrices: Tensor) -> Tensor:
    """[r1, c], [r2, c], ... -> [r1 + r2 + ..., c]: a view if they lie below each other in memory, else a copy."""
    first, end = matrices[0], matrices[0].storage_offset()
    for matrix in matrices:
        same = matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and matrix.storage_offset() == end and matrix.is_contiguous()):
            return cat(matrices)
        end += matrix.numel()
    shape = (sum(map(len, matrices)), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride())

"""Gradients of weights, summed in float32 where they are made.

A parameter may carry `gradient_sum`, a float32 tensor of its shape to which every backward pass adds. Parameters that
lie below each other in one buffer can be taken as one matrix, and their sums too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stages.stacked import stacked

__all__ = ["GradientSums"]


class GradientSums:
    """Where the gradients of some parameters are added up: in their `gradient_sum`, or here if they have none."""

    def __init__(self, parameters: Sequence[Tensor], total: Tensor, kept: bool) -> None:
        self._parameters, self._total, self._kept = parameters, total, kept

    @staticmethod
    def of(*parameters: Tensor) -> GradientSums:
        """Of matrices that are multiplied as one, or of one parameter."""
        sums = [getattr(parameter, "gradient_sum", None) for parameter in parameters]
        given = [each for each in sums if each is not None]
        if len(given) == len(parameters):
            total = stacked(*given)
            if total.data_ptr() == given[0].data_ptr():
                return GradientSums(parameters, total, kept=True)
        shape = (sum(map(len, parameters)), *parameters[0].shape[1:])
        return GradientSums(parameters, torch.zeros(shape, device=parameters[0].device), kept=False)

    def add(self, gradient: Tensor) -> None:
        """gradient: float32, of the parameters' shape."""
        self._total.add_(gradient)

    def add_product(self, given: Tensor, x: Tensor, first: int = 0) -> None:
        """Add given^T x, for outputs given [M, out] of inputs x [M, in]; `first`: the first row that they are of."""
        rows = self._total[first:]
        if not len(x):  # a micro-batch without supervised slots
            return
        if given.dtype == torch.float32:
            rows.addmm_(given.t(), x)
        else:
            torch.addmm(rows, given.t(), x, out_dtype=torch.float32, out=rows)

    def returned(self) -> Iterator[Tensor | None]:
        """For each parameter what a backward function returns: nothing if it has been added to its sum."""
        if self._kept:
            return iter([None] * len(self._parameters))
        parts = self._total.split([len(parameter) for parameter in self._parameters])
        return iter([part.to(parameter.dtype) for part, parameter in zip(parts, self._parameters, strict=True)])

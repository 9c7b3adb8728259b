"""How sure a median is: bootstrap intervals of a few repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_pipe.forecast_table import figure

__all__ = ["Estimate", "estimate"]

_DRAWS = 10_000


@dataclass(frozen=True)
class Estimate:
    """A median, and the ends of its interval; they are None where one measurement says nothing about the spread."""

    median: float
    low: float | None
    high: float | None

    def range(self, scale: float = 1.0, digits: int = 3) -> str:
        """Both ends as text; empty where there are none."""
        if self.low is None or self.high is None:
            return ""
        return f"{figure(self.low * scale, digits)} to {figure(self.high * scale, digits)}"


def estimate(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> Estimate:
    """The median with its percentile bootstrap interval (Efron 1979): medians of values drawn again, with replacement.

    Of n values the interval never reaches past the least and the greatest, so at n < 6 it holds less than it says.
    Raises ValueError without values.
    """
    measured = np.asarray(values, dtype=np.float64)
    if not len(measured):
        raise ValueError("no values to estimate from")
    if len(measured) == 1:
        return Estimate(float(measured[0]), None, None)
    places = np.random.default_rng(seed).integers(0, len(measured), (_DRAWS, len(measured)))
    medians = np.median(measured[places], axis=1)
    low, high = np.quantile(medians, ((1 - level) / 2, (1 + level) / 2))
    return Estimate(float(np.median(measured)), float(low), float(high))

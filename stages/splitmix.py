"""SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) as a hash, in wrapping 64-bit integers.

Integers are the same on every machine and device, and so is their sum, in whatever order it is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["AT_ONCE", "STEP", "digest", "mix", "mix_int", "shifted", "signed"]

STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
AT_ONCE = 1 << 25  # numbers hashed at once: their 64-bit copies are the memory that this takes


def digest(values: Tensor) -> str:
    """16 hexadecimal digits that depend on every bit of `values` (float32, contiguous) and on its place."""
    bits = values.detach().view(torch.int32)
    places = torch.arange(min(AT_ONCE, len(bits)), device=bits.device).mul_(signed(STEP))
    total = 0
    for start in range(0, len(bits), AT_ONCE):
        part = bits[start : start + AT_ONCE].long()
        # In place, and half a round of the finaliser instead of two and a half: all of this is memory traffic.
        part.add_(places[: len(part)]).add_(signed(start * STEP)).mul_(signed(_FIRST))
        part.bitwise_xor_(part >> 29)
        total += int(part.sum())
    return f"{total % (1 << 64):016x}"


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, elementwise."""
    x = (x ^ shifted(x, 30)) * signed(_FIRST)
    x = (x ^ shifted(x, 27)) * signed(_SECOND)
    return x ^ shifted(x, 31)


def mix_int(x: int) -> int:
    """The same on one unsigned number; the step is added so that 0 does not stay 0."""
    x = (x + STEP) % (1 << 64)
    x = (x ^ (x >> 30)) * _FIRST % (1 << 64)
    x = (x ^ (x >> 27)) * _SECOND % (1 << 64)
    return x ^ (x >> 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    x %= 1 << 64
    return x - (1 << 64) if x >= 1 << 63 else x

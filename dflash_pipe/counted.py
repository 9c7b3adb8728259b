"""How many of something, for a reader."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, one: str, many: str = "") -> str:
    """1 window, 2 windows, 1,024 windows. many: what more than one is called, unless it is `one` with an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"

"""The digest of a tensor's bits."""

from __future__ import annotations

import pytest
import torch

from stages import splitmix
from stages.splitmix import digest

VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(3))


def test_it_depends_on_every_bit() -> None:
    found = {digest(VALUES)}
    for bit in range(32):
        changed = VALUES.view(torch.int32).clone()
        changed[(bit * 31) % 1000] ^= torch.tensor(1 << bit).to(torch.int32)
        found.add(digest(changed.view(torch.float32)))
    assert len(found) == 33


def test_it_depends_on_places() -> None:
    swapped = VALUES.clone()
    swapped[[3, 700]] = VALUES[[700, 3]]
    assert digest(swapped) != digest(VALUES) == digest(VALUES.clone())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("at_once", [1, 7, 999, 1000, 1001])
def test_it_does_not_depend_on_how_it_is_cut(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest(VALUES)
    monkeypatch.setattr(splitmix, "AT_ONCE", at_once)
    assert digest(VALUES) == expected

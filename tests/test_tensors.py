"""Tensors are found, and replaced, wherever a payload holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.tensors import mapped, tensors


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Box:
    inside: Any


LEAVES = st.integers(0, 9).map(torch.tensor) | st.integers() | st.none() | st.text(max_size=3)
PAYLOADS = st.recursive(
    LEAVES,
    lambda inner: (
        inner.map(Box)
        | st.builds(Pair, inner, inner)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
)


def plain(value: Any) -> Any:
    """The payload with numbers in place of tensors, marked as such."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.item())
    if isinstance(value, Box):
        return ("box", plain(value.inside))
    if isinstance(value, Pair):
        return ("pair", plain(value.first), plain(value.second))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


@given(PAYLOADS)
def test_every_tensor_is_changed_and_nothing_else(payload: Any) -> None:
    before = plain(payload)
    numbers = [tensor.item() for tensor in tensors(payload)]
    changed = mapped(payload, lambda tensor: tensor + 10)
    assert plain(payload) == before
    assert [tensor.item() for tensor in tensors(changed)] == [number + 10 for number in numbers]
    assert plain(mapped(changed, lambda tensor: tensor - 10)) == before


@given(PAYLOADS)
def test_what_does_not_change_is_not_made_anew(payload: Any) -> None:
    assert mapped(payload, lambda tensor: tensor) is payload

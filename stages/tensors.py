"""The tensors inside a payload: in fields of dataclasses, in dicts, lists and tuples, to any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["mapped", "tensors"]


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, item in _items(value):
            yield from tensors(item)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to every tensor in it; itself where `change` gave every tensor back."""
    if isinstance(value, Tensor):
        return change(value)
    items = _items(value)
    changed = {name: new for name, item in items if (new := mapped(item, change)) is not item}
    if not changed:
        return value
    if isinstance(value, dict):
        return value | changed
    if isinstance(value, list | tuple):
        made = getattr(value, "_make", type(value))  # a named tuple takes its fields one by one
        return made(changed.get(name, item) for name, item in items)
    return dataclasses.replace(value, **changed)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []

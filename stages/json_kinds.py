"""What a JSON value is, in the words of a message to a reader."""

from __future__ import annotations

from typing import Any

__all__ = ["json_kind"]

_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def json_kind(value: Any) -> str:
    """Such as "a number", of a value that `json.loads` returned."""
    return _KINDS.get(type(value), "null")

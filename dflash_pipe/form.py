"""Whether what a snapshot holds has the form that its reader expects, and whether it can hold what it is given; what is
wrong in one line, with its key."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from dflash_pipe.errors import BadSnapshot, cut_off, nearest

__all__ = ["exactly", "refuse_no_json", "refuse_other_form"]

_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def exactly(number: int) -> range:
    """The form of this whole number and no other."""
    return range(number, number + 1)


def refuse_other_form(own: Any, given: Any, place: str) -> None:
    """Raise `BadSnapshot` unless `given` has the form of `own`. place: what `given` is called, such as "cursor".

    `own` is JSON, with ranges. A whole number stands for those from it on, a range for those in it, a float for any
    number, a text for any, true or false for both, None for itself. An object needs the keys of `own`, each of the form
    there, and may have others; the entries of a list need the form of the first in `own`, if there is one.
    Raises TypeError where `own` is anything else.
    """
    expected = _expected(own)
    if not _fits(own, given):
        raise BadSnapshot(f"{place or 'all of it'} is {_shown(given)}, expected {expected}")
    if isinstance(own, dict):
        for key, form in own.items():
            inside = f"{place}.{key}" if place else key
            if key not in given:
                raise BadSnapshot(f"{inside} is missing{nearest(key, map(str, given))}")
            refuse_other_form(form, given[key], inside)
    elif isinstance(own, list) and own:
        for number, entry in enumerate(given):
            refuse_other_form(own[0], entry, f"{place}[{number}]")


def refuse_no_json(value: Any, place: str) -> None:
    """Raise TypeError unless `value` would come back from JSON as it is, but for tuples, which come back as lists.
    place: what it is called, such as "cursor"."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}, which would come back as text: expected text")
            refuse_no_json(entry, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            refuse_no_json(entry, f"{place}[{number}]")
    elif not isinstance(value, str | int | float | None):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"{place} is {_shown(value)}, of type {kind}: expected a JSON value")


def _expected(own: Any) -> str:
    if isinstance(own, range):
        return str(own.start) if own.stop == own.start + 1 else f"a whole number from {own.start} to {own.stop - 1}"
    if type(own) is int:
        return f"a whole number from {own}"
    if type(own) not in _KINDS:
        raise TypeError(f"{own!r} is the form of nothing in a snapshot, expected JSON or a range")
    return _KINDS[type(own)]


def _fits(own: Any, given: Any) -> bool:
    if isinstance(own, range):
        return type(given) is int and given in own
    if type(own) is float:
        return type(given) in (int, float)
    return type(given) is type(own) and (type(own) is not int or given >= own)


def _shown(value: Any) -> str:
    """As JSON, or, of what a stage has put there by mistake, as Python shows it; on one line, cut off if long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = " ".join(reprlib.repr(value).split())
    return cut_off(text)

"""Whether what a snapshot holds has the form that its reader expects; what is wrong in one line, with its key."""

from __future__ import annotations

import json
from typing import Any

from dflash_pipe.errors import BadSnapshot, nearest

__all__ = ["refuse_other_form"]

_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text"}


def refuse_other_form(own: Any, given: Any, place: str) -> None:
    """Raise `BadSnapshot` unless `given` has the form of `own`. place: what `given` is called, such as "cursor".

    Both are JSON. A number stands for whole numbers from it on, a range for those in it, a text for any. An object
    needs the keys of `own`, each of the form there, and may have others; the entries of a list need the form of the
    first in `own`, if there is one.
    """
    if not _fits(own, given):
        raise BadSnapshot(f"{place or 'all of it'} is {_shown(given)}, expected {_expected(own)}")
    if isinstance(own, dict):
        for key, form in own.items():
            inside = f"{place}.{key}" if place else key
            if key not in given:
                raise BadSnapshot(f"{inside} is missing{nearest(key, given)}")
            refuse_other_form(form, given[key], inside)
    elif isinstance(own, list) and own:
        for number, entry in enumerate(given):
            refuse_other_form(own[0], entry, f"{place}[{number}]")


def _fits(own: Any, given: Any) -> bool:
    if isinstance(own, range):
        return type(given) is int and given in own
    return type(given) is type(own) and (type(own) is not int or given >= own)


def _expected(own: Any) -> str:
    if isinstance(own, range):
        return str(own.start) if own.stop == own.start + 1 else f"a whole number from {own.start} to {own.stop - 1}"
    return f"a whole number from {own}" if isinstance(own, int) else _KINDS[type(own)]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

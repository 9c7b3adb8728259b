"""What the YAML may say: keys, types, ranges and defaults, validated by pydantic; its complaints in one line."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import PurePath
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

from dflash_pipe.errors import BadInput, cut_off, nearest
from dflash_pipe.located import SECTIONS, Located, at, plain, under

__all__ = ["KEYS", "CapacityKeys", "ChannelKeys", "CreditsKeys", "GraphKeys", "StageKeys", "WorkerKeys", "validate"]


_LONGEST = 100  # characters of a run's name


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _items(value: Any) -> Any:
    return value if isinstance(value, dict) else {"items": value}


def _every_stage(value: Any) -> Any:
    return value if isinstance(value, dict) else {"*": value}


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _folder_name(name: str) -> str:
    """A run's name is its folder's."""
    if name in ("", "..") or PurePath(name).name != name or not name.isprintable() or len(os.fsencode(name)) > _LONGEST:
        raise ValueError(f"cannot be the name of a run folder (one part of a path, at most {_LONGEST} bytes)")
    return name


class StageKeys(_Keys):
    """use: "module:Name". with: the stage's own parameters, validated against its annotations later."""

    use: str
    with_: dict[str, Any] | None = Field(default=None, alias="with")


class CapacityKeys(_Keys):
    """items: messages. bytes: of their payloads, also as text ("8GiB")."""

    items: int = Field(default=2, ge=1, le=1_000_000)
    bytes: Annotated[ByteSize, Field(ge=1)] | None = None


class ChannelKeys(_Keys):
    """to: `stage.port`, or `stage` where it has one port; or a list of them. capacity: messages, or items and bytes."""

    from_: str = Field(alias="from")
    to: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]
    per: Literal["message", "window"] = "message"
    broadcast: bool = False
    initial: int = Field(default=0, ge=0)
    capacity: Annotated[CapacityKeys, BeforeValidator(_items)] = CapacityKeys()
    group: int = Field(default=1, ge=1)


class WorkerKeys(_Keys):
    """device: for every stage ("*") or by stage; one name for all replicas, or a list with one for each."""

    stages: list[str] = Field(min_length=1)
    kind: Literal["thread", "async"] = "thread"
    replicas: int = Field(default=1, ge=1, le=1024)
    device: Annotated[dict[str, str | list[str]], BeforeValidator(_every_stage)] = {"*": "auto"}
    take: Literal["first_free", "round_robin"] = "first_free"
    order: Literal["input", "completion"] = "input"
    turn: str | None = None


class CreditsKeys(_Keys):
    """How many messages or windows may be in flight in the whole graph."""

    messages: int | None = Field(default=None, ge=1)
    windows: int | None = Field(default=None, ge=1)


_Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]


class GraphKeys(_Keys):
    """The top level, after `extends:` has been followed."""

    name: Annotated[str, AfterValidator(_folder_name)]
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    window: int = Field(default=1, ge=1)
    partial_window: Literal["keep", "drop"] = "keep"
    threads: int | None = Field(default=None, ge=1, le=1024)
    stall_after: float = Field(default=10.0, gt=0)
    snapshot: int | None = Field(default=None, ge=1)
    credits: CreditsKeys | None = None
    transport: str = "dflash_pipe.transport:Transport"
    stages: dict[_Name, StageKeys]
    channels: dict[_Name, ChannelKeys]
    workers: dict[_Name, WorkerKeys]


def _names(keys: type[_Keys]) -> list[str]:
    return [f.alias or name for name, f in keys.model_fields.items()]


# where a key may stand (top level, section, or the key above it) -> the keys that may stand there
KEYS: dict[str, list[str]] = {
    "": _names(GraphKeys),
    "stages": _names(StageKeys),
    "channels": _names(ChannelKeys),
    "workers": _names(WorkerKeys),
    "capacity": _names(CapacityKeys),
    "credits": _names(CreditsKeys),
}


# words of pydantic about JSON -> words about YAML
_WORDS = {
    "Input should be": "should be",
    " or should be": " or",
    "an object": "a mapping",
    "a valid array": "a list",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "Value error, ": "",
}


def validate(kind: Any, tree: Located, path: tuple[str, ...]) -> Any:
    """What is at a path of the tree, as `kind`. Raises `BadInput`.

    Validated as JSON: a list may become a tuple and a string a Path or an enum, but never a number. A number is finite.
    """
    value = tree
    for part in path:
        value = value.value[part]
    _refuse_infinite(value, path)
    try:
        adapter = TypeAdapter(kind)
    except PydanticUserError as error:
        where, shown = at(tree, path)
        raise BadInput(f"{shown}: a parameter of type {kind} cannot be given in YAML", where) from error
    try:
        return adapter.validate_json(pydantic_core.to_json(plain(value)), strict=True)
    except ValidationError as error:
        raise _complaint(tree, path, error) from None


def _refuse_infinite(tree: Located, path: tuple[str, ...]) -> None:
    """Raise BadInput where a number is none that can be computed with: .inf, .nan, or beyond the largest float."""
    inside = tree.value
    if isinstance(inside, dict | list):
        for part, entry in inside.items() if isinstance(inside, dict) else enumerate(inside):
            _refuse_infinite(entry, (*path, str(part)))
    elif isinstance(inside, int | float) and not abs(inside) <= sys.float_info.max:
        raise BadInput(f"{'.'.join(path)}: should be a finite number, got {_shown(inside)}", tree.where)


_OF_KEYS = ("missing", "string_pattern_mismatch")


def _complaint(tree: Located, path: tuple[str, ...], error: ValidationError) -> BadInput:
    """The first thing that is wrong; the branches of a union are told together."""
    errors = error.errors(include_url=False)
    first = _furthest(tree, path, errors)
    loc = (*path, *first["loc"])
    where, shown = at(tree, loc)
    shown = f"{shown}: " if shown else ""
    kind, given = first["type"], first["input"]
    if kind == "extra_forbidden":
        above = "" if len(loc) == 1 else str(loc[-2]) if loc[-2] in KEYS else str(loc[0])
        return BadInput(f"{shown}unknown key {loc[-1]!r}{nearest(str(loc[-1]), KEYS.get(above, []))}", where)
    if kind == "missing" and len(loc) == 3 and loc[0] in SECTIONS:
        return BadInput(f"{shown}{_nothing_to_lay_over(tree, *map(str, loc))}", where)
    if kind == "missing":
        return BadInput(f"{shown}key {loc[-1]!r} is missing", where)
    if kind == "too_short":
        return BadInput(f"{shown}needs at least one entry", where)
    if kind == "string_pattern_mismatch":
        return BadInput(f"{shown}a name begins with a letter and has letters, digits, '_' and '-'", where)
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return BadInput(f"{shown}unknown value {_shown(given)}{nearest(str(given), choices)}", where)
    alike = dict.fromkeys(e["msg"] for e in errors if at(tree, (*path, *e["loc"]))[1] == at(tree, loc)[1])
    said = " or ".join(alike)
    for pydantic_says, yaml_says in _WORDS.items():
        said = said.replace(pydantic_says, yaml_says)
    return BadInput(f"{shown}{said[:1].lower()}{said[1:]}, got {_shown(given)}", where)


def _furthest(tree: Located, path: tuple[str, ...], errors: list[ErrorDetails]) -> ErrorDetails:
    """The first complaint; of a union that of the branch which got furthest into what is written."""
    first, loc = errors[0], errors[0]["loc"]
    if first["type"] in _OF_KEYS or at(tree, (*path, *loc)) != at(tree, (*path, *loc[:-1])):  # the last part is written
        return first
    branches = [each for each in errors if each["loc"][: len(loc) - 1] == loc[:-1]]
    return max(branches, key=lambda each: at(tree, (*path, *each["loc"]))[1].count("."))


def _nothing_to_lay_over(tree: Located, section: str, name: str, key: str) -> str:
    """An entry without the key that makes it one: most likely it was meant for another graph, or another name."""
    own = [
        f"{outer}.{inner}" if inner else outer
        for outer, entry in under(tree, section, name).items()
        for inner in (entry.value if isinstance(entry.value, dict) else {}) or [""]
    ]
    sets = ", ".join(own[:4]) + (f" and {len(own) - 4} more" if own[4:] else "") or "nothing"
    known = nearest(name, [other for other in under(tree, section) if key in under(tree, section, other)])
    return f"it sets {sets}, but the graph has no {section[:-1]} {name!r}{known}; a new one needs {key!r}"


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return cut_off(text)

"""Names in the graph: `key=value` overrides and `${...}` references.

`stage.parameter` stands for `stages.STAGE.with.PARAMETER` in both; an override may also say `worker.key` or
`channel.key`; a full path from the top of the file always works.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pydantic_core

from dflash_pipe.errors import BadInput, nearest
from dflash_pipe.keys import KEYS
from dflash_pipe.located import SECTIONS, Located, at, dumps, located, overlay, parse, plain, under
from dflash_pipe.places import COMMAND_LINE, Places
from dflash_pipe.stage import Signature, signature
from dflash_pipe.use import load_object

__all__ = ["missing", "override", "resolve", "used"]

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
KeyPath = tuple[str, ...]


def override(tree: Located, text: str) -> Located:
    """The tree with `key=value` laid over it; the value is YAML. Raises `BadInput`."""
    key, equals, written = text.partition("=")
    if not equals or not key:
        raise BadInput(f"{text!r}: expected key=value", COMMAND_LINE)
    try:
        value = parse(written, lambda line: "") or Located(None, "")
    except BadInput as error:
        raise error.at(COMMAND_LINE, text) from error
    value = located(plain(value), COMMAND_LINE)
    for part in reversed(_full_path(tree, key)):
        value = Located({part: value}, COMMAND_LINE)
    return replace(overlay(tree, value), where=tree.where)


def _full_path(tree: Located, key: str) -> KeyPath:
    first, *rest = parts = key.split(".")
    if first in KEYS[""]:
        inside = under(tree, first)
        if first in SECTIONS and len(rest) > 1 and rest[0] not in inside:
            raise BadInput(f"{key}: no {first[:-1]} {rest[0]!r}{nearest(rest[0], inside)}", COMMAND_LINE)
        return tuple(parts)
    means: dict[str, list[KeyPath]] = {}
    for section in SECTIONS:
        if first in under(tree, section):
            known = used(tree, first)[1].parameters if section == "stages" else KEYS[section]
            path = (section, first, "with") if section == "stages" else (section, first)
            for name in known:
                means.setdefault(name, []).append((*path, name))
    if not means and not any(first in under(tree, section) for section in SECTIONS):
        names = [*KEYS[""], *(name for section in SECTIONS for name in under(tree, section))]
        raise BadInput(f"{key}: no key, stage, worker or channel {first!r}{nearest(first, names)}", COMMAND_LINE)
    found = means.get(rest[0], []) if rest else []
    if not found:
        what = f"{first} has no {rest[0]!r}{nearest(rest[0], means)}" if rest else f"expected {first}.KEY=value"
        raise BadInput(f"{key}: {what}", COMMAND_LINE)
    if len(found) > 1:
        raise BadInput(f"{key} is ambiguous: write {' or '.join('.'.join(path) for path in found)}", COMMAND_LINE)
    return (*found[0], *rest[1:])


def resolve(tree: Located, files: Sequence[str] = ()) -> Located:
    """Replace every `${stage.parameter}`, `${stage}` (its whole `with:`) and `${full.path}`.

    A reference that is the whole value keeps its type; inside a string it becomes text. A parameter that `with:` does
    not give stands for its default. What is put in has the place of the reference, or of what it refers to, whichever
    was laid last of the files. Raises `BadInput` for unknown and circular references.
    """
    return _resolved(tree, tree, (), (), Places(tree, tuple(files)).later)


def _resolved(
    tree: Located, entry: Located, path: KeyPath, active: tuple[KeyPath, ...], later: Callable[..., str]
) -> Located:
    """entry, found at path, without references. active: the references being followed."""
    if isinstance(entry.value, dict):
        inside = {k: _resolved(tree, v, (*path, k), active, later) for k, v in entry.value.items()}
        return replace(entry, value=inside)
    if isinstance(entry.value, list):
        items = [_resolved(tree, v, (*path, str(i)), active, later) for i, v in enumerate(entry.value)]
        return replace(entry, value=items)
    if not isinstance(entry.value, str):
        return entry

    def look(match: re.Match[str]) -> Located:
        try:
            target, found = _find(tree, match[1])
            if target in active:
                circle = [*active[active.index(target) :], target]
                raise BadInput(f"references go in a circle: {' → '.join(map('.'.join, circle))}")
            put_in = _resolved(tree, found, target, (*active, target), later)
            return replace(put_in, where=later(entry.where, put_in.where))
        except BadInput as error:
            stage = match[1].partition(".")[0]
            made = at(tree, ("stages", stage, "use"))[0]  # or where stages were taken out
            raise error.at(later(entry.where, made), f"{'.'.join(path)}: {match[0]}") from error

    places = [entry.where]

    def text(match: re.Match[str]) -> str:
        put_in = look(match)
        value = put_in.value
        if isinstance(value, dict | list):
            raise BadInput(f"{'.'.join(path)}: {match[0]} is not a single value", entry.where)
        places.append(put_in.where)
        return value if isinstance(value, str) else dumps(value).split("\n")[0]

    if whole := _REFERENCE.fullmatch(entry.value):
        return look(whole)
    written = _REFERENCE.sub(text, entry.value)
    return Located(written, later(*places))


def _find(tree: Located, name: str) -> tuple[KeyPath, Located]:
    """The full path that a reference means, and what is there."""
    path = tuple(name.split("."))
    if path[0] not in tree.value:
        stages = under(tree, "stages")
        if path[0] not in stages:
            raise BadInput(f"no stage or key {path[0]!r}{nearest(path[0], [*stages, *tree.value])}")
        path = ("stages", path[0], "with", *path[1:])
    if path[0] == "stages" and path[2:3] == ("with",) and path[1] in under(tree, "stages"):
        given = under(tree, *path[:3])
        if len(path) == 3:
            entry = under(tree, *path[:2]).get("with")
            return path, Located(given, entry.where if entry else "")
        if len(path) == 4 and path[3] not in given:
            return path, _default(tree, path[1], path[3])
    found = tree
    for depth, part in enumerate(path):
        inside = found.value if isinstance(found.value, dict) else {}
        if part not in inside:
            raise BadInput(f"{'.'.join(path[:depth])} has no {part!r}{nearest(part, inside)}")
        found = inside[part]
    return path, found


def _default(tree: Located, stage: str, parameter: str) -> Located:
    made, sig = used(tree, stage)
    if parameter not in sig.parameters:
        raise BadInput(f"{made.__name__} has no parameter {parameter!r}{nearest(parameter, sig.parameters)}")
    default = sig.parameters[parameter][1]
    if default is dataclasses.MISSING:
        raise missing(tree, stage, [parameter])
    return located(pydantic_core.to_jsonable_python(default), "")


def used(tree: Located, stage: str) -> tuple[Any, Signature]:
    """The class or function of a stage of a merged tree, and what it takes and sends. Raises `BadInput`."""
    use = under(tree, "stages", stage).get("use")
    if use is None or not isinstance(use.value, str):
        where = tree.value["stages"].value[stage].where
        raise BadInput(f'stages.{stage}: expected use: "module:Name"', where)
    try:
        made = load_object(use.value)
        return made, signature(made)
    except BadInput as error:
        raise error.at(use.where, f"stages.{stage}.use") from error
    except (TypeError, NameError) as error:
        raise BadInput(f"stages.{stage}.use: {use.value} is no stage: {error}", use.where) from error


def missing(tree: Located, stage: str, parameters: list[str]) -> BadInput:
    """The complaint about required parameters that `with:` does not give."""
    written = " and ".join(map(repr, parameters))
    made, _ = used(tree, stage)
    entry = under(tree, "stages", stage)
    if "with" in entry and not isinstance(entry["with"].value, dict | None):
        line = f"stages.{stage}.with: expected keys of {made.__name__} such as {written}, got {plain(entry['with'])!r}"
        return BadInput(line, entry["with"].where)
    emptied = "with" in entry and entry["with"].value is None
    where = entry["with" if emptied else "use"].where
    example = f"in a file, or {stage}.{parameters[0]}=... on the command line"
    return BadInput(f"stages.{stage}.with: {made.__name__} needs {written} ({example})", where)

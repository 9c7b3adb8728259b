"""YAML with positions: every value knows its file and line; files extend and overlay one another.

Scalars follow the YAML 1.2 core schema (`6e-4` is a number, `no` and `12:30` are strings). Mappings are merged key by
key, lists and scalars are replaced, null removes a stage, channel or worker of an earlier file, and a stage with a new
`use:` and a `with:` of its own replaces the old one whole. Each file counts once, after everything it extends, so two
overlays may extend the same base.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from dflash_pipe.errors import BadInput, nearest

__all__ = ["SECTIONS", "Located", "at", "dumps", "located", "overlay", "parse", "plain", "read", "under"]

SECTIONS = ("stages", "channels", "workers")
_MOST_OF_ALIASES = 100_000  # what aliases add to a text
_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": r"^(~|null|Null|NULL|)$",
    "bool": r"^(true|True|TRUE|false|False|FALSE)$",
    "int": r"^([-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+)$",
    "float": r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (PyYAML's own class attribute)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern in _CORE.items():
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), None)
    _Dumper.add_implicit_resolver(_TAG + _tag, re.compile(_pattern), None)


@dataclass(frozen=True)
class Located:
    """A value and where it was written (`file:line` of its key). value: scalar, list of Located, or dict of Located."""

    value: Any
    where: str


def files_among(words: Iterable[str]) -> list[str]:
    """Those of a command line's words that name a file; the others are `key=value`."""
    return [word for word in words if "=" not in word or os.path.isfile(word)]


def plain(tree: Located) -> Any:
    """The value without its places."""
    if isinstance(tree.value, dict):
        return {key: plain(entry) for key, entry in tree.value.items()}
    return [plain(entry) for entry in tree.value] if isinstance(tree.value, list) else tree.value


def located(value: Any, where: str) -> Located:
    """A plain value as if all of it had been written in one place."""
    if isinstance(value, dict):
        return Located({str(key): located(entry, where) for key, entry in value.items()}, where)
    return Located([located(entry, where) for entry in value] if isinstance(value, list) else value, where)


def under(tree: Located, *path: str) -> dict[str, Located]:
    """The entries of the mapping at a path; none where there is no mapping."""
    for part in path:
        if not isinstance(tree.value, dict) or part not in tree.value:
            return {}
        tree = tree.value[part]
    return tree.value if isinstance(tree.value, dict) else {}


def dumps(value: Any, *, flow: bool = False) -> str:
    """YAML text that reads back as the same value. flow: what holds nothing nested is written on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None if flow else False, width=120)


def at(tree: Located, path: Iterable[str | int]) -> tuple[str, str]:
    """The place of what exists of a path, and that part of the path as text."""
    shown: list[str] = []
    where = tree.where
    for part in path:
        inside = tree.value
        if part in (inside if isinstance(inside, dict) else range(len(inside) if isinstance(inside, list) else 0)):
            tree = inside[part]
            shown, where = [*shown, str(part)], tree.where
    return where, ".".join(shown)


# --- one text ---------------------------------------------------------------------------------------------------------


def parse(text: str, place: Callable[[int], str]) -> Located | None:
    """One YAML document; None if there is nothing in it. place: line number from 1 -> where. Raises `BadInput`."""
    try:
        document = yaml.compose(text, _Loader)
        if document is not None:
            _count(document, place, {})
        return _tree(document, place, ()) if document is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ": ".join(part for part in (error.context, error.problem) if part)
        if r"'\t'" in problem:
            problem = "a tab (YAML is indented with spaces)"
        raise BadInput(f"not valid YAML: {problem}", place(mark.line + 1 if mark else 1)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise BadInput(f"not valid YAML: character {ord(text[error.position])} is not allowed", place(line)) from error
    except RecursionError as error:
        raise BadInput("not valid YAML: nested too deeply", place(1)) from error


def _count(node: yaml.Node, place: Callable[[int], str], counts: dict[int, int]) -> int:
    """Nodes of a value with its aliases written out. counts: those already known, by `id`; 0 while one is counted."""
    if id(node) not in counts:
        counts[id(node)] = 0
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        inside = parts if isinstance(node, yaml.CollectionNode) else []
        counts[id(node)] = 1 + sum(_count(part, place, counts) for part in inside)
        if counts[id(node)] - len(counts) > _MOST_OF_ALIASES:
            line = f"its aliases stand for more than {_MOST_OF_ALIASES:,} values"
            raise BadInput(line, place(node.start_mark.line + 1))
    return counts[id(node)]


def _tree(node: yaml.Node, place: Callable[[int], str], around: tuple[yaml.Node, ...]) -> Located:
    where = place(node.start_mark.line + 1)
    if any(node is outer for outer in around):
        raise BadInput("an alias contains itself", where)
    inside = (*around, node)
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return Located([_tree(item, place, inside) for item in node.value], where)
    if isinstance(node, yaml.MappingNode) and kind == "map":
        entries: dict[str, Located] = {}
        for key, value in node.value:
            where_key = place(key.start_mark.line + 1)
            if not isinstance(key, yaml.ScalarNode):
                raise BadInput("a key must be a name", where_key)
            if key.value in entries:
                first = entries[key.value].where.rpartition(":")[2]
                raise BadInput(f"duplicate key {key.value!r} (first on line {first})", where_key)
            entries[key.value] = replace(_tree(value, place, inside), where=where_key)
        return Located(entries, where)
    try:
        return Located(_SCALARS[kind](node.value), where)
    except (KeyError, ValueError) as error:
        raise BadInput(f"cannot read {node.value!r} as !!{kind}", where) from error


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text.replace("_", ""), {"0x": 16, "0o": 8}.get(text[:2], 10)),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}


# --- files ------------------------------------------------------------------------------------------------------------


def read(files: Sequence[str | Path]) -> tuple[Located, tuple[str, ...]]:
    """All files and what they extend, overlaid in order; and the names of those files. Raises `BadInput`."""
    if not files:
        raise BadInput("no graph given (expected one or more YAML files)", "command line")
    layers: dict[Path, tuple[str, Located]] = {}
    for file in files:
        _collect(os.fspath(file), Path(), "", (), layers)
    merged = Located({section: Located({}, os.fspath(files[0])) for section in SECTIONS}, os.fspath(files[0]))
    for _, layer in layers.values():
        merged = replace(overlay(merged, layer), where=merged.where)
    return merged, tuple(shown for shown, _ in layers.values())


def _collect(
    written: str, beside: Path, asked: str, chain: tuple[tuple[Path, str], ...], layers: dict[Path, tuple[str, Located]]
) -> None:
    """Put a file behind everything it extends. beside: the folder its name is relative to. asked: who named it."""
    path, shown = _find(written, beside, chain[-1][1] if chain else "", asked)
    real = path.resolve()
    if real in [seen for seen, _ in chain]:
        raise BadInput(f"extends goes in a circle: {' → '.join([*(name for _, name in chain), shown])}", asked)
    if real in layers:
        return
    tree = _parse_file(path, shown)
    bases = tree.value.pop("extends", None)
    for base in [] if bases is None else bases.value if isinstance(bases.value, list) else [bases]:
        if not isinstance(base.value, str):
            raise BadInput(f"extends: expected a file name, got {plain(base)!r}", base.where)
        _collect(base.value, path.parent, base.where, (*chain, (real, shown)), layers)
    layers[real] = (shown, tree)


def _find(written: str, beside: Path, extending: str, asked: str) -> tuple[Path, str]:
    """The file and the name to show for it. What is not there but ships with the package is taken from there."""
    path = beside / written
    shown = os.path.normpath(os.path.join(os.path.dirname(extending), written))
    if path.is_file():
        return path, shown
    if path.is_dir():
        raise BadInput(f"{shown} is a folder, not a YAML file", asked)
    known = {p.name for p in path.parent.glob("*.yaml")} if path.parent.is_dir() else set()
    parts = PurePosixPath(os.path.normpath(written)).parts
    if parts[:1] == ("graphs",) or extending:  # a user's file may extend a shipped one by its bare name
        inside = parts[1:] if parts[:1] == ("graphs",) else parts
        shipped = importlib.resources.files("graphs")
        file = shipped.joinpath(*inside)
        if isinstance(file, Path) and file.is_file():
            return file, "/".join(("graphs", *inside))
        folder = shipped.joinpath(*inside[:-1])
        known |= {p.name for p in folder.iterdir() if p.name.endswith(".yaml")} if folder.is_dir() else set()
    raise BadInput(f"no such file: {shown}{nearest(path.name, known)}", asked)


def _parse_file(path: Path, shown: str) -> Located:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BadInput(f"not UTF-8: byte {error.object[error.start]:#04x}", f"{shown}:{line}") from error
    except OSError as error:
        raise BadInput(f"cannot be read: {error.strerror}", shown) from error
    tree = parse(text, lambda line: f"{shown}:{line}")
    if tree is None:
        raise BadInput("the file is empty (expected stages, channels, workers)", shown)
    if not isinstance(tree.value, dict):
        raise BadInput("expected a mapping at the top (stages, channels, workers)", tree.where)
    return tree


def overlay(base: Located, over: Located, path: tuple[str, ...] = ()) -> Located:
    """`over` on top of `base`. Raises `BadInput` where null removes what is not there."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, entry in over.value.items():
        if entry.value is None and len(path) == 1 and path[0] in SECTIONS:
            if merged.pop(key, None) is None:
                name = f"{path[0]}.{key}"
                raise BadInput(f"{name}: null removes, but nothing has that name{nearest(key, merged)}", entry.where)
        elif key in merged and not (path == ("stages",) and _another_stage(merged[key], entry)):
            merged[key] = overlay(merged[key], entry, (*path, key))
        else:
            merged[key] = entry
    if path and path[0] in SECTIONS and len(path) == 1:  # not every file of a section, but those that took from it
        nulls = [entry.where for entry in over.value.values() if entry.value is None]
        return Located(merged, nulls[-1] if nulls else base.where)
    return Located(merged, over.where)


def _another_stage(base: Located, over: Located) -> bool:
    """Whether an entry names another class together with parameters: those of the old class are not meant for it."""
    old, new = under(base), under(over)
    return "with" in new and "use" in new and "use" in old and new["use"].value != old["use"].value

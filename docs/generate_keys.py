"""Writes docs/keys.md: every key of a graph file and every `with:` key of every shipped stage, read off the code.

python -m docs.generate_keys            # writes it; a test asserts that it is up to date
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import graphs
import stages
from dflash_pipe import Stage, keys
from dflash_pipe.stage import Signature, signature

ROOT = Path(__file__).parent.parent
KEYS = ROOT / "docs" / "keys.md"
END = "...\n"  # what PyYAML writes behind a scalar

# One line for each key of a graph file; `_section` refuses a key without one, and one without a key.
FILE = {
    "name": "the run's folder is `runs/NAME` (one part of a path, at most 100 characters); the first file's name where"
    " none is given",
    "seed": "of all randomness, together with the epoch and the sample; 0 to 2^63 − 1",
    "window": "micro-batches in one optimizer step",
    "partial_window": "whether a last window that the data does not fill is stepped",
    "threads": "intra-op threads of every worker, at most 1024; null: the library's own choice",
    "stall_after": "seconds without any movement, with every worker waiting, before the run is given up",
    "snapshot": "write a snapshot every so many windows (there is one at a requested stop in any case)",
    "credits": "how much may be in flight in the whole graph",
    "transport": "`module:Name` of what knows the devices and moves payloads between them",
    "stages": "name → what it computes",
    "channels": "name → from whom to whom",
    "workers": "name → which stages it owns, and where",
    "extends": "file or files that this one is laid over, beside it or in the shipped graphs",
}
STAGE = {
    "use": "`module:Name` of a Stage class or an annotated function",
    "with": "its parameters; `${stage.parameter}` takes another stage's, `${key}` a top-level key",
}
CHANNEL = {
    "from": "the sending stage",
    "to": "the receiving stage, or `stage.port` where it has several; a list for several receivers",
    "per": "sent for every message, or once a window",
    "broadcast": "every replica of the receiver gets every message",
    "initial": "tokens on a feedback channel at the start; N means a staleness of N − 1 windows",
    "capacity": "messages that fit in; `{items: 4, bytes: 8GiB}` bounds the bytes as well",
    "group": "hand on in complete groups of so many messages only",
}
CAPACITY = {"items": "messages, at most 1 000 000", "bytes": "bytes of their payloads; null: not bounded"}
WORKER = {
    "stages": "the stages it owns, in the order in which they run; no queue lies between them",
    "kind": "a thread of its own, or a coroutine for stages that wait",
    "replicas": "copies of the worker, each with its own stage objects",
    "device": "one name, a list with one for each replica, or a mapping of stage → these; auto:N is the Nth GPU,"
    " counted round, or the CPU where there is none",
    "take": "which replica takes the next message",
    "order": "whether results are handed on in the order of the input (the same result always), or as they come",
    "turn": "workers with the same name never compute at the same time",
}
CREDITS = {
    "messages": "messages in flight; 1: no overlap at all",
    "windows": "windows in flight; 1: a barrier each step",
}


def text() -> str:
    """The whole page."""
    parts = [
        "# Keys\n\nGenerated from the code by `python -m docs.generate_keys`.\n\n## A graph file",
        _section("", keys.GraphKeys, FILE, beside={"extends": ("file or [file, ...]", "")}),
        _section("`stages: NAME:`", keys.StageKeys, STAGE),
        _section("`channels: NAME:`", keys.ChannelKeys, CHANNEL),
        _section("`channels: NAME: capacity:`", keys.CapacityKeys, CAPACITY),
        _section("`workers: NAME:`", keys.WorkerKeys, WORKER),
        _section("`credits:`", keys.CreditsKeys, CREDITS),
        "## Stages\n\nWhat stands behind `with:` of each. A key without a default is required.",
        *(_stage(use, make) for use, make in shipped_stages()),
    ]
    return "\n\n".join(parts) + "\n"


def shipped_stages() -> Iterator[tuple[str, type[Stage] | Callable[..., Any]]]:
    """(`module:Name`, class) of every stage in stages/, and every function that a shipped graph uses."""
    files = Path(graphs.__file__).parent.rglob("*.yaml")
    used = {use for file in files for use in re.findall(r"""use:\s*["']?([\w.]+:\w+)""", file.read_text())}
    for module in sorted(pkgutil.iter_modules(stages.__path__, "stages."), key=lambda m: m.name):
        try:
            members = vars(importlib.import_module(module.name))
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            continue  # kernels, where Triton is not installed: they hold no stages
        for name, member in sorted(members.items()):
            use = f"{module.name}:{name}"
            own = getattr(member, "__module__", None) == module.name
            if own and ((inspect.isclass(member) and issubclass(member, Stage)) or use in used):
                yield use, member


def _section(title: str, model: type[BaseModel], words: dict[str, str], beside: dict[str, Any] | None = None) -> str:
    """A table of a model's keys. beside: further keys, each with its type and default."""
    rows = {(f.alias or name): (_type(f.annotation), _model_default(f)) for name, f in model.model_fields.items()}
    rows |= beside or {}
    if rows.keys() != words.keys():
        raise ValueError(f"{title or 'file'}: keys without words or words without keys: {rows.keys() ^ words.keys()}")
    lines = [f"| `{key}` | {kind} | {default} | {words[key]} |" for key, (kind, default) in rows.items()]
    return "\n".join(
        [*([f"### {title}\n"] if title else []), "| key | type | default | |", "|---|---|---|---|", *lines]
    )


def _stage(use: str, make: type[Stage] | Callable[..., Any]) -> str:
    read = signature(make)
    docstring = inspect.cleandoc(make.__doc__ or "")
    words, prose = _words(docstring, read.parameters)
    module = vars(importlib.import_module(make.__module__))
    for named in filter(inspect.isclass, map(module.get, re.findall(r"`(\w+)`", docstring))):  # what it refers to
        words = _words(inspect.cleandoc(named.__doc__ or ""), read.parameters)[0] | words
    lines = [f"### `{use}`\n", _ports(read), "", prose, ""]
    if read.parameters:
        lines += ["| key | type | default | |", "|---|---|---|---|"]
    for key, (annotation, default) in read.parameters.items():
        lines.append(f"| `{key}` | {_type(annotation)} | {_default(default)} | {words.get(key, '')} |")
    return "\n".join(lines).rstrip()


def _words(docstring: str, names: Collection[str]) -> tuple[dict[str, str], str]:
    """What a docstring says of each key, in the form `key: words. key, key: words.`; and the rest of it."""
    words: dict[str, str] = {}
    rest = []
    if not names:
        return words, docstring
    name = "(?:" + "|".join(map(re.escape, names)) + ")"
    begins = re.compile(rf"(?:^|(?<=[.;:)]) )({name}(?:, {name})*): ")
    for paragraph in docstring.split("\n\n"):
        flat = " ".join(paragraph.split())
        before, *found = begins.split(flat)
        if before:
            rest.append(before if found else paragraph)
        said = (text.rstrip(".").replace("|", "\\|") for text in found[1::2])
        words |= {name: text for group, text in zip(found[::2], said, strict=True) for name in group.split(", ")}
    return words, "\n\n".join(rest)


def _ports(read: Signature) -> str:
    def named(annotation: Any) -> str:
        return f"`{_type(annotation)}`".replace("\\|", "|")

    takes = [
        f"{name}: {named(port.type)}{' of every replica' if port.gather else ''}" for name, port in read.inputs.items()
    ]
    sends = [named(t) for t in (read.output, read.window_output) if t is not None]
    window = " once a window" if read.window_output is not None else ""
    said = [
        "a source" if read.source else f"takes {', '.join(takes)}",
        f"sends {' and '.join(sends)}{window}" if sends else "",
    ]
    return "*" + "; ".join(filter(None, said)) + "*"


def _type(annotation: Any) -> str:
    """An annotation in a reader's words; `|` escaped for a table."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin in (typing.Union, UnionType):
        return " \\| ".join(_type(a) for a in inner)
    if origin is typing.Literal:
        return " \\| ".join(map(str, inner))
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "mapping"
    if annotation is NoneType:
        return "null"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type(a) for a in inner if a is not ...)}]"
    return getattr(annotation, "__name__", str(annotation))


def _model_default(info: FieldInfo) -> str:
    default = info.default
    return _default(default.model_dump(exclude_none=True) if isinstance(default, BaseModel) else default)


def _default(value: Any) -> str:
    if value is PydanticUndefined or value is dataclasses.MISSING:
        return ""
    shown: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return f"`{shown.removesuffix(END).strip()}`"


if __name__ == "__main__":
    KEYS.write_text(text())
    print(f"{KEYS.relative_to(ROOT)} written")

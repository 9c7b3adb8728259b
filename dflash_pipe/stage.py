"""What a stage author writes: `Stage`, `Source`, `Context`; ports and parameters are read from annotations.

A stage is a class whose annotated fields are the keys of `with:` in the graph, and whose `process` parameters are its
input ports. The return annotation is the type it sends; `-> X | None` may send nothing this time.

    class Scale(Stage):
        factor: float = 2.0

        def process(self, x: Number) -> Number:
            return Number(x.value * self.factor)

- A parameter annotated `tuple[X, ...]` gathers one X from every replica of the sender, in replica order.
- A parameter annotated `Stamp` is not a port: it receives the message's place in the stream.
- `end_window() -> Y` is called after a window's last message; its result is what the stage sends on a channel that is
  `per: window`. A stage that only reads per-window channels sends what `process` returns, once a window.
- A plain annotated function is a stage too; its keyword-only parameters are its `with:` keys.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, dataclass_transform

from dflash_pipe.message import Stamp

__all__ = ["Context", "Footprint", "FunctionStage", "Port", "Signature", "Source", "Stage", "signature"]

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """Where a stage finds itself, handed to `open`.

    device: a device name that exists ("cpu", "cuda:0"). replica / replicas: which copy of how many.
    seed: the graph's. window: micro-batches in an optimizer step. folder: the run's folder.
    restored: the state that the stateful stage had in the snapshot that is resumed; None at a new start.
    report: `report({"loss": 1.2})` puts numbers into the metrics file and the live view.
    """

    stage: str = "stage"
    worker: str = "main"
    device: str = "cpu"
    replica: int = 0
    replicas: int = 1
    seed: int = 0
    window: int = 1
    folder: Path = Path()
    restored: dict[str, Any] | None = None
    report: Callable[[dict[str, Any]], None] = lambda metrics: None


@dataclass(frozen=True)
class Footprint:
    """Bytes that a stage needs on its device, at most; each part under a name.

    held: what it has from `open` on. working: what it has beside that only while it computes. host: what it has in the
    host's memory, for a while or always, where that is not what it computes with. sent, window_sent: one payload that
    it sends, and one that `end_window` returns. told: anything that those who receive its messages need to know for
    their own footprint, such as the shapes of the messages; handed on unread.
    """

    held: dict[str, int] = dataclasses.field(default_factory=dict)
    working: dict[str, int] = dataclasses.field(default_factory=dict)
    host: dict[str, int] = dataclasses.field(default_factory=dict, kw_only=True)
    sent: int = 0
    window_sent: int = 0
    told: Any = None


@dataclass_transform(kw_only_default=True)
class Stage:
    """One kind of work. Subclasses are keyword-only dataclasses: their fields are the graph's `with:` keys.

    untimed: keys on which no time depends, such as how many messages there are. A forecast refuses a graph in which any
    other key differs from the profiled run, unless it knows what the key does.
    """

    untimed: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # what a stage may have; which of them it has is asked with hasattr

        def process(self, *inputs: Any, **ports: Any) -> Any:
            """Work on one message (or one window, if every port is per window)."""

        def end_window(self) -> Any:
            """What is sent per window by a stage that fires per message."""

        def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
            """What it will need on its device, estimated before anything is opened; told: port -> what its sender tells
            (feedback ports have none). May raise `BadInput`."""

        def initial(self) -> Any:
            """The first token of a feedback channel; called after open and restore."""

        @property
        def measures(self) -> dict[str, float]:
            """How large the work was that `process` has just done, beside what the payloads' own `measures` say:
            name -> amount. The forecast tells from it what a key `max_NAME` or `num_NAME` does."""

        def state(self) -> dict[str, Any]:
            """numpy arrays and JSON values, flat; at most one stage of a graph has a state."""

        def state_digest(self) -> str:
            """A text that differs wherever `state` does, where that is quicker than copying the state."""

        def restore(self, state: dict[str, Any]) -> None:
            """Take over what `state` returned; called after open. Raises `BadSnapshot` for anything else."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(kw_only=True, eq=False)(cls)

    def check(self, replicas: int) -> None:
        """Called before anything is built: raise `BadInput` or `ValueError` for parameters that cannot work."""

    def open(self, ctx: Context) -> None:
        """Called once, inside the worker that owns the stage, before the first message."""

    def finish(self) -> None:
        """Called after the last message when the stream ended normally (also on a requested stop), before `close`."""

    def close(self) -> None:
        """Called once at the end of an opened stage, whatever ended it."""


class Source(Stage, Generic[T]):
    """A stage without inputs. `read` yields `(cursor, payload)`; a cursor is a JSON value, and not None."""

    def read(self, cursor: Any) -> Iterator[tuple[Any, T | None]]:
        """Yield what comes after `cursor` (None: from the beginning), each with the cursor behind it. Raises
        `BadSnapshot` for a cursor that is none of its own, such as that of other data (see `refuse_other_form`)."""
        raise NotImplementedError

    def account(self, read: Any, done: Any) -> str:
        """Lines on what became of everything that was read, for the end of a run; "" if there is nothing to say.

        read: cursor behind the last message that was sent; done: behind the last window that was finished (None: none).
        """
        return ""


class FunctionStage(Stage):
    """A plain function as a stage; keyword-only parameters are bound from `with:`."""

    def __init__(self, function: Callable[..., Any], **parameters: Any) -> None:
        self.function = function
        self.parameters = parameters

    def process(self, *inputs: Any, **ports: Any) -> Any:
        return self.function(*inputs, **ports, **self.parameters)


@dataclass(frozen=True)
class Port:
    """An input port: the type it takes, and whether it gathers one payload from every replica of the sender."""

    type: Any
    gather: bool = False


@dataclass(frozen=True)
class Signature:
    """What a stage class or function takes and sends, read from its annotations.

    inputs: ports in the order in which they are read. output: what `process` (or `read`) sends, None if nothing.
    window_output: what `end_window` sends, None if there is no such method. parameters: `with:` keys and their
    (type, default) with `dataclasses.MISSING` for a required one. stamp: name of the parameter that takes the Stamp.
    """

    source: bool
    inputs: dict[str, Port]
    output: Any
    window_output: Any
    parameters: dict[str, tuple[Any, Any]]
    stamp: str | None
    is_async: bool
    stateful: bool
    has_initial: bool


def signature(use: type[Stage] | Callable[..., Any]) -> Signature:
    """Read ports and parameters off a stage class or a plain function.

    Raises TypeError with one line that names what lacks an annotation.
    """
    if inspect.isclass(use):
        return _of_class(typing.cast(type[Stage], use))
    return _of_function(use)


def _of_class(use: type[Stage]) -> Signature:
    if not issubclass(use, Stage):
        raise TypeError(f"{use.__name__} is not a Stage (subclass dflash_pipe.Stage, or give a function)")
    hints = typing.get_type_hints(use)
    parameters = {
        f.name: (hints[f.name], f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
        for f in dataclasses.fields(typing.cast(Any, use))
        if f.init
    }
    source = issubclass(use, Source)
    method = getattr(use, "read" if source else "process", None)
    if method is None:
        raise TypeError(f"{use.__name__} has no process method")
    inputs, output, stamp = ({}, _yielded(method), None) if source else _ports(method, skip_self=True)
    end_window = getattr(use, "end_window", None)
    return Signature(
        source=source,
        inputs=inputs,
        output=output,
        window_output=_sent(typing.get_type_hints(end_window).get("return")) if end_window else None,
        parameters=parameters,
        stamp=stamp,
        is_async=inspect.iscoroutinefunction(method),
        stateful=hasattr(use, "state"),
        has_initial=hasattr(use, "initial"),
    )


def _of_function(use: Callable[..., Any]) -> Signature:
    inputs, output, stamp = _ports(use, skip_self=False)
    hints = typing.get_type_hints(use)
    missing = inspect.Parameter.empty
    parameters = {
        name: (hints.get(name, Any), dataclasses.MISSING if p.default is missing else p.default)
        for name, p in inspect.signature(use).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
    return Signature(False, inputs, output, None, parameters, stamp, inspect.iscoroutinefunction(use), False, False)


def _ports(method: Callable[..., Any], skip_self: bool) -> tuple[dict[str, Port], Any, str | None]:
    hints = typing.get_type_hints(method)
    inputs: dict[str, Port] = {}
    stamp = None
    for position, (name, p) in enumerate(inspect.signature(method).parameters.items()):
        if (skip_self and position == 0) or p.kind is p.KEYWORD_ONLY:
            continue
        if name not in hints or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TypeError(f"{method.__qualname__}: parameter {name!r} needs an annotation (it is an input port)")
        if hints[name] is Stamp:
            stamp = name
        elif typing.get_origin(hints[name]) is tuple and typing.get_args(hints[name])[1:] == (...,):
            inputs[name] = Port(typing.get_args(hints[name])[0], gather=True)
        else:
            inputs[name] = Port(hints[name])
    if "return" not in hints:
        raise TypeError(f"{method.__qualname__} needs a return annotation (the type it sends, or None)")
    return inputs, _sent(hints["return"]), stamp


def _sent(annotation: Any) -> Any:
    """The type that is sent: `X | None` sends X, `None` sends nothing."""
    if annotation in (None, NoneType):
        return None
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        kept = [a for a in typing.get_args(annotation) if a is not NoneType]
        return kept[0] if len(kept) == 1 else typing.Union[tuple(kept)]  # noqa: UP007
    return annotation


def _yielded(method: Callable[..., Any]) -> Any:
    """X of `-> Iterator[tuple[cursor, X]]`."""
    hint = typing.get_type_hints(method).get("return")
    pair = typing.get_args(hint)[:1]
    if not pair or len(typing.get_args(pair[0])) != 2:
        raise TypeError(f"{method.__qualname__} yields (cursor, payload): annotate it -> Iterator[tuple[Any, X]]")
    return _sent(typing.get_args(pair[0])[1])

"""What a stage finds in a snapshot has the form of what it wrote, or is refused in one line that names the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipe import Context, Source, Stage, refuse_other_form
from dflash_pipe.errors import BadSnapshot
from dflash_pipe.form import exactly
from stages.optimizer import AdamW
from stages.prepare import ArrowWriter, JsonlConversations
from stages.toy import Numbers, WaitOptimizer
from tests.test_data import row, source, write
from tests.test_prepare import prompts, token_rows
from tests.test_random_rows import source as random_tokens

pytestmark = pytest.mark.usefixtures("model_cache")
ODD = [None, -1, 0.5, True, "x", [], {}]
MISSING = object()
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


def rows(folder: Path) -> Source[Any]:
    return source(write(folder / "rows.arrow", [row(9, supervised=5), row(9, supervised=1)] * 20), epochs=2)


def conversations(folder: Path) -> Source[Any]:
    return JsonlConversations(path=str(prompts(folder / "chats.jsonl", 9)), batch=2)


def optimizer(folder: Path) -> Stage:
    return AdamW(drafter={"target": "tiny:llama", "layers": 2, "num_layers": 1, "block_size": 4})


def writer(folder: Path) -> Stage:
    stage = ArrowWriter(path=str(folder), tokenizer="tiny:qwen3")
    stage.open(Context())
    stage.process(token_rows(0, 3))
    stage.dropped["no assistant turn"] = 2
    return stage


SOURCES: dict[str, Callable[[Path], Source[Any]]] = {
    "toy": lambda folder: Numbers(count=8),
    "random": lambda folder: random_tokens(),
    "rows": rows,
    "conversations": conversations,
}
STATES: dict[str, Callable[[Path], Stage]] = {
    "toy": lambda folder: WaitOptimizer(),
    "optimizer": optimizer,
    "writer": writer,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nested JSON value, itself included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield path
    for key, entry in inside:
        yield from places(entry, (*path, key))


def spoilt(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(place, the value with that place missing, if it says anything, or with another kind of thing, or -1, there)."""
    for path in places(value):
        for odd in (MISSING, *ODD):
            changed = json.loads(json.dumps({"": value}))
            parent, last = changed, ""
            for key in path:
                parent, last = parent[last], key
            was = parent[last]
            if odd is MISSING and path and isinstance(parent, dict) and was is not None:
                del parent[last]
            elif odd is MISSING or odd == was or (type(odd) is type(was) and odd != -1):
                continue
            else:
                parent[last] = odd
            yield path, changed[""]


def refused(path: tuple[Any, ...], call: Callable[[], Any]) -> None:
    with pytest.raises(BadSnapshot) as caught:
        call()
    line = str(caught.value)
    named = [key for key in path if isinstance(key, str)][-1:]
    assert "\n" not in line and all(key in line for key in named), (path, line)


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_refuses_a_cursor_that_is_none_of_its_own(name: str, tmp_path: Path) -> None:
    stage = SOURCES[name](tmp_path)
    cursor = [at for at, _ in stage.read(None)][1]
    assert len([at for at, _ in stage.read(cursor)]) == len(list(stage.read(None))) - 2
    for path, changed in spoilt(cursor):
        if changed is not None:
            refused(path, lambda changed=changed: next(iter(stage.read(changed))))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("toy", "", 0, "cursor is 0, expected a whole number from 1 to 8"),
        ("toy", "", 9, "cursor is 9, expected a whole number from 1 to 8"),
        ("random", "done", 0, "cursor.done is 0, expected a whole number from 1 to 8"),
        ("random", "done", 9, "cursor.done is 9, expected a whole number from 1 to 8"),
        ("rows", "done", 0, "cursor.done is 0, expected 2"),
        ("rows", "done", 3, "cursor.done is 3, expected 2"),
        ("rows", "batch", 0, "cursor.batch is 0, expected a whole number from 1 to 3"),
        ("rows", "batch", 99, "cursor.batch is 99, expected a whole number from 1 to 3"),
        ("rows", "epoch", 1, "cursor.done is 2, expected 5"),
        ("rows", "epoch", 2, "cursor.epoch is 2, expected a whole number from 0 to 1"),
        ("rows", "rows.read", 0, "cursor.rows.read is 0, expected 33"),
        ("conversations", "offset", 0, "it has changed since the snapshot was written"),
        ("conversations", "offset", 10**9, "it has changed since the snapshot was written"),
    ],
)
def test_a_source_refuses_a_cursor_that_it_never_gave(
    name: str, key: str, value: int, said: str, tmp_path: Path
) -> None:
    """Else it would begin at the start, or never end."""
    stage = SOURCES[name](tmp_path)
    given = {"": [at for at, _ in stage.read(None)][1]}
    parent: Any = given
    *above, last = ["", *filter(None, key.split("."))]
    for each in above:
        parent = parent[each]
    parent[last] = value
    with pytest.raises(BadSnapshot) as caught:
        next(iter(stage.read(given[""])))
    assert said in str(caught.value)


@pytest.mark.parametrize("name", STATES)
def test_a_stage_refuses_a_state_that_is_none_of_its_own(name: str, tmp_path: Path) -> None:
    stage = STATES[name](tmp_path)
    if name != "writer":
        stage.open(Context())
    state = stage.state()
    arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
    stage.restore(state)
    for path, changed in spoilt({key: value for key, value in state.items() if key not in arrays}):
        if path and (path[0] != "dropped" or changed.get("dropped") != {}):  # what is counted there may be anything
            refused(path, lambda changed=changed: stage.restore(changed | arrays))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("own", "given", "said"),
    [
        ({"a": {"b": 0}}, {"a": {"b": -1}}, "it.a.b is -1, expected a whole number from 0"),
        ({"a": range(1, 4)}, {"a": 4}, "it.a is 4, expected a whole number from 1 to 3"),
        ({"a": exactly(3)}, {"a": True}, "it.a is true, expected 3"),
        ({"alpha": ""}, {"alpa": "x"}, "it.alpha is missing (did you mean 'alpa'?)"),
        ([{"a": 0}], [{"a": 1}, {"a": None}], "it[1].a is null, expected a whole number from 0"),
        ({}, "x" * 99, f'it is "{"x" * 56}..., expected an object'),
        (exactly(3), 4, "it is 4, expected 3"),
        (0.5, True, "it is true, expected a number"),
        (False, 0, "it is 0, expected true or false"),
        (True, None, "it is null, expected true or false"),
        (None, 0, "it is 0, expected null"),
        (0, np.int64(3), f"it is {np.int64(3)!r}, expected a whole number from 0"),
        ({}, np.arange(3), "it is array([0, 1, 2]), expected an object"),
        ({}, [np.array([[1], [2]])], "it is [array([[1], [2]])], expected an object"),
        ("", {(1, 2): ENDLESS}, "it is {(1, 2): [[[[[[...]]]]]]}, expected text"),
        ({"a": 0}, {1: 0}, "it.a is missing (known: 1)"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(own: Any, given: Any, said: str) -> None:
    with pytest.raises(BadSnapshot) as caught:
        refuse_other_form(own, given, "it")
    assert str(caught.value) == said
    refuse_other_form({"a": 0, "b": [], "c": ""}, {"a": 3, "b": [1, "x"], "c": "", "more": None}, "it")


def test_each_kind_of_json_is_the_form_of_its_own() -> None:
    for own, given in [(0.5, -1), (0.5, 1e9), (True, False), (False, True), (None, None), (exactly(0), 0)]:
        refuse_other_form({"a": [own]}, {"a": [given, given]}, "it")


@pytest.mark.parametrize("own", [(1, 2), {1}, b"", np.int64(3), np.float64(3), np.arange(3), Path()])
def test_what_is_no_form_is_the_stages_fault(own: Any) -> None:
    with pytest.raises(TypeError, match="is the form of nothing in a snapshot, expected JSON or a range"):
        refuse_other_form({"a": own}, {"a": own}, "it")

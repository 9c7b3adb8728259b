"""The key reference is what the code says; a key that may be null tells 0 from it."""

import dataclasses
import inspect
import typing
from types import NoneType

import pytest

from dflash_pipe import BadInput
from dflash_pipe.stage import signature
from docs.generate_keys import KEYS, _words, shipped_stages, text

GIVEN = {"target": "tiny:qwen3", "drafter": {"target": "tiny:qwen3"}, "max_tokens": 64, "sliding_window": 32}
NUMBERS = [
    (make, key)
    for _, make in shipped_stages()
    if inspect.isclass(make)
    for key, (kind, _) in signature(make).parameters.items()
    if {*typing.get_args(kind)} == {int, NoneType}
]


def test_the_reference_is_up_to_date():
    assert KEYS.read_text() == text(), "run: python -m docs.generate_keys"


def test_words_of_keys_are_read_off_a_docstring():
    docstring = "Do it.\n\nlr: the rate (see: this). betas, eps: two\nnumbers | none.\n\nNot a key: prose, lr: no."
    words, prose = _words(docstring, ["lr", "betas", "eps"])
    assert words == {"lr": "the rate (see: this)", "betas": "two numbers \\| none", "eps": "two numbers \\| none"}
    assert prose == "Do it.\n\nNot a key: prose, lr: no."


def test_every_key_of_every_stage_is_explained():
    rows = [line for line in text().splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize(("make", "key"), NUMBERS, ids=lambda each: getattr(each, "__name__", each))
def test_a_number_that_may_be_null_is_refused_where_it_is_less_than_one(make, key):
    """Else 0 would be taken as not given."""
    parameters = signature(make).parameters.items()
    needed = {name for name, (_, default) in parameters if default is dataclasses.MISSING}
    given = {name: GIVEN.get(name, "a/b") for name, _ in parameters if name in needed or name in GIVEN}
    make(**given).check(1)
    for value in (0, -1):
        with pytest.raises(BadInput, match=rf"^{key} is {value}, expected "):
            make(**{**given, key: value}).check(1)


def test_there_are_such_numbers():
    assert {key for _, key in NUMBERS} >= {"head_dim", "num_attention_heads", "max_rows", "limit", "ce_chunk"}

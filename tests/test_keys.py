"""The key reference is what the code says."""

from docs.generate_keys import KEYS, _words, text


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

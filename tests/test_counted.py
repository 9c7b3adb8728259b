"""Counts in words."""

import pytest

from dflash_pipe.counted import counted


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("window",), "0 windows"),
        (1, ("window",), "1 window"),
        (1024, ("window",), "1,024 windows"),
        (1, ("batch", "batches"), "1 batch"),
        (2, ("batch", "batches"), "2 batches"),
    ],
)
def test_one_is_singular(count, words, said):
    assert counted(count, *words) == said

"""Whether an option's file can be written, asked before anything runs: what was measured must not be lost then."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dflash_pipe.errors import BadInput

__all__ = ["writable"]


def writable(option: str, file: Path | None, inputs: Sequence[str] = (), begins: str = "") -> None:
    """Raise BadInput, before anything runs, where an option's file is one of the inputs, is there and is none that this
    option wrote (those begin with `begins`), or could not be written."""
    if file is None:
        return
    there = file.exists()
    if there and any(os.path.exists(each) and file.samefile(each) for each in inputs):
        raise BadInput(f"{option}: {file} is read by this command, expected another file to write to", "command line")
    if there and begins and file.is_file() and not _begins(file, begins):
        raise BadInput(f"{option}: {file} is there, and this option did not write it: remove it first", "command line")
    try:
        file.open("ab").close()
    except OSError as error:
        raise BadInput(f"{option}: {file} cannot be written ({error.strerror})", "command line") from None
    if not there:
        file.unlink()


def _begins(file: Path, text: str) -> bool:
    with file.open("rb") as opened_file:
        return opened_file.read(len(text)) in (b"", text.encode())

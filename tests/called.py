"""`python -m benchmarks` in this process, and the toy topologies that its tests run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.commands import app, main
from dflash_pipe import Source
from stages.toy import Number

TOY = [f"graphs/toy/{name}.yaml" for name in ("sequential", "overlapped", "parallel_target")]
FAST = ["target.seconds=0.002", "drafter.seconds=0.001", "optimizer.seconds=0.001"]


class Endless(Source[Number]):
    """A source that nothing tells how long to be."""

    def read(self, cursor: Any) -> Iterator[tuple[Any, Number | None]]:
        raise NotImplementedError


def called(*words: object) -> Result:
    """What the command printed, no line with blanks at its end, and how it ended; other failures are raised."""
    interval = sys.getswitchinterval()
    try:
        result: Any = CliRunner().invoke(app, list(map(str, words)))
    finally:
        sys.setswitchinterval(interval)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert [line for line in result.stdout.splitlines() if line != line.rstrip()] == []
    return result


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line with which the command is refused, before anything is printed."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and said.err.count("\n") == 1, said
    return said.err.strip()

"""A run's folder, `runs/NAME/`: the resolved graph, the log, the metrics, the snapshots. One run at a time uses it.

graph.yaml      the graph as it ran: files, overlays and overrides merged
metrics.jsonl   one line for each report of a stage, with the time
log.txt         what was run when, how it ended, tracebacks
profile.json    what the run measured of itself, see dflash_pipe.profile; at the end
snapshots/      see dflash_pipe.snapshot
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from dflash_pipe.errors import BadInput
from dflash_pipe.snapshot import has_snapshot

__all__ = ["RunFolder", "fresh"]

_LOCK = ".lock"  # whoever uses the folder holds it; it stays, as the sign of a run's folder


def fresh(root: Path, name: str, *, chosen: bool) -> Path:
    """`root/name`; if something was made there already: an error for a name that the user chose, else `name-N`, the
    first one that is new or whose run failed before it had made anything."""
    path = root / name
    if not path.exists() or (chosen and _has_nothing(path)):
        return path
    if chosen:
        go_on = f", or go on with --resume {path}" if has_snapshot(path) else " (it has no snapshot to go on from)"
        raise BadInput(f"{path} exists already: choose another name={go_on}")
    numbered = (root / (f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
    return next(path for path in numbered if not path.exists() or (_has_nothing(path) and _is_idle(path)))


def _has_nothing(path: Path) -> bool:
    """Whether it is empty, or a run failed there before its first result: its name is free again. What else its stages
    have put there, such as a cache, says nothing and stays."""
    if not path.is_dir():
        return False
    results = (path / "metrics.jsonl", path / "profile.json")
    if has_snapshot(path) or any(file.exists() and file.stat().st_size for file in results):
        return False
    return (path / _LOCK).exists() or not any(path.iterdir())


def _is_idle(path: Path) -> bool:
    """Whether it is a run's folder that no run uses."""
    try:
        with (path / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class RunFolder:
    """An opened and locked run folder. Raises BadInput if it is in use or cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened:
            with _usable(path):
                path.mkdir(parents=True, exist_ok=True)
                self._lock: IO[str] = opened.enter_context((path / _LOCK).open("a"))
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise BadInput(f"{path} is in use by another run: wait for it, or choose another name=") from error
            with _usable(path):
                (path / "log.txt").open("a").close()
                self._metrics = os.open(path / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._metrics)
        self._lock.close()

    def report(self, metrics: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, whole: several workers may report at once."""
        line = json.dumps({"time": round(time.time(), 3), **metrics}, default=str) + "\n"
        os.write(self._metrics, line.encode())

    def forget_after(self, step: int) -> None:
        """Take out the metrics of steps behind a snapshot that is resumed: they will be made again."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text(errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            file.write_text("".join(kept))

    def keep_graph(self, text: str) -> None:
        """Write graph.yaml; a kill leaves the old one or the new one."""
        new = self.path / "graph.yaml.tmp"
        new.write_text(text)
        new.replace(self.path / "graph.yaml")

    def log(self, text: str) -> None:
        """Append to log.txt, with the time."""
        with (self.path / "log.txt").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"{error.filename or path}: cannot be used in a run folder ({error.strerror})") from error


def _step_of(line: str) -> float:
    """The step that a line of metrics.jsonl is about, 0 if it is about none; of a damaged line, such as the half that
    a crash may leave at the end, infinity: that step is done again."""
    try:
        return float(json.loads(line).get("step", 0))
    except (ValueError, AttributeError, TypeError):
        return math.inf

"""Snapshots: the source's cursor together with the one stage state, written whole or not at all.

    runs/NAME/snapshots/window-00000040/
        snapshot.json       next index and window, cursor, plain values of the state, the dataflow it belongs to
        state.safetensors   its arrays

What was in flight behind the cursor is computed again after a resume, so no other stage needs a state.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dflash_pipe.errors import BadInput
from dflash_pipe.message import Message, Stamp
from dflash_pipe.stage import Stage

__all__ = ["Snapshot", "Snapshots", "has_snapshot", "newest", "read", "write"]

_FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """index, window: of the first message after it. cursor: where the source goes on. state: of the stateful stage."""

    index: int
    window: int
    cursor: Any
    state: dict[str, Any]
    dataflow: dict[str, Any]


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder/window-N` atomically: a kill at any moment leaves the old snapshots and perhaps a `.tmp` folder."""
    target = folder / f"window-{snapshot.window:08d}"
    partial = target.with_suffix(".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    arrays = {k: np.asarray(v, order="C") for k, v in snapshot.state.items() if isinstance(v, np.ndarray)}
    save_file(arrays, partial / "state.safetensors")
    about = {
        "format": _FORMAT,
        "index": snapshot.index,
        "window": snapshot.window,
        "cursor": snapshot.cursor,
        "state": {k: v for k, v in snapshot.state.items() if k not in arrays},
        "dataflow": snapshot.dataflow,
    }
    (partial / "snapshot.json").write_text(json.dumps(about, indent=1))
    for file in (*partial.iterdir(), partial):
        _flush(file)
    if target.exists():  # the same window again, after a resume from an older snapshot
        target.rename(target.with_suffix(".old.tmp"))
    partial.rename(target)
    _flush(folder)
    for left_over in folder.glob("*.tmp"):
        shutil.rmtree(left_over)
    return target


def _flush(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def newest(run_folder: Path) -> Path:
    """The newest snapshot of a run. Raises BadInput if it has none."""
    if not run_folder.is_dir():
        raise BadInput(f"{run_folder}: no such run folder")
    found = _whole(run_folder / "snapshots")
    if not found:
        raise BadInput(f"{run_folder}: nothing to resume, it has no snapshot")
    return found[-1]


def has_snapshot(run_folder: Path) -> bool:
    """Whether the run can be resumed."""
    return bool(_whole(run_folder / "snapshots"))


def _whole(folder: Path) -> list[Path]:
    """The snapshots in a folder, oldest first."""
    return sorted(path for path in folder.glob("window-*") if path.suffix != ".tmp")


def read(folder: Path) -> Snapshot:
    """Raises BadInput, one line, if it is not a whole snapshot of a known format; it says how to go on."""
    try:
        return _read(folder)
    except BadInput as error:
        older = next((path for path in reversed(_whole(folder.parent)) if path < folder and _is_readable(path)), None)
        if older is None:
            raise
        line = f"{error.message}; {older.name} is whole: remove the damaged one (rm -r {shlex.quote(str(folder))}) and "
        raise BadInput(f"{line}resume again to go on from there") from error


def _is_readable(folder: Path) -> bool:
    try:
        _read(folder)
    except BadInput:
        return False
    return True


def _read(folder: Path) -> Snapshot:
    try:
        about = json.loads((folder / "snapshot.json").read_text())
        if about["format"] != _FORMAT:
            raise BadInput(f"{folder}: snapshot format {about['format']}, expected {_FORMAT}")
        arrays = load_file(folder / "state.safetensors")
        state = {**about["state"], **arrays}
        return Snapshot(about["index"], about["window"], about["cursor"], state, about["dataflow"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"{folder}: not a whole snapshot ({why})") from error


class Snapshots:
    """When to write: every `every` windows (None: only at the end), and at the end if anything has happened since.

    Keeps the newest `keep` snapshots of this run. on_state: is given the stage instead, and nothing is written.
    """

    def __init__(
        self,
        folder: Path,
        dataflow: dict[str, Any],
        every: int | None,
        keep: int = 2,
        on_state: Callable[[Stage], None] | None = None,
    ) -> None:
        self.written: Path | None = None
        self._on_state = on_state
        self._folder, self._dataflow, self._every, self._keep = folder, dataflow, every, keep
        self._unsaved: tuple[Stamp, Any] | None = None  # of the last message of the newest finished window; its cursor

    def window_done(self, stage: Stage, message: Message) -> None:
        """The stage has finished the window that `message` ends."""
        self._unsaved = (message.stamp, message.cursor)
        if self._every is not None and (message.stamp.window + 1) % self._every == 0:
            self.finish(stage)

    def finish(self, stage: Stage) -> None:
        """Write what is not saved yet."""
        if self._unsaved is None:
            return
        (stamp, cursor), self._unsaved = self._unsaved, None
        if self._on_state is not None:
            self._on_state(stage)
            return
        snapshot = Snapshot(stamp.index + 1, stamp.window + 1, cursor, stage.state(), self._dataflow)
        self.written = write(self._folder, snapshot)
        for old in _whole(self._folder)[: -self._keep]:
            shutil.rmtree(old)

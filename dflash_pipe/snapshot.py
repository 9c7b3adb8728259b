"""Snapshots: the source's cursor together with the one stage state, written whole or not at all.

    runs/NAME/snapshots/window-00000040/
        snapshot.json       next index and window, cursor, plain values of the state, the dataflow it belongs to, and
                            checksums of all that and of each array
        state.safetensors   the arrays of the state

What was in flight behind the cursor is computed again after a resume, so no other stage needs a state. Whatever else
lies beside the snapshots is left alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dflash_pipe.errors import BadInput, BadSnapshot
from dflash_pipe.form import exactly, refuse_no_json, refuse_other_form
from dflash_pipe.message import Message, Stamp
from dflash_pipe.stage import Stage

__all__ = ["Snapshot", "Snapshots", "has_snapshot", "newest", "read", "write"]

_FORMAT = 2  # 1 had no checksums
_ITSELF = "snapshot.json"  # among the checksums
_TAKEN = (_ITSELF, "__metadata__")  # the second by safetensors
_OWN = re.compile(r"window-(\d{8}|[1-9]\d{8,})")
_LEFT_OVER = re.compile(rf"{_OWN.pattern}(\.old)?\.tmp")


@dataclass(frozen=True)
class Snapshot:
    """index, window: of the first message after it. cursor: where the source goes on. state: of the stateful stage.
    place: the file that holds it, if it was read from one."""

    index: int
    window: int
    cursor: Any
    state: dict[str, Any]
    dataflow: dict[str, Any]
    place: str = field(default="", compare=False)


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder/window-N` atomically: a kill at any moment leaves the old snapshots and perhaps a `.tmp` folder.

    Raises TypeError, naming the key, if the cursor or the state is neither JSON nor an array that can be kept.
    """
    target = folder / f"window-{snapshot.window:08d}"
    partial = target.with_suffix(".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    arrays = {k: _plain(k, v) for k, v in snapshot.state.items() if isinstance(v, np.ndarray)}
    save_file(arrays, partial / "state.safetensors")
    about = {
        "format": _FORMAT,
        "index": snapshot.index,
        "window": snapshot.window,
        "cursor": snapshot.cursor,
        "state": {k: v for k, v in snapshot.state.items() if k not in arrays},
        "dataflow": snapshot.dataflow,
    }
    refuse_no_json(about["cursor"], "cursor")
    refuse_no_json(about["state"], "state")
    about["crc32"] = _checksums(about, arrays)
    (partial / "snapshot.json").write_text(json.dumps(about, indent=1))
    for file in (*partial.iterdir(), partial):
        _flush(file)
    if target.exists():  # the same window again, after a resume from an older snapshot
        target.rename(target.with_suffix(".old.tmp"))
    partial.rename(target)
    _flush(folder)
    for left_over in folder.glob("*.tmp"):
        if _LEFT_OVER.fullmatch(left_over.name) and left_over.is_dir():
            shutil.rmtree(left_over)
    return target


def _plain(name: str, array: np.ndarray) -> np.ndarray:
    """Contiguous and in the machine's byte order, as it is read back; copied only if it is not so already."""
    if name in _TAKEN:
        raise TypeError(f"state.{name}: an array cannot have this name")
    if array.dtype.kind in "OSUMm" or array.dtype.names or array.dtype.itemsize > 8:  # safetensors has none of these
        raise TypeError(f"state.{name} is an array of {array.dtype}: expected numbers of at most 8 bytes, or bool")
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def _checksums(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """CRC-32 of snapshot.json without its checksums, and of what each array is and its bytes, which are not copied."""
    text = json.dumps({key: value for key, value in about.items() if key != "crc32"})
    found = {_ITSELF: zlib.crc32(text.encode())}
    for name, array in arrays.items():
        kind = zlib.crc32(f"{array.dtype.str}{array.shape}".encode())
        found[name] = zlib.crc32(array.reshape(-1).view(np.uint8).data, kind)
    return found


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
    found = _written(run_folder / "snapshots")
    if not found:
        raise BadInput(f"{run_folder}: nothing to resume, it has no snapshot")
    return found[-1]


def has_snapshot(run_folder: Path) -> bool:
    """Whether the run can be resumed."""
    return bool(_written(run_folder / "snapshots"))


def _written(folder: Path) -> list[Path]:
    """The snapshots in a folder, oldest first, damaged ones too."""
    found = (path for path in folder.glob("window-*") if _OWN.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=_window)


def _window(folder: Path) -> int:
    return int(folder.name.removeprefix("window-"))


def read(folder: Path) -> Snapshot:
    """Raises BadInput, one line, if it is not a whole snapshot of a known format; it says how to go on."""
    try:
        return _read(folder)
    except BadInput as error:
        before = [path for path in _written(folder.parent) if _window(path) < _window(folder)]
        older = next(filter(_is_readable, reversed(before)), None)
        if older is None:
            raise
        line = f"{error}; {older.name} is whole: remove the damaged one (rm -r {shlex.quote(str(folder))}) and "
        raise BadInput(f"{line}resume again to go on from there") from error


def _is_readable(folder: Path) -> bool:
    try:
        _read(folder)
    except BadInput:
        return False
    return True


def _read(folder: Path) -> Snapshot:
    file = folder / "snapshot.json"
    try:
        about = json.loads(file.read_text())
        arrays = load_file(folder / "state.safetensors")
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"{folder}: not a whole snapshot ({why})") from error
    try:
        _refuse_other_content(about, _window(folder))
        if about["format"] == _FORMAT:
            _refuse_other_bytes(about, arrays)
    except BadSnapshot as error:
        raise error.at(str(file)) from None
    state = {**about["state"], **arrays}
    return Snapshot(about["index"], about["window"], about["cursor"], state, about["dataflow"], str(file))


def _refuse_other_content(about: Any, window: int) -> None:
    """Raise BadSnapshot for a snapshot.json that is not of that window, or lacks what there is to be said."""
    form = {"format": range(1, _FORMAT + 1), "window": exactly(window), "index": window, "state": {}, "dataflow": {}}
    refuse_other_form(form, about, "")
    if about.get("cursor") is None:
        raise BadSnapshot(f"cursor is {'null' if 'cursor' in about else 'missing'}, expected where the source goes on")


def _refuse_other_bytes(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    found = _checksums(about, arrays)
    refuse_other_form({"crc32": dict.fromkeys(found, 0)}, about, "")
    for name, checksum in found.items():
        if checksum != (written := about["crc32"][name]):
            what = "the text" if name == _ITSELF else f"array {name} of state.safetensors"
            raise BadSnapshot(f"{what} is not as it was written: its crc32 is {checksum}, expected {written}")


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
        for old in _written(self._folder)[: -self._keep]:
            shutil.rmtree(old)

"""Tuned configurations of Triton's autotuned kernels, kept in a file.

Which configuration wins a benchmark differs from process to process, and with it the bits that a kernel computes. So
what was tuned is part of the run: it is written into the run's folder as soon as it is known and read by whoever goes
on with that run. With the variable DFLASH_PIPE_TUNING set to a path, that file is used instead, so that several runs
compute the same bits and all but the first start without tuning.

Processes may write to one file at the same time; the first to tune a key decides what is in it. Another that has tuned
that key at the same moment uses its own result until it ends, so let one process tune before several compare.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dflash_pipe import BadInput, Context
from stages import autotune

__all__ = ["FILE_NAME", "TunedConfigs", "keep_tuning", "prepare_kernels", "tuning_file"]

FILE_NAME = "tuning.json"
_VARIABLE = "DFLASH_PIPE_TUNING"

# Which function was tuned (its name and a digest of its source) and the key, and the configuration that won.
Kernel: TypeAlias = tuple[str, str]
Key: TypeAlias = tuple[Any, ...]
Config: TypeAlias = dict[str, Any]
Rows: TypeAlias = dict[tuple[Kernel, Key], Config]

log = logging.getLogger("dflash_pipe")
_current: TunedConfigs | None = None
_models: list[str] = []  # of the GPUs that this process has tuned for, the first one first
_opening = threading.Lock()


def prepare_kernels(ctx: Context) -> None:
    """Make a target's autotuned kernels safe for threads, and keep in the run's file what is tuned; on a CPU nothing.

    Every stage that loads a target calls it when it opens, on its own thread, with the model loaded. Raises `BadInput`
    as `keep_tuning` does.
    """
    if ctx.device.startswith("cuda"):
        autotune.make_thread_safe()
        keep_tuning(tuning_file(ctx.folder), torch.cuda.get_device_name(ctx.device))


def tuning_file(folder: Path) -> Path:
    """The file that a run in `folder` uses: DFLASH_PIPE_TUNING if that is set, else tuning.json in the folder."""
    return Path(os.environ.get(_VARIABLE) or folder / FILE_NAME)


def keep_tuning(file: Path, gpu: str) -> TunedConfigs | None:
    """Take over the configurations in `file`, if it exists, and write there what is tuned from now on.

    gpu: the name of the GPU that tunes. A file that was made on another GPU, or with another version of Triton or
    flash-linear-attention, is refused in one line and left as it is: None is returned, and nothing is kept.
    All GPUs of a process run the same configurations, so the first name stands for them all; another is said once.
    Raises `BadInput` for a file that is no such file, or that is not there and cannot be written. One that is there
    may be read-only.
    """
    global _current
    with _opening:
        made_with = _versions(_first_model(gpu))
        if _current is not None and (_current.file, _current.made_with) == (file, made_with):
            return _current
        _current = None
        autotune.keep_in(None)
        found = _read(file)
        if found is not None and found[0] != made_with:
            log.warning(
                "%s was tuned with %s, this is %s: not used, and nothing that is tuned now is kept "
                "(name another file in %s, or remove it)",
                file,
                _said(found[0]),
                _said(made_with),
                _VARIABLE,
            )
            return None
        if found is None:
            _refuse_unwritable(file)
        _current = TunedConfigs(file, made_with, found[1] if found else {})
        autotune.keep_in(_current)
    _current.begin()
    return _current


def _first_model(gpu: str) -> str:
    """The GPU whose configurations this process holds: the keys under which Triton files them name no device."""
    if gpu in _models:
        return _models[0]
    _models.append(gpu)
    first = _models[0]
    if gpu != first:
        log.warning(
            "%s and %s in one process: Triton's autotuned kernels run on both with what was tuned on either of them, "
            "and it is kept as what was tuned on %s (in a run of its own, each tunes for itself)",
            first,
            gpu,
            first,
        )
    return first


class TunedConfigs:
    """The configurations in a file, and those that this process adds to it. made_with: GPU and versions."""

    def __init__(self, file: Path, made_with: dict[str, str | None], rows: Rows) -> None:
        self.file = file
        self.made_with = made_with
        self._rows = dict(rows)
        self._loaded: dict[str, list[tuple[str, Key, Config]]] = defaultdict(list)
        for ((name, source), key), config in rows.items():
            self._loaded[name].append((source, key, config))
        self._told: set[str] = set()
        self._kept = True  # until it cannot be written any more
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Fill every kernel that exists, and write down what was tuned already."""
        kernels = _autotuners()
        for kernel in kernels:
            self.fill(kernel)
        self._take(kernels)
        if autotune.way_taken() == "unchanged":
            atexit.register(self.save)  # nobody tells when a kernel was tuned

    def fill(self, kernel: Any) -> None:
        """Put the configurations that the file holds into a kernel's cache. A configuration that the kernel does not
        offer any more is not used, and said in one line."""
        known = self._loaded.get(_name(kernel))
        if not known:
            return
        source = _source(kernel.base_fn)
        offered = [(_plain(config.all_kwargs()), config) for config in kernel.configs]
        lost = 0
        for was, key, plain in known:
            config = next((each for other, each in offered if other == plain), None) if was == source else None
            if config is None:
                lost += 1
            else:
                kernel.cache[key] = config
        if lost:
            self._tell(_name(kernel), f"{lost} configurations belong to another form of this kernel: tuned anew")

    def add(self, kernel: Any) -> None:
        """Write down what a kernel has tuned."""
        self._take([kernel])

    def save(self) -> None:
        """Write down what all kernels of this process have tuned."""
        self._take(_autotuners())

    def _take(self, kernels: list[Any]) -> None:
        """A failure to write ends no run: it is said once, and nothing is kept from then on."""
        with self._lock:
            if not self._kept:
                return
            before = len(self._rows)
            for kernel in kernels:
                for key, config in dict(kernel.cache).items():
                    self._note(kernel, key, config)
            try:
                if len(self._rows) > before:
                    self._write()
            except BadInput as error:
                self._kept = False
                log.warning("what is tuned from now on is not kept: %s", error)

    def _note(self, kernel: Any, key: Key, config: Any) -> None:
        plain_key, plain_config = _plain(key), _plain(config.all_kwargs())
        if plain_key is None or plain_config is None or not any(config == each for each in kernel.configs):
            self._tell(_name(kernel), "a configuration cannot be kept: its key or itself is not made of plain values")
        else:
            self._rows.setdefault(((_name(kernel), _source(kernel.base_fn)), _tuple(plain_key)), plain_config)

    def _tell(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning("%s: %s: %s", self.file, name, what)

    def _write(self) -> None:
        """What other processes have written meanwhile stays. A kill leaves the old file or the new one."""
        with _writing(self.file) as new:
            found = _read(self.file)
            if found is not None and found[0] != self.made_with:
                self._tell("another process", f"has written what was tuned with {_said(found[0])}: nothing is kept")
                return
            rows = self._rows | (found[1] if found else {})
            listed = [
                {"kernel": kernel, "source": source, "key": _plain(key), "config": config}
                for ((kernel, source), key), config in rows.items()
            ]
            lines = ",\n".join(json.dumps(row) for row in sorted(listed, key=lambda row: json.dumps(row)))
            new.write_text(f'{{"made_with": {json.dumps(self.made_with)},\n"tuned": [\n{lines}\n]}}\n')
            new.replace(self.file)


# --- the file


@contextmanager
def _writing(file: Path) -> Iterator[Path]:
    """The file beside it that is to take its place, while no other process writes. Raises `BadInput`."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_name(f".{file.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield file.with_name(f"{file.name}.tmp")
    except OSError as error:
        why = error.strerror or error
        raise BadInput(
            f"tuned configurations cannot be written here ({why}); name another file in {_VARIABLE}", str(file)
        ) from error


def _refuse_unwritable(file: Path) -> None:
    """By trying it, before anything is computed."""
    with _writing(file) as new:
        new.write_text("{}")
        new.unlink()


def _versions(gpu: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {"gpu": gpu}
    for package in ("triton", "fla-core"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _said(made_with: dict[str, str | None]) -> str:
    rest = (f"{name} {version or 'not installed'}" for name, version in made_with.items() if name != "gpu")
    return ", ".join([str(made_with.get("gpu")), *rest])


def _read(file: Path) -> tuple[dict[str, str | None], Rows] | None:
    """What it was made with, and its rows; None if there is no file. Raises `BadInput`."""
    try:
        found = json.loads(file.read_text())
        rows = {
            ((str(row["kernel"]), str(row["source"])), _tuple(row["key"])): dict(row["config"])
            for row in found["tuned"]
        }
        return dict(found["made_with"]), rows
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BadInput(
            f"no file of tuned configurations ({said}); remove it, and they are tuned anew", str(file)
        ) from error


def _plain(value: Any) -> Any:
    """The value as JSON gives it back; None for a list, tuple or dict that holds what JSON does not know."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list | tuple) else value


# --- kernels


def _autotuners() -> list[Any]:
    """Every instance of Triton's Autotuner in this process."""
    module = sys.modules.get("triton.runtime.autotuner")
    return [each for each in gc.get_objects() if issubclass(type(each), module.Autotuner)] if module else []


def _name(kernel: Any) -> str:
    return f"{kernel.base_fn.__module__}.{kernel.base_fn.__qualname__}"


@functools.cache
def _source(function: Any) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]

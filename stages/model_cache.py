"""The folder in which models that are made on this machine are kept, and the one way to put one there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["cache_root", "cached_directory"]


def cache_root() -> Path:
    """`$DFLASH_PIPE_CACHE`, or `~/.cache/dflash_pipe`."""
    return Path(os.environ.get("DFLASH_PIPE_CACHE") or "~/.cache/dflash_pipe").expanduser()


def cached_directory(name: str, build: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache; where it is missing, `build(directory)` fills it first.

    The result appears whole or not at all: it is built under another name and renamed. Of two processes that build
    the same directory at once, the first to finish wins and the other takes its result.
    """
    final = cache_root() / name
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=final.parent))
    try:
        build(building)
        try:
            building.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final

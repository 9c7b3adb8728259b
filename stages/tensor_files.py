"""Tensors written to a .safetensors file that whoever may read any other new file may read."""

from __future__ import annotations

import stat
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

__all__ = ["save_tensors"]


def save_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a new `file`, or write it anew. safetensors alone lets nobody but its owner read it, not even a server."""
    file.unlink(missing_ok=True)
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)  # what the umask leaves of it
    save_file(tensors, file, metadata=metadata)
    file.chmod(mode)

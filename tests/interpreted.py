"""Runs Triton kernels by Triton's interpreter on the CPU, in processes of their own, with every Triton that there is.

Those are the installed one and those in the directories that DFLASH_PIPE_TRITONS names (`make test` names the oldest
that is claimed, so there nothing is skipped).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRITONS = "DFLASH_PIPE_TRITONS"
NAMED = [folder for folder in os.environ.get(TRITONS, "").split(os.pathsep) if folder]
FOLDERS = [*([""] if importlib.util.find_spec("triton") else []), *NAMED]  # "": where Python finds it by itself
NO_TRITON = "Triton cannot be imported here"


with_every_triton = pytest.mark.skipif(not FOLDERS, reason=f"{NO_TRITON}, and {TRITONS} names no directory with one")


def interpreted(*arguments):
    """Run Python with these arguments and each Triton at the same time; what they printed, in the order of FOLDERS."""
    with ThreadPoolExecutor(len(FOLDERS)) as pool:
        return list(pool.map(lambda folder: _ended(folder, arguments), FOLDERS))


def _ended(folder, arguments):
    path = os.pathsep.join(filter(None, [folder, str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, f"with {folder or 'the installed Triton'}: {ended.stderr[-3000:]}"
    return ended.stdout


def mend_loops():
    """Inside such a process: Triton 3.6's interpreter cannot loop up to an argument with numpy 2.4."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patch(tensor, *more):
        plain(tensor, *more)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch

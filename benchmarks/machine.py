"""What stands beside every figure: machine, versions and command; and the file where figures are kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_pipe import BadInput
from dflash_pipe.counted import counted

__all__ = ["Out", "cores", "described", "keep", "processor", "record"]

_PACKAGES = (
    "dflash-pipe", "janus", "numpy", "pyarrow", "torch", "transformers", "triton", "flash-linear-attention", "datasets",
)  # fmt: skip


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not a Linux
        lines = []
    named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def described() -> str:
    """The machine in one line."""
    system = f"{platform.system()} {platform.release()}"
    gpus = ", ".join(f"{count} x {name}" for name, count in Counter(_gpus()).items()) or "no GPU"
    return f"{processor()}, {counted(cores(), 'core')}, {gpus}, {system}, Python {platform.python_version()}"


def record() -> dict[str, Any]:
    """machine, versions, command and time of what runs now, as JSON values. GPUs are named if torch is loaded."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "machine": {
            "processor": processor(),
            "cores": cores(),
            "memory_bytes": memory,
            "system": f"{platform.system()} {platform.release()}",
            "gpus": _gpus(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _tried(folder: Path | None) -> Path | None:
    """The folder, made, tried and, if it is new, removed before anything is measured: figures must not be lost at the
    end, and no empty folder be left where there are none."""
    if folder is not None:
        new = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(dir=folder))
        except OSError as error:
            raise BadInput(f"--out: nothing can be written into {folder} ({error.strerror})", "command line") from None
        finally:
            for each in new:
                if each.is_dir():
                    each.rmdir()
    return folder


# The option of every command that keeps its figures.
Out = Annotated[Path | None, typer.Option(callback=_tried, help="write the figures as JSON into this folder")]


def keep(folder: Path, name: str, figures: dict[str, Any]) -> Path:
    """Write folder/name.json: the record of this moment, then the figures. The folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(record() | figures, indent=1) + "\n")
    return file


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if torch else []

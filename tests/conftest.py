"""The suite runs on the CPU, whatever the machine has, so that it tests the same everywhere; `-m gpu` runs on GPUs.

The two never share a process: which kernels a Gated DeltaNet target runs is decided once for a process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a job in a script's background; its children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") == "gpu":
        import torch

        reason = "" if torch.cuda.is_available() else "this machine has no CUDA device"
    else:
        reason = "on a GPU: pytest -m gpu"
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of models of the file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_PIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield

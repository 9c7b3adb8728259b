"""Tiny targets for tests: ids for them, and copies of their directories to break."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.model_source import locate
from stages.target_model import reference_kernels_on_cpu

FAMILIES = ("tiny:llama", "tiny:qwen3", "tiny:qwen3_5")


@pytest.fixture(autouse=True, scope="module")
def models(tmp_path_factory):
    """A cache of the file's own that takes this name over, and no GPU kernels even where their package is installed."""
    reference_kernels_on_cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_PIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def some_ids(rows, length, seed=0):
    return torch.randint(4, 512, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(ids, rows):
    return torch.full((rows,), ids.shape[1])


def copied(model, folder):
    """A directory of one's own with the model in it."""
    return Path(shutil.copytree(locate(model).place, folder / "model"))


# --- ways to break one


def no_config(folder):
    (folder / "config.json").unlink()


def bad_json(folder):
    (folder / "config.json").write_text("{")


def change(**keys):
    def broken(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return broken


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def index(content):
    """This in place of an index of shards."""

    def broken(folder):
        no_weights(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return broken


def damaged(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def without(*names):
    def broken(folder):
        path = folder / "model.safetensors"
        save_file({k: v for k, v in load_file(path).items() if k not in names}, path, metadata={"format": "pt"})

    return broken

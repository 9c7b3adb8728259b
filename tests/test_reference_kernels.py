"""Kernels that need a GPU are not taken on a CPU, and what a process cannot have both of is said."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stages import target_model
from stages.target_model import load_truncated
from tests import tiny_targets

ROOT = Path(__file__).parent.parent


models = tiny_targets.models  # the fixture


def python(script, **environment):
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=100)


HYBRID = """
import torch
from stages.target_model import load_truncated
for _ in range(2):
    target = load_truncated("tiny:qwen3_5", None, [1, 5], "float32", "cpu")
    print(target(torch.arange(4, 24)[None], torch.tensor([20])).double().sum().item())
"""


@pytest.fixture
def kernels_for_a_gpu(tmp_path):
    """An importable `fla` whose kernels fail as triton's do where there is no GPU."""
    folder = tmp_path / "fla" / "ops" / "gated_delta_rule"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (tmp_path / "fla" / "__init__.py").write_text("from fla.ops import gated_delta_rule\n")
    (folder / "__init__.py").write_text(
        "def _fail(*args, **kwargs):\n    raise RuntimeError('0 active drivers ([]). There should only be one.')\n"
        "chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = _fail\n"
    )
    return f"{tmp_path}{os.pathsep}{ROOT}"


def test_gpu_kernels_are_not_taken_on_a_cpu(kernels_for_a_gpu):
    ended = python(HYBRID, PYTHONPATH=kernels_for_a_gpu)
    assert ended.returncode == 0, ended.stderr
    target, ids = load_truncated("tiny:qwen3_5", None, [1, 5], "float32", "cpu"), torch.arange(4, 24)[None]
    expected = target(ids, torch.tensor([20])).double().sum().item()
    assert [float(line) for line in ended.stdout.splitlines()] == pytest.approx([expected] * 2)
    assert ended.stderr.count("transformers' reference path is used") == 1
    assert "install" not in ended.stderr  # as transformers advises, which would be of no use on a CPU
    unprotected = HYBRID.replace("import load_truncated", "import load_truncated\nimport stages.target_model as m")
    unprotected = unprotected.replace("for _", "m.reference_kernels_on_cpu = lambda: None\nfor _")
    assert "0 active drivers" in python(unprotected, PYTHONPATH=kernels_for_a_gpu).stderr


def test_gpu_kernels_that_are_in_use_are_not_mixed_with_the_cpu(kernels_for_a_gpu):
    ended = python("import transformers.models.qwen3_5.modeling_qwen3_5\n" + HYBRID, PYTHONPATH=kernels_for_a_gpu)
    assert "BadInput: a model of this process runs on the GPU kernels of flash-linear-attention" in ended.stderr
    assert ended.stderr.rstrip().endswith("give both a GPU, both the CPU, or each a run of its own")


def test_a_gpu_model_that_has_to_share_the_reference_kernels_says_so(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    monkeypatch.delitem(sys.modules, "causal_conv1d", raising=False)
    with caplog.at_level(logging.WARNING, "dflash_pipe"):
        target_model._choose_kernels(torch.device("cuda"))
        assert not caplog.messages
        monkeypatch.setitem(sys.modules, "fla", None)
        target_model._choose_kernels(torch.device("cuda"))
    assert ["slow reference kernels" in message for message in caplog.messages] == [True]

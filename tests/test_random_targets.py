"""Measuring without a checkpoint: architectures alone, random tokens, and the command line's word on memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dflash_pipe import BadInput, cli
from dflash_pipe.graph import load
from stages.frozen import load_frozen
from stages.target_model import load_full, load_truncated

GRAPHS = ("graphs/overlapped.yaml", "graphs/targets/random_qwen3_8b.yaml")
TINY = (
    "target.model=tiny:qwen3",
    "target.layers=[1,3,5]",
    "drafter.num_layers=1",
    "drafter.block_size=4",
    "drafter.num_anchors=4",
    "drafter.mask_token_id=3",
    "data.vocabulary=500",
    "data.rows=2",
    "data.length=24",
    "data.steps=2",
    "window=2",
    "threads=1",
    "snapshot=1",
)


def called(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `dflash-pipe ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["dflash-pipe", *map(str, arguments)])
    interval = sys.getswitchinterval()
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        sys.setswitchinterval(interval)
    assert isinstance(left.value.code, int)
    return left.value.code


def test_a_run_with_random_weights_says_so_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, "run", "--plain", "--runs", tmp_path, *GRAPHS, *TINY) == 0
    said = capsys.readouterr().out
    assert "RANDOM WEIGHTS: target 'tiny:qwen3' has learned nothing" in said
    assert "it is WORTHLESS, because the target's weights are random" in said and "sglang" not in said
    assert said.startswith("cpu needs about ") and "rows: 8 random = 8 finished + 0 in flight" in said
    assert called(monkeypatch, "run", "--plain", "--resume", next(tmp_path.iterdir())) == 0
    assert "rows: 8 random = 8 finished" in capsys.readouterr().out


def test_check_and_plan_tell_what_each_device_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = "transport=tests.test_footprints:TwoDevices"
    assert called(monkeypatch, "check", *GRAPHS, devices) == 0
    first, second, host, last = capsys.readouterr().out.splitlines()[-4:]
    assert first.startswith("cuda:0 needs about ") and " of 80.0 GiB, the largest part is target: weights (" in first
    assert second.startswith("cuda:1 needs about ")
    assert host.startswith("cpu needs about ") and "state, as it is saved, on the host" in host
    assert last.endswith(" workers, all sound")
    assert called(monkeypatch, "plan", *GRAPHS, devices) == 0
    assert "memory at most, estimated:\n" in capsys.readouterr().out
    assert called(monkeypatch, "check", *GRAPHS, devices, "data.rows=20") == 2
    assert capsys.readouterr().err.startswith("cuda:1 needs about 1")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("target.layers=[1,3,99]", "stages.target: layers: the target has no layer 99"),
        ("target.packed=true target.shapes=null", "stages.target: packed: needs the fused layers; here: no GPU"),
        ("drafter.num_key_value_heads=3", "stages.drafter: num_attention_heads is 4"),
        ("drafter.attention=fused", "stages.drafter: attention is 'fused', whose kernels need a CUDA device"),
        ("drafter.attention=flex", "stages.drafter: attention is 'flex', which trains on a CUDA device only"),
        ("drafter.mask_token_id=99999", "stages.drafter: mask_token_id 99999 is outside the embedding"),
    ],
)
def test_check_finds_what_only_the_models_config_tells(
    override: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not only a run."""
    tiny = ["graphs/overlapped.yaml", "graphs/targets/random_tiny_qwen3.yaml"]
    assert called(monkeypatch, "check", *tiny, *override.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"command line: {said}")


def test_a_run_that_cannot_fit_is_refused_before_it_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = "transport=tests.test_footprints:TwoDevices"
    assert called(monkeypatch, "run", "--plain", "--runs", tmp_path, *GRAPHS, devices, "data.rows=20") == 2
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_what_is_not_there_yet_leaves_memory_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("graphs/sequential.yaml", "graphs/targets/tiny_llama.yaml")
    assert called(monkeypatch, "check", *files, "data.path=/nowhere/train.arrow") == 0
    assert capsys.readouterr().out.startswith(
        "memory is not estimated: command line: stages.data: no data set at /nowhere/train.arrow\n"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["target.weights=pretrained"],
            "target 'sizes:qwen3_8b' has no weights, it is for measurements only: expected",
        ),
        (["target.model=sizes:qwen3_9b"], "target 'sizes:qwen3_9b': no such model (did you mean 'sizes:qwen3_8b'?)"),
        (["drafter.mask_token_id=auto"], "mask_token_id is \"auto\", but target 'sizes:qwen3_8b' has no tokenizer"),
        (["target.revision=main"], "revision 'main' is given, but only models on the hub have revisions"),
    ],
)
def test_what_an_architecture_alone_cannot_do_is_refused(
    overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, "run", "--plain", "--runs", tmp_path, *GRAPHS, *overrides) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_its_weights_are_refused_wherever_they_are_asked_for() -> None:
    with pytest.raises(BadInput, match="expected weights: random"):
        load_truncated("sizes:qwen3_1_7b", None, 1, "auto", "cpu")
    with pytest.raises(BadInput, match="expected weights: random"):
        load_full("sizes:qwen3_1_7b", None, "auto", "cpu")
    with pytest.raises(BadInput, match="expected weights: random"):
        load_frozen("sizes:qwen3_1_7b", None, torch.float32, "cpu")
    with pytest.raises(BadInput, match=r"^command line: stages.*expected weights: random"):
        load(["graphs/evaluate.yaml"], ["target.model=sizes:qwen3_1_7b"])

"""The drafter against numbers that a public implementation computed, and the command that prints them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import benchmarks.parity as parity
from benchmarks.commands import app
from dflash_pipe import BadInput

DATA = Path(__file__).parent / "data"
NAMES = ["dpace", "full_attention", "no_decay", "sliding_window"]
CASES = {case.name: case for case in parity.cases(DATA)}


def test_all_cases_are_there() -> None:
    assert sorted(CASES) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_every_quantity_matches(name: str, attention: str) -> None:
    found = list(parity.compare(CASES[name], attention))
    layers = CASES[name].config.num_hidden_layers
    assert len(found) == 3 + 11 * layers + 3  # hidden, loss, accuracy; every parameter's gradient
    assert [d for d in found if not d.good] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_matches_too(name: str) -> None:
    """Forward only: on a CPU flex attention has no backward."""
    assert [d for d in parity.compare(CASES[name], "flex", gradients=False) if not d.good] == []


def test_a_wrong_weight_is_noticed() -> None:
    case = CASES["no_decay"]
    tensors = {**case.tensors, "weight.norm.weight": case.tensors["weight.norm.weight"] * 1.001}
    found = list(parity.compare(parity.Case(case.name, case.config, case.loss, tensors)))
    assert not all(d.good for d in found)


def test_nan_is_a_difference() -> None:
    assert not parity.Difference("case", "loss", float("nan"), 1.0).good


def test_command_prints_a_table_and_ends_with_0() -> None:
    result = CliRunner().invoke(app, ["parity", str(DATA)])
    assert result.exit_code == 0
    assert "sliding_window" in result.output and "grad.layers.0.self_attn.k_norm.weight" in result.output
    assert "4 cases compared, 0 differ" in result.output


def test_command_ends_with_1_past_the_tolerance(tmp_path: Path) -> None:
    shutil.copy(DATA / "no_decay.json", tmp_path)
    tensors = load_file(DATA / "no_decay.safetensors")
    tensors["loss"] = tensors["loss"] * 1.0001
    save_file(tensors, tmp_path / "no_decay.safetensors")
    result = CliRunner().invoke(app, ["parity", str(tmp_path)])
    assert result.exit_code == 1
    assert "1 case compared, 1 differs" in result.output


def test_bad_folder_is_one_line_and_exit_2() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "parity", "nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["no folder 'nowhere', expected one with NAME.json and NAME.safetensors"]


def _pair(folder: Path, **changes: object) -> Path:
    """A good pair, its JSON changed at top level; None removes a key."""
    data = json.loads((DATA / "no_decay.json").read_text()) | changes
    (folder / "x.json").write_text(
        json.dumps({k: v for k, v in data.items() if v is not None or k == "sliding_window"})
    )
    shutil.copy(DATA / "no_decay.safetensors", folder / "x.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "x.json: hidden_size is missing"),
        ({"hidden_size": "32"}, "x.json: hidden_size is '32', expected int"),
        ({"dflash_config": {"mask_token_id": 96}}, "x.json: dflash_config.target_layer_ids is missing"),
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [4]}}, "outside the embedding"),
        ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [8]}}, "outside 0..7, the target's layers"),
        ({"loss": None}, "x.json: 'loss' is missing"),
        ({"loss": {"type": "dflsh"}}, "did you mean 'dflash'"),
        ({"head_dim": 4}, "x.safetensors: tensor 'weight.layers.0.self_attn.q_proj.weight' is"),
        ({"num_hidden_layers": 2, "layer_types": None}, "x.safetensors: tensor 'weight.layers.1"),
        ({"attention_bias": True}, "no bias tensors"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is set"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    ],
)
def test_malformed_config_is_named(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parity.cases(_pair(tmp_path, **changes))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_half_a_pair_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="without pairs"):
        parity.cases(tmp_path)
    _pair(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"x\.safetensors: not a \.safetensors file"):
        parity.cases(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BadInput, match=r"x\.json: not a drafter's config"):
        parity.cases(tmp_path)
    (tmp_path / "x.json").unlink()
    with pytest.raises(BadInput, match=r"x\.json: half of a pair is missing"):
        parity.cases(tmp_path)


@pytest.mark.parametrize("name", ["anchors", "input_ids"])
def test_ids_out_of_range_are_named(tmp_path: Path, name: str) -> None:
    _pair(tmp_path)
    tensors = load_file(DATA / "no_decay.safetensors")
    tensors[name] = torch.full_like(tensors[name], 1000)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(BadInput, match=f"tensor '{name}' has to hold integers in"):
        parity.cases(tmp_path)

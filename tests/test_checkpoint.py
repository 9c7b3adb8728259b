"""Export: the exact names, shapes and keys that servers read; and every way a drafter folder can be wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from dflash_pipe import BadInput, Context
from stages.arrow_rows import RECIPE
from stages.checkpoint import Export, export, launch_lines, load_drafter
from stages.dflash_model import DrafterConfig, DrafterKeys, initial_parameters
from stages.drafter_files import read_record, refuse_other_target
from stages.messages import Parameters
from tests.drafters import CONFIG, config, normal
from tests.test_data import row, write

PARITY = Path(__file__).parent / "data"
KEYS = {"target": "tiny:qwen3", "layers": [1, 3, 5], "num_layers": 2, "block_size": 4, "lr_of_nobody": 1}


pytestmark = pytest.mark.usefixtures("model_cache")


def exported(folder: Path, of: DrafterConfig = CONFIG, seed: int = 0) -> Path:
    export(of, {"step": 3}, initial_parameters(of, seed), folder)
    return folder


def names(layers: int) -> set[str]:
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    return {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
        f"layers.{i}.{part}.weight" for i in range(layers) for part in parts
    }


def test_exact_tensors_in_bfloat16(tmp_path: Path) -> None:
    tensors = load_file(exported(tmp_path / "drafter") / "model.safetensors")
    assert set(tensors) == names(2) and len(tensors) == 11 * 2 + 3
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (16, 32) and tensors["layers.1.self_attn.k_proj.weight"].shape == (16, 16)


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "of",
    [
        CONFIG,
        config(sliding=6),
        config(rope_scaling=YARN),
        config(rope_scaling={**ROPE, "original_max_position_embeddings": 64}),
    ],
    ids=["full", "sliding", "yarn", "llama3"],
)
def test_config_reads_back_here_and_in_transformers(tmp_path: Path, of: DrafterConfig) -> None:
    folder = exported(tmp_path / "drafter", of)
    data = json.loads((folder / "config.json").read_text())
    assert load_drafter(folder)[0] == of
    wanted = ["architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"]
    wanted += ["num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling"]
    wanted += ["rope_parameters", "max_position_embeddings", "vocab_size", "attention_bias", "layer_types"]
    wanted += ["sliding_window", "use_sliding_window", "tie_word_embeddings", "block_size", "num_target_layers"]
    wanted += ["torch_dtype", "dtype", "dflash_config"]
    assert set(wanted) <= set(data)
    assert not {"auto_map", "partial_rotary_factor", "mrope_section"} & set(data)
    assert data["dflash_config"] == {"mask_token_id": 60, "target_layer_ids": [1, 5]}
    served: Any = Qwen3Config.from_pretrained(folder)
    kind = (of.rope_scaling or {}).get("rope_type", "default")
    assert served.rope_parameters["rope_theta"] == 10000.0 and served.rope_parameters["rope_type"] == kind
    assert served.layer_types == list(of.layer_types) and served.sliding_window == of.sliding_window


@pytest.mark.parametrize("old", [True, False], ids=["old RoPE keys only", "new RoPE keys only"])
def test_either_form_of_rope_is_enough(tmp_path: Path, old: bool) -> None:
    of = config(rope_scaling=YARN)
    folder = exported(tmp_path / "drafter", of)
    change(folder, lambda c: [c.pop(key) for key in (["rope_parameters"] if old else ["rope_theta", "rope_scaling"])])
    assert load_drafter(folder)[0] == of


@pytest.mark.parametrize("case", ["full_attention", "sliding_window", "dpace", "no_decay"])
def test_a_public_drafter_loads(tmp_path: Path, case: str) -> None:
    """The published form of the config, with weights under their published names."""
    tensors = load_file(PARITY / f"{case}.safetensors")
    weights = {name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")}
    (tmp_path / "config.json").write_text((PARITY / f"{case}.json").read_text())
    save_file(weights, tmp_path / "model.safetensors")
    read, model = load_drafter(tmp_path)
    assert set(weights) == names(read.num_hidden_layers) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert read_record(tmp_path) == {}


def test_the_loaded_drafter_drafts_like_the_trained_one(tmp_path: Path) -> None:
    from stages.dflash_model import DFlashModel, flatten

    trained = DFlashModel(CONFIG, device="meta")
    flatten(trained).load(initial_parameters(CONFIG, 5).bfloat16().float())
    _, loaded = load_drafter(exported(tmp_path / "drafter", seed=5))
    inputs = (normal(1, 8, 16), normal(1, 20, 32, seed=1), torch.tensor([[3, 19]]), torch.ones(1, 2, dtype=torch.bool))
    assert torch.equal(trained(*inputs), loaded.float()(*inputs))


WRITTEN = ["config.json", "model.safetensors", "dflash_pipe.json"]


def test_the_files_of_an_export_are_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    folder = exported(tmp_path / "drafter")
    before = (folder / "model.safetensors").read_bytes()
    (folder / "README.md").write_text("mine")
    (folder / "sub").mkdir()
    exported(folder, seed=1)
    assert (folder / "model.safetensors").read_bytes() != before
    assert sorted(p.name for p in folder.iterdir()) == sorted([*WRITTEN, "README.md", "sub"])
    assert (folder / "README.md").read_text() == "mine"
    other = tmp_path / "papers"
    other.mkdir()
    with pytest.raises(BadInput, match="is no export"):
        exported(other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "papers"]


@pytest.mark.parametrize("renamed", range(4))
def test_a_kill_while_an_export_is_replaced_leaves_a_drafter_and_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    folder = exported(tmp_path / "drafter")
    older = initial_parameters(CONFIG, 0).bfloat16()
    (folder / "README.md").write_text("mine")
    left, replace = iter(range(renamed)), os.replace

    def killed(old: Path, new: Path) -> None:
        next(left)
        replace(old, new)

    with monkeypatch.context() as patched, contextlib.suppress(StopIteration):
        patched.setattr(os, "replace", killed)
        export(CONFIG, {"step": 4}, initial_parameters(CONFIG, 1), folder)
    _, model = load_drafter(folder)
    newer = not torch.equal(torch.cat([p.flatten() for p in model.parameters()]), older)
    assert newer == (renamed > 1) and read_record(folder)["step"] == (4 if renamed == 3 else 3)
    exported(folder, seed=2)
    assert sorted(p.name for p in folder.iterdir()) == sorted([*WRITTEN, "README.md"])


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_no_file_under_an_exports_name_is_refused_before_training(tmp_path: Path, name: str, kind: str) -> None:
    resumed(tmp_path, 5).finish()
    file = tmp_path / "export" / name
    file.rename(tmp_path / "elsewhere")
    file.mkdir() if kind == "folder" else file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="in the way" if (name, kind) != (WRITTEN[2], "folder") else "is no export"):
        resumed(tmp_path, 5)


def test_whoever_may_read_other_new_files_may_read_an_export(tmp_path: Path) -> None:
    """A server may run as another user than the training."""
    before = os.umask(0o027)
    try:
        folder = exported(tmp_path / "drafter")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o640}


def test_a_failed_check_leaves_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server would not notice: tensors that are there, but with other values."""
    import stages.drafter_files as files

    def save_wrongly(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        save_file({**tensors, "fc.weight": tensors["fc.weight"] + 1}, file, metadata)

    monkeypatch.setattr(files, "save_tensors", save_wrongly)
    with pytest.raises(BadInput, match="drafts differently"):
        exported(tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((folder / "config.json").read_text())
    edit(data)
    (folder / "config.json").write_text(json.dumps(data))


def resave(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no ids": (
        lambda f: change(f, lambda c: c["dflash_config"].pop("target_layer_ids")),
        "target_layer_ids is missing",
    ),
    "no dflash_config": (lambda f: change(f, lambda c: c.pop("dflash_config")), "mask_token_id is missing"),
    "no block size": (lambda f: change(f, lambda c: c.pop("block_size")), "block_size is missing"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: a list, expected an object"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "cut off": (lambda f: (f / "model.safetensors").write_bytes(b"\x10" + bytes(40)), "damaged or cut off"),
    "missing": (lambda f: resave(f, lambda t: t.pop("norm.weight")), "tensor norm.weight is missing"),
    "unexpected": (
        lambda f: resave(f, lambda t: t.update({"lm_head.weight": torch.ones(2)})),
        "unexpected tensor lm_head",
    ),
    "shape": (
        lambda f: resave(f, lambda t: t.update({"norm.weight": torch.ones(2)})),
        "norm.weight is [2], expected [16]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_line(tmp_path: Path, case: str) -> None:
    folder = exported(tmp_path / "drafter")
    spoil, said = BROKEN[case]
    spoil(folder)
    with pytest.raises(BadInput) as caught:
        load_drafter(folder)
    assert said in str(caught.value) and str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no drafter at"):
        load_drafter(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is not a directory"):
        load_drafter(tmp_path / "file")


def stage(run: Path, **fields: Any) -> Export:
    made = Export(drafter=dict(KEYS), **fields)
    made.open(Context(folder=run))
    return made


def test_stage_exports_the_newest_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {"key": "k", "template": "t", "thinking": False, "vocabulary": "v", "dropped": {"x": 1}}
    data = write(tmp_path / "train.arrow", [row(4)], metadata={RECIPE: json.dumps(recipe).encode()})
    made = stage(tmp_path / "run", data=str(data))
    for step in (1, 2):
        made.process(Parameters(initial_parameters(made.config, step), step))
    made.finish()
    folder = tmp_path / "run" / "export"
    read, model = load_drafter(folder)
    assert read == made.config and read.target_layer_ids == (1, 3, 5)
    flat = torch.cat([p.flatten() for p in model.parameters()])
    assert torch.equal(flat, initial_parameters(made.config, 2).bfloat16())
    record = read_record(folder)
    assert record["step"] == 2 and record["target"] == "tiny:qwen3" and record["drafter"] == KEYS
    assert record["data"] == {"template": "t", "thinking": False, "vocabulary": "v"}
    printed = capsys.readouterr().out
    assert "step 2" in printed and "sglang.launch_server" in printed and "vllm serve" in printed
    refuse_other_target(read, "tiny:qwen3", None)
    with pytest.raises(BadInput, match="target with hidden_size 16, but tiny:qwen3 has 64"):
        refuse_other_target(CONFIG, "tiny:qwen3", None)


def test_stage_without_a_step_exports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage(tmp_path).finish()
    assert "nothing is exported" in capsys.readouterr().out
    assert not (tmp_path / "export").exists()


def resumed(run: Path, step: int, folder: str = "export") -> Export:
    made = Export(drafter=dict(KEYS), folder=folder)
    masters = initial_parameters(DrafterKeys.pick(KEYS).resolve(), step).numpy()
    made.open(Context(folder=run, restored={"masters": masters, "step": step}))
    return made


def test_a_resumed_run_exports_what_it_has_though_nothing_is_left_to_train(tmp_path: Path) -> None:
    """And again, over its own export, in its folder or elsewhere."""
    for folder in ("export", str(tmp_path / "elsewhere")):
        for step in (5, 6):
            made = resumed(tmp_path / "run", step, folder=folder)
            made.finish()
            _, model = load_drafter(made.to)
            flat = torch.cat([p.flatten() for p in model.parameters()])
            assert torch.equal(flat, initial_parameters(made.config, step).bfloat16())
            assert read_record(made.to)["step"] == step
        assert [p.name for p in made.to.parent.iterdir() if p.name.startswith(".")] == []
    with pytest.raises(BadInput, match=r"state\.step is -1, expected a whole number from 0"):
        resumed(tmp_path / "run", -1)
    made = resumed(tmp_path / "run", 5)
    made.process(Parameters(initial_parameters(made.config, 7), 7))
    made.finish()
    assert read_record(made.to)["step"] == 7


def test_what_this_run_did_not_export_is_refused_before_training(tmp_path: Path) -> None:
    other = exported(tmp_path / "export")
    before = (other / "model.safetensors").read_bytes()
    for open_stage in (stage, lambda run: resumed(run, 5)):
        with pytest.raises(BadInput, match="is the export of another run"):
            open_stage(tmp_path)
    assert (other / "model.safetensors").read_bytes() == before
    (tmp_path / "papers").mkdir()
    with pytest.raises(BadInput, match="is no export"):
        stage(tmp_path, folder="papers")
    resumed(tmp_path, 5, folder="mine").finish()
    with pytest.raises(BadInput, match="is the export of another run"):
        stage(tmp_path, folder="mine")  # a new start of the same recipe is another run


def test_launch_lines() -> None:
    sglang, vllm = map(shlex.split, launch_lines("runs/my run/export", "Qwen/Qwen3-8B", 16))
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "DFLASH"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "runs/my run/export"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "16"
    assert json.loads(vllm[vllm.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": "runs/my run/export",
        "num_speculative_tokens": 15,
    }

"""An exported drafter: `config.json` and `model.safetensors` as z-lab's reference, SGLang and vLLM read them.

Form: z-lab/dflash. Servers take tensors by name, and one of them passes over names that it does not know, which leaves
random weights; so an export is reopened and compared before it gets its name. `dflash_pipe.json` beside it records what
the drafter was trained for: target, template, thinking.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash_pipe import BadInput
from dflash_pipe.errors import Missing, nearest_file
from stages.dflash_config import SLIDING
from stages.dflash_model import DFlashModel, DrafterConfig, parameter_layout
from stages.json_kinds import json_kind
from stages.model_source import text_config
from stages.tensor_files import save_tensors

__all__ = [
    "export",
    "launch_lines",
    "load_drafter",
    "read_config",
    "read_record",
    "refuse_other_target",
    "refuse_what_is_no_export",
]

CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "dflash_pipe.json"
_WRITTEN = (CONFIG, WEIGHTS, RECORD)  # in the order in which they replace those of an older export


def export(config: DrafterConfig, record: dict[str, Any], flat: Tensor, folder: Path) -> None:
    """Write a drafter as `folder`, which appears whole and checked or not at all.

    Of an export that is there, the files that are written anew are replaced, each at once, and all else is kept. A kill
    in between leaves whole files of both; the record comes last, and until then tells of the older step.

    record: JSON, kept as it is in dflash_pipe.json. flat: [P] weights, laid out by `parameter_layout`; rounded to
    bfloat16. Raises BadInput where `folder` is something else than an export, and where the check fails.
    """
    refuse_what_is_no_export(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    older = folder.exists()
    unfinished = (folder if older else folder.parent) / f".{folder.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    rounded = flat.detach().to("cpu", torch.bfloat16)
    layout = parameter_layout(DFlashModel(config, device="meta"))
    if rounded.numel() != sum(slot.size for slot in layout.values()):
        raise BadInput(f"{rounded.numel()} parameters were given for a drafter that has another number of them")
    tensors = {name: slot.of(rounded).clone() for name, slot in layout.items()}
    save_tensors(tensors, unfinished / WEIGHTS, {"format": "pt"})
    _write_json(unfinished / CONFIG, config_json(config))
    _write_json(unfinished / RECORD, record)
    _check(config, tensors, unfinished)
    if not older:
        os.replace(unfinished, folder)
        return
    for name in _WRITTEN:
        os.replace(unfinished / name, folder / name)
    unfinished.rmdir()


def refuse_what_is_no_export(folder: Path) -> None:
    """Raise BadInput where something is at `folder` that an export must not replace."""
    if folder.exists() and not (folder / RECORD).is_file():
        raise BadInput(f"{folder} exists and is no export (it has no {RECORD}): choose another folder")
    for file in (folder / name for name in _WRITTEN):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise BadInput(f"{file} is in the way: expected a file that was exported, or none")


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """The keys of `config.json`. RoPE stands under the keys of transformers 5 and under the older ones."""
    names = [field.name for field in dataclasses.fields(config)]
    numbers = {name: getattr(config, name) for name in names if name not in ("mask_token_id", "target_layer_ids")}
    scaling = config.rope_scaling
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **numbers,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": SLIDING in config.layer_types,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
    }


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check(config: DrafterConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    """Reopen what was written: the same config, names, shapes and values, and the same draft of one block."""
    reopened, model = load_drafter(folder)
    if reopened != config:
        different = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(reopened, f.name)]
        raise BadInput(f"{folder}: the exported config reads back differently ({', '.join(different)})")
    trained = DFlashModel(config, device="meta")
    trained.load_state_dict(tensors, assign=True)
    draw = torch.Generator().manual_seed(0)
    context = torch.randn(1, 8, config.feature_size, generator=draw)
    block = torch.randn(1, config.block_size, config.hidden_size, generator=draw)
    place, keep = torch.tensor([[8]]), torch.tensor([[True]])
    with torch.no_grad():
        drafts = [m.float()(block, context, place, keep, "sdpa") for m in (trained, model)]
    if not torch.equal(*drafts):
        raise BadInput(f"{folder}: the exported drafter drafts differently from the trained one")


def read_config(folder: str | Path) -> DrafterConfig:
    """A drafter's config. Raises Missing where there is no folder, BadInput for one that is no drafter."""
    folder = Path(folder)
    if not folder.exists():
        raise Missing(f"path: no drafter at {folder}{nearest_file(folder)}")
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a directory (expected one with {CONFIG} and {WEIGHTS})")
    try:
        config = DrafterConfig.from_json(_read_json(folder, CONFIG))
    except BadInput as error:
        raise error.at(str(folder / CONFIG)) from None
    return config


def load_drafter(folder: str | Path) -> tuple[DrafterConfig, DFlashModel]:
    """A drafter's config and its model: bfloat16 (or as it was saved), on the CPU.

    Raises BadInput for a folder that is no drafter: config.json or weights missing or damaged, a key missing
    (`target_layer_ids` is never guessed), a tensor missing, unexpected, or of another shape.
    """
    config, folder = read_config(folder), Path(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        raise BadInput(f"{WEIGHTS} is missing", str(folder))
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"damaged or cut off ({error})", str(file)) from None
    model = DFlashModel(config, device="meta")
    expected = {name: slot.shape for name, slot in parameter_layout(model).items()}
    for name, shape in expected.items():
        if name not in tensors:
            raise BadInput(f"tensor {name} is missing", str(file))
        if tuple(tensors[name].shape) != shape:
            raise BadInput(f"tensor {name} is {list(tensors[name].shape)}, expected {list(shape)}", str(file))
    unexpected = sorted(set(tensors) - set(expected))
    if unexpected:
        raise BadInput(f"unexpected tensor {unexpected[0]} ({len(unexpected)} of them)", str(file))
    model.load_state_dict(tensors, assign=True)
    return config, model.requires_grad_(False).eval()


def read_record(folder: str | Path) -> dict[str, Any]:
    """What dflash_pipe.json says; {} for a drafter that was trained elsewhere."""
    folder = Path(folder)
    return _read_json(folder, RECORD) if (folder / RECORD).exists() else {}


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    if not file.is_file():
        raise BadInput(f"{name} is missing", str(folder))
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"not JSON ({error})", str(file)) from None
    if not isinstance(value, dict):
        raise BadInput(f"{json_kind(value)}, expected an object", str(file))
    return value


def refuse_other_target(config: DrafterConfig, target: str, revision: str | None) -> None:
    """Raise BadInput where the drafter was made for a target of other sizes."""
    there = text_config(target, revision)
    numbers = {
        "hidden_size": (config.hidden_size, there.hidden_size),
        "vocab_size": (config.vocab_size, there.vocab_size),
        "num_target_layers": (config.num_target_layers, there.num_hidden_layers),
    }
    for name, (drafter, here) in numbers.items():
        if drafter != here:
            raise BadInput(f"the drafter is for a target with {name} {drafter}, but {target} has {here}")


def launch_lines(folder: str | Path, target: str, block_size: int) -> list[str]:
    """The command lines that serve `target` with the drafter in `folder`: SGLang's, then vLLM's."""
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": block_size - 1}
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "DFLASH"]
    sglang += ["--speculative-draft-model-path", str(folder), "--speculative-num-draft-tokens", str(block_size)]
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    return [shlex.join(sglang), shlex.join(vllm)]

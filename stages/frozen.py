"""The target's embedding and lm_head, frozen: the drafter computes with them but never saves or trains them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.model_source import ModelSource, Weights, first_line, locate, text_config
from stages.sized_models import refuse_weights

__all__ = ["Frozen", "load_frozen", "random_embedding", "safetensors_names", "weight_map"]

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Config keys of targets that scale or cap what goes through these matrices; a drafter that ignores it learns nonsense.
_SCALED = ("embedding_multiplier", "scale_emb", "logits_scaling", "logit_scale", "final_logit_softcapping")


@dataclass(frozen=True)
class Frozen:
    """embed: [V, H]. head: [V, H]; the same tensor as embed where the target ties them. Neither needs a gradient."""

    embed: Tensor
    head: Tensor


def load_frozen(
    model: str, revision: str | None, dtype: torch.dtype, device: str | torch.device, weights: Weights = "pretrained"
) -> Frozen:
    """Read the target's embedding and lm_head, and no other tensor, from its safetensors files.

    weights: "pretrained", or "random" (the values that a random target of the same config embeds with).
    Raises `BadInput` where they are not there under a known name, have another shape than the config says, or where
    the target scales its embedding or caps its logits.
    """
    source, config, device = locate(model, revision), text_config(model, revision), torch.device(device)
    refuse_weights(model, weights)
    _refuse_scaled(source, config)
    if weights == "random":
        embed = random_embedding(config, dtype, device)
        return Frozen(embed, embed if config.tie_word_embeddings else random_embedding(config, dtype, device, seed=1))
    files = _files(source, config)
    embed = _read(source, config, files, _EMBEDDINGS, dtype, device)
    if config.tie_word_embeddings and not any(name in files for name in _HEADS):
        return Frozen(embed, embed)
    if "lm_head.bias" in files:
        raise source.complaint("its lm_head has a bias, which a DFlash drafter cannot use")
    return Frozen(embed, _read(source, config, files, _HEADS, dtype, device))


def _refuse_scaled(source: ModelSource, config: Any) -> None:
    for key in _SCALED:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise source.complaint(f"it scales or caps its embedding or logits ({key}), which is not supported")
    if config.model_type.startswith("gemma"):
        raise source.complaint("Gemma models scale their embedding, which is not supported")


def safetensors_names(config: Any) -> tuple[str, ...]:
    """The file of all weights or the index of their shards: the names that transformers tries, in its order."""
    named = getattr(config, "transformers_weights", None)
    return (named,) if isinstance(named, str) else ("model.safetensors", "model.safetensors.index.json")


def weight_map(source: ModelSource, index: Path) -> dict[str, str]:
    """Tensor name -> name of the shard that holds it. Raises `BadInput` for a file that is no index of shards."""
    try:
        shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(shard, str) for shard in shards.values()):
            return shards
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise source.complaint(f"{index.name} is not an index: {first_line(error)}") from error
    raise source.complaint(f"{index.name} is not an index: its weight_map names no file for some tensor")


def _files(source: ModelSource, config: Any) -> dict[str, str]:
    """Tensor name -> name of the safetensors file that holds it. Shards are fetched only when they are read."""
    names = safetensors_names(config)
    found = source.file(*names)
    if found is None:
        raise source.complaint(f"it has no {' and no '.join(names)}")
    if found.suffix == ".json":
        return weight_map(source, found)
    try:
        with safe_open(found, framework="pt") as file:
            return dict.fromkeys(file.keys(), names[0])
    except SafetensorError as error:
        raise source.complaint(f"{names[0]} is damaged: {first_line(error)}") from error


def _read(
    source: ModelSource,
    config: Any,
    files: dict[str, str],
    names: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    name = next((name for name in names if name in files), None)
    if name is None:
        raise source.complaint(f"its checkpoint has no tensor {' or '.join(names)}")
    path = source.file(files[name])
    if path is None:
        raise source.complaint(f"the file {files[name]} that holds {name} is missing")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            value: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise source.complaint(f"{files[name]} is damaged: {first_line(error)}") from error
    expected = (config.vocab_size, config.hidden_size)
    if tuple(value.shape) != expected:
        raise source.complaint(f"{name} has shape {tuple(value.shape)}, its config says {expected}")
    return value.to(dtype)


def random_embedding(config: Any, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Fixed random values [V, H], normal with the config's `initializer_range`; the same on devices of one kind."""
    draw = torch.Generator(device).manual_seed(seed)
    std = getattr(config, "initializer_range", 0.02)
    embed = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    return embed.normal_(0, std, generator=draw)

"""The frozen target: the layers below the highest captured one, and what they compute at the captured ones.

Layer id i means the output of decoder layer i (`hidden_states[i + 1]` in Hugging Face terms). The last layer's output
is only ever handed on after the final norm, so its id is refused.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys
import warnings
from typing import Any, Literal

import huggingface_hub
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from dflash_pipe.errors import BadInput, nearest
from stages.frozen import random_embedding, safetensors_names, weight_map
from stages.model_source import (
    ModelSource,
    Weights,
    first_line,
    locate,
    quiet,
    refuse_unreachable,
    text_config,
)
from stages.sized_models import refuse_weights
from stages.truncated_target import TruncatedTarget

__all__ = [
    "Dtype",
    "load_full",
    "load_truncated",
    "reference_kernels_on_cpu",
    "resolve_dtype",
    "resolve_layers",
    "shortened",
    "weight_count",
]

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KERNEL_PACKAGES = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
_AUTO: Any = AutoModelForCausalLM
log = logging.getLogger("dflash_pipe")


def resolve_layers(layers: int | list[int], num_layers_of_target: int) -> list[int]:
    """The ids of the captured layers, strictly increasing, each in 0..T-2 for a target of T layers.

    layers: how many (1: the middle one, T // 2; L: points evenly from 1 to T-3, rounded), or the ids themselves.
    Raises `BadInput` that names the valid range, for duplicates, and for ids out of order.
    """
    total = num_layers_of_target
    if type(layers) is int:
        layers = _spread(layers, total)
    if not isinstance(layers, list) or not layers or not all(type(i) is int for i in layers):
        raise BadInput(f"layers: expected a number of layers or a list of layer ids, got {layers!r}")
    for i in layers:
        if i == total - 1:
            raise BadInput(
                f"layers: id {i} is the target's last layer, whose output is only known after the final norm; "
                f"valid ids are 0..{total - 2}"
            )
        if not 0 <= i < total:
            raise BadInput(f"layers: the target has no layer {i}; valid ids are 0..{total - 2}")
    if layers != sorted(set(layers)):
        raise BadInput(f"layers: expected increasing ids without duplicates, got {layers}")
    return list(layers)


def _spread(count: int, total: int) -> list[int]:
    if count == 1:
        return [total // 2]
    if not 1 < count <= total - 3:
        most = max(total - 3, 1)
        raise BadInput(
            f"layers: {count} layers cannot be spread over a target of {total}; "
            f"expected 1..{most}, or a list of layers in 0..{total - 2}"
        )
    return [round(1 + i * (total - 4) / (count - 1)) for i in range(count)]


def resolve_dtype(dtype: str | torch.dtype, device: str | torch.device) -> torch.dtype:
    """The torch dtype of a name; "auto" is float32 on a CPU and bfloat16 elsewhere. Raises `BadInput`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise BadInput(f"dtype: unknown dtype {dtype!r}{nearest(str(dtype), ['auto', *_DTYPES])}")
    return _DTYPES[dtype]


def load_truncated(
    model: str,
    revision: str | None,
    layers: int | list[int],
    dtype: Dtype | torch.dtype,
    device: str | torch.device,
    weights: Weights = "pretrained",
    plain: bool = False,
) -> TruncatedTarget:
    """Load the target up to its highest captured layer.

    plain: compute as transformers does, also where there are kernels of our own.
    weights: "pretrained", or "random" (fixed random weights from the config alone, for measurements).
    Raises `BadInput` for a model, a layer id, a dtype or a checkpoint that cannot be used.
    """
    source, whole, device = locate(model, revision), text_config(model, revision), torch.device(device)
    ids = resolve_layers(layers, whole.num_hidden_layers)
    depth = ids[-1] + 1
    causal: Any = _load(source, shortened(whole, depth), resolve_dtype(dtype, device), device, weights)
    decoder = _first_layers(source, causal, depth)
    del causal  # with it goes the lm_head, before anything is moved
    return TruncatedTarget(decoder.to(device), ids, plain)


def _first_layers(source: ModelSource, causal: Any, depth: int) -> Any:
    decoder = causal.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or len(decoder.layers) < depth:
        raise source.complaint(f"{type(causal).__name__} keeps its decoder layers in another place than `layers`")
    decoder.layers = decoder.layers[:depth]
    decoder.config.num_hidden_layers = depth
    decoder.norm = nn.Identity()
    return decoder


def weight_count(model: str, revision: str | None, layers: int | list[int] | None, device: str) -> int:
    """Numbers in the weights that `load_truncated` puts on `device`, or, with layers None, `load_full`; from the config
    alone. Raises `BadInput`."""
    source, config, depth = locate(model, revision), text_config(model, revision), None
    if layers is not None:
        depth = resolve_layers(layers, config.num_hidden_layers)[-1] + 1
        config = shortened(config, depth)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        _choose_kernels(torch.device(device))
    with warnings.catch_warnings(), quiet(), torch.device("meta"):
        # Sizes for a GPU may be asked for where there is none; the kernel package that is imported then says so.
        warnings.filterwarnings("ignore", "Triton is not supported on current platform", UserWarning)
        made = _from_config(source, config, torch.float32)
        made = made if depth is None else _first_layers(source, made, depth)
    return sum(weight.numel() for weight in made.parameters())


def load_full(
    model: str,
    revision: str | None,
    dtype: Dtype | torch.dtype,
    device: str | torch.device,
    weights: Weights = "pretrained",
) -> Any:
    """The whole causal language model (a `PreTrainedModel`), frozen and ready to `generate`. Raises `BadInput`."""
    source, device = locate(model, revision), torch.device(device)
    causal = _load(source, text_config(model, revision), resolve_dtype(dtype, device), device, weights)
    return causal.to(device)


def shortened(whole: PretrainedConfig, depth: int) -> PretrainedConfig:
    """The config of the first `depth` layers of a model, so that the weights of the others are never read."""
    config = copy.deepcopy(whole)
    if getattr(whole, "num_kv_shared_layers", 0):  # which layers share depends on the depth: cut after loading
        return config
    for key, value in whole.to_dict().items():  # one entry a layer: layer_types, mlp_layer_types, ...
        if "layer" in key and isinstance(value, list) and len(value) == whole.num_hidden_layers:
            setattr(config, key, value[:depth])
    config.num_hidden_layers = depth
    return config


def _load(
    source: ModelSource, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, weights: Weights
) -> Any:
    refuse_weights(source.name, weights)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        _choose_kernels(device)
    with quiet():
        read = _pretrained if weights == "pretrained" else _random
        causal = read(source, config, dtype, device)
    return causal.eval().requires_grad_(False)


def _pretrained(source: ModelSource, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:  # else transformers asks a hub that is not there for minutes
            _refuse_unusable_files(source, config)
        causal, info = _AUTO.from_pretrained(
            source.place, revision=source.revision, config=config, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        _refuse_unusable_files(source, config)
        raise source.complaint(f"its weights cannot be loaded: {first_line(error)}") from error
    lacking = sorted(info["missing_keys"])
    if lacking:  # transformers would go on with random values in their place
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise source.complaint(f"its checkpoint lacks {lacking[0]}{more} of {type(causal).__name__}")
    return causal


def _refuse_unusable_files(source: ModelSource, config: PretrainedConfig) -> None:
    """Raise Missing for weights that are neither here nor to be had, of which transformers would say that the model has
    none, and BadInput for an index of shards that is none, where it would fail."""
    found = source.file(*safetensors_names(config), "pytorch_model.bin", "pytorch_model.bin.index.json")
    if found is not None and found.suffix == ".json":
        for shard in sorted(set(weight_map(source, found).values())):
            refuse_unreachable(source, shard)


@torch.no_grad()
def _random(source: ModelSource, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        causal = _from_config(source, config, dtype)
    causal.get_input_embeddings().weight.copy_(random_embedding(config, dtype, device))
    return causal


def _from_config(source: ModelSource, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    try:
        return _AUTO.from_config(config, dtype=dtype)
    except (ValueError, TypeError) as error:
        raise source.complaint(f"its config gives no causal language model: {first_line(error)}") from error


def _choose_kernels(device: torch.device) -> None:
    if device.type == "cpu":
        reference_kernels_on_cpu()
    elif any(sys.modules.get(name, sys) is None for name in _KERNEL_PACKAGES):
        log.warning("slow reference kernels: an earlier model of this process runs on the CPU and needs them")


def reference_kernels_on_cpu() -> None:
    """Make transformers take its own PyTorch code for Gated DeltaNet layers, and say so once.

    Kernel packages such as flash-linear-attention need a GPU, but transformers takes them whenever they can be
    imported, when it imports a model's code: so on a CPU their import is blocked, in this process only.
    Raises `BadInput` if a model of this process runs on their kernels already.
    """
    # It advises to install these packages, which would be of no use here.
    transformers_logging.get_logger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    found = [name for name in _KERNEL_PACKAGES if importlib.util.find_spec(name) is not None]
    if not found:
        return
    names = " and ".join(_KERNEL_PACKAGES[name] for name in found)
    if any(name in sys.modules for name in found) and _model_code_is_imported():
        raise BadInput(
            f"a model of this process runs on the GPU kernels of {names}, so one of that kind cannot run on the CPU in "
            "it: give both a GPU, both the CPU, or each a run of its own"
        )
    for name in found:
        sys.modules[name] = None  # type: ignore[assignment]  # what Python documents for blocking an import
    log.warning("%s needs a GPU; on this CPU transformers' reference path is used, correct but slower", names)


def _model_code_is_imported() -> bool:
    return any(
        name.startswith("transformers.models.") and hasattr(module, "torch_chunk_gated_delta_rule")
        for name, module in list(sys.modules.items())
    )

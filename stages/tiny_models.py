"""`tiny:llama`, `tiny:qwen3`, `tiny:qwen3_5`: small targets with fixed random weights and a small tokenizer.

They have the real architectures, special tokens and chat template, run in milliseconds on a CPU, and need no
download. Their text is nonsense, but it varies, and it is the same on every machine of one kind.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config

from stages.model_cache import cached_directory
from stages.tensor_files import save_tensors

__all__ = ["TINY_MODELS", "tiny_directory"]

TINY_MODELS = ("llama", "qwen3", "qwen3_5")

_VERSION = 1  # change it when anything below changes what is written
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 0..3; <|endoftext|> pads
_VOCABULARY = 512

_TEMPLATE = """\
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

# What the tokenizer's merges are learned from.
_TEXT = """\
A drafter proposes a block of tokens and the target checks the whole block in one pass. The tokens on which both agree
are kept, and the target adds one token of its own, so the answer is exactly what the target would have written alone.
The better the drafter knows the target, the longer the accepted prefix, and the fewer passes the answer takes.
What is the capital of France? The capital of France is Paris. What is the capital of Italy? It is Rome.
How many days are there in a week? There are seven days in a week, and twelve months in a year.
Please write a short story about the sea. Once upon a time there was a small boat that went out in the morning and came
back in the evening with the wind. The people of the town waited for it, because it brought the letters.
You are a helpful assistant. Answer the question in one sentence. Explain the reason for your answer, step by step.
First we add the numbers, then we divide the sum by the count, and the result is the mean of the list.
Is the statement true or false? It is true, because every number that can be divided by four can be divided by two.
def mean(values): return sum(values) / len(values)
def greatest(values):
    result = values[0]
    for value in values:
        if value > result:
            result = value
    return result
for index, name in enumerate(names): print(index, name)
class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y
Water boils when it is heated, ice melts when it is warm, and a stone that is thrown into the air comes down again.
Which of these would you choose, and why? I would choose the second one, since it needs less time and less room.
The train leaves at ten, the bus leaves at eleven, and both arrive at noon; so the bus is the faster of the two.
"""


def tiny_directory(name: str) -> Path:
    """The directory of `tiny:name`, made on first use. `name` is one of `TINY_MODELS`."""
    return cached_directory(f"tiny-{name}-v{_VERSION}", lambda folder: _build(name, folder))


def _build(kind: str, folder: Path) -> None:
    # Written without the model's code: importing that would settle which kernels this process uses.
    config = _config(kind)
    config.save_pretrained(folder)
    weights = {name: _weight(name, shape, config) for name, shape in _shapes(config).items()}
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    generation: Any = GenerationConfig
    generation(bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _config(name: str) -> Any:
    shared: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    if name == "llama":
        return LlamaConfig(**shared, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    if name == "qwen3":
        return Qwen3Config(**shared, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    return Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        **shared,
        tie_word_embeddings=False,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    )


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the checkpoint."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(config.num_hidden_layers):
        linear = getattr(config, "layer_types", None) is not None and config.layer_types[i] == "linear_attention"
        layer = {
            **(_delta_net(config) if linear else _attention(config)),
            "mlp.gate_proj.weight": (config.intermediate_size, hidden),
            "mlp.up_proj.weight": (config.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, config.intermediate_size),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _attention(config: Any) -> dict[str, tuple[int, ...]]:
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    gated = 2 if config.model_type == "qwen3_5_text" else 1  # Qwen3.5's queries come with an output gate
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (gated * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if config.model_type != "llama":
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return shapes


def _delta_net(config: Any) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    mixed = 2 * keys + values
    return {
        "linear_attn.in_proj_qkv.weight": (mixed, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (mixed, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _weight(name: str, shape: tuple[int, ...], config: Any) -> Tensor:
    """A fixed value, drawn from a generator of its own that is keyed by the tensor's name."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if name.endswith("A_log"):  # decay rates
        return torch.rand(shape, generator=draw).mul(4).add(0.1).log()
    if name.endswith("dt_bias"):
        return torch.randn(shape, generator=draw)
    if len(shape) == 1:  # a norm; Qwen3.5's add 1 to their weight, but for the one inside a Gated DeltaNet layer
        return torch.full(shape, 0.0 if config.model_type == "qwen3_5_text" and "linear_attn" not in name else 1.0)
    gain = 1.0 if "embed_tokens" in name else 1.6 / math.sqrt(math.prod(shape[1:]))
    value = torch.randn(shape, generator=draw) * gain
    if name == ("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"):
        value[config.eos_token_id] *= 1.7  # so that answers end now and then
    return value


def _tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    fast: Any = PreTrainedTokenizerFast
    wrapped = fast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _TEMPLATE
    return wrapped

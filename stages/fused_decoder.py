"""Decoder layers of Llama, Qwen3 and Qwen3.5 computed with few kernels, from the weights of a transformers model.

What is computed is what transformers computes; the order of roundings differs. Projections of the same input are one
matrix product, a residual is added by the product that ends its branch, and everything between two products is one
kernel (`stages.fused_kernels`). Shape legend: B rows, S tokens, M = B·S, H hidden size, K captured layers.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.stacked import stacked

__all__ = ["FusedDecoder", "not_fused"]

_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_ATTENTION = (*_QKV, "self_attn.o_proj.weight")
_QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_DELTA_IN = tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
_DELTA_REST = ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight")
_DELTA = (*_DELTA_IN, *(f"linear_attn.{name}" for name in _DELTA_REST))
_FAMILIES = {"llama": _ATTENTION, "qwen3": _ATTENTION + _QK_NORMS, "qwen3_5_text": _ATTENTION + _QK_NORMS}
# Those whose frequencies do not depend on how long the sequence is.
_ROPES = ("default", "linear", "llama3", "yarn")


def not_fused(decoder: Any) -> str | None:
    """Why these layers cannot be computed here; None if they can. decoder: with `layers`, `config`, `rotary_emb`."""
    config = decoder.config
    if config.model_type not in _FAMILIES:
        return f"no kernels for {config.model_type}"
    rope = getattr(decoder.rotary_emb, "rope_type", None)
    if config.hidden_act != "silu" or rope not in _ROPES:
        return f"no kernels for {config.hidden_act} with {rope} rotary embeddings"
    kinds = [_kind(config, number) for number in range(len(decoder.layers))]
    for number, (kind, layer) in enumerate(zip(kinds, decoder.layers, strict=True)):
        if kind not in ("full_attention", "linear_attention"):
            return f"no kernels for {kind}"
        names = {name for name, _ in layer.named_parameters()}
        expected = {*_NORMS, *_MLP, *(_DELTA if kind == "linear_attention" else _FAMILIES[config.model_type])}
        if other := sorted(names ^ expected):
            return f"no kernels for layer {number} with or without {other[0]}"
    if any(size & (size - 1) or size < 16 for size in _head_sizes(config, kinds)):
        return "no kernels for the size of its heads"
    if "linear_attention" in kinds and not importlib.util.find_spec("fla"):
        return "flash-linear-attention cannot be imported here"
    return None


def _kind(config: Any, number: int) -> str:
    kinds = getattr(config, "layer_types", None)
    return str(kinds[number]) if kinds else "full_attention"


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _head_sizes(config: Any, kinds: Sequence[str]) -> list[int]:
    sizes = [_head_size(config)]
    return [*sizes, config.linear_key_head_dim, config.linear_value_head_dim] if "linear_attention" in kinds else sizes


@dataclass(frozen=True)
class _Batch:
    """rows B and tokens S of what is computed; cos, sin: [S, R] float32."""

    rows: int
    tokens: int
    cos: Tensor
    sin: Tensor


class FusedDecoder:
    """The layers of a transformers decoder up to the highest captured one.

    decoder: one for which `not_fused` is None, frozen. Its weights are used as they are, and those of projections that
    are joined become views of the joined one: it goes on to work by itself, and nothing is held twice.
    layers: ids of the captured layers. kernels: what has the functions of `stages.fused_kernels`; None: that.
    """

    def __init__(self, decoder: Any, layers: Sequence[int], kernels: Any = None) -> None:
        if kernels is None:
            from stages import fused_kernels as kernels
        config = decoder.config
        self._embed: Tensor = decoder.embed_tokens.weight
        self._rotary = decoder.rotary_emb
        self._captured = {layer: k for k, layer in enumerate(layers)}
        build: dict[str, type[_Attention | _DeltaNet]] = {"full_attention": _Attention, "linear_attention": _DeltaNet}
        self._mixers = [build[_kind(config, n)](layer, config, kernels) for n, layer in enumerate(decoder.layers)]
        self._mlps = [_Mlp(layer, config, kernels) for layer in decoder.layers]

    @property
    def features(self) -> int:
        """K·H."""
        return len(self._captured) * self._embed.shape[1]

    def __call__(self, input_ids: Tensor, states: Tensor | None = None) -> Tensor:
        """[B, S] int64 -> [B, S, K·H]: the captured layers' outputs side by side, written into `states` if given."""
        with torch.cuda.device(self._embed.device) if self._embed.is_cuda else contextlib.nullcontext():
            return self._run(input_ids, states)

    def _run(self, input_ids: Tensor, states: Tensor | None) -> Tensor:
        rows, tokens = input_ids.shape
        size = self._embed.shape[1]
        if states is None:
            states = self._embed.new_empty(rows, tokens, self.features)
        flat = states.view(rows * tokens, self.features)
        hidden = F.embedding(input_ids.reshape(-1), self._embed)
        batch = _Batch(rows, tokens, *self._angles(tokens))
        for number, (mixer, mlp) in enumerate(zip(self._mixers, self._mlps, strict=True)):
            mixer.add(hidden, batch)
            mlp.add(hidden)
            if number in self._captured:
                k = self._captured[number]
                flat[:, k * size : (k + 1) * size] = hidden
        return states

    def _angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens, dtype=torch.float32, device=self._embed.device)
        angles = positions[:, None] * self._rotary.inv_freq.float()
        cos, sin = (part.mul_(self._rotary.attention_scaling).repeat(1, 2) for part in (angles.cos(), angles.sin()))
        return cos, sin


class _Norm:
    """RMSNorm over the hidden size."""

    def __init__(self, weight: Tensor, config: Any, kernels: Any) -> None:
        self._weight, self._eps, self._kernels = weight, config.rms_norm_eps, kernels
        self._one = _one(config)

    def __call__(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self._kernels.rms_norm(hidden, self._weight, self._eps, self._one)
        return normed


def _one(config: Any) -> int:
    """Qwen3.5's norms keep their weight less one."""
    return int(config.model_type == "qwen3_5_text")


class _Mlp:
    def __init__(self, layer: nn.Module, config: Any, kernels: Any) -> None:
        self._gate, self._up, self._down = (layer.get_parameter(name) for name in _MLP)
        self._norm = _Norm(layer.get_parameter(_NORMS[1]), config, kernels)
        self._kernels = kernels

    def add(self, hidden: Tensor) -> None:
        """hidden [M, H] += what the layer's feed-forward part computes from it."""
        normed = self._norm(hidden)
        gate, up = F.linear(normed, self._gate), F.linear(normed, self._up)
        hidden.addmm_(self._kernels.silu_mul(gate, up), self._down.t())


class _Attention:
    """Causal attention with grouped queries; with Qwen3.5 a gate of its own for each output."""

    def __init__(self, layer: nn.Module, config: Any, kernels: Any) -> None:
        self._heads, self._kv = config.num_attention_heads, config.num_key_value_heads
        self._size = _head_size(config)
        self._in, self._out = _joined(layer, _QKV), layer.get_parameter("self_attn.o_proj.weight")
        self._gates = len(self._in) // self._size - 2 * self._kv == 2 * self._heads
        names = {name for name, _ in layer.named_parameters()}
        self._q_norm, self._k_norm = (layer.get_parameter(name) if name in names else None for name in _QK_NORMS)
        self._norm = _Norm(layer.get_parameter(_NORMS[0]), config, kernels)
        self._eps, self._one, self._kernels = config.rms_norm_eps, _one(config), kernels

    def add(self, hidden: Tensor, batch: _Batch) -> None:
        """hidden [M, H] += what the layer's attention computes from it."""
        count, size = len(hidden), self._size
        mixed = F.linear(self._norm(hidden), self._in)
        kv = self._kv * size
        q, k, v = mixed.split([mixed.shape[1] - 2 * kv, kv, kv], dim=1)
        q = q.view(count, self._heads, -1)  # a head's queries, then its gate, if there is one
        gate = q[..., size:]
        q = self._turned(q[..., :size], self._q_norm, batch)
        k = self._turned(k.view(count, self._kv, size), self._k_norm, batch)
        q, k, v = (each.view(batch.rows, batch.tokens, -1, size).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed = mixed.transpose(1, 2).reshape(count, self._heads, size)
        mixed = self._kernels.gate_heads(mixed, gate) if self._gates else mixed.view(count, -1)
        hidden.addmm_(mixed, self._out.t())

    def _turned(self, x: Tensor, weight: Tensor | None, batch: _Batch) -> Tensor:
        turned: Tensor = self._kernels.norm_rope(x, weight, self._eps, self._one, batch.cos, batch.sin)
        return turned


class _DeltaNet:
    """Gated DeltaNet: a short convolution, the gated delta rule, and a gated norm."""

    def __init__(self, layer: nn.Module, config: Any, kernels: Any) -> None:
        self._key = (2, config.linear_num_key_heads, config.linear_key_head_dim)  # queries and keys
        self._value = (1, config.linear_num_value_heads, config.linear_value_head_dim)
        self._in, self._out = _joined(layer, _DELTA_IN), layer.get_parameter("linear_attn.out_proj.weight")
        conv = layer.get_parameter("linear_attn.conv1d.weight")[:, 0]
        keys = self._key[0] * self._key[1] * self._key[2]
        self._key_taps, self._value_taps = (part.t().contiguous() for part in (conv[:keys], conv[keys:]))
        self._decay = layer.get_parameter("linear_attn.A_log"), layer.get_parameter("linear_attn.dt_bias")
        self._out_norm = layer.get_parameter("linear_attn.norm.weight")
        self._norm = _Norm(layer.get_parameter(_NORMS[0]), config, kernels)
        self._eps, self._kernels = config.rms_norm_eps, kernels

    def add(self, hidden: Tensor, batch: _Batch) -> None:
        """hidden [M, H] += what the layer's DeltaNet computes from it."""
        mixed = F.linear(self._norm(hidden), self._in)
        _, heads, size = self._value
        sizes = [self._key_taps.shape[1], self._value_taps.shape[1], heads * size, heads, heads]
        qk, v, z, b, a = mixed.split(sizes, dim=1)
        q, k = self._kernels.short_conv(qk, self._key_taps, self._key, batch.tokens, normed=True)
        (v,) = self._kernels.short_conv(v, self._value_taps, self._value, batch.tokens, normed=False)
        out = self._kernels.delta_rule(q, k, v, a, b, self._decay).view(len(hidden), heads, size)
        hidden.addmm_(self._kernels.gated_rms_norm(out, z, self._out_norm, self._eps), self._out.t())


def _joined(layer: nn.Module, names: Sequence[str]) -> Tensor:
    """The weights below each other; the layer's own become views of that, if they are not already."""
    weights = [layer.get_parameter(name) for name in names]
    joined = stacked(*(weight.data for weight in weights))
    for weight, part in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return joined

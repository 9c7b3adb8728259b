"""Decoder layers of Llama, Qwen3 and Qwen3.5 computed with few kernels, from the weights of a transformers model.

What is computed is what transformers computes; the order of roundings differs. Projections of the same input are one
matrix product, a residual is added by the product that ends its branch, and everything between two products is one
kernel (`stages.fused_kernels`). Shape legend: B rows, S tokens, M = B·S, H hidden size, K captured layers.

Packed, M is the number of real tokens, which lie one row after another. Only where tokens meet others does that make a
difference: the delta rule and its convolution are told where rows begin; attention is computed of padded rows, as if
nothing were packed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.packing import Pack
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
_DELTA_HEADS = (16, 64, 128)  # that the kernels have run with on a GPU
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
    size = _head_size(config)
    if size & (size - 1) or size < 16:
        return f"no kernels for attention's heads of {size}"
    return _no_delta_net(config) if "linear_attention" in kinds else None


def _no_delta_net(config: Any) -> str | None:
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    if key != value or key not in _DELTA_HEADS:
        return f"no kernels for Gated DeltaNet's heads of {key} and {value}"
    return None if importlib.util.find_spec("fla") else "flash-linear-attention cannot be imported here"


def _kind(config: Any, number: int) -> str:
    kinds = getattr(config, "layer_types", None)
    return str(kinds[number]) if kinds else "full_attention"


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class _Batch:
    """rows B and padded tokens S of a micro-batch; cos, sin: [S, R] float32. pack: where its real tokens lie; None: its
    padding is computed too."""

    rows: int
    tokens: int
    cos: Tensor
    sin: Tensor
    pack: Pack | None

    @property
    def line(self) -> int:
        """Tokens that lie in one row for the kernels: S, or all M that are packed."""
        return self.tokens if self.pack is None else len(self.pack.positions)

    @property
    def positions(self) -> Tensor | None:
        """[M], if packed."""
        return None if self.pack is None else self.pack.positions

    def packed(self, x: Tensor) -> Tensor:
        """[B·S, ...] -> [M, ...]."""
        return x if self.pack is None else x.index_select(0, self.pack.places)

    def padded(self, x: Tensor) -> Tensor:
        """[M, ...] -> [B·S, ...]; behind a row's end is what its last token has."""
        return x if self.pack is None else x.index_select(0, self.pack.sources)

    def write(self, hidden: Tensor, states: Tensor) -> None:
        """hidden [M, H] into states [B·S, H], where there is a token."""
        if self.pack is None:
            states.copy_(hidden)
        else:
            states.index_copy_(0, self.pack.places, hidden)


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

    def __call__(self, input_ids: Tensor, states: Tensor | None = None, pack: Pack | None = None) -> Tensor:
        """[B, S] int64 -> [B, S, K·H]: the captured layers' outputs side by side, written into `states` if given.

        pack: where its real tokens lie; only they are computed, and the states of padding are 0.
        """
        rows, tokens = input_ids.shape
        size = self._embed.shape[1]
        if states is None:
            states = self._embed.new_empty(rows, tokens, self.features)
        with self._device():
            if pack is not None:
                states.zero_()
            flat = states.view(rows * tokens, self.features)
            hidden, batch = self._begin(input_ids, pack)
            for number, (mixer, mlp) in enumerate(zip(self._mixers, self._mlps, strict=True)):
                mixer.add(hidden, batch)
                mlp.add(hidden)
                if number in self._captured:
                    k = self._captured[number]
                    batch.write(hidden, flat[:, k * size : (k + 1) * size])
        return states

    def steps(self, input_ids: Tensor, pack: Pack) -> Iterator[tuple[str, Tensor]]:
        """What every token, [M, ...], has become after each step in which tokens meet others, with the step's name.

        A tensor is valid until the next is asked for. For looking at the computation: it takes longer.
        """
        with self._device():
            hidden, batch = self._begin(input_ids, pack)
            for number, (mixer, mlp) in enumerate(zip(self._mixers, self._mlps, strict=True)):
                for name, value in mixer.steps(hidden, batch):
                    yield f"{name} of layer {number}", value
                mlp.add(hidden)

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self._embed.device) if self._embed.is_cuda else contextlib.nullcontext()

    def _begin(self, input_ids: Tensor, pack: Pack | None) -> tuple[Tensor, _Batch]:
        rows, tokens = input_ids.shape
        batch = _Batch(rows, tokens, *self._angles(tokens), pack)
        return F.embedding(batch.packed(input_ids.reshape(-1)), self._embed), batch

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
        q = batch.padded(self._turned(q[..., :size], self._q_norm, batch))
        k = batch.padded(self._turned(k.view(count, self._kv, size), self._k_norm, batch))
        mixed = batch.packed(self._attended(q, k, batch.padded(v), batch))
        mixed = self._kernels.gate_heads(mixed, gate) if self._gates else mixed.view(count, -1)
        hidden.addmm_(mixed, self._out.t())

    def steps(self, hidden: Tensor, batch: _Batch) -> Iterator[tuple[str, Tensor]]:
        """`add`, and what has come of it."""
        self.add(hidden, batch)
        yield "attention", hidden

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, batch: _Batch) -> Tensor:
        """Of padded rows: [B·S, heads, D] and, of keys and values, [B·S, ...] -> [B·S, heads, D]."""
        q, k, v = (each.view(batch.rows, batch.tokens, -1, self._size).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(len(mixed) * batch.tokens, self._heads, self._size)

    def _turned(self, x: Tensor, weight: Tensor | None, batch: _Batch) -> Tensor:
        turned: Tensor = self._kernels.norm_rope(x, weight, self._eps, self._one, batch.cos, batch.sin, batch.positions)
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
        (q, k, v), z, b, a = self._convolved(hidden, batch)
        _, heads, size = self._value
        out = self._kernels.delta_rule(q, k, v, a, b, self._decay, batch.pack).view(len(hidden), heads, size)
        hidden.addmm_(self._kernels.gated_rms_norm(out, z, self._out_norm, self._eps), self._out.t())

    def steps(self, hidden: Tensor, batch: _Batch) -> Iterator[tuple[str, Tensor]]:
        """The convolution by itself; then `add`, and what has come of it."""
        heads, _, _, _ = self._convolved(hidden, batch)
        yield "convolution", torch.cat([each.reshape(len(hidden), -1) for each in heads], dim=1)
        self.add(hidden, batch)
        yield "Gated DeltaNet", hidden

    def _convolved(self, hidden: Tensor, batch: _Batch) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor]:
        """The heads' queries, keys and values, and z, b, a as they come from the projection."""
        mixed = F.linear(self._norm(hidden), self._in)
        _, heads, size = self._value
        sizes = [self._key_taps.shape[1], self._value_taps.shape[1], heads * size, heads, heads]
        qk, v, z, b, a = mixed.split(sizes, dim=1)
        conv, rows = self._kernels.short_conv, (batch.line, batch.positions)
        q, k = conv(qk, self._key_taps, self._key, *rows, normed=True)
        (v,) = conv(v, self._value_taps, self._value, *rows, normed=False)
        return (q, k, v), z, b, a


def _joined(layer: nn.Module, names: Sequence[str]) -> Tensor:
    """The weights below each other; the layer's own become views of that, if they are not already."""
    weights = [layer.get_parameter(name) for name in names]
    joined = stacked(*(weight.data for weight in weights))
    for weight, part in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return joined

"""The drafter's layers on a GPU: attention and MLP as one autograd function each.

The arithmetic is that of the modules in `stages.dflash_model`, which stay the reference and what a CPU runs. Here
element-wise work and attention are kernels (`stages.fused_training`, `stages.fused_attention`), matrices that meet the
same input are multiplied as one, what is cheap to compute again is not kept, and gradients of the weights go straight
into their float32 sums (`stages.gradient_sums`).
Shape legend: B sequences, S features, b block size, Q = N·b block slots, R = B·Q, H hidden size, n heads, D head size,
K captured layers.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stages.fused_attention import Keys, Sight, attention, attention_backward
from stages.fused_training import (
    add_norm,
    norm_backward,
    rotated_heads,
    rotated_heads_backward,
    swiglu,
    swiglu_backward_,
)
from stages.gradient_sums import GradientSums
from stages.stacked import stacked

__all__ = ["Places", "fused_forward"]


@dataclass(frozen=True)
class Places:
    """Where keys and queries stand. cos, sin: [B, S + Q, D / 2] float32, of the S features, then of the Q slots.
    features: S. block_size: b."""

    cos: Tensor
    sin: Tensor
    features: int
    block_size: int

    @property
    def before(self) -> tuple[Tensor, Tensor]:
        """Those of the features."""
        return self.cos[:, : self.features], self.sin[:, : self.features]

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Those of the block slots."""
        return self.cos[:, self.features :], self.sin[:, self.features :]


def fused_forward(
    model: Any, embeds: Tensor, context: Tensor, places: Places, sights: Sequence[Sight], alike: bool,
    rows: Tensor | None,
) -> Tensor:  # fmt: skip
    """embeds [R, H], context [B·S, K·H], what each layer sees -> [R, H] after the final norm.

    alike: whether all slots but the first of each block have the same embedding, so that the first layer need not
    project it again and again. rows: the slots whose result is wanted, all of them different; the last layer computes
    no others after its attention, and the result is theirs.
    """
    eps = model.config.rms_norm_eps
    features = _AddNorm.apply(_Linear.apply(context, model.fc.weight), None, model.hidden_norm.weight, eps)
    x, delta = embeds, None
    for layer, sight in zip(model.layers, sights, strict=True):
        part = layer.self_attn
        weights = [m.weight for m in (part.q_proj, part.k_proj, part.v_proj, part.q_norm, part.k_norm)]
        given = _Given(places, sight, eps, alike and layer is model.layers[0])
        x, out = _Attention.apply(x, delta, features, given, layer.input_layernorm.weight, *weights)
        if rows is not None and layer is model.layers[-1]:
            x, out = _Rows.apply(x, rows), _Rows.apply(out, rows)
        weights = [m.weight for m in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)]
        norm = layer.post_attention_layernorm.weight
        x, delta = _OutputAndMlp.apply(x, out, eps, part.o_proj.weight, norm, *weights)
    return _AddNorm.apply(x, delta, model.norm.weight, eps)


class _Rows(torch.autograd.Function):
    """Rows of a matrix, all different."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return given.new_zeros(ctx.count, given.shape[1]).index_copy_(0, rows, given), None


class _Linear(torch.autograd.Function):
    """x [M, in], weight [out, in] -> [M, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sums = GradientSums.of(weight)
        sums.add_product(given, x)
        return given @ weight if ctx.needs_input_grad[0] else None, *sums.returned()


class _AddNorm(torch.autograd.Function):
    """x and delta (or None) [M, H], weight [H] -> RMSNorm of their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        total, y, scale = add_norm(x, delta, weight, eps)
        ctx.save_for_backward(total, scale, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        total, scale, weight = ctx.saved_tensors
        dx, share = norm_backward(total, scale, weight, given.contiguous(), None)
        sums = GradientSums.of(weight)
        sums.add(share)
        return dx, dx if ctx.needs_input_grad[1] else None, *sums.returned(), None


@dataclass(frozen=True)
class _Given:
    """What an attention layer knows besides tensors. alike: see `fused_forward`; True for the first layer only."""

    places: Places
    sight: Sight
    eps: float
    alike: bool


@dataclass(frozen=True)
class _Projected:
    """Columns of the products with q_proj, k_proj and v_proj: of the block slots [R, ...], of the features before
    [B·S, ...]."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_before: Tensor
    value_before: Tensor

    @staticmethod
    def of(qkv: Tensor, kv: Tensor, keys: int) -> _Projected:
        """keys: width of k_proj and v_proj."""
        return _Projected(*qkv.split((qkv.shape[1] - 2 * keys, keys, keys), 1), *kv.split(keys, 1))

    def values(self, like: Keys) -> Keys:
        """In the shapes of the keys `like`."""
        return Keys(self.value_before.view(like.before.shape), self.value.view(like.own.shape))


class _Attention(torch.autograd.Function):
    """x and delta (or None) [R, H], features [B·S, H] -> their sum [R, H], attention's output of its norm [R, n·D]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, features: Tensor, given: _Given, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        norm, q_proj, k_proj, v_proj, q_norm, k_norm = weights
        size, batch, places, eps = len(q_norm), len(given.places.cos), given.places, given.eps
        total, y, scale = add_norm(_few(x, places.block_size) if given.alike else x, delta, norm, eps)
        qkv = y @ stacked(q_proj, k_proj, v_proj).t()
        if given.alike:
            qkv = _many(qkv, places.block_size)
        kv = features @ stacked(k_proj, v_proj).t()
        of = _Projected.of(qkv, kv, len(k_proj))
        query, own = (x.new_empty(batch, len(x) // batch, len(w) // size, size) for w in (q_proj, k_proj))
        keys = Keys(x.new_empty(batch, places.features, len(k_proj) // size, size), own)
        rotated_heads(of.query, q_norm, places.slots, eps, query)
        rotated_heads(of.key, k_norm, places.slots, eps, keys.own)
        rotated_heads(of.key_before, k_norm, places.before, eps, keys.before)
        out, log_sums = attention(query, keys, of.values(keys), given.sight)
        ctx.save_for_backward(total, scale, features, qkv, kv, query, keys.before, keys.own, out, log_sums, *weights)
        ctx.given, ctx.added = given, delta is not None
        return x if given.alike else total, out.flatten(0, 1).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, d_out: Tensor) -> tuple[Tensor | None, ...]:
        total, scale, features, qkv, kv, query, before, own, out, log_sums, *weights = ctx.saved_tensors
        norm, q_proj, k_proj, v_proj, q_norm, k_norm = weights
        given, keys = ctx.given, Keys(before, own)
        places, eps = given.places, given.eps
        d_qkv, d_kv = torch.empty_like(qkv), torch.empty_like(kv)
        of, to = _Projected.of(qkv, kv, len(k_proj)), _Projected.of(d_qkv, d_kv, len(k_proj))
        d_keys = Keys(torch.empty_like(before), torch.empty_like(own))
        d_out = d_out.contiguous().view_as(out)
        d_query = attention_backward(
            query, keys, of.values(keys), given.sight, (out, log_sums), d_out, d_keys, to.values(keys)
        )
        d_q = rotated_heads_backward(of.query, q_norm, places.slots, eps, d_query, to.query)
        d_k = rotated_heads_backward(of.key, k_norm, places.slots, eps, d_keys.own, to.key)
        d_k += rotated_heads_backward(of.key_before, k_norm, places.before, eps, d_keys.before, to.key_before)
        if given.alike:
            d_qkv = _few_summed(d_qkv, places.block_size)
        sums = GradientSums.of(q_proj, k_proj, v_proj)
        sums.add_product(d_qkv, add_norm(total, None, norm, eps)[1])
        sums.add_product(d_kv, features, first=len(q_proj))
        d_features = d_kv @ stacked(k_proj, v_proj)
        residual = None if given.alike else d_total
        dx, share = norm_backward(total, scale, norm, d_qkv @ stacked(q_proj, k_proj, v_proj), residual)
        returned = [*_added(norm, share), *sums.returned(), *_added(q_norm, d_q), *_added(k_norm, d_k)]
        return None if given.alike else dx, dx if ctx.added else None, d_features, None, *returned


def _few(x: Tensor, block_size: int) -> Tensor:
    """[R, ...] whose slots are alike but for the first of each block -> those first ones and one other [R / b + 1]."""
    return torch.cat((x[::block_size], x[1:2]))


def _many(x: Tensor, block_size: int) -> Tensor:
    """The inverse of `_few`."""
    blocks = torch.arange(len(x) - 1, device=x.device)
    index = blocks.new_full((len(blocks), block_size), len(blocks))
    index[:, 0] = blocks
    return x.index_select(0, index.flatten())


def _few_summed(x: Tensor, block_size: int) -> Tensor:
    """The gradient of `_many`."""
    by_block = x.unflatten(0, (-1, block_size))
    rest = by_block[:, 1:].sum((0, 1), dtype=torch.float32).to(x.dtype)
    return torch.cat((by_block[:, 0], rest[None]))


def _added(weight: Tensor, share: Tensor) -> Iterator[Tensor | None]:
    sums = GradientSums.of(weight)
    sums.add(share)
    return sums.returned()


class _OutputAndMlp(torch.autograd.Function):
    """x [M, H], out of attention [M, n·D] -> (x + o_proj(out), what the MLP adds to it), both [M, H].

    The second is not added yet, because the next norm can do it in passing. Backward runs once: it overwrites gate and
    up by their gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, eps: float, *weights: Tensor) -> tuple[Tensor, Tensor]:
        o_proj, norm, gate, up, down = weights
        total, y, scale = add_norm(x, out @ o_proj.t(), norm, eps)
        gate_up = y @ stacked(gate, up).t()
        ctx.save_for_backward(total, scale, out, *weights)
        ctx.eps, ctx.gate_up = eps, gate_up
        return total, swiglu(gate_up) @ down.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, given_delta: Tensor) -> tuple[Tensor | None, ...]:
        total, scale, out, *weights = ctx.saved_tensors
        o_proj, norm, gate, up, down = weights
        gate_up, ctx.gate_up = ctx.gate_up, None
        if gate_up is None:
            raise RuntimeError("backward of a drafter's layer can run only once")
        product = given_delta @ down
        swiglu_backward_(gate_up, product)
        sums_down = GradientSums.of(down)
        sums_down.add_product(given_delta, product)
        del product
        sums = GradientSums.of(gate, up)
        sums.add_product(gate_up, add_norm(total, None, norm, ctx.eps)[1])
        dy = gate_up @ stacked(gate, up)
        del gate_up
        dx, share = norm_backward(total, scale, norm, dy, given)
        sums_out = GradientSums.of(o_proj)
        sums_out.add_product(dx, out)
        returned = [*sums_out.returned(), *_added(norm, share), *sums.returned(), *sums_down.returned()]
        return dx, dx @ o_proj, None, *returned

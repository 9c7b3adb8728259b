"""Which keys a block's queries see, for every attention backend; all of them give the same result.

A query of a block with anchor a sees the target's features at positions strictly below a (at inference a itself has
not been through the target yet) and every key of its own block; it never sees another block. A sliding layer with
window W also hides features at positions <= a + k - W from slot k, and is causal inside the block.
Unused blocks see themselves only, so that no row is without keys.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_pipe import BadInput

__all__ = [
    "Attention",
    "BlockGeometry",
    "attend",
    "build_mask",
    "dense_mask",
    "flex_kernel",
    "resolve_attention",
    "tile_mask",
]

Attention = Literal["auto", "fused", "flex", "sdpa", "eager"]

_FLEX_HEAD_DIM = 16  # the least that flex attention's CUDA kernel takes
_FUSED_HEAD_DIMS = (16, 32, 64, 128, 256)  # those of ours
_KERNELS = 64  # of flex attention, on all devices together
TILE = 128  # queries and keys in one tile of flex attention


def resolve_attention(name: Attention, device: torch.device, head_dim: int) -> Attention:
    """The backend. "auto": on CUDA "fused", for heads that its kernels do not take "flex" or "sdpa"; elsewhere "sdpa".

    "fused": kernels for all that a layer does (`stages.fused_drafter`), for CUDA or Triton's interpreter. "flex": its
    cost grows with what is visible. "sdpa", "eager": everything is computed and hidden by a mask.
    Raises BadInput for a backend that does not take such heads, or not on this device.
    """
    cuda, interpreted = device.type == "cuda", os.environ.get("TRITON_INTERPRET") == "1"
    if name == "auto":
        if cuda and head_dim in _FUSED_HEAD_DIMS:
            return "fused"
        return "flex" if cuda and head_dim >= _FLEX_HEAD_DIM else "sdpa"
    if name == "flex" and cuda and head_dim < _FLEX_HEAD_DIM:
        raise BadInput(
            f"attention is 'flex', whose CUDA kernel takes heads of {_FLEX_HEAD_DIM} and more, not {head_dim}"
        )
    if name == "fused" and head_dim not in _FUSED_HEAD_DIMS:
        sizes = ", ".join(map(str, _FUSED_HEAD_DIMS))
        raise BadInput(f"attention is 'fused', whose kernels take heads of {sizes}, not {head_dim}")
    if name == "fused" and not (cuda or interpreted):
        raise BadInput("attention is 'fused', whose kernels need a CUDA device")
    return name


@dataclass(frozen=True)
class BlockGeometry:
    """Where the blocks are. anchors: [B, N] int64. keep: [B, N] bool. context: S, positions with features.

    Queries are the N·b block tokens; keys are the S features, then the N·b block tokens.
    """

    anchors: Tensor
    keep: Tensor
    context: int
    block_size: int

    @property
    def queries(self) -> int:
        return self.anchors.shape[1] * self.block_size

    @property
    def seen(self) -> Tensor:
        """[B, N]: features at positions below this are visible; 0 for an unused block."""
        return self.anchors.where(self.keep, 0)


def build_mask(geometry: BlockGeometry, window: int | None, attention: str) -> Any:
    """The mask of one layer type in the form that `attend` takes for the backend `attention`."""
    return tile_mask(geometry, window) if attention == "flex" else dense_mask(geometry, window)


@dataclass(frozen=True)
class _Ranges:
    """Which keys a query sees, as two half-open ranges of key indices.

    first, last: [B, N·b], of the features. own_first, own_last: [N·b], of the block tokens.
    """

    first: Tensor
    last: Tensor
    own_first: Tensor
    own_last: Tensor


def _ranges(geometry: BlockGeometry, window: int | None) -> _Ranges:
    b, context = geometry.block_size, geometry.context
    index = torch.arange(geometry.queries, device=geometry.anchors.device)
    slot = index % b
    seen = geometry.seen.repeat_interleave(b, 1)
    own_first = context + index - slot
    if window is None:
        return _Ranges(torch.zeros_like(seen), seen.clamp(max=context), own_first, own_first + b)
    first = (seen + slot - window + 1).clamp(min=0)
    return _Ranges(first, seen.clamp(max=context), own_first, context + index + 1)


def dense_mask(geometry: BlockGeometry, window: int | None) -> Tensor:
    """[B, 1, N·b, S + N·b] bool, True where a query sees a key."""
    r = _ranges(geometry, window)
    key = torch.arange(geometry.context + geometry.queries, device=r.first.device)
    own = (key >= r.own_first[:, None]) & (key < r.own_last[:, None])
    return (own | ((key >= r.first[..., None]) & (key < r.last[..., None])))[:, None]


def tile_mask(geometry: BlockGeometry, window: int | None) -> BlockMask:
    """The same mask for flex attention, its tiles found from the ranges instead of by trying every pair.

    A tile of keys is visited if some pair in it may be visible, and taken without testing if all pairs are.
    """
    r, queries, keys = _ranges(geometry, window), geometry.queries, geometry.context + geometry.queries
    low = torch.arange(-(-keys // TILE), device=r.first.device) * TILE  # the first key of each tile
    high = low + TILE - 1
    nothing = r.last <= r.first
    visited = (low < _tiled(r.last, 0, torch.amax)) & (high >= _tiled(r.first.where(~nothing, keys), keys, torch.amin))
    own = (low < _tiled(r.own_last, 0, torch.amax)) & (high >= _tiled(r.own_first, keys, torch.amin))
    full = (low >= _tiled(r.first, keys, torch.amax)) & (high < _tiled(r.last, 0, torch.amin))
    return BlockMask.from_kv_blocks(
        *_listed((visited | own) & ~full),
        *_listed(full),
        BLOCK_SIZE=TILE,
        mask_mod=_mask_mod(r),
        seq_lengths=(queries, keys),
    )


def _tiled(bound: Tensor, padding: int, reduce: Callable[..., Tensor]) -> Tensor:
    """[..., N·b] -> [..., tiles of queries, 1], the least or greatest of each tile; the last is filled up."""
    return reduce(F.pad(bound, (0, -bound.shape[-1] % TILE), value=padding).unflatten(-1, (-1, TILE)), -1)[..., None]


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[B, tiles of queries, tiles of keys] bool -> (how many, which ones first) with a dimension for heads."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _mask_mod(r: _Ranges) -> Callable[..., Tensor]:
    """One function for every layer type, block size and length: it captures tensors only, so one kernel serves all."""
    first, last, own_first, own_last = r.first, r.last, r.own_first, r.own_last

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        feature = (key >= first[batch, query]) & (key < last[batch, query])
        return feature | ((key >= own_first[query]) & (key < own_last[query]))

    return visible


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def flex_kernel() -> Callable[..., Any]:
    """Flex attention as a kernel, one for each device and each special size (one row, one tile), for all threads.

    torch.compile's limit of 8 kernels is too few for several GPUs, and where it is raised it is raised for the calling
    thread alone. Past the limit `fullgraph=True` raises; otherwise the plain function would run, which holds every
    score.
    """
    if torch._dynamo.config.recompile_limit < _KERNELS:
        torch._dynamo.config.recompile_limit = _KERNELS
    return _compiled_flex()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, attention: str) -> Tensor:
    """query [B, heads, Q, D], key and value [B, kv heads, S + Q, D] -> [B, heads, Q, D]."""
    grouped = query.shape[1] != key.shape[1]
    if attention == "flex":
        if query.device.type != "cuda":
            return flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)
        # Left to itself, torch takes its decoding kernel for few queries, which cannot serve training.
        options = {"BACKEND": "TRITON"}
        return flex_kernel()(query, key, value, block_mask=mask, enable_gqa=grouped, kernel_options=options)
    if attention == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(query.dtype) @ value

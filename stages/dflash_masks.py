"""Which keys a block's queries see, for every attention backend; all of them give the same result.

A query of a block with anchor a sees the target's features at positions strictly below a (at inference a itself has
not been through the target yet) and every key of its own block; it never sees another block. A sliding layer with
window W also hides features at positions <= a + k - W from slot k, and is causal inside the block.
Unused blocks see themselves only, so that no row is without keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_pipe import BadInput
from dflash_pipe.errors import nearest

__all__ = ["ATTENTION", "BlockGeometry", "attend", "build_mask", "dense_mask", "resolve_attention", "tile_mask"]

ATTENTION = ("flex", "sdpa", "eager")
TILE = 128  # queries and keys in one tile of flex attention


def resolve_attention(name: str, device: torch.device) -> str:
    """ "auto" is flex on CUDA (cost grows with what is visible) and sdpa elsewhere. Raises BadInput for other names."""
    if name == "auto":
        return "flex" if device.type == "cuda" else "sdpa"
    if name not in ATTENTION:
        raise BadInput(f"attention is {name!r}{nearest(name, ('auto', *ATTENTION))}")
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


def dense_mask(geometry: BlockGeometry, window: int | None) -> Tensor:
    """[B, 1, N·b, S + N·b] bool, True where a query sees a key."""
    device, b = geometry.anchors.device, geometry.block_size
    seen = geometry.seen.repeat_interleave(b, 1)[:, :, None]
    position = torch.arange(geometry.context, device=device)
    features = position < seen
    index = torch.arange(geometry.queries, device=device)
    block, slot = index // b, index % b
    own = block[:, None] == block
    if window is not None:
        features = features & (position > seen + slot[:, None] - window)
        own = own & (slot <= slot[:, None])
    return torch.cat((features, own.expand(len(seen), -1, -1)), -1)[:, None]


def tile_mask(geometry: BlockGeometry, window: int | None) -> BlockMask:
    """The same mask for flex attention, its tiles found from the anchors instead of by trying every pair.

    A tile of keys is visited if some pair in it may be visible, and taken without testing if all pairs are.
    """
    device, b, context = geometry.anchors.device, geometry.block_size, geometry.context
    seen, queries = geometry.seen, geometry.queries
    limit = seen.repeat_interleave(b, 1)
    tiles = -(-queries // TILE)
    first = torch.arange(tiles, device=device) * TILE  # of each tile of queries
    padded = F.pad(limit, (0, tiles * TILE - queries)).view(-1, tiles, TILE)
    inside = (first[:, None] + torch.arange(TILE, device=device)) < queries
    highest = padded.amax(-1)[..., None]
    lowest = padded.where(inside, context).amin(-1)[..., None]
    low = torch.arange(-(-(context + queries) // TILE), device=device) * TILE  # first key of each tile of keys
    high = low + TILE - 1
    visited = low < highest.clamp(max=context)
    full = (high < lowest) & (high < context) & (first[:, None] + TILE <= queries)
    if window is not None:
        visited = visited & (high > lowest - window)
        full = full & (low > highest + b - 1 - window)
    # Block tokens: a tile of queries holds whole and cut blocks, whose keys lie between these two.
    own_first = context + (first // b * b)[:, None]
    own_last = context + ((first + TILE - 1) // b * b + b - 1).clamp(max=queries - 1)[:, None]
    partial = (visited | ((high >= own_first) & (low <= own_last))) & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=TILE,
        mask_mod=_mask_mod(limit, context, b, window),
        seq_lengths=(queries, context + queries),
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[B, tiles of queries, tiles of keys] bool -> (how many, which ones first) with a dimension for heads."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _mask_mod(limit: Tensor, context: int, b: int, window: int | None) -> Callable[..., Tensor]:
    def full(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= context) & ((key - context) // b == query // b)
        return own | ((key < context) & (key < limit[batch, query]))

    def sliding(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        own = (key >= context) & ((key - context) // b == query // b) & (key - context <= query)
        last = limit[batch, query]
        return own | ((key < context) & (key < last) & (key > last + query % b - window))

    return full if window is None else sliding


_compiled: dict[str, Callable[..., Any]] = {}
_compiling = threading.Lock()


def _flex(device: torch.device) -> Callable[..., Any]:
    """Flex attention for a device: compiled on CUDA, where the plain one would build every score."""
    if device.type != "cuda":
        return flex_attention
    with _compiling:
        if "flex" not in _compiled:
            _compiled["flex"] = torch.compile(flex_attention, dynamic=True)
        return _compiled["flex"]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, attention: str) -> Tensor:
    """query [B, heads, Q, D], key and value [B, kv heads, S + Q, D] -> [B, heads, Q, D]."""
    grouped = query.shape[1] != key.shape[1]
    if attention == "flex":
        return _flex(query.device)(query, key, value, block_mask=mask, enable_gqa=grouped)
    if attention == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(query.dtype) @ value

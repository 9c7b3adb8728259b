"""Attention of draft blocks by kernels of our own (`stages.fused_attention_kernels`), forward and backward.

Importing this needs Triton.
Shape legend: B sequences, S features, N blocks, b block size, Q = N·b slots, n heads, g key heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from stages.fused_attention_kernels import forward_kernel, key_backward_kernel, query_backward_kernel

__all__ = ["Keys", "Sight", "attention", "attention_backward"]


@dataclass(frozen=True)
class Keys:
    """Keys or values. before: [B, S, g, D] of the features. own: [B, Q, g, D] of the block slots. Rows may be apart."""

    before: Tensor
    own: Tensor


class Sight:
    """What the blocks of a micro-batch see in one kind of layer."""

    def __init__(self, seen: Tensor, block_size: int, features: int, window: int | None) -> None:
        """seen: [B, N], the block sees features below it (0: an unused block). window: W, or None."""
        self.seen, self.block_size, self.features, self.window = seen.int().contiguous(), block_size, features, window
        self._visits: dict[tuple[int, int], Tensor] = {}

    @property
    def numbers(self) -> tuple[Tensor, int, int, int, int, int]:
        """Arguments of every kernel: seen, S, N, b, W (0 without), Q."""
        blocks = self.seen.shape[1]
        return self.seen, self.features, blocks, self.block_size, self.window or 0, blocks * self.block_size

    def visits(self, queries: int, keys: int) -> Tensor:
        """[B, tiles of features, 4] int32: the tiles of `queries` that may see something of a tile of `keys` features
        are first..last, and those from third up to fourth see all of it; as (first, third, fourth, last + 1)."""
        if (queries, keys) not in self._visits:
            self._visits[queries, keys] = self._visiting(queries, keys)
        return self._visits[queries, keys]

    def _visiting(self, queries: int, keys: int) -> Tensor:
        last = self.seen.repeat_interleave(self.block_size, 1)
        slot = torch.arange(last.shape[1], device=last.device) % self.block_size
        first = (last + slot - self.window + 1).clamp(min=0) if self.window else torch.zeros_like(last)
        last = last.clamp(max=self.features)
        low = torch.arange(0, self.features, keys, device=last.device)[:, None]  # [tiles of features, tiles of queries]
        high = (low + keys).clamp(max=self.features)
        fill = -last.shape[1] % queries
        padded = (F.pad(bound, (0, fill), mode="constant", value=-1) for bound in (first, last))
        firsts, lasts = (bound.unflatten(1, (-1, queries))[:, None] for bound in padded)
        real = lasts >= 0  # the last tile of queries is filled up
        seeing = (real & (firsts < high[..., None]) & (lasts > low[..., None]) & (lasts > firsts)).any(-1)
        whole = (real & (firsts <= low[..., None]) & (lasts >= high[..., None])).all(-1)
        tiles = seeing.shape[2]
        index = torch.arange(tiles, device=last.device)
        begin = index.where(seeing, tiles).amin(2)
        end = (index + 1).where(seeing, 0).amax(2).maximum(begin)
        # One run of whole tiles; with ascending anchors there is no other.
        inner = index.where(whole, tiles).amin(2).minimum(end)
        outer = index.where(~whole & (index >= inner[..., None]), tiles).amin(2).minimum(end)
        return torch.stack((begin, inner, outer, end), 2).int()


# (tile of queries, tile of keys, warps, stages) of the forward kernel, the backward of queries, and that of keys.
_TILES = {
    "small": ((64, 64, 4, 3), (128, 64, 8, 3), (32, 128, 8, 3)),
    "large": ((64, 32, 4, 2), (64, 32, 8, 2), (32, 64, 8, 2)),
}
_TILES_FLOAT32 = ((16, 16, 4, 1),) * 3


def _tiles(kernel: int, like: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of a kernel for heads of this size and type, and options of its launch."""
    size = like.shape[-1]
    chosen = _TILES_FLOAT32 if like.dtype == torch.float32 else _TILES["small" if size <= 128 else "large"]
    queries, keys, warps, stages = chosen[kernel]
    return {"SIZE": size, "TILE_Q": queries, "TILE_K": keys}, {"num_warps": warps, "num_stages": stages}


def _constants(query: Tensor, keys: Keys, sight: Sight) -> dict[str, object]:
    heads = query.shape[2]
    return {
        "HEADS": heads,
        "GROUP": heads // keys.own.shape[2],
        "WINDOW": sight.window is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def _four(keys: Keys, values: Keys) -> tuple[list[Tensor], list[int]]:
    """The tensors, features first, and the distances between their rows."""
    tensors = [keys.before, values.before, keys.own, values.own]
    return tensors, [tensor.stride(1) for tensor in tensors]


def attention(query: Tensor, keys: Keys, values: Keys, sight: Sight) -> tuple[Tensor, Tensor]:
    """query: [B, Q, n, D], contiguous; D a power of two from 16 to 256. -> out [B, Q, n, D], and for backward the
    binary logarithms of the sums [B, n, Q] float32."""
    batch, slots, heads, size = query.shape
    out = torch.empty_like(query)
    log_sums = torch.empty(batch, heads, slots, dtype=torch.float32, device=query.device)
    tensors, rows = _four(keys, values)
    sizes, options = _tiles(0, query)
    grid = (batch * heads, triton.cdiv(slots, sizes["TILE_Q"]))
    scale = math.log2(math.e) / math.sqrt(size)
    constants = _constants(query, keys, sight)
    forward_kernel[grid](query, *tensors, out, log_sums, *sight.numbers, *rows, scale, **constants, **sizes, **options)
    return out, log_sums


def attention_backward(
    query: Tensor, keys: Keys, values: Keys, sight: Sight, result: tuple[Tensor, Tensor], given: Tensor,
    d_keys: Keys, d_values: Keys,
) -> Tensor:  # fmt: skip
    """result: what `attention` returned. given: [B, Q, n, D], contiguous, the gradient of out. d_keys, d_values are
    written to. -> the gradient of query."""
    batch, slots, heads, size = query.shape
    out, log_sums = result
    deltas, d_query = torch.empty_like(log_sums), torch.empty_like(query)
    factor = 1 / math.sqrt(size)
    scale = math.log2(math.e) * factor
    constants = _constants(query, keys, sight)
    tensors, rows = _four(keys, values)
    sizes, options = _tiles(1, query)
    grid = (batch * heads, triton.cdiv(slots, sizes["TILE_Q"]))
    done = (out, given, log_sums, deltas, d_query)
    query_backward_kernel[grid](
        query, *tensors, *done, *sight.numbers, *rows, scale, factor, **constants, **sizes, **options
    )
    sizes, options = _tiles(2, query)
    visits = sight.visits(sizes["TILE_Q"], sizes["TILE_K"])
    for own in (False, True):
        four = [each.own if own else each.before for each in (keys, values, d_keys, d_values)]
        k, v, dk, dv = four
        count = k.shape[1]
        grid = (batch * k.shape[2], triton.cdiv(count, sizes["TILE_K"]))
        key_backward_kernel[grid](
            query, k, v, given, log_sums, deltas, dk, dv, visits, *sight.numbers, count,
            *(each.stride(1) for each in four), scale, factor, OWN=own, **constants, **sizes, **options,
        )  # fmt: skip
    return d_query

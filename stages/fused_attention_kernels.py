"""Triton kernels of a draft block's attention: each query sees a run of features and its own block, nothing else.

What `stages.dflash_masks` says as a mask is arithmetic here: a query of slot k in a block that sees the features below
s takes features from max(0, s + k - W + 1) on (W: window) and its block's slots (up to k, if there is a window). Tiles
that all queries of a tile see are not tested. Softmax is kept online (Milakov and Gimelshein, arXiv 1805.02867), and
recomputed in backward (FlashAttention-2, arXiv 2307.08691) by one kernel for queries and one for keys, so that every
sum has a fixed order. `stages.fused_attention` launches them.
Shape legend: Q slots, n heads, g key heads, D head size (SIZE); queries, out and their gradients are [B, Q, n, D].
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["forward_kernel", "key_backward_kernel", "query_backward_kernel"]

_HIDDEN = tl.constexpr(-1.0e38)  # finite: a difference with it is a number
_FREE = ["features", "blocks", "block_size", "window", "slots"]  # numbers that change from batch to batch


@triton.jit
def _sight(seen, index, features, block_size, window, slots, WINDOW: tl.constexpr):
    """Of the queries `index`: the features they see and the slots they see, as four vectors of bounds. A query beyond
    the last slot sees nothing."""
    real = index < slots
    last = tl.load(seen + index // block_size, mask=real, other=0)
    own_first = index // block_size * block_size
    if WINDOW:
        first = tl.maximum(last + index - own_first - window + 1, 0)
        own_last = index + 1
    else:
        first = tl.zeros_like(last)
        own_last = own_first + block_size
    return first, tl.minimum(last, features), own_first, tl.where(real, own_last, own_first)


@triton.jit
def _rows(base, index, row, limit, MASKED: tl.constexpr, SIZE: tl.constexpr):
    at = base + index[:, None] * row + tl.arange(0, SIZE)[None, :]
    if MASKED:
        return tl.load(at, mask=(index < limit)[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def _bounds(first, last, TILE: tl.constexpr):
    """Begin and end of the keys that some query sees, and of the tiles among them that all see."""
    some = last > first
    begin = tl.min(tl.where(some, first, 2147483647), 0) // TILE * TILE
    end = tl.max(last, 0)
    inner = (tl.max(first, 0) + TILE - 1) // TILE * TILE
    outer = tl.min(last, 0) // TILE * TILE
    inner = tl.minimum(tl.maximum(inner, begin), end)
    return begin, inner, tl.maximum(outer, inner), end


@triton.jit
def _softmax_step(
    total, top, out, q, keys, values, start, first, last, limit, key_row, value_row, scale,
    MASKED: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index = start + tl.arange(0, TILE)
    k = _rows(keys, index, key_row, limit, MASKED, SIZE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        visible = (index[None, :] >= first[:, None]) & (index[None, :] < last[:, None])
        scores = tl.where(visible, scores, _HIDDEN)
    highest = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(top - highest)
    v = _rows(values, index, value_row, limit, MASKED, SIZE)
    out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return total * shrink + tl.sum(p, 1), highest, out


@triton.jit(do_not_specialize=_FREE)
def forward_kernel(
    queries, keys, values, own_keys, own_values, out, log_sums, seen, features, blocks, block_size, window, slots,
    key_row, value_row, own_key_row, own_value_row, scale, HEADS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The last tiles of queries see most, so they begin.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    index = tile * TILE_Q + tl.arange(0, TILE_Q)
    first, last, own_first, own_last = _sight(
        seen + sequence * blocks, index, features, block_size, window, slots, WINDOW
    )
    q = _rows(queries + (sequence * slots * HEADS + head) * SIZE, index, HEADS * SIZE, slots, True, SIZE)
    keys += sequence * features * key_row + head // GROUP * SIZE
    values += sequence * features * value_row + head // GROUP * SIZE
    own_keys += sequence * slots * own_key_row + head // GROUP * SIZE
    own_values += sequence * slots * own_value_row + head // GROUP * SIZE
    total = tl.zeros([TILE_Q], dtype=tl.float32)
    top = tl.full([TILE_Q], _HIDDEN, dtype=tl.float32)
    result = tl.zeros([TILE_Q, SIZE], dtype=tl.float32)
    # The own block first: every query sees some of it, so the maximum is real from then on.
    for start in range(tl.min(own_first, 0), tl.max(own_last, 0), TILE_K):
        total, top, result = _softmax_step(
            total, top, result, q, own_keys, own_values, start, own_first, own_last, slots, own_key_row, own_value_row,
            scale, True, SIZE, TILE_K, PRECISION,
        )  # fmt: skip
    begin, inner, outer, end = _bounds(first, last, TILE_K)
    for start in range(begin, inner, TILE_K):
        total, top, result = _softmax_step(
            total, top, result, q, keys, values, start, first, last, features, key_row, value_row,
            scale, True, SIZE, TILE_K, PRECISION,
        )  # fmt: skip
    for start in range(inner, outer, TILE_K):
        total, top, result = _softmax_step(
            total, top, result, q, keys, values, start, first, last, features, key_row, value_row,
            scale, False, SIZE, TILE_K, PRECISION,
        )  # fmt: skip
    for start in range(outer, end, TILE_K):
        total, top, result = _softmax_step(
            total, top, result, q, keys, values, start, first, last, features, key_row, value_row,
            scale, True, SIZE, TILE_K, PRECISION,
        )  # fmt: skip
    to = out + (sequence * slots * HEADS + head) * SIZE + index[:, None] * (HEADS * SIZE) + tl.arange(0, SIZE)[None, :]
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=(index < slots)[:, None])
    log_sum = top + tl.log2(total)
    tl.store(log_sums + tl.program_id(0).to(tl.int64) * slots + index, log_sum, mask=index < slots)


@triton.jit
def _query_step(
    dq, q, given, log_sum, delta, keys, values, start, first, last, limit, key_row, value_row, scale,
    MASKED: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index = start + tl.arange(0, TILE)
    k = _rows(keys, index, key_row, limit, MASKED, SIZE)
    v = _rows(values, index, value_row, limit, MASKED, SIZE)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - log_sum[:, None])
    if MASKED:
        p = tl.where((index[None, :] >= first[:, None]) & (index[None, :] < last[:, None]), p, 0.0)
    ds = p * (tl.dot(given, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=_FREE)
def query_backward_kernel(
    queries, keys, values, own_keys, own_values, out, given, log_sums, deltas, d_queries, seen, features, blocks,
    block_size, window, slots, key_row, value_row, own_key_row, own_value_row, scale, factor, HEADS: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    index = tile * TILE_Q + tl.arange(0, TILE_Q)
    first, last, own_first, own_last = _sight(
        seen + sequence * blocks, index, features, block_size, window, slots, WINDOW
    )
    here = (sequence * slots * HEADS + head) * SIZE
    q = _rows(queries + here, index, HEADS * SIZE, slots, True, SIZE)
    d_out = _rows(given + here, index, HEADS * SIZE, slots, True, SIZE)
    delta = tl.sum(_rows(out + here, index, HEADS * SIZE, slots, True, SIZE).to(tl.float32) * d_out.to(tl.float32), 1)
    at = tl.program_id(0).to(tl.int64) * slots + index
    tl.store(deltas + at, delta, mask=index < slots)
    log_sum = tl.load(log_sums + at, mask=index < slots, other=0.0)
    keys += sequence * features * key_row + head // GROUP * SIZE
    values += sequence * features * value_row + head // GROUP * SIZE
    own_keys += sequence * slots * own_key_row + head // GROUP * SIZE
    own_values += sequence * slots * own_value_row + head // GROUP * SIZE
    dq = tl.zeros([TILE_Q, SIZE], dtype=tl.float32)
    for start in range(tl.min(own_first, 0), tl.max(own_last, 0), TILE_K):
        dq = _query_step(
            dq, q, d_out, log_sum, delta, own_keys, own_values, start, own_first, own_last, slots, own_key_row,
            own_value_row, scale, True, SIZE, TILE_K, PRECISION,
        )  # fmt: skip
    begin, inner, outer, end = _bounds(first, last, TILE_K)
    for start in range(begin, inner, TILE_K):
        dq = _query_step(
            dq, q, d_out, log_sum, delta, keys, values, start, first, last, features, key_row, value_row, scale,
            True, SIZE, TILE_K, PRECISION,
        )  # fmt: skip
    for start in range(inner, outer, TILE_K):
        dq = _query_step(
            dq, q, d_out, log_sum, delta, keys, values, start, first, last, features, key_row, value_row, scale,
            False, SIZE, TILE_K, PRECISION,
        )  # fmt: skip
    for start in range(outer, end, TILE_K):
        dq = _query_step(
            dq, q, d_out, log_sum, delta, keys, values, start, first, last, features, key_row, value_row, scale,
            True, SIZE, TILE_K, PRECISION,
        )  # fmt: skip
    to = d_queries + here + index[:, None] * (HEADS * SIZE) + tl.arange(0, SIZE)[None, :]
    tl.store(to, (dq * factor).to(d_queries.dtype.element_ty), mask=(index < slots)[:, None])


@triton.jit
def _key_step(
    dk, dv, k, v, queries, given, log_sums, deltas, seen, tile, key, features, block_size, window, slots, scale,
    OWN: tl.constexpr, MASKED: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, TILE_Q: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index = tile * TILE_Q + tl.arange(0, TILE_Q)
    q = _rows(queries, index, HEADS * SIZE, slots, MASKED, SIZE)
    log_sum = tl.load(log_sums + index, mask=index < slots, other=0.0)
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - log_sum[None, :])
    if MASKED:
        first, last, own_first, own_last = _sight(seen, index, features, block_size, window, slots, WINDOW)
        if OWN:
            first = own_first
            last = own_last
        p = tl.where((key[:, None] >= first[None, :]) & (key[:, None] < last[None, :]), p, 0.0)
    d_out = _rows(given, index, HEADS * SIZE, slots, MASKED, SIZE)
    dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    delta = tl.load(deltas + index, mask=index < slots, other=0.0)
    ds = p * (tl.dot(v, tl.trans(d_out), input_precision=PRECISION) - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit(do_not_specialize=[*_FREE, "count"])
def key_backward_kernel(
    queries, keys, values, given, log_sums, deltas, d_keys, d_values, visits, seen, features, blocks, block_size,
    window, slots, count, key_row, value_row, d_key_row, d_value_row, scale, factor, OWN: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = HEADS // GROUP
    sequence, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    part = tl.program_id(1)
    key = part * TILE_K + tl.arange(0, TILE_K)
    k = _rows(keys + sequence * count * key_row + group * SIZE, key, key_row, count, True, SIZE)
    v = _rows(values + sequence * count * value_row + group * SIZE, key, value_row, count, True, SIZE)
    seen += sequence * blocks
    if OWN:
        begin = part * TILE_K // block_size * block_size // TILE_Q
        last = (tl.minimum((part + 1) * TILE_K, slots) - 1) // block_size * block_size + block_size
        end = (last + TILE_Q - 1) // TILE_Q
        inner = end
        outer = end
    else:
        table = visits + (sequence * tl.num_programs(1) + part) * 4
        begin = tl.load(table)
        inner = tl.load(table + 1)
        outer = tl.load(table + 2)
        end = tl.load(table + 3)
    dk = tl.zeros([TILE_K, SIZE], dtype=tl.float32)
    dv = tl.zeros([TILE_K, SIZE], dtype=tl.float32)
    for each in range(GROUP):
        head = group * GROUP + each
        q = queries + (sequence * slots * HEADS + head) * SIZE
        d_out = given + (sequence * slots * HEADS + head) * SIZE
        sums = log_sums + (sequence * HEADS + head) * slots
        shares = deltas + (sequence * HEADS + head) * slots
        for tile in range(begin, inner):
            dk, dv = _key_step(
                dk, dv, k, v, q, d_out, sums, shares, seen, tile, key, features, block_size, window, slots, scale,
                OWN, True, HEADS, SIZE, TILE_Q, WINDOW, PRECISION,
            )  # fmt: skip
        for tile in range(inner, outer):
            dk, dv = _key_step(
                dk, dv, k, v, q, d_out, sums, shares, seen, tile, key, features, block_size, window, slots, scale,
                OWN, False, HEADS, SIZE, TILE_Q, WINDOW, PRECISION,
            )  # fmt: skip
        for tile in range(outer, end):
            dk, dv = _key_step(
                dk, dv, k, v, q, d_out, sums, shares, seen, tile, key, features, block_size, window, slots, scale,
                OWN, True, HEADS, SIZE, TILE_Q, WINDOW, PRECISION,
            )  # fmt: skip
    column = group * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (key < count)[:, None]
    to = d_keys + (sequence * count + key)[:, None] * d_key_row + column
    tl.store(to, (dk * factor).to(d_keys.dtype.element_ty), mask=inside)
    to = d_values + (sequence * count + key)[:, None] * d_value_row + column
    tl.store(to, dv.to(d_values.dtype.element_ty), mask=inside)

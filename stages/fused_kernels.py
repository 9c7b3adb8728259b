"""The element-wise parts of decoder layers as one Triton kernel each, computed in float32 and rounded once.

Each reads its tensors where a matrix product has left them, strided, and writes contiguous ones. None is tuned: they
only move bytes, and one configuration serves. Shape legend: B rows, S tokens, M = B·S; n heads of D values.

Rows without padding (`stages.packing`) are one row of M tokens, B = 1, S = M, together with where each of them begins;
None instead of that is a constant to the compiler, so the kernel of padded rows has nothing of it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stages.packing import CHUNK, Pack

__all__ = [
    "delta_gates",
    "delta_rule",
    "delta_scan",
    "gate_heads",
    "gated_rms_norm",
    "norm_rope",
    "rms_norm",
    "short_conv",
    "silu_mul",
]

_HEADS = 8  # heads in a program
_TOKENS = 32  # tokens in a program of the convolution
_BLOCK = 64  # values of a head in a program of the scan
_L2_EPS = 1e-6  # of the delta rule's queries and keys, as in transformers and flash-linear-attention


@triton.jit
def _rms_norm(x, weight, out, row, eps, ONE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    value = tl.load(x + m * row + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    value *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + ONE
    tl.store(out + m * SIZE + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, one: int) -> Tensor:
    """x [M, H] over its root mean square, times (one + weight [H]) -> [M, H].

    one: 1 for weights that are kept around zero (Qwen3.5), else 0.
    """
    count, size = x.shape
    out = x.new_empty(count, size)
    block = triton.next_power_of_2(size)
    warps = min(max(block // 1024, 1), 8)
    _rms_norm[(count,)](x, weight, out, x.stride(0), eps, one, size, block, num_warps=warps)
    return out


@triton.jit
def _silu_mul(gate, up, row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    parts: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    m = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    value = tl.load(gate + m * row + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.sigmoid(value) * tl.load(up + m * row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate + m * row + at, value.to(gate.dtype.element_ty), mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, both [M, I] with rows equally far apart; written into `gate`, which is returned."""
    count, size = gate.shape
    block = 2048 if size % 2048 == 0 else 1024
    _silu_mul[(count * triton.cdiv(size, block),)](gate, up, gate.stride(0), size, block)
    return gate


@triton.jit(do_not_specialize=["tokens"])
def _norm_rope(
    x, weight, cos, sin, out, positions, row, step, tokens, eps,
    NORM: tl.constexpr, ONE: tl.constexpr, n: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (n + HEADS - 1) // HEADS
    m = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)
    half: tl.constexpr = R // 2
    turned = d < R
    other = tl.where(d < half, d + half, tl.where(turned, d - half, d))  # what it is turned with
    value = tl.load(x + m * row + head * step + d[None, :], mask=head < n, other=0.0).to(tl.float32)
    beside = tl.load(x + m * row + head * step + other[None, :], mask=head < n, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= scale * (tl.load(weight + d).to(tl.float32) + ONE)[None, :]
        beside *= scale * (tl.load(weight + other).to(tl.float32) + ONE)[None, :]
    at = (m % tokens if positions is None else tl.load(positions + m)) * R + d
    c = tl.load(cos + at, mask=turned, other=1.0)
    s = tl.load(sin + at, mask=turned, other=0.0)
    value = value * c[None, :] + beside * tl.where(d < half, -s, s)[None, :]
    tl.store(out + (m * n + head) * D + d[None, :], value.to(out.dtype.element_ty), mask=head < n)


def norm_rope(
    x: Tensor, weight: Tensor | None, eps: float, one: int, cos: Tensor, sin: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Queries or keys x [M, n, D], normed as in `rms_norm` (weight None: not), then turned -> [M, n, D].

    cos, sin: [S, R] float32, both halves; only the first R ≤ D values of a head are turned. M is rows after rows of S;
    or of any lengths, with positions [M] below S.
    """
    count, n, size = x.shape
    out = x.new_empty(count, n, size)
    heads = min(triton.next_power_of_2(n), _HEADS)
    grid = (count * triton.cdiv(n, heads),)
    arguments = (x, weight, cos, sin, out, positions, x.stride(0), x.stride(1), len(cos), eps)
    _norm_rope[grid](*arguments, weight is not None, one, n, size, cos.shape[1], heads)
    return out


@triton.jit
def _gate_heads(x, gate, out, row, step, gate_row, gate_step, n: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr):
    parts: tl.constexpr = (n + HEADS - 1) // HEADS
    m = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)[None, :]
    value = tl.load(x + m * row + head * step + d, mask=head < n, other=0.0).to(tl.float32)
    value *= tl.sigmoid(tl.load(gate + m * gate_row + head * gate_step + d, mask=head < n, other=0.0).to(tl.float32))
    tl.store(out + (m * n + head) * D + d, value.to(out.dtype.element_ty), mask=head < n)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate), both [M, n, D] -> [M, n·D]."""
    count, n, size = x.shape
    out = x.new_empty(count, n * size)
    heads = min(triton.next_power_of_2(n), _HEADS)
    grid = (count * triton.cdiv(n, heads),)
    _gate_heads[grid](x, gate, out, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1), n, size, heads)
    return out


@triton.jit
def _gated_rms_norm(x, gate, weight, out, gate_row, eps, n: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr):
    parts: tl.constexpr = (n + HEADS - 1) // HEADS
    m = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)[None, :]
    value = tl.load(x + (m * n + head) * D + d, mask=head < n, other=0.0).to(tl.float32)
    gates = tl.load(gate + m * gate_row + head * D + d, mask=head < n, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    value *= tl.load(weight + d).to(tl.float32) * gates * tl.sigmoid(gates)
    tl.store(out + (m * n + head) * D + d, value.to(out.dtype.element_ty), mask=head < n)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each head of x [M, n, D], contiguous, over its root mean square, times weight [D] and silu(gate [M, n·D])."""
    count, n, size = x.shape
    out = x.new_empty(count, n * size)
    heads = min(triton.next_power_of_2(n), 2 * _HEADS)
    grid = (count * triton.cdiv(n, heads),)
    _gated_rms_norm[grid](x, gate, weight, out, gate.stride(0), eps, n, size, heads)
    return out


@triton.jit(do_not_specialize=["tokens"])
def _short_conv(
    x, weight, out, positions, row, channels, tokens, eps,
    NORM: tl.constexpr, TAPS: tl.constexpr, n: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(2).to(tl.int64) * tokens
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * D + tl.arange(0, D)
    begin = 0 if positions is None else t - tl.load(positions + t, mask=t < tokens, other=0)
    value = tl.zeros([TOKENS, D], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = t + tap - (TAPS - 1)
        inside = (at >= begin) & (at < tokens)
        taken = tl.load(x + (first + at)[:, None] * row + channel[None, :], mask=inside[:, None], other=0.0)
        value += taken.to(tl.float32) * tl.load(weight + tap * channels + channel).to(tl.float32)[None, :]
    value *= tl.sigmoid(value)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, 1) + eps)[:, None]
    part = (tl.program_id(1) // n).to(tl.int64) * tl.num_programs(2) * tokens  # each part is a tensor of its own
    head = tl.program_id(1) % n * D + tl.arange(0, D)
    to = out + (part + first + t)[:, None] * (n * D) + head[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=(t < tokens)[:, None])


def short_conv(
    x: Tensor,
    weight: Tensor,
    shape: tuple[int, int, int],
    tokens: int,
    positions: Tensor | None,
    normed: bool,
) -> Tensor:
    """Causal depthwise convolution of each row's tokens, then SiLU; normed: then each head over its L2 norm.

    x: [M, P·n·D], rows of `tokens`. weight: [taps, P·n·D], the last tap is the token itself. shape: (P, n, D).
    positions: [M], if M = `tokens` are rows without padding: a token at position i sees i before it, at most.
    -> [P, B, S, n, D], each of the P parts contiguous.
    """
    parts, n, size = shape
    rows = len(x) // tokens
    out = x.new_empty(parts, rows, tokens, n, size)
    grid = (triton.cdiv(tokens, _TOKENS), parts * n, rows)
    arguments = (x, weight, out, positions, x.stride(0), weight.stride(0), tokens, _L2_EPS)
    _short_conv[grid](*arguments, normed, len(weight), n, size, _TOKENS)
    return out


@triton.jit(do_not_specialize=["tokens"])
def _delta_gates(
    a, b, a_log, dt_bias, decay, strength, starts, chunks, row, tokens,
    m: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * tokens
    if starts is not None:
        of, chunk = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
        first = tl.load(starts + of)
        tokens = tl.load(starts + of + 1) - first
    t = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    at = first + t
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[None, :]
    inside = (t < tokens) & (head < m)
    x = tl.load(a + at * row + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=head < m, other=0.0).to(tl.float32)
    soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    rate = tl.exp(tl.load(a_log + head, mask=head < m, other=0.0).to(tl.float32))
    total = tl.cumsum(tl.where(inside, -rate * soft, 0.0), axis=0)
    tl.store(decay + at * m + head, total * 1.4426950408889634, mask=inside)
    y = tl.load(b + at * row + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(strength + at * m + head, tl.sigmoid(y), mask=inside)


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, tokens: int, pack: Pack | None = None
) -> tuple[Tensor, Tensor]:
    """a, b: [M, m], rows of `tokens`, equally far apart. a_log, dt_bias: [m]. -> [B, S, m] float32 both:

    log2 of the decay exp(-exp(a_log)·softplus(a + dt_bias)), summed up from each chunk's first token, and sigmoid(b).
    pack: of M = `tokens`, whose chunks are those of its rows.
    """
    m, rows = a.shape[1], len(a) // tokens
    decay, strength = (a.new_empty(rows, tokens, m, dtype=torch.float32) for _ in range(2))
    starts, chunks = (pack.starts, pack.chunks) if pack else (None, None)
    grid = (triton.cdiv(tokens, CHUNK) if chunks is None else len(chunks), rows, triton.cdiv(m, 16))
    arguments = (a, b, a_log, dt_bias, decay, strength, starts, chunks, a.stride(0), tokens)
    _delta_gates[grid](*arguments, m, 16, CHUNK)
    return decay, strength


@triton.jit(do_not_specialize=["tokens"])
def _delta_scan(
    q, k, w, u, decay, out, starts, tokens, scale,
    n: tl.constexpr, m: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) % (V // BLOCK) * BLOCK + tl.arange(0, BLOCK)[None, :]
    head = tl.program_id(0) // (V // BLOCK) % m
    row = (tl.program_id(0) // (V // BLOCK) // m).to(tl.int64)
    first = row * tokens
    if starts is not None:
        first = tl.load(starts + row)
        tokens = (tl.load(starts + row + 1) - first).to(tl.int32)
    i, key = tl.arange(0, CHUNK), tl.arange(0, K)[None, :]
    state = tl.zeros([K, BLOCK], dtype=tl.float32)
    for begin in range(0, tokens, CHUNK):
        inside = begin + i < tokens
        at = (first + begin + i)[:, None]
        keys = tl.load(k + (at * n + head // (m // n)) * K + key, mask=inside[:, None], other=0.0)
        queries = tl.load(q + (at * n + head // (m // n)) * K + key, mask=inside[:, None], other=0.0)
        known = tl.load(w + (at * m + head) * K + key, mask=inside[:, None], other=0.0)
        new = tl.load(u + (at * m + head) * V + column, mask=inside[:, None], other=0.0).to(tl.float32)
        g = tl.load(decay + (first + begin + i) * m + head, mask=inside, other=0.0)
        last = tl.load(decay + (first + tl.minimum(begin + CHUNK, tokens) - 1) * m + head)
        before = state.to(keys.dtype)
        new -= tl.dot(known, before)
        seen = (i[:, None] >= i[None, :]) & inside[:, None]
        score = tl.dot(queries, tl.trans(keys))
        score *= tl.exp2(tl.where(seen, g[:, None] - g[None, :], float("-inf")))
        value = tl.dot(queries, before) * tl.exp2(g)[:, None] + tl.dot(score.to(keys.dtype), new.to(keys.dtype))
        tl.store(out + (at * m + head) * V + column, (value * scale).to(out.dtype.element_ty), mask=inside[:, None])
        kept = new * tl.exp2(tl.where(inside, last - g, float("-inf")))[:, None]
        state = state * tl.exp2(last) + tl.dot(tl.trans(keys), kept.to(keys.dtype))


def delta_scan(q: Tensor, k: Tensor, w: Tensor, u: Tensor, decay: Tensor, starts: Tensor | None = None) -> Tensor:
    """The recurrence from chunk to chunk, and the outputs, [B, S, m, D']: w, u [B, S, m, D or D'] are a chunk's writes.

    A chunk with state H writes v = u - w·H, gives q·H and what its tokens see of v among themselves, both decayed, and
    leaves the decayed H plus k·v (Yang et al. 2024, arXiv:2412.06464, section 3.3). The state is float32, [D, D'].
    starts: [rows + 1], where rows without padding begin in S; each begins with a state of zeros.
    """
    rows, tokens, n, key = q.shape
    m, value = u.shape[2:]
    out = torch.empty_like(u)
    block = min(value, _BLOCK)
    if starts is not None:
        rows = len(starts) - 1
    grid = (rows * m * (value // block),)
    sizes = (n, m, key, value, block, CHUNK)
    _delta_scan[grid](q, k, w, u, decay, out, starts, tokens, key**-0.5, *sizes, num_warps=4, num_stages=3)
    return out


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    decay: tuple[Tensor, Tensor],
    pack: Pack | None = None,
) -> Tensor:
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464) in chunks -> [B, S, m, D'].

    q, k: [B, S, n, D], over their L2 norms. v: [B, S, m, D'], m a multiple of n. a, b: [B·S, m], from which come the
    decay exp(-exp(A_log)·softplus(a + dt_bias)) and the writing strength sigmoid(b). decay: A_log, dt_bias [m].
    pack: B = 1, S = M are rows without padding. flash-linear-attention is given the list of chunks because its own
    waits for the device; of entries behind a row's end its kernels read and write nothing.
    """
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

    starts, chunks = (pack.starts, pack.chunks) if pack else (None, None)
    summed, strength = delta_gates(a, b, *decay, q.shape[1], pack)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(
        k=k, v=v, g=summed, beta=strength, cu_seqlens=starts, chunk_size=CHUNK, chunk_indices=chunks
    )
    return delta_scan(q, k, w, u, summed, starts)

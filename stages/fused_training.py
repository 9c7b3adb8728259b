"""Element-wise work of the drafter's step as Triton kernels: norms, rotated heads, SwiGLU, cross entropy.

Each reads and writes a value as few times as the arithmetic allows, computes in float32 and rounds once. Configurations
are fixed and sums have a fixed order (a share of each program, then the shares), so results repeat to the bit.
Importing this needs Triton, and calling it a GPU (or Triton's interpreter).
Shape legend: R rows, H width, B sequences, T positions, D head size, I width of the MLP, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "add_norm",
    "cross_entropy_",
    "norm_backward",
    "rotated_heads",
    "rotated_heads_backward",
    "swiglu",
    "swiglu_backward_",
]

_PROGRAMS = 512  # that share the rows of a sum over rows: the same on every GPU, because it is part of the result


def _warps(block: int, each: int) -> int:
    """Warps of a program, if one is to have `each` numbers."""
    return max(1, min(16, block // each))


# --- RMSNorm


@triton.jit
def _add_norm(x, delta, weight, total, y, scale, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * WIDTH + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what is normed is what is handed on
    inverse = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (value * inverse * factor).to(y.dtype.element_ty), mask=inside)
    tl.store(scale + row, inverse)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, delta [R, H], weight [H] -> (x + delta, its RMSNorm, reciprocal root mean squares [R] float32).

    Without delta the first is x itself.
    """
    rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    y, scale = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        tensors = (x, x if delta is None else delta, weight, total, y, scale)
        sizes = {"ADD": delta is not None, "WIDTH": width, "BLOCK": block}
        _add_norm[(rows,)](*tensors, eps, **sizes, num_warps=_warps(block, 1024))
    return total, y, scale


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    x, scale, weight, dy, residual, dx, share, rows, ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_gradient = tl.zeros([BLOCK], dtype=tl.float32)
    row = tl.program_id(0)
    while row < rows:
        at = row.to(tl.int64) * WIDTH + column
        inverse = tl.load(scale + row)
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse
        given = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        weight_gradient += given * unit
        given *= factor
        result = (given - unit * (tl.sum(given * unit, 0) / WIDTH)) * inverse
        if ADD:
            result += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    tl.store(share + tl.program_id(0) * WIDTH + column, weight_gradient, mask=inside)


def norm_backward(
    x: Tensor, scale: Tensor, weight: Tensor, dy: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x: what was normed, scale: its reciprocal root mean squares, dy: gradient of the norm, all of R rows.

    -> (gradient towards x [R, H], with `residual` added to it; gradient towards the weight [H] float32).
    """
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs = min(_PROGRAMS, rows)
    share = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        tensors = (x, scale, weight, dy, dy if residual is None else residual, dx, share)
        sizes = {"ADD": residual is not None, "WIDTH": width, "BLOCK": block}
        _norm_backward[(programs,)](*tensors, rows, **sizes, num_warps=_warps(block, 1024))
    return dx, share.sum(0)


# --- heads: normed over their own width, then rotated by position in pairs (i, i + D / 2)
#
# Distances between rows, heads and sequences are counted in heads, so that addresses are known to be aligned.


@triton.jit(do_not_specialize=["length", "out_sequence", "table_sequence"])
def _heads(
    source, weight, cos, sin, out, length, source_row, out_row, out_sequence, table_sequence, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sequence, position = row // length, row % length
    head, pair = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK)
    inside = (head < HEADS) & (pair < HALF)[None, :]
    at = source + (row * source_row + head) * (2 * HALF) + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    first *= inverse * tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    second *= inverse * tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    turn = (sequence * table_sequence + position) * HALF + pair
    c = tl.load(cos + turn, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + turn, mask=pair < HALF, other=0.0)[None, :]
    to = out + (sequence * out_sequence + position * out_row + head) * (2 * HALF) + pair[None, :]
    tl.store(to, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def rotated_heads(source: Tensor, weight: Tensor, turns: tuple[Tensor, Tensor], eps: float, out: Tensor) -> None:
    """The RMSNorm of each head, rotated.

    source: [B·T, heads·D] (rows may be apart). weight: [D]. turns: cos and sin [B, T, D / 2] float32.
    out: [B, T, heads, D], written to (sequences may be apart).
    """
    sequences, length, heads, size = out.shape
    if sequences * length:
        between = (source.stride(0) // size, out.stride(1) // size, out.stride(0) // size)
        table = turns[0].stride(0) // (size // 2)
        blocks, warps = _head_blocks(heads, size)
        _heads[(sequences * length,)](source, weight, *turns, out, length, *between, table, eps, **blocks, **warps)


def _head_blocks(heads: int, size: int) -> tuple[dict[str, int], dict[str, int]]:
    rows, width = triton.next_power_of_2(heads), triton.next_power_of_2(size // 2)
    sizes = {"HEADS": heads, "HALF": size // 2, "BLOCK_HEADS": rows, "BLOCK": width}
    return sizes, {"num_warps": _warps(rows * width, 512)}


@triton.jit(do_not_specialize=["rows", "length", "given_sequence", "table_sequence"])
def _heads_backward(
    source, weight, cos, sin, given, result, share, rows, length, source_row, given_row, given_sequence,
    table_sequence, eps, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, pair = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK)
    inside = (head < HEADS) & (pair < HALF)[None, :]
    w1 = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sum1 = tl.zeros([BLOCK_HEADS, BLOCK], dtype=tl.float32)
    sum2 = tl.zeros([BLOCK_HEADS, BLOCK], dtype=tl.float32)
    row = tl.program_id(0)
    while row < rows:
        sequence, position = (row // length).to(tl.int64), (row % length).to(tl.int64)
        at = (row.to(tl.int64) * source_row + head) * (2 * HALF) + pair[None, :]
        unit1 = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        unit2 = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt((tl.sum(unit1 * unit1, 1) + tl.sum(unit2 * unit2, 1)) / (2 * HALF) + eps)[:, None]
        unit1 *= inverse
        unit2 *= inverse
        turn = (sequence * table_sequence + position) * HALF + pair
        c = tl.load(cos + turn, mask=pair < HALF, other=0.0)[None, :]
        s = tl.load(sin + turn, mask=pair < HALF, other=0.0)[None, :]
        to = given + (sequence * given_sequence + position * given_row + head) * (2 * HALF) + pair[None, :]
        turned1 = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        turned2 = tl.load(to + HALF, mask=inside, other=0.0).to(tl.float32)
        d1, d2 = turned1 * c + turned2 * s, turned2 * c - turned1 * s
        sum1 += d1 * unit1
        sum2 += d2 * unit2
        d1 *= w1
        d2 *= w2
        mean = ((tl.sum(d1 * unit1, 1) + tl.sum(d2 * unit2, 1)) / (2 * HALF))[:, None]
        tl.store(result + at, ((d1 - unit1 * mean) * inverse).to(result.dtype.element_ty), mask=inside)
        tl.store(result + at + HALF, ((d2 - unit2 * mean) * inverse).to(result.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    mine = share + tl.program_id(0) * (2 * HALF) + pair
    tl.store(mine, tl.sum(sum1, 0), mask=pair < HALF)
    tl.store(mine + HALF, tl.sum(sum2, 0), mask=pair < HALF)


def rotated_heads_backward(
    source: Tensor, weight: Tensor, turns: tuple[Tensor, Tensor], eps: float, given: Tensor, result: Tensor
) -> Tensor:
    """given: [B, T, heads, D], the gradient of the rotated heads. The others as for `rotated_heads`.

    The gradient towards source is written to `result`, which lies as source does. -> the one towards the weight [D]
    float32.
    """
    sequences, length, heads, size = given.shape
    rows = sequences * length
    programs = min(4 * _PROGRAMS, rows)
    share = torch.empty(programs, size, dtype=torch.float32, device=source.device)
    if rows:
        between = (source.stride(0), given.stride(1), given.stride(0))
        counts = (rows, length, *(stride // size for stride in between), turns[0].stride(0) // (size // 2))
        blocks, warps = _head_blocks(heads, size)
        _heads_backward[(programs,)](source, weight, *turns, given, result, share, *counts, eps, **blocks, **warps)
    return share.sum(0)


# --- SwiGLU


@triton.jit
def _swiglu(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = gate_up + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [R, 2·I] -> silu(gate)·up [R, I]."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        block = min(4096, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        _swiglu[grid](gate_up, out, WIDTH=width, BLOCK=block, num_warps=_warps(block, 512))
    return out


@triton.jit
def _swiglu_backward(gate_up, given, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at, to = gate_up + row * (2 * WIDTH) + column, given + row * WIDTH + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    tl.store(to, (silu * up).to(given.dtype.element_ty), mask=inside)
    tl.store(at, (d * up * (share + silu * (1.0 - share))).to(gate_up.dtype.element_ty), mask=inside)
    tl.store(at + WIDTH, (d * silu).to(gate_up.dtype.element_ty), mask=inside)


def swiglu_backward_(gate_up: Tensor, given: Tensor) -> None:
    """In place: gate_up [R, 2·I] becomes its gradient, and given [R, I], the gradient of the product, the product."""
    rows, width = given.shape
    if rows:
        block = min(4096, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        _swiglu_backward[grid](gate_up, given, WIDTH=width, BLOCK=block, num_warps=_warps(block, 512))


# --- cross entropy


@triton.jit
def _cross_entropy(logits, labels, loss, hit, GRADIENT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB
    label = tl.load(labels + row)
    of_label = tl.load(logits + label).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -3.0e38, dtype=tl.float32)  # finite: a difference with it is a number
    total = tl.zeros([BLOCK], dtype=tl.float32)
    beaten = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + lane
        value = tl.load(logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
        smaller = tl.exp(-tl.abs(value - top))
        total = tl.where(value > top, total * smaller + 1.0, total + smaller)
        top = tl.maximum(top, value)
        beaten |= ((value > of_label) | ((value == of_label) & (column < label))).to(tl.int32)
    highest = tl.max(top, 0)
    whole = tl.sum(total * tl.exp(top - highest), 0)
    inverse = 1.0 / whole
    tl.store(loss + row, highest - of_label + tl.log(whole))
    tl.store(hit + row, tl.max(beaten, 0) == 0)
    if GRADIENT:
        # Backwards, because the end of the row is still in the cache.
        for start in range(0, VOCAB, BLOCK):
            column = (VOCAB - 1) // BLOCK * BLOCK - start + lane
            value = tl.load(logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
            slope = tl.exp(value - highest) * inverse - tl.where(column == label, 1.0, 0.0)
            tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=column < VOCAB)


def cross_entropy_(logits: Tensor, labels: Tensor, loss: Tensor, hit: Tensor, gradient: bool) -> None:
    """logits [R, V], labels [R] int64 -> written to loss [R] float32 and hit [R] bool: whether the label is the first
    of the greatest. If `gradient`, the logits are overwritten with each row's gradient towards them."""
    if len(logits):
        vocab = logits.shape[1]
        block = min(4096, triton.next_power_of_2(vocab))
        sizes = {"GRADIENT": gradient, "VOCAB": vocab, "BLOCK": block}
        _cross_entropy[(len(logits),)](logits, labels, loss, hit, **sizes, num_warps=_warps(block, 256))

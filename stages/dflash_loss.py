"""What a drafter is trained on: block inputs, labels and weights, and the cross entropy against the frozen head.

DFlash (arXiv 2602.06036) and D-PACE (arXiv 2605.18810). Shape legend: B sequences, S padded length, N blocks a
sequence, b block size, H hidden size, V vocabulary, R supervised rows (slots of weight above zero).
The loss of a window is a quotient of two sums (`Sums`), so it does not depend on how the window was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dflash_pipe import BadInput
from dflash_pipe.errors import nearest

__all__ = [
    "DpaceWeight",
    "Loss",
    "LossConfig",
    "Sums",
    "Supervision",
    "auto_gamma",
    "block_inputs",
    "block_loss",
    "dpace_weights",
    "frozen_head_cross_entropy",
    "labels_and_weights",
]

Loss = Literal["dflash", "dpace"]
DpaceWeight = Literal["suffix", "prefix", "ratio"]


@dataclass(frozen=True)
class LossConfig:
    """type: "dflash" (decay by slot) or "dpace" (weights from the draft's own confidence).

    gamma: decay of "dflash", in slots; None: no decay. alpha: smoothing of "dpace", 0..1. dpace: its weight of slot k:
    "suffix" (sum of P_j over j >= k), "prefix" (P_k), "ratio" (suffix sum / P_k).
    """

    type: Loss = "dflash"
    gamma: float | None = None
    alpha: float = 0.5
    dpace: DpaceWeight = "suffix"

    def __post_init__(self) -> None:
        if self.type not in get_args(Loss):  # read from a file, where no graph is
            raise BadInput(f"loss is {self.type!r}{nearest(self.type, get_args(Loss))}")
        if self.gamma is not None and not self.gamma > 0:
            raise BadInput(f"gamma is {self.gamma}, expected a positive number of slots (or null: no decay)")
        if not 0.0 <= self.alpha <= 1.0:
            raise BadInput(f"alpha is {self.alpha}, expected 0..1")


def auto_gamma(block_size: int) -> float:
    """The decay published for block sizes 8, 10 and 16 (4, 5, 7), on straight lines through them: b/2 up to 10."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def block_inputs(input_ids: Tensor, anchors: Tensor, mask_token_id: int, block_size: int) -> Tensor:
    """input_ids [B, S], anchors [B, N] -> [B, N, b] int64: the anchor's token, then MASK."""
    ids = input_ids.new_full((*anchors.shape, block_size), mask_token_id)
    ids[..., 0] = input_ids.gather(1, anchors)
    return ids


def labels_and_weights(
    input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, keep: Tensor, block_size: int, gamma: float | None
) -> tuple[Tensor, Tensor]:
    """What each slot should predict, and how much it counts.

    input_ids, loss_mask: [B, S]. anchors, keep: [B, N]. -> labels [B, N, b] int64: slot k predicts the token at a + k
    (0 past the end). weights [B, N, b] float32: exp(-(k - 1) / gamma) where that token is supervised; 0 for slot 0,
    which is given, for unused blocks and past the end.
    """
    slot = torch.arange(block_size, device=anchors.device)
    position = anchors[..., None] + slot
    inside = position < input_ids.shape[1]
    flat = position.where(inside, 0).flatten(1)
    labels = input_ids.gather(1, flat).view(position.shape).where(inside, 0)
    valid = loss_mask.bool().gather(1, flat).view(position.shape) & inside & keep[..., None] & (slot > 0)
    decay = torch.ones(block_size, device=anchors.device)
    if gamma is not None:
        decay = torch.exp((1 - slot.float()) / gamma)
    return labels, valid * decay


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """Cross entropy per row whose gradient towards the hidden states is made beside it, chunk by chunk.

    Each row's gradient is linear in the row's weight, so it is made for weight 1 and scaled in backward: weights may
    depend on the result, and neither logits nor a second product with the head is ever needed again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, chunk: int, plain: bool
    ) -> tuple[Tensor, Tensor]:
        rows = len(hidden)
        loss = hidden.new_empty(rows, dtype=torch.float32)
        hit = torch.empty(rows, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        logits_buffer = hidden.new_empty(min(chunk, rows), len(head))
        entropy = _fused_entropy() if hidden.is_cuda and not plain else _PlainEntropy(logits_buffer)
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            label = labels[part]
            logits = torch.mm(hidden[part], head.t(), out=logits_buffer[: len(label)])
            entropy(logits, label, loss[part], hit[part], gradient is not None)
            if gradient is not None:
                torch.mm(logits, head, out=gradient[part])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hit)
        return loss, hit

    @staticmethod
    def backward(ctx: Any, weight: Tensor, _: Any) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return torch.mul(gradient, weight[:, None], out=torch.empty_like(gradient)), None, None, None, None


class _PlainEntropy:
    """The cross entropy of some rows by torch's own operations, with probabilities of a chunk in float32."""

    def __init__(self, logits: Tensor) -> None:
        self._buffer = torch.empty_like(logits, dtype=torch.float32)

    def __call__(self, logits: Tensor, labels: Tensor, loss: Tensor, hit: Tensor, gradient: bool) -> None:
        """Write loss and hit [R] of logits [R, V]; if `gradient`, overwrite the logits by the gradient towards them."""
        label = labels[:, None]
        share = torch.softmax(logits, 1, dtype=torch.float32, out=self._buffer[: len(label)])
        top, best = logits.max(1, keepdim=True)
        hit.copy_((best == label)[:, 0])
        # log-sum-exp = top - log(share of top); the label's own share may underflow, the top's cannot.
        loss.copy_((top.float() - share.gather(1, best).log() - logits.gather(1, label).float())[:, 0])
        if gradient:
            logits.copy_(share.scatter_(1, label, share.gather(1, label) - 1.0))


def _fused_entropy() -> Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]:
    """The same as one kernel that keeps nothing."""
    from stages.fused_training import cross_entropy_  # needs Triton, which a CPU does without

    return cross_entropy_


def frozen_head_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, chunk: int, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """hidden [R, H], head [V, H] (same dtype, frozen), labels [R] int64 -> (cross entropy [R] float32, hit [R] bool).

    Memory beside the result: the gradient [R, H] and the logits of `chunk` rows; on a CPU, or if `plain`, their
    probabilities too. hit: whether the label is the most probable token.
    """
    return _FrozenHeadCrossEntropy.apply(hidden, head, labels, chunk, plain)


def dpace_weights(cross_entropy: Tensor, valid: Tensor, alpha: float, kind: DpaceWeight) -> Tensor:
    """Weights by how far a block would be accepted. cross_entropy, valid: [..., b], slot 0 never valid.

    q_k = (1 - alpha) p_k + alpha with p_k the label's probability (q = 1 where a slot is not valid);
    P_k = q_1 ... q_k; the weight of a valid slot is by `kind`: the sum of P_j over valid j >= k, P_k, or the quotient
    of the two, R_k = [k valid] + q_(k+1) R_(k+1). It is made so, because P_k may underflow to 0.
    """
    smoothed = ((1.0 - alpha) * torch.exp(-cross_entropy) + alpha).where(valid, 1.0)
    if kind == "ratio":
        return _ratios(smoothed, valid.to(smoothed.dtype)) * valid
    prefix = smoothed.cumprod(-1)
    if kind == "prefix":
        return prefix * valid
    return (prefix * valid).flip(-1).cumsum(-1).flip(-1) * valid


def _ratios(smoothed: Tensor, valid: Tensor) -> Tensor:
    """R_k of `dpace_weights`, from the last slot to the first. Both [..., b], of one dtype."""
    ratios = valid.clone()
    for k in range(valid.shape[-1] - 2, -1, -1):
        ratios[..., k].addcmul_(smoothed[..., k + 1], ratios[..., k + 1])
    return ratios


class Sums:
    """Named views of a vector of 5 + 2·b float64 counters, which add up over micro-batches.

    loss: sum of weight times cross entropy. weight: what it is divided by (sum of weights; for D-PACE, sequences).
    blocks: blocks in use. hits, counts: [b], right predictions and supervised slots by slot (0 is never supervised).
    supervised, covered: supervised tokens, and those that some block predicts.
    """

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.block_size = (len(vector) - 5) // 2
        self.loss, self.weight, self.blocks = vector[0], vector[1], vector[2]
        self.hits = vector[3 : 3 + self.block_size]
        self.counts = vector[3 + self.block_size : 3 + 2 * self.block_size]
        self.supervised, self.covered = vector[-2], vector[-1]

    @staticmethod
    def zeros(block_size: int, device: str | torch.device = "cpu") -> Sums:
        return Sums(torch.zeros(5 + 2 * block_size, dtype=torch.float64, device=device))

    def metrics(self) -> dict[str, float]:
        """loss, accuracy over supervised slots and by slot, estimated acceptance 1 + sum_k prod_(i<=k) accuracy_i, and
        the share of supervised tokens that a block covered. A quotient with nothing below is 0."""
        loss, weight, blocks, *rest = self.vector.tolist()
        b = self.block_size
        hits, counts, (supervised, covered) = rest[1:b], rest[b + 1 : 2 * b], rest[2 * b :]
        by_slot = [_share(hit, count) for hit, count in zip(hits, counts, strict=True)]
        acceptance = product = 1.0
        for accuracy in by_slot:
            product *= accuracy
            acceptance += product
        return {
            "loss": _share(loss, weight),
            "accuracy": _share(sum(hits), sum(counts)),
            "estimated_acceptance": acceptance,
            "covered": _share(covered, supervised),
            "blocks": blocks,
            **{f"accuracy_slot_{slot}": accuracy for slot, accuracy in enumerate(by_slot, 1)},
        }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class Supervision:
    """Which slots of a micro-batch are supervised. labels, weights: [B, N, b]; rows: [R] int64 into the N·b slots of
    all sequences, those of weight above zero; tokens: supervised tokens [B, S] bool; anchors: [B, N]; keep: [B, N]."""

    labels: Tensor
    weights: Tensor
    rows: Tensor
    tokens: Tensor
    anchors: Tensor
    keep: Tensor

    @staticmethod
    def of(
        input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, keep: Tensor, block_size: int, loss: LossConfig
    ) -> Supervision:
        """Made before the forward pass, because finding the rows waits for the device."""
        gamma = loss.gamma if loss.type == "dflash" else None
        labels, weights = labels_and_weights(input_ids, loss_mask, anchors, keep, block_size, gamma)
        rows = weights.flatten().nonzero()[:, 0]
        return Supervision(labels, weights, rows, loss_mask.bool(), anchors, keep)


def block_loss(
    hidden: Tensor, head: Tensor, what: Supervision, loss: LossConfig, chunk: int, plain: bool = False
) -> tuple[Tensor, Sums]:
    """hidden [R, H] of the supervised rows -> (summed weighted loss, 0-d float32 with a gradient towards hidden; its
    `Sums`). chunk, plain: as for `frozen_head_cross_entropy`."""
    entropy, hit = frozen_head_cross_entropy(hidden, head, what.labels.flatten()[what.rows], chunk, plain)
    weights = what.weights
    valid = weights > 0
    detached = entropy.detach()
    if loss.type == "dpace":
        grid = torch.zeros_like(weights).flatten().index_copy(0, what.rows, detached).view(weights.shape)
        weights = dpace_weights(grid, valid, loss.alpha, loss.dpace)
    weight = weights.flatten()[what.rows]
    sums = Sums.zeros(weights.shape[-1], hidden.device)
    sums.loss.copy_((weight.double() * detached.double()).sum())
    sums.weight.copy_(weight.double().sum()) if loss.type == "dflash" else sums.weight.fill_(len(weights))
    sums.blocks.copy_(what.keep.sum())
    right = torch.zeros_like(valid).flatten().index_copy(0, what.rows, hit).view(valid.shape)
    sums.hits.copy_(right.sum((0, 1)))
    sums.counts.copy_(valid.sum((0, 1)))
    sums.supervised.copy_(what.tokens.sum())
    sums.covered.copy_(_covered(valid, what.anchors, what.tokens).sum())
    return (weight * entropy).sum(), sums


def _covered(valid: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
    """[B, S] bool: tokens that at least one valid slot predicts."""
    position = (anchors[..., None] + torch.arange(valid.shape[-1], device=anchors.device)).flatten(1)
    counts = torch.zeros(tokens.shape[0], tokens.shape[1] + valid.shape[-1], dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(1, position, valid.flatten(1).int())[:, : tokens.shape[1]] > 0

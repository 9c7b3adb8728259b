"""The payloads that travel between the stages.

Shape legend: B sequences in a micro-batch, S padded length, K captured layers, H hidden size of the target,
N block slots (anchors) a sequence, b block size, P drafter parameters, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor

__all__ = [
    "AcceptanceCounts",
    "Conversations",
    "FeatureBatch",
    "Gradients",
    "Parameters",
    "Partial",
    "TokenBatch",
    "TokenRows",
]


class Payload:
    """A frozen dataclass of tensors, other payloads and plain values."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in it."""
        return sum(_bytes(getattr(self, name)) for name in _names(self))


def _names(payload: Payload) -> list[str]:
    return [field.name for field in dataclasses.fields(cast(Any, payload))]


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor | Payload | np.ndarray):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(_bytes, value))
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return 0


@dataclass(frozen=True)
class TokenBatch(Payload):
    """A micro-batch of right-padded rows.

    input_ids: [B, S] int64. loss_mask: [B, S] bool, positions whose token is supervised (False on padding).
    lengths: [B] int64, real tokens in each row. sample: [B] int64, row numbers in the data set (keys of randomness).
    epoch: the epoch the rows are read in. progress: (before, after): shares of the whole training, 0..1, that
    precede this micro-batch and that include it.
    real, supervised: real tokens and supervised ones, counted by whoever made the batch (None: not counted), so that
    nobody has to look at the tensors for it.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    sample: Tensor
    epoch: int = 0
    progress: tuple[float, float] = (0.0, 0.0)
    real: int | None = None
    supervised: int | None = None

    @property
    def measures(self) -> dict[str, float]:
        """How large it is: rows, padded (tokens, padding included) and what was counted; without a look at the data."""
        rows, length = self.input_ids.shape
        counted = {"tokens": self.real, "supervised": self.supervised}
        known = {name: float(count) for name, count in counted.items() if count is not None}
        return {"rows": float(rows), "padded": float(rows * length), **known}


@dataclass(frozen=True)
class FeatureBatch(Payload):
    """A micro-batch with what the frozen target computed from it.

    hidden: [B, S, K·H] in the target's dtype: outputs of the K captured layers, concatenated in the order of their ids.
    """

    tokens: TokenBatch
    hidden: Tensor

    @property
    def measures(self) -> dict[str, float]:
        """Those of its tokens."""
        return self.tokens.measures


@dataclass(frozen=True)
class Partial(Payload):
    """One fixed share of a window: sums over the micro-batches i with i mod partials = its number, in input order.

    gradient: [P] float32, gradient of the *summed* weighted loss. sums: [3 + 2·b + 2] float64 counters, laid out by
    `stages.dflash_loss.Sums`.
    """

    gradient: Tensor
    sums: Tensor


@dataclass(frozen=True)
class Gradients(Payload):
    """What one drafter replica accumulated over a window.

    partials: number of the partial -> its sums; replica k of r holds the numbers congruent to k mod r.
    progress: (before the first, after the last) micro-batch of the window that this replica saw.
    """

    partials: dict[int, Partial]
    progress: tuple[float, float]


@dataclass(frozen=True)
class Parameters(Payload):
    """The drafter's weights after a step.

    flat: [P] in the drafter's compute dtype, laid out as `stages.dflash_model.parameter_layout` says.
    step: optimizer steps done. metrics: name -> 0-d tensor or number of the step that made them (empty at the start).
    """

    flat: Tensor
    step: int
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Conversations(Payload):
    """Chat rows as text, on their way to whoever turns them into tokens.

    rows: each {"id": str, "messages": [{"role": str, "content": str}, ...], ...}; further keys are carried along by
    nobody and may be anything. dropped: reason -> rows that the sender read and left out since its previous payload.
    """

    rows: list[dict[str, Any]]
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class TokenRows(Payload):
    """Rows as exact token ids, unpadded, on their way to a file.

    ids: one name a row. input_ids: per row [length] int32. loss_mask: per row [length] bool, the supervised tokens.
    dropped: reason -> rows left out since the previous payload, the sender's own and those reported to it.
    """

    ids: list[str]
    input_ids: list[np.ndarray]
    loss_mask: list[np.ndarray]
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class AcceptanceCounts(Payload):
    """How far a drafter's blocks were accepted along the responses of a micro-batch.

    tokens, verifications: [W] int64 for each of W responses: tokens emitted after its first one, and target passes that
    emitted them. accepted: [b] int64, passes by the number of drafted tokens they accepted (0..b-1). offered: [b]
    int64, passes in which slot k had a token of the response to be compared with (slot 0, the anchor: all of them).
    unverified: responses of a single token, which no pass was needed for.
    """

    tokens: Tensor
    verifications: Tensor
    accepted: Tensor
    offered: Tensor
    unverified: int = 0

"""The drafter's step: forward and backward of one micro-batch, its gradients summed over the window.

Shape legend: B sequences, S padded length, N blocks a sequence, b block size, H hidden size, P parameters.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

from dflash_pipe import BadInput, Context, Stage, Stamp
from dflash_pipe.errors import nearest
from stages.anchors import draw_anchors
from stages.dflash_loss import LossConfig, Sums, Supervision, auto_gamma, block_inputs, block_loss
from stages.dflash_masks import ATTENTION, resolve_attention
from stages.dflash_model import DFlashModel, DrafterKeys, flatten
from stages.messages import FeatureBatch, Gradients, Parameters, Partial
from stages.target_model import load_frozen, resolve_dtype

__all__ = ["DrafterStep"]

# Rows that meet the head at once. Few on a CPU, whose caches are small; many on a GPU, whose products want size.
_CHUNK = {"cpu": 128, "cuda": 2048}


class DrafterStep(Stage):
    """Accumulate the gradient of the summed loss over a window, in `partials` fixed shares.

    Micro-batch `slot` of a window goes to partial `slot mod partials`; replica k of r holds the partials congruent to
    k mod r. A partial is therefore the same sum in the same order whoever computes it. The loss is not divided here:
    the optimizer knows the weight of the whole window.

    The first fields say what the drafter is (`DrafterKeys`); the others:
    num_anchors: blocks a sequence at most. partials: sums of a window, a multiple of the drafter's replicas, and the
    same number wherever results are to be equal. gamma: decay in slots, null: none, "auto": by the block size (7 for
    16).
    loss: "dflash" or "dpace", with its alpha and kind of weight (`LossConfig`). attention: "auto", "flex", "sdpa",
    "eager". ce_chunk: rows that meet the head at once (null: by device). dtype: of the computation; "auto" is float32
    on a CPU and bfloat16 on a GPU. The sums are float32 always.
    """

    target: str
    revision: str | None = None
    layers: int | list[int] = 5
    num_layers: int = 5
    block_size: int = 16
    mask_token_id: int | str = "auto"
    sliding_window: int | None = None
    sliding_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    feature_std: str | None = None
    final_norm_init: float = 1.0
    dtype: str = "auto"
    weights: str = "pretrained"
    num_anchors: int = 512
    gamma: float | str | None = "auto"
    loss: str = "dflash"
    alpha: float = 0.5
    dpace: str = "suffix"
    partials: int = 1
    attention: str = "auto"
    ce_chunk: int | None = None

    def check(self, replicas: int) -> None:
        self.architecture().check()
        self._loss_config()
        if self.partials < 1 or self.partials % replicas:
            raise BadInput(
                f"partials is {self.partials}, expected a multiple of the drafter's {replicas} replicas "
                "(micro-batch i of a window is summed into partial i mod partials)"
            )
        if self.num_anchors < 1:
            raise BadInput(f"num_anchors is {self.num_anchors}, expected at least 1")
        if self.ce_chunk is not None and self.ce_chunk < 1:
            raise BadInput(f"ce_chunk is {self.ce_chunk}, expected at least 1 row")
        if self.attention not in ("auto", *ATTENTION):
            raise BadInput(f"attention is {self.attention!r}{nearest(self.attention, ('auto', *ATTENTION))}")

    def architecture(self) -> DrafterKeys:
        """The fields that say what the drafter is."""
        names = [field.name for field in dataclasses.fields(DrafterKeys)]
        return DrafterKeys(**{name: getattr(self, name) for name in names})

    def _loss_config(self) -> LossConfig:
        if isinstance(self.gamma, str) and self.gamma != "auto":
            raise BadInput(f'gamma is {self.gamma!r}, expected a number of slots, null or "auto"')
        gamma = auto_gamma(self.block_size) if isinstance(self.gamma, str) else self.gamma
        return LossConfig(self.loss, gamma, self.alpha, self.dpace)

    def open(self, ctx: Context) -> None:
        self._ctx = ctx
        self._device = torch.device(ctx.device)
        dtype = resolve_dtype(self.dtype, self._device)
        self.config = self.architecture().resolve()
        self._model = DFlashModel(self.config, device="meta")
        self._flat = flatten(self._model, self._device, dtype)
        self._frozen = load_frozen(self.target, self.revision, dtype, self._device, self.weights)
        self._loss = self._loss_config()
        self._attention = resolve_attention(self.attention, self._device, self.config.head_dim)
        self._chunk = self.ce_chunk or _CHUNK.get(self._device.type, _CHUNK["cuda"])
        self._mine = range(ctx.replica, self.partials, ctx.replicas)
        self._step: int | None = None
        if self._device.type == "cuda":
            self._warm_up()
        self._begin_window()

    def _warm_up(self) -> None:
        """Build the kernels now, while no other stage computes: a batch of one row is a kernel of its own."""
        length, blocks = 300, 512 // self.block_size + 1
        for rows in (2, 1):
            context = self._flat.values.new_zeros(rows, length, self.config.feature_size)
            embeds = self._flat.values.new_zeros(rows, blocks * self.block_size, self.config.hidden_size)
            anchors = torch.arange(blocks, device=self._device).expand(rows, -1) + 100
            hidden = self._model(embeds, context, anchors, anchors > 0, self._attention)
            hidden.sum().backward()
        self._model.zero_grad(set_to_none=True)

    def _begin_window(self) -> None:
        self._partials: dict[int, Partial] = {}
        # Neutral in min and max, for a replica that a short last window leaves without a micro-batch.
        self._progress = (math.inf, -math.inf)

    def _partial(self, number: int) -> Partial:
        """The sums of a partial: fresh memory at its first use, because the last window's has been given away."""
        if number not in self._partials:
            gradient = torch.zeros(self._flat.size, dtype=torch.float32, device=self._device)
            self._partials[number] = Partial(gradient, Sums.zeros(self.block_size, self._device).vector)
        return self._partials[number]

    def process(self, features: FeatureBatch, params: Parameters, stamp: Stamp) -> None:
        number = stamp.slot % self.partials
        if number not in self._mine:
            raise RuntimeError(
                f"micro-batch {stamp.slot} of its window belongs to partial {number}, "
                f"which replica {self._ctx.replica} of {self._ctx.replicas} does not hold: deal the drafter round robin"
            )
        if params.step != self._step:
            self._flat.load(params.flat)
            self._step = params.step
        if features.hidden.shape[-1] != self.config.feature_size:
            raise BadInput(
                f"the target's hidden states are {features.hidden.shape[-1]} wide, "
                f"expected {len(self.config.target_layer_ids)} layers of {self.config.hidden_size}: "
                "give stages target and drafter the same layers"
            )
        before, after = features.tokens.progress
        self._progress = (min(self._progress[0], before), max(self._progress[1], after))
        self._accumulate(features, self._partial(number))

    def _accumulate(self, features: FeatureBatch, partial: Partial) -> None:
        tokens = features.tokens
        anchors, keep = draw_anchors(
            tokens.loss_mask, tokens.lengths, tokens.sample, tokens.epoch, self._ctx.seed, self.num_anchors
        )
        # Used blocks come first in every row: the longest row says how many slots are needed.
        slots = max(1, int(keep.sum(1).max()))
        anchors, keep = anchors[:, :slots], keep[:, :slots]
        supervision = Supervision.of(tokens.input_ids, tokens.loss_mask, anchors, keep, self.block_size, self._loss)
        ids = block_inputs(tokens.input_ids, anchors, self.config.mask_token_id, self.block_size)
        embeds = F.embedding(ids.flatten(1), self._frozen.embed)
        self._flat.sum_gradients_into(partial.gradient)
        hidden = self._model(embeds, features.hidden, anchors, keep, self._attention)
        loss, sums = block_loss(hidden, self._frozen.head, supervision, self._loss, self._chunk)
        loss.backward()
        partial.sums.add_(sums.vector)

    def end_window(self) -> Gradients:
        gradients = Gradients({number: self._partial(number) for number in self._mine}, self._progress)
        self._flat.sum_gradients_into(None)
        self._begin_window()
        return gradients

"""The drafter's step: forward and backward of one micro-batch, its gradients summed over the window.

Shape legend: B sequences, S padded length, N blocks a sequence, b block size, H hidden size, P parameters.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F

from dflash_pipe import BadInput, Context, Footprint, Stage, Stamp
from stages.anchors import draw_anchors
from stages.dflash_config import MOST_ANCHORS, ArchitectureKeys
from stages.dflash_loss import (
    DpaceWeight,
    Loss,
    LossConfig,
    Sums,
    Supervision,
    auto_gamma,
    block_inputs,
    block_loss,
    frozen_head_cross_entropy,
)
from stages.dflash_masks import Attention, resolve_attention
from stages.dflash_model import DFlashModel, DrafterKeys, flatten
from stages.footprints import drafter_step_bytes, parameter_count
from stages.frozen import load_frozen
from stages.messages import FeatureBatch, Gradients, Parameters, Partial
from stages.model_source import text_config
from stages.target_model import resolve_dtype

__all__ = ["DrafterStep"]

# Rows that meet the head at once. Few on a CPU, whose caches are small; on a GPU so many that the tiles of the product
# with the head's columns come out even (33 tiles of 128 rows for 132 processors).
_CHUNK = {"cpu": 128, "cuda": 4224}


class DrafterStep(ArchitectureKeys, Stage):
    """Accumulate the gradient of the summed loss over a window, in `partials` fixed shares.

    Micro-batch `slot` of a window goes to partial `slot mod partials`; replica k of r holds the partials congruent to
    k mod r. A partial is therefore the same sum in the same order whoever computes it. The loss is not divided here:
    the optimizer knows the weight of the whole window.

    The first fields say what the drafter is (`ArchitectureKeys`); the others:
    num_anchors: blocks a sequence at most. partials: sums of a window, a multiple of the drafter's replicas, and the
    same number wherever results are to be equal. gamma: decay in slots, null: none, "auto": by the block size (7 for
    16).
    loss: "dflash" or "dpace", with its alpha and kind of weight (`LossConfig`); that of "dpace" is a sum over a
    sequence, so it grows with the blocks. attention: "auto", "fused" (all of a layer in kernels of our own, and the
    loss too), "flex", "sdpa", "eager". ce_chunk: rows that meet the head at once (null: by device). dtype: of the
    computation; "auto" is float32 on a CPU and bfloat16 on a GPU. The sums are float32 always.
    """

    untimed = ("gamma", "alpha", "partials")
    num_anchors: int = 512
    gamma: float | Literal["auto"] | None = "auto"
    loss: Loss = "dflash"
    alpha: float = 0.5
    dpace: DpaceWeight = "suffix"
    partials: int = 1
    attention: Attention = "auto"
    ce_chunk: int | None = None

    def check(self, replicas: int) -> None:
        self.architecture().check()
        self._loss_config()
        if self.loss == "dflash" and (self.alpha, self.dpace) != (type(self).alpha, type(self).dpace):
            raise BadInput("alpha and dpace are of loss: dpace, and this is loss: dflash")
        if self.loss == "dpace" and self.gamma not in ("auto", None):
            raise BadInput("gamma is of loss: dflash, and this is loss: dpace, which has alpha")
        if self.partials < 1 or self.partials % replicas:
            raise BadInput(
                f"partials is {self.partials}, expected a multiple of {replicas}, the drafter's replicas "
                "(micro-batch i of a window is summed into partial i mod partials)"
            )
        if not 1 <= self.num_anchors <= MOST_ANCHORS:
            raise BadInput(f"num_anchors is {self.num_anchors}, expected 1..{MOST_ANCHORS}")
        if self.ce_chunk is not None and self.ce_chunk < 1:
            raise BadInput(f"ce_chunk is {self.ce_chunk}, expected at least 1 row")

    def architecture(self) -> DrafterKeys:
        """The fields that say what the drafter is."""
        names = [field.name for field in dataclasses.fields(DrafterKeys)]
        return DrafterKeys(**{name: getattr(self, name) for name in names})

    def _loss_config(self) -> LossConfig:
        gamma = auto_gamma(self.block_size) if self.gamma == "auto" else self.gamma
        return LossConfig(self.loss, gamma, self.alpha, self.dpace)

    def _resolved(self, device: torch.device, head_dim: int) -> tuple[Attention, int]:
        """The attention, and how many rows meet the head at once."""
        if self.attention == "flex" and device.type != "cuda":
            raise BadInput("attention is 'flex', which trains on a CUDA device only")
        chunk = self.ce_chunk or _CHUNK.get(device.type, _CHUNK["cuda"])
        return resolve_attention(self.attention, device, head_dim), chunk

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Weights, the frozen matrices, one step of the largest micro-batch, and the gradient sums that it sends."""
        config, dtype = self.architecture().sizes(), resolve_dtype(self.dtype, ctx.device)
        matrices = 1 if text_config(self.target, self.revision).tie_word_embeddings else 2
        frozen = matrices * config.vocab_size * config.hidden_size * dtype.itemsize
        shapes = told["features"] or []
        parameters = parameter_count(config)
        attention, chunk = self._resolved(torch.device(ctx.device), config.head_dim)
        fused, dense = attention == "fused", attention in ("sdpa", "eager")
        step = drafter_step_bytes(config, shapes, self.num_anchors, dtype, fused=fused, dense=dense)
        logits = dtype.itemsize + (0 if fused else 4)  # and their probabilities, in float32
        return Footprint(
            held={"weights": parameters * dtype.itemsize, "frozen embedding and head": frozen},
            working={
                f"step of {self.num_anchors} blocks a row": step,
                "logits": chunk * config.vocab_size * logits,
            },
            window_sent=4 * parameters * len(range(ctx.replica, self.partials, ctx.replicas)),
            told=shapes,
        )

    def open(self, ctx: Context) -> None:
        self._ctx = ctx
        self._device = torch.device(ctx.device)
        dtype = resolve_dtype(self.dtype, self._device)
        self.config = self.architecture().resolve()
        self._model = DFlashModel(self.config, device="meta")
        self._flat = flatten(self._model, self._device, dtype)
        self.frozen = load_frozen(self.target, self.revision, dtype, self._device, self.weights)
        self._loss = self._loss_config()
        self._attention, self._chunk = self._resolved(self._device, self.config.head_dim)
        self._plain = self._attention != "fused"
        self._mine = range(ctx.replica, self.partials, ctx.replicas)
        self._step: int | None = None
        if ctx.replica == 0:
            layers = ", ".join(map(str, self.config.target_layer_ids))
            mask = self.config.mask_token_id
            size = f"{self._flat.size:,} parameters"
            print(f"drafter: {size}, MASK is token {mask}, target layers {layers}, {self._attention} attention")
        if self._device.type == "cuda":
            self._warm_up()
        self._begin_window()

    def _warm_up(self) -> None:
        """Build the kernels now, while no other stage computes: a batch of one row is a kernel of its own."""
        length, blocks = 300, 512 // self.block_size + 1
        labels = torch.arange(2, device=self._device)
        for rows in (2, 1):
            context = self._flat.values.new_zeros(rows, length, self.config.feature_size)
            embeds = self._flat.values.new_zeros(rows, blocks * self.block_size, self.config.hidden_size)
            anchors = torch.arange(blocks, device=self._device).expand(rows, -1) + 100
            hidden = self._model(embeds, context, anchors, anchors > 0, self._attention, alike=True, rows=labels)
            entropy, _ = frozen_head_cross_entropy(hidden, self.frozen.head, labels, len(labels), self._plain)
            entropy.sum().backward()
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
                f"expected {len(self.config.target_layer_ids)} x {self.config.hidden_size} (layers x hidden size): "
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
        self._anchors = slots * len(anchors)
        supervision = Supervision.of(tokens.input_ids, tokens.loss_mask, anchors, keep, self.block_size, self._loss)
        ids = block_inputs(tokens.input_ids, anchors, self.config.mask_token_id, self.block_size)
        embeds = F.embedding(ids.flatten(1), self.frozen.embed)
        self._flat.sum_gradients_into(partial.gradient)
        hidden = self._model(embeds, features.hidden, anchors, keep, self._attention, alike=True, rows=supervision.rows)
        loss, sums = block_loss(hidden, self.frozen.head, supervision, self._loss, self._chunk, self._plain)
        loss.backward()
        partial.sums.add_(sums.vector)

    @property
    def measures(self) -> dict[str, float]:
        """anchors: block slots that the last micro-batch was computed with, in all rows together."""
        return {"anchors": float(self._anchors)}

    def end_window(self) -> Gradients:
        gradients = Gradients({number: self._partial(number) for number in self._mine}, self._progress)
        self._flat.sum_gradients_into(None)
        self._begin_window()
        return gradients

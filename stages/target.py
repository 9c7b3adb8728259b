"""The stage that runs the frozen target over a micro-batch and keeps the hidden states the drafter conditions on."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from dflash_pipe import BadInput, Context, Footprint, Stage
from stages.footprints import feature_bytes, forward_bytes
from stages.messages import FeatureBatch, TokenBatch
from stages.model_source import Weights, text_config
from stages.sized_models import refuse_weights
from stages.target_model import Dtype, load_truncated, resolve_dtype, resolve_layers, weight_count
from stages.tuning import prepare_kernels

__all__ = ["TargetForward"]


class TargetForward(Stage):
    """Run the target up to its highest captured layer.

    model: directory, hub id, `package:smollm2`, `tiny:NAME`, or `sizes:NAME` (an architecture alone, for weights:
    random). revision: of a hub id. layers: how many layers are captured, or their ids. dtype: "auto" is float32 on a
    CPU and bfloat16 on a GPU. weights: "random" takes fixed random ones from the config alone, to measure without a
    checkpoint. forward: "fused" runs the layers as fused kernels on a GPU, where there are kernels for them; "plain" as
    transformers does. shapes: [[rows, padded length], ...] that most micro-batches will have; on a GPU each is tuned
    and captured in a CUDA graph at the start, which changes no result and spares the host nearly all of its work.
    packed: compute real tokens only, no padding; for the fused layers, without `shapes`. A test at the start makes sure
    that rows which are packed together do not change each other.
    """

    model: str
    revision: str | None = None
    layers: int | list[int] = 5
    dtype: Dtype = "auto"
    weights: Weights = "pretrained"
    forward: Literal["fused", "plain"] = "fused"
    shapes: list[list[int]] | None = None
    packed: bool = False

    def check(self, replicas: int) -> None:
        refuse_weights(self.model, self.weights)
        for shape in self.shapes or ():
            if len(shape) != 2 or min(shape) < 1:
                raise BadInput(f"shapes: {shape} is no shape, expected [rows, padded length] such as [3, 2048]")
        if self.packed and self.shapes:
            raise BadInput("packed: not together with shapes, since CUDA graphs need shapes that are always the same")
        if self.packed and self.forward == "plain":
            raise BadInput("packed: needs the fused layers; here: forward: plain")

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Weights up to the highest captured layer; the graphs of `shapes`, and a forward pass of the largest other
        micro-batch; or what loading needs, if that is more. told: the shapes of the micro-batches. Packed, they need
        no more: what attention pads again is less than the MLP's part of a forward pass."""
        if self.packed and ctx.device == "cpu":
            raise BadInput("packed: needs the fused layers; here: no GPU")
        config, dtype = text_config(self.model, self.revision), resolve_dtype(self.dtype, ctx.device)
        width = len(resolve_layers(self.layers, config.num_hidden_layers)) * config.hidden_size
        on_gpu = ctx.device != "cpu"
        asked = self.shapes if self.shapes and on_gpu and self.forward == "fused" and dtype != torch.float32 else []
        held, captured = {}, sorted({(rows, length) for rows, length in asked}, key=math.prod)
        if captured:  # they share the memory of the largest; the ids of each have their own
            most = math.prod(captured[-1])
            memory = forward_bytes(config, captured[-1], dtype.itemsize) + most * width * dtype.itemsize
            held["graphs of " + _tokens(captured[-1])] = memory + 8 * sum(map(math.prod, captured))
        shapes = told["batch"] or []
        eager = max({*shapes, *captured} - set(captured[-1:]), key=math.prod, default=(0, 0))
        working = {"forward pass of " + _tokens(eager): forward_bytes(config, eager, dtype.itemsize)}
        loading = self._loading_numbers(config, on_gpu) * dtype.itemsize
        if loading > sum(held.values()) + sum(working.values()):
            held, working = {}, {"matrices that loading drops again": loading}
        held["weights"] = weight_count(self.model, self.revision, self.layers, ctx.device) * dtype.itemsize
        head = config.vocab_size * config.hidden_size * dtype.itemsize
        host = {"weights, as they are read": held["weights"] + head} if on_gpu and self.weights == "pretrained" else {}
        largest = max(shapes, key=math.prod, default=(0, 0))
        sent = feature_bytes(largest, width, dtype.itemsize)
        return Footprint(held, working, host=host, sent=sent, told=shapes)

    def _loading_numbers(self, config: Any, on_gpu: bool) -> int:
        """Numbers on the device only while the target is loaded, each matrix [V, H] (see `load_truncated`): of a random
        one the lm_head and a copy of the embedding; a checkpoint is read on the CPU, with an lm_head."""
        matrix: int = config.vocab_size * config.hidden_size
        if self.weights == "random":
            return matrix if config.tie_word_embeddings else 2 * matrix
        return 0 if on_gpu else matrix

    def open(self, ctx: Context) -> None:
        if self.weights == "random" and ctx.replica == 0:
            print(f"RANDOM WEIGHTS: target {self.model!r} has learned nothing, what is trained for it is worthless")
        plain = self.forward == "plain"
        where = self.model, self.revision, self.layers, self.dtype, ctx.device, self.weights
        self._target = load_truncated(*where, plain=plain)
        self._checked = False
        on_gpu, more, self._captured = ctx.device.startswith("cuda"), "", 0
        prepare_kernels(ctx)
        if self.packed:
            self._target.pack()
        elif on_gpu:
            self._captured = self._target.prepare([(rows, length) for rows, length in self.shapes or ()])
            more = f", {self._captured} shapes in CUDA graphs"
        if on_gpu and ctx.replica == 0:
            print(f"target: {self._target.forward}{more}")

    def process(self, batch: TokenBatch) -> FeatureBatch:
        """[B, S] token ids -> [B, S, K·H] hidden states. Raises `BadInput` for ids outside the target's vocabulary."""
        self._check_ids(batch)
        return FeatureBatch(tokens=batch, hidden=self._target(batch.input_ids, batch.lengths, batch.real))

    def _check_ids(self, batch: TokenBatch) -> None:
        # On a GPU only the first batch: looking at the data means waiting for the device.
        if self._checked and batch.input_ids.is_cuda:
            return
        self._checked = True
        lowest, highest = int(batch.input_ids.min()), int(batch.input_ids.max())
        last = self._target.vocab_size - 1
        if lowest < 0 or highest > last:
            raise BadInput(
                f"token ids {lowest}..{highest} do not fit target {self.model!r}, which has 0..{last}: "
                "was the data prepared with another model's tokenizer?"
            )

    def finish(self) -> None:
        replayed, others = self._target.counted
        if self._captured:
            print(f"target: micro-batches in the shapes of its CUDA graphs: {replayed}, in others: {others}")
        spared, tokens = self._target.spared
        if tokens:
            print(f"target: tokens of padding, not computed: {spared:,} of {tokens:,} ({spared / tokens:.1%})")

    def close(self) -> None:
        self._target = None  # type: ignore[assignment]


def _tokens(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]} tokens"

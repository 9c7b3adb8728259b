"""The stage that runs the frozen target over a micro-batch and keeps the hidden states the drafter conditions on."""

from __future__ import annotations

import torch

from dflash_pipe import BadInput, Context, Stage
from stages.autotune import make_thread_safe
from stages.messages import FeatureBatch, TokenBatch
from stages.target_model import Dtype, Weights, load_truncated
from stages.tuning import keep_tuning, tuning_file

__all__ = ["TargetForward"]


class TargetForward(Stage):
    """Run the target up to its highest captured layer.

    model: directory, hub id, `package:smollm2` or `tiny:NAME`. revision: of a hub id. layers: how many layers are
    captured, or their ids. dtype: "auto" is float32 on a CPU and bfloat16 on a GPU.
    weights: "random" takes fixed random ones from the config alone, to measure without a checkpoint.
    """

    model: str
    revision: str | None = None
    layers: int | list[int] = 5
    dtype: Dtype = "auto"
    weights: Weights = "pretrained"

    def open(self, ctx: Context) -> None:
        self._target = load_truncated(self.model, self.revision, self.layers, self.dtype, ctx.device, self.weights)
        self._checked = False
        if ctx.device.startswith("cuda"):
            make_thread_safe()
            keep_tuning(tuning_file(ctx.folder), torch.cuda.get_device_name(ctx.device))

    def process(self, batch: TokenBatch) -> FeatureBatch:
        """[B, S] token ids -> [B, S, K·H] hidden states. Raises `BadInput` for ids outside the target's vocabulary."""
        self._check_ids(batch)
        return FeatureBatch(tokens=batch, hidden=self._target(batch.input_ids, batch.lengths))

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

    def close(self) -> None:
        self._target = None  # type: ignore[assignment]

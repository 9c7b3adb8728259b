"""The stage that measures how widely each feature of the target's hidden states is spread.

Middle layers have a few features that are a hundred times larger than the rest; a drafter whose first projection
starts scaled by 1/std of each feature is not drowned by them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_pipe import BadInput, Context, Footprint, Stage
from stages.messages import FeatureBatch
from stages.model_source import text_config
from stages.target_model import resolve_layers
from stages.tensor_files import save_tensors

__all__ = ["FILE", "FeatureStatistics"]

FILE = "feature_std.safetensors"


class FeatureStatistics(Stage):
    """Standard deviation of every feature over the real tokens, accumulated in float64.

    Writes `feature_std.safetensors` to the run's folder when the stream ends: tensor `std` [K·H] float32 (0 for a
    feature that never varies), and in its metadata `layers` (a JSON list of the K layer ids), `hidden_size`,
    `target` and `tokens`.

    target, revision, layers: the same as those of the stage that makes the features.
    """

    target: str
    revision: str | None = None
    layers: int | list[int] = 5

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Two float64 numbers a feature; while it adds a row, that in float64 and its distances from the mean."""
        config = text_config(self.target, self.revision)
        features = len(resolve_layers(self.layers, config.num_hidden_layers)) * config.hidden_size
        longest = max((length for _, length in told["features"] or ()), default=0)
        return Footprint({"sums": 16 * features}, {"a row": 8 * features * (2 * longest + 4)})

    def open(self, ctx: Context) -> None:
        config = text_config(self.target, self.revision)
        self._layers = resolve_layers(self.layers, config.num_hidden_layers)
        self._hidden_size: int = config.hidden_size
        self._folder = Path(ctx.folder)
        self._tokens = 0
        features = len(self._layers) * self._hidden_size
        self._mean = torch.zeros(features, dtype=torch.float64, device=ctx.device)
        self._squares = torch.zeros_like(self._mean)  # sum of squared distances from the mean

    @torch.no_grad()
    def process(self, features: FeatureBatch) -> None:
        """Add a micro-batch. Raises `BadInput` where its features are not those of the layers given here."""
        hidden = features.hidden
        if hidden.shape[-1] != len(self._mean):
            raise BadInput(
                f"layers: features are {hidden.shape[-1]} wide, but {len(self._layers)} x {self._hidden_size} "
                f"(layers x hidden size) make {len(self._mean)}; give this stage the same layers as the target"
            )
        for row, length in zip(hidden, features.tokens.lengths.tolist(), strict=True):
            self._add(row[:length].double())

    def _add(self, values: Tensor) -> None:
        """Join the moments of [n, K·H] values to those seen so far (Chan, Golub and LeVeque's update)."""
        count = len(values)
        if count == 0:
            return
        total, mean = self._tokens + count, values.mean(0)
        distance = mean - self._mean
        self._squares += (values - mean).square_().sum(0) + distance.square() * (self._tokens * count / total)
        self._mean += distance * (count / total)
        self._tokens = total

    def finish(self) -> None:
        """Write the file. Raises `BadInput` if no token was seen."""
        if not self._tokens:
            raise BadInput("no token was seen, so there is nothing to measure")
        std = (self._squares / self._tokens).sqrt().float().cpu()
        metadata = {
            "layers": json.dumps(self._layers),
            "hidden_size": str(self._hidden_size),
            "target": self.target,
            "tokens": str(self._tokens),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"{FILE}.unfinished"
        save_tensors({"std": std}, unfinished, metadata)
        unfinished.rename(self._folder / FILE)

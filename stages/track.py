"""The stage that turns the numbers an optimizer step made into the run's metrics."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dflash_pipe import Context, Footprint, Stage
from stages.messages import Parameters

__all__ = ["Track"]


class Track(Stage):
    """Report `step` and the metrics of every step, as plain numbers; weights that no step made have none."""

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Next to nothing."""
        return Footprint()

    def open(self, ctx: Context) -> None:
        self.ctx = ctx

    def process(self, params: Parameters) -> None:
        if params.metrics:
            self.ctx.report({"step": params.step, **{name: _plain(value) for name, value in params.metrics.items()}})


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value

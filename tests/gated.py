"""A target whose first message is held back until a message of the next window has passed: completion order, forced."""

from __future__ import annotations

import threading

from dflash_pipe import Context, Stamp
from stages.messages import FeatureBatch, TokenBatch
from stages.target import TargetForward

_overtaken: dict[str, threading.Event] = {}


class GatedTarget(TargetForward):
    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._window = ctx.window
        self._event = _overtaken.setdefault(str(ctx.folder), threading.Event())

    def process(self, batch: TokenBatch, stamp: Stamp) -> FeatureBatch:  # type: ignore[override]
        if stamp.index == 0:
            assert self._event.wait(60)
        features = super().process(batch)
        if stamp.index >= self._window:
            self._event.set()
        return features

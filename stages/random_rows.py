"""A data stage for measurements: micro-batches of one shape, filled with random tokens, without any file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dflash_pipe import BadInput, Context, Footprint, Source, refuse_other_form
from dflash_pipe.errors import BadSnapshot
from stages.footprints import token_bytes
from stages.messages import TokenBatch

__all__ = ["RandomTokens"]


class RandomTokens(Source[TokenBatch]):
    """Send micro-batches of random token ids. Nothing can be learned from them: they are for measurements only.

    What is in a micro-batch depends on the graph's seed and on its place in the stream alone, so a resumed run goes on
    as if it had not been interrupted. The cursor is {done, of}: micro-batches behind us, and the settings, and a cursor
    made under other ones is refused.

    vocabulary: ids are below it; the target's. rows, length: of every micro-batch. steps: optimizer steps. window:
    micro-batches in a step, the graph's own key. supervised: share of each row that is supervised, at its end.
    target, revision: the model that will read the tokens, which must have all of `vocabulary` (null: not looked at).
    """

    untimed = ("steps", "target", "revision")
    vocabulary: int
    rows: int
    length: int
    steps: int
    window: int = 1
    supervised: float = 1.0
    target: str | None = None
    revision: str | None = None

    def check(self, replicas: int) -> None:
        for name, least in (("vocabulary", 1), ("rows", 1), ("length", 2), ("steps", 1), ("window", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}, expected at least {least}")
        if not 0 < self.supervised <= 1 or self._trained() < 2:
            raise BadInput(
                f"supervised is {self.supervised}, expected a share of at least 2 of {self.length} tokens, at most 1"
            )

    def _trained(self) -> int:
        return round(self.supervised * self.length)

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Raises `BadInput` for a vocabulary that is larger than the target's."""
        if self.target is not None:
            self._refuse_more_than(self.target)
        shape = (self.rows, self.length)
        return Footprint(sent=token_bytes(shape), told=[shape])

    def _refuse_more_than(self, target: str) -> None:
        from stages.model_source import text_config  # here: transformers takes seconds to import

        has = text_config(target, self.revision).vocab_size
        if self.vocabulary > has:
            raise BadInput(f"vocabulary is {self.vocabulary}, expected at most {has}: target {target!r} has no more")

    def open(self, ctx: Context) -> None:
        self._seed = ctx.seed
        names = ("vocabulary", "rows", "length", "supervised")
        self._of = {"seed": ctx.seed, **{name: getattr(self, name) for name in names}}

    def read(self, cursor: Any) -> Iterator[tuple[Any, TokenBatch | None]]:
        """Yield the micro-batches after `cursor`. Raises `BadSnapshot` for a cursor of other settings."""
        total = self.steps * self.window
        if cursor is not None:
            refuse_other_form({"done": range(1, total + 1), "of": {}}, cursor, "cursor")
            if cursor["of"] != self._of:
                raise BadSnapshot(f"cannot go on: it is of random tokens with {cursor['of']}, here {self._of}")
        for number in range(cursor["done"] if cursor else 0, total):
            yield {"done": number + 1, "of": self._of}, self._batch(number)

    def _batch(self, number: int) -> TokenBatch:
        draws = np.random.Philox(key=np.array((self._seed, number), dtype=np.uint64))
        ids = (draws.random_raw(self.rows * self.length) % np.uint64(self.vocabulary)).astype(np.int64)
        mask = torch.zeros(self.rows, self.length, dtype=torch.bool)
        mask[:, self.length - self._trained() :] = True
        total = self.steps * self.window
        return TokenBatch(
            input_ids=torch.from_numpy(ids).view(self.rows, self.length),
            loss_mask=mask,
            lengths=torch.full((self.rows,), self.length),
            sample=torch.arange(number * self.rows, (number + 1) * self.rows),
            progress=(number / total, (number + 1) / total),
            real=self.rows * self.length,
            supervised=self.rows * self._trained(),
        )

    def account(self, read: Any, done: Any) -> str:
        """Every random row that was sent is finished, or was in flight at the end."""
        if read is None:
            return ""
        sent, finished = (at["done"] * self.rows if at else 0 for at in (read, done))
        return f"rows: {sent:,} random = {finished:,} finished + {sent - finished:,} in flight"

"""The data stage: cut tokenised rows into micro-batches, once and for all topologies, and know where it stands.

Batches are a pure function of (rows, settings, seed, epoch): see `stages.batches`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dflash_pipe import BadInput, Context, Footprint, Source, exactly, refuse_other_form
from dflash_pipe.errors import BadSnapshot
from stages.arrow_rows import ArrowRows, recipe_of
from stages.batches import Cut, Epoch
from stages.footprints import token_bytes
from stages.messages import TokenBatch

__all__ = ["TokenBatches"]

log = logging.getLogger("dflash_pipe")

_LOOKED_AT = 4096  # rows of another model's tokens; what is in no such row is found by the target


class TokenBatches(Source[TokenBatch]):
    """Read tokenised rows and send them as padded micro-batches.

    A row without two adjacent supervised tokens (after truncation) can have no anchor: it is dropped and counted at
    the beginning of each epoch. Every other row is in exactly one batch of each epoch. The cursor is {plan, epoch,
    batch, done, short, rows, tokens}: `plan` is a digest of what decides the batches, and a cursor made under another
    one is refused. rows: read = batched + dropped; tokens: real and padded; short: batches with fewer rows than their
    bucket has.

    path: an Arrow IPC file or a folder of them (see `stages.arrow_rows`). max_tokens: budget of a micro-batch, rows
    times padded length. max_length: longer rows lose their tail, and so do rows longer than the whole budget (counted
    as truncated). max_rows: at most so many rows in a micro-batch (null: as many as fit). epochs: times every row is
    read; null: as often as `steps` takes. steps: end after so many optimizer steps (null: when the epochs end).
    window: micro-batches in a step, the graph's own key. sort_pool: rows sorted by length together. pad_to_multiple:
    lengths are padded to a multiple of it (fewer shapes for compiled kernels). buckets: lengths that rows are padded
    to, each with a fixed number of rows, so that nearly all micro-batches have one of so few shapes; max_length (or
    max_tokens, if less) is always the longest of them (null: a row is padded to the longest of its micro-batch).
    target, revision: the model that will read the tokens; rows that say they were made for another one are looked
    through for ids that it does not have (null: they are not).
    """

    untimed = ("epochs", "steps", "target", "revision")
    path: str
    max_tokens: int
    max_length: int = 3072
    max_rows: int | None = None
    epochs: int | None = 1
    steps: int | None = None
    window: int = 1
    sort_pool: int = 4096
    pad_to_multiple: int = 1
    buckets: list[int] | None = None
    target: str | None = None
    revision: str | None = None

    def check(self, replicas: int) -> None:
        at_least_one = ("max_tokens", "max_length", "max_rows", "epochs", "steps", "window", "sort_pool")
        for name in (*at_least_one, "pad_to_multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} is {value}, expected at least 1")
        if self.epochs is None and self.steps is None:
            raise BadInput("epochs and steps are both null: nothing says when to end")
        if self.pad_to_multiple > self.max_tokens:
            raise BadInput(f"pad_to_multiple is {self.pad_to_multiple}, more than max_tokens ({self.max_tokens})")
        if min(self.max_length, self.max_tokens) < 2:
            raise BadInput("max_length and max_tokens must be at least 2: a draft needs an anchor and a token after it")
        self._check_buckets()

    def _check_buckets(self) -> None:
        if self.buckets is None:
            return
        if not self.buckets or min(self.buckets) < 2 or self.buckets != sorted(set(self.buckets)):
            raise BadInput(
                f"buckets are {self.buckets}, expected increasing lengths such as [512, 1024, 2048], or null"
            )
        if self.pad_to_multiple > 1:
            raise BadInput(f"buckets are given, and pad_to_multiple is {self.pad_to_multiple}: expected one of the two")

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """told: (rows, padded length) of the first epoch's micro-batches, each once. Looks at no more than lengths,
        unless the rows were made for another target. Raises `BadInput` for ids that the target does not have."""
        self._open_rows()
        self._refuse_foreign_ids()
        rows = np.flatnonzero(self.lengths > 1)
        shapes = self.cut.shapes(self.cut.epoch(rows, self.lengths[rows], (ctx.seed, 0)), self.lengths)
        return Footprint(sent=max(map(token_bytes, shapes), default=0), told=shapes)

    def _made_for_another(self) -> str | None:
        """The model with whose tokenizer the rows say they were made, if that is not the target."""
        made_for: str | None = recipe_of(self.path).get("tokenizer")
        return None if self.target in (None, made_for) else made_for

    def _refuse_foreign_ids(self) -> None:
        made_for = self._made_for_another()
        if self.target is None or made_for is None:
            return
        # Imported here: transformers takes seconds to import, and rows of the target's own do not need it.
        from stages.model_source import text_config

        last = text_config(self.target, self.revision).vocab_size - 1
        lowest, highest = self.rows.id_range(_LOOKED_AT, self.limit)
        if lowest < 0 or highest > last:
            raise BadInput(
                f"path: {self.path} was made with the tokenizer of {made_for!r}: its token ids {lowest}..{highest} "
                f"do not fit target {self.target!r}, which has 0..{last}"
            )

    def _open_rows(self) -> None:
        self.rows = ArrowRows(self.path)
        budget = self.max_tokens // self.pad_to_multiple * self.pad_to_multiple
        self.limit = min(self.max_length, budget)
        buckets = () if self.buckets is None else (*(n for n in self.buckets if n < self.limit), self.limit)
        self.cut = Cut(self.max_tokens, self.max_rows, self.sort_pool, self.pad_to_multiple, buckets)
        self.lengths = np.minimum(self.rows.lengths, self.limit)

    def open(self, ctx: Context) -> None:
        self.check(replicas=1)
        self.ctx = ctx
        self._open_rows()
        if made_for := self._made_for_another():
            log.warning("%s was made with the tokenizer of %s; the target is %s", self.path, made_for, self.target)
        usable = self.rows.usable(self.limit)
        self.kept = np.flatnonzero(usable)
        if not len(self.kept):
            raise BadInput(
                f"{self.path}: none of its rows ({len(self.rows)}) has two adjacent supervised tokens"
                f" among its first {self.limit} (is loss_mask all zero?)"
            )
        self.dropped = {
            "empty": int((self.rows.lengths == 0).sum()),
            "no two adjacent supervised tokens": int((~usable & (self.rows.lengths > 0)).sum()),
        }
        self.plan = self._digest()
        self.behind = self._count()
        self.total = self.behind[-1]

    def _digest(self) -> str:
        settings = [
            self.max_tokens,
            self.max_length,
            self.max_rows,
            self.sort_pool,
            self.pad_to_multiple,
            self.cut.buckets,
            self.ctx.seed,
        ]
        digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8)
        digest.update(self.rows.lengths.tobytes())
        digest.update(self.kept.tobytes())
        return digest.hexdigest()

    def _epoch(self, number: int) -> Epoch:
        return self.cut.epoch(self.kept, self.lengths[self.kept], (self.ctx.seed, number))

    def _count(self) -> list[int]:
        """Micro-batches at the beginning of each epoch, and of the whole training: the epochs' or the steps', whichever
        end first."""
        limit = math.inf if self.steps is None else self.steps * self.window
        behind = [0]
        while (self.epochs is None or len(behind) <= self.epochs) and behind[-1] < limit:
            behind.append(int(min(behind[-1] + len(self._epoch(len(behind) - 1)), limit)))
        return behind

    def read(self, cursor: Any) -> Iterator[tuple[Any, TokenBatch | None]]:
        """Yield the batches after `cursor`. Raises `BadSnapshot` for a cursor of other data or settings."""
        at = self._resume(cursor)
        while at["done"] < self.total:
            epoch = self._epoch(at["epoch"])
            if at["batch"] == 0:
                self._meet_dropped(at["rows"])
            while at["batch"] < len(epoch) and at["done"] < self.total:
                yield self._next(epoch, at)
            self._report(at, len(epoch))
            if at["batch"] == len(epoch):
                at["epoch"], at["batch"] = at["epoch"] + 1, 0

    def account(self, read: Any, done: Any) -> str:
        """Every row that was read is finished, dropped, or was in flight at the end; how much was padding.

        Raises RuntimeError if the rows do not add up.
        """
        if read is None:
            return ""
        trained = done["rows"]["batched"] if done else 0
        dropped = {reason: count for reason, count in read["rows"]["dropped"].items() if count}
        in_flight = read["rows"]["batched"] - trained
        reasons = f" ({', '.join(f'{reason}: {count:,}' for reason, count in dropped.items())})" if dropped else ""
        line = (
            f"rows: {read['rows']['read']:,} read = {trained:,} finished + {sum(dropped.values()):,} dropped{reasons}"
        )
        if read["rows"]["read"] != trained + sum(dropped.values()) + in_flight or in_flight < 0:
            raise RuntimeError(f"{line} + {in_flight:,} in flight does not add up")
        return "\n".join([f"{line} + {in_flight:,} in flight", *self._padding(done)])

    def _padding(self, done: Any) -> Iterator[str]:
        """One line on the padding in what was finished."""
        if not done:
            return
        real, padded = done["tokens"]["real"], done["tokens"]["padded"]
        line = f"tokens: {real:,} finished + {padded - real:,} of padding ({1 - real / padded:.1%} of all)"
        if self.cut.buckets:
            shapes = len(self.cut.shapes(self._epoch(0), self.lengths))
            line += f"; shapes: {shapes}, {done['short']:,} of {done['done']:,} micro-batches short of rows"
        yield line

    def _resume(self, cursor: Any) -> dict[str, Any]:
        rows = {"read": 0, "batched": 0, "truncated": 0, "dropped": dict.fromkeys(self.dropped, 0)}
        at = {"plan": self.plan, "epoch": 0, "batch": 0, "done": 0, "short": 0, "rows": rows}
        at["tokens"] = {"real": 0, "padded": 0}
        if cursor is not None:
            self._refuse_foreign(cursor, at)
            at = json.loads(json.dumps(cursor))  # a copy that shares nothing
        return at

    def _refuse_foreign(self, cursor: Any, start: dict[str, Any]) -> None:
        """Raise BadSnapshot for a cursor that is not made like that of the start, or cannot follow from it."""
        refuse_other_form(start, cursor, "cursor")
        if cursor["plan"] != self.plan:
            raise BadSnapshot(
                f"cannot go on in {self.path}: the rows, the seed or one of max_tokens, max_length, max_rows,"
                " sort_pool, pad_to_multiple, buckets is another than when the snapshot was written"
            )
        refuse_other_form({"epoch": range(len(self.behind) - 1)}, cursor, "cursor")
        before, after = self.behind[cursor["epoch"] :][:2]
        refuse_other_form({"batch": range(1, after - before + 1)}, cursor, "cursor")
        rows, dropped = cursor["rows"], cursor["rows"]["dropped"]
        refuse_other_form(dict.fromkeys(dropped, 0), dropped, "cursor.rows.dropped")
        read = exactly(rows["batched"] + sum(dropped.values()))
        sums = {"done": exactly(before + cursor["batch"]), "rows": {"read": read}}
        refuse_other_form(sums, cursor, "cursor")

    def _next(self, epoch: Epoch, at: dict[str, Any]) -> tuple[Any, TokenBatch]:
        progress = (at["done"] / self.total, (at["done"] + 1) / self.total)
        batch = self._batch(epoch.batch(at["batch"]), at["epoch"], progress)
        size, padded = batch.input_ids.shape
        at["batch"] += 1
        at["done"] += 1
        at["short"] += bool(self.cut.buckets) and size < self.cut.rows(padded)
        at["rows"]["read"] += size
        at["rows"]["batched"] += size
        at["rows"]["truncated"] += int((self.rows.lengths[batch.sample.numpy()] > self.limit).sum())
        at["tokens"]["real"] += int(batch.lengths.sum())
        at["tokens"]["padded"] += size * padded
        counts = {**at["rows"], "dropped": dict(at["rows"]["dropped"])}
        return {**at, "rows": counts, "tokens": dict(at["tokens"])}, batch

    def _batch(self, rows: np.ndarray, epoch: int, progress: tuple[float, float]) -> TokenBatch:
        lengths = self.lengths[rows]
        padded = int(self.cut.padded(lengths.max()))
        ids = np.zeros((len(rows), padded), dtype=np.int64)
        mask = np.zeros((len(rows), padded), dtype=bool)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids[place, :length] = self.rows.ids(row, self.limit)
            mask[place, :length] = self.rows.mask(row, self.limit)
        return TokenBatch(
            input_ids=torch.from_numpy(ids),
            loss_mask=torch.from_numpy(mask),
            lengths=torch.from_numpy(lengths),
            sample=torch.from_numpy(rows.copy()),  # no view: it would keep the whole epoch's array alive
            epoch=epoch,
            progress=progress,
            real=int(lengths.sum()),
            supervised=int(mask.sum()),
        )

    def _meet_dropped(self, rows: dict[str, Any]) -> None:
        for reason, count in self.dropped.items():
            rows["dropped"][reason] += count
            rows["read"] += count

    def _report(self, at: dict[str, Any], batches: int) -> None:
        rows, tokens = at["rows"], at["tokens"]
        reasons = {f"rows_dropped.{reason.replace(' ', '_')}": n for reason, n in rows["dropped"].items() if n}
        self.ctx.report(
            {
                "epoch": at["epoch"] + at["batch"] / batches,
                "rows_read": rows["read"],
                "rows_batched": rows["batched"],
                "rows_truncated": rows["truncated"],
                "rows_dropped": sum(rows["dropped"].values()),
                **reasons,
                "tokens": tokens["real"],
                "padding_share": 1 - tokens["real"] / tokens["padded"],
            }
        )

"""Preparing data is a graph too: read conversations, turn them into tokens (here, or by the target's own answers:
`stages.regenerate`), write them to Arrow files that say how they were made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from dflash_pipe import BadInput, Context, Footprint, Source, Stage, refuse_other_form
from dflash_pipe.errors import BadSnapshot, Missing, nearest_file
from stages.arrow_rows import recipe_of
from stages.arrow_shards import assemble, copy_rows, shard_totals, write_shard
from stages.chat_tokens import ChatTokens, fingerprint
from stages.conversations import parse_conversation
from stages.messages import Conversations, TokenRows
from stages.model_source import load_tokenizer

__all__ = ["ArrowWriter", "JsonlConversations", "Tokenise"]

FORMAT = 1  # goes up whenever the same conversations would become other rows
_FURTHER_ROW = re.compile(r"#\d+$")  # Regenerate's second, third, ... row of one conversation stays beside its first
SHARD_TOKENS = 1 << 23  # tokens held in memory before a shard is written
_PART = 1 << 20  # bytes


class JsonlConversations(Source[Conversations]):
    """Read conversations from a JSON Lines file (forms: see `stages.conversations`).

    The cursor is {line, offset, rows, size, digest}: lines and bytes behind us, rows sent; the file's size and a digest
    of the bytes behind us, and a cursor into a file that has changed is refused.

    path: the file. split: only rows whose `split` is this, the others are counted (null: all). limit: at most so many
    rows. batch: rows in a message.
    """

    untimed = ("limit",)
    path: str
    split: str | None = None
    limit: int | None = None
    batch: int = 64

    def check(self, replicas: int) -> None:
        for name in ("batch", "limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(f"{name} is {value}, expected at least 1")

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Some text. told: rows in a message, at most. Raises `Missing` where there is no file."""
        self._find()
        return Footprint(told=self.batch)

    def open(self, ctx: Context) -> None:
        self._find()

    def _find(self) -> None:
        path = Path(self.path)
        if not path.exists():
            raise Missing(f"path: no conversations at {path}{nearest_file(path)}")
        if not path.is_file():
            raise BadInput(f"path: {path} is a folder, expected a JSON Lines file")

    def read(self, cursor: Any) -> Iterator[tuple[Any, Conversations | None]]:
        """Yield the rows after `cursor`. Raises `BadInput` for a malformed line and if there is no row at all, and
        `BadSnapshot` for a cursor into a file that was another."""
        at: dict[str, Any] = {"line": 0, "offset": 0, "rows": 0}
        if cursor is not None:
            refuse_other_form({**at, "size": 0, "digest": ""}, cursor, "cursor")
            at |= cursor
        rows: list[dict[str, Any]] = []
        other = 0
        with open(self.path, "rb") as file:
            behind = self._digest_behind(file, at)
            for line in file:
                if self.limit is not None and at["rows"] >= self.limit:
                    break
                behind.update(line)
                at["line"] += 1
                at["offset"] += len(line)
                if not line.strip():
                    continue
                row = self._row(line, at["line"])
                if row is None:
                    other += 1
                    continue
                rows.append(row)
                at["rows"] += 1
                if len(rows) == self.batch:
                    yield {**at, "digest": behind.hexdigest()}, self._message(rows, other)
                    rows, other = [], 0
        if not at["rows"]:
            raise BadInput(f"{self.path}: no conversations" + (f" of split {self.split!r}" if other else ""))
        if rows or other:
            yield {**at, "digest": behind.hexdigest()}, self._message(rows, other)

    def _digest_behind(self, file: IO[bytes], at: dict[str, Any]) -> Any:
        """Move to where the cursor points and put the file's size into it; a hash of the bytes before."""
        behind, size = hashlib.blake2b(digest_size=8), os.fstat(file.fileno()).st_size
        while part := file.read(min(_PART, at["offset"] - file.tell())):
            behind.update(part)
        if "digest" in at and (at["size"], at["digest"]) != (size, behind.hexdigest()):
            raise BadSnapshot(f"cannot go on in {self.path}: it has changed since the snapshot was written")
        at["size"] = size
        return behind

    def _message(self, rows: list[dict[str, Any]], other: int) -> Conversations:
        return Conversations(rows=rows, dropped={"of another split": other} if other else {})

    def _row(self, line: bytes, number: int) -> dict[str, Any] | None:
        row = parse_conversation(line, f"{self.path}:{number}")
        if self.split is None or row["split"] == self.split:
            return row
        if row["split"] is None:
            raise BadInput(f"no 'split', but split {self.split!r} is asked for", f"{self.path}:{number}")
        return None


class Tokenise(Stage):
    """Turn conversations that have answers into tokens; what is supervised: see `stages.chat_tokens`.

    Rows without any supervised token are dropped by reason.

    model, revision: whose tokenizer and template. thinking: the template's `enable_thinking` (null: not passed).
    max_length: longer rows lose their tail.
    """

    model: str
    revision: str | None = None
    thinking: bool | None = None
    max_length: int = 3072

    def check(self, replicas: int) -> None:
        if self.max_length < 1:
            raise BadInput(f"max_length is {self.max_length}, expected at least 1")

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Some text. Raises `BadInput` where the model has no tokenizer, or none with a template."""
        self._chat()
        return Footprint()

    def _chat(self) -> ChatTokens:
        return ChatTokens(load_tokenizer(self.model, self.revision), self.thinking)

    def open(self, ctx: Context) -> None:
        self.ctx = ctx
        self.chat = self._chat()
        self.counts: Counter[str] = Counter()

    def process(self, conversations: Conversations) -> TokenRows:
        dropped = Counter(conversations.dropped)
        ids: list[str] = []
        tokens: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        for row in conversations.rows:
            try:
                row_tokens, mask, unsupervised = self.chat.encode(row["messages"])
            except BadInput as error:
                dropped[str(error)] += 1
                continue
            self.counts["turns_unsupervised"] += unsupervised
            self.counts["rows_truncated"] += len(row_tokens) > self.max_length
            reason = self._reason(row["messages"], mask)
            if reason:
                dropped[reason] += 1
                continue
            ids.append(row["id"])
            tokens.append(row_tokens[: self.max_length])
            masks.append(mask[: self.max_length])
        return TokenRows(ids=ids, input_ids=tokens, loss_mask=masks, dropped=dict(dropped))

    def _reason(self, messages: list[dict[str, str]], mask: np.ndarray) -> str | None:
        if all(message["role"] != "assistant" for message in messages):
            return "no assistant turn"
        if not mask.any():
            return "no token that was decoded in this form"
        return None if mask[: self.max_length].any() else "answer begins behind max_length"

    def finish(self) -> None:
        self.ctx.report(dict(self.counts))


class ArrowWriter(Stage):
    """Write token rows to train.arrow and eval.arrow in a folder, with a summary.txt in words beside them.

    Shards gather in its `.unfinished-*` and become the files at the end, also where the run is stopped; a resumed run
    goes on with the rows that its snapshot knows, and replaces the files. A data set that says it was made in another
    way is not overwritten. A row is held out by a digest of (seed, id): rows of one id stay on one side, whatever else
    is there.

    path: the folder. tokenizer, revision: the model whose tokens these are. thinking, max_length: as they were made.
    responses: "given", or "target" where the target wrote them greedily. held_out: the share of rows that goes to
    eval.arrow. recipe: anything else that decides the rows; recorded in the files, as are the keys before. overwrite:
    replace whatever data set is there.
    """

    path: str
    tokenizer: str
    revision: str | None = None
    thinking: bool | None = None
    max_length: int | None = None
    responses: Literal["given", "target"] = "given"
    held_out: float = 0.0
    recipe: dict[str, Any] | None = None
    overwrite: bool = False

    def check(self, replicas: int) -> None:
        if not 0 <= self.held_out < 1:
            raise BadInput(f"held_out is {self.held_out}, expected a share from 0 to below 1")
        if self.max_length is not None and self.max_length < 1:
            raise BadInput(f"max_length is {self.max_length}, expected at least 1")

    def open(self, ctx: Context) -> None:
        self.ctx = ctx
        self.folder = Path(self.path)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{self.folder} cannot be the folder to write to ({error.strerror})") from None
        self.made = self._made()
        self.staging = self.folder / f".unfinished-{self.made['key']}"
        self._refuse_other_data()
        self.shards: list[dict[str, Any]] = []
        self.dropped: Counter[str] = Counter()
        self.pending: dict[str, list[tuple[np.ndarray, np.ndarray, str]]] = {"train": [], "eval": []}
        self.waiting = 0

    def _made(self) -> dict[str, Any]:
        made = {
            "format": FORMAT,
            "tokenizer": self.tokenizer,
            "revision": self.revision,
            **fingerprint(load_tokenizer(self.tokenizer, self.revision)),
            "thinking": self.thinking,
            "max_length": self.max_length,
            "responses": self.responses,
            "held_out": self.held_out,
            "seed": self.ctx.seed,
            "recipe": self.recipe or {},
        }
        key = hashlib.blake2b(json.dumps(made, sort_keys=True).encode(), digest_size=8).hexdigest()
        return {**made, "key": key}

    def _refuse_other_data(self) -> None:
        for name in ("train.arrow", "eval.arrow"):
            file = self.folder / name
            if self.overwrite or not file.exists():
                continue
            there = recipe_of(file)
            if there.get("key") != self.made["key"]:
                differs = [k for k in self.made if k != "key" and there.get(k) != self.made[k]]
                what = f"{differs[0]} {there.get(differs[0])!r} there, {self.made[differs[0]]!r} here" if there else "?"
                raise BadInput(f"{file} holds another data set ({what}): choose another path or set overwrite: true")

    def process(self, rows: TokenRows) -> None:
        self.dropped.update(rows.dropped)
        for name, ids, mask in zip(rows.ids, rows.input_ids, rows.loss_mask, strict=True):
            self.pending["eval" if self._is_held_out(name) else "train"].append((ids, mask, name))
            self.waiting += len(ids)
        if self.waiting >= SHARD_TOKENS:
            self._flush()

    def _is_held_out(self, name: str) -> bool:
        name = _FURTHER_ROW.sub("", name)
        digest = hashlib.blake2b(f"{self.ctx.seed}:{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self.held_out * 2**64

    def _flush(self) -> None:
        """Write what is pending as shards."""
        self.staging.mkdir(parents=True, exist_ok=True)
        for split, rows in self.pending.items():
            if not rows:
                continue
            start = shard_totals(self.shards, split)["rows"]
            name = f"{split}-{start}-{start + len(rows)}.arrow"  # decides its rows, whoever wrote it
            self.shards.append({"name": name, "split": split, "start": start, **write_shard(self.staging / name, rows)})
            rows.clear()
        self.waiting = 0

    def state(self) -> dict[str, Any]:
        self._flush()
        return {"key": self.made["key"], "shards": list(self.shards), "dropped": dict(self.dropped)}

    def restore(self, state: dict[str, Any]) -> None:
        own = {"name": "", "split": "", "start": 0, "rows": 0, "tokens": 0, "supervised": 0}
        refuse_other_form({"key": "", "shards": [own], "dropped": {}}, state, "state")
        refuse_other_form(dict.fromkeys(state["dropped"], 0), state["dropped"], "state.dropped")
        if state["key"] != self.made["key"]:
            raise BadSnapshot(f"{self.path}: the snapshot belongs to rows that are made in another way")
        self.shards, self.dropped = list(state["shards"]), Counter(state["dropped"])
        self.staging.mkdir(parents=True, exist_ok=True)
        for shard in self.shards:
            if not (self.staging / shard["name"]).exists():
                self._recover(shard)

    def _recover(self, shard: dict[str, Any]) -> None:
        """A shard that `finish` of a stopped run has put into its whole file already."""
        whole = self.folder / f"{shard['split']}.arrow"
        try:
            if not whole.exists() or recipe_of(whole).get("key") != self.made["key"]:
                raise IndexError(f"{whole} is not of this run")
            copy_rows(whole, shard["start"], shard["start"] + shard["rows"], self.staging / shard["name"])
        except IndexError as error:
            raise BadSnapshot(f"cannot go on: shard {self.staging / shard['name']} is gone, and {error}") from None

    def finish(self) -> None:
        """Put the shards together, also those of a stopped run. Raises `BadInput` if no row has a supervised token."""
        self._flush()
        total = shard_totals(self.shards)
        if not total["rows"] and not self.dropped:
            return  # stopped before anything was read
        if not shard_totals(self.shards, "train")["supervised"]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            raise BadInput(f"{self.path}: no row to train on has a supervised token (dropped: {reasons or 'none'})")
        for split in ("eval", "train"):  # train last: where it is, everything is
            files = [self.staging / shard["name"] for shard in self.shards if shard["split"] == split]
            if files:
                made = {**self.made, "split": split, **shard_totals(self.shards, split), "dropped": dict(self.dropped)}
                assemble(files, self.folder / f"{split}.arrow", made)
            else:
                (self.folder / f"{split}.arrow").unlink(missing_ok=True)  # of an overwritten data set
        (self.folder / "summary.txt").write_text(self._summary(), encoding="utf-8")
        shutil.rmtree(self.staging)
        by_reason = {f"rows_dropped.{reason.replace(' ', '_')}": count for reason, count in self.dropped.items()}
        dropped = self.dropped.total()
        counts = {"rows_read": total["rows"] + dropped, "rows_written": total["rows"], "rows_dropped": dropped}
        self.ctx.report(counts | by_reason)

    def _summary(self) -> str:
        dropped = self.dropped.total()
        lines = [f"rows: {shard_totals(self.shards)['rows'] + dropped} read, {dropped} dropped"]
        lines += [f"  {count:>8} {reason}" for reason, count in self.dropped.most_common()]
        for split in ("train", "eval"):
            total = shard_totals(self.shards, split)
            share = total["supervised"] / max(total["tokens"], 1)
            lines.append(f"{split}: rows: {total['rows']}, tokens: {total['tokens']}, {share:.1%} supervised")
        for key in ("tokenizer", "revision", "template", "thinking", "max_length", "responses", "seed"):
            lines.append(f"{key}: {self.made[key]}")
        return "\n".join(lines) + "\n"

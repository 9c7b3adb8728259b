"""A conversation as token ids and the mask of what the model itself would have decoded in it.

The mask is made from token positions, never from a search in text. A turn's supervised span begins where decoding
begins (behind the generation prompt, which may hold an empty thinking block) and ends with the token that ends the
turn. It comes from the template's `{% generation %}` markers if it has them; otherwise the rendered row is compared
with the row as it was when the turn began and when it ended. A turn that the template renders in another way once the
conversation has gone on (Qwen3 takes earlier thinking out) was never decoded in this form: without markers it is left
unsupervised, and counted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import jinja2
import numpy as np

from dflash_pipe import BadInput

__all__ = ["ChatTokens", "fingerprint"]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the same test as the tokenizer's own
Messages = list[dict[str, str]]


class ChatTokens:
    """Renders conversations with a tokenizer's template. thinking: passed on as `enable_thinking` unless it is None."""

    def __init__(self, tokenizer: Any, thinking: bool | None = None) -> None:
        if not isinstance(getattr(tokenizer, "chat_template", None), str):
            raise BadInput("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._options = {} if thinking is None else {"enable_thinking": thinking}
        self._has_markers = bool(_MARKER.search(tokenizer.chat_template))
        added = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
        self._special = added | set(tokenizer.all_special_ids)

    def encode(self, messages: Messages) -> tuple[np.ndarray, np.ndarray, int]:
        """([S] int32 ids, [S] bool mask, assistant turns left unsupervised).

        Raises `BadInput` where the template refuses the conversation.
        """
        ids, marked = self._render(messages, markers=self._has_markers)
        row = np.array(ids, dtype=np.int32)
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        if marked is None:
            spans = self._compared_spans(messages, row, turns)
        else:
            spans = self._marked_spans(messages, row, turns, _runs(marked))
        mask = np.zeros(len(row), dtype=bool)
        found = 0
        for start, stop in spans:
            mask[start:stop] = True
            found += start < stop
        return row, mask, max(len(turns) - found, 0)

    def prompt(self, messages: Messages) -> np.ndarray:
        """[S] int32 ids up to where decoding the next assistant turn begins."""
        return np.array(self._render(messages, prompt=True)[0], dtype=np.int32)

    def _render(
        self, messages: Messages, prompt: bool = False, markers: bool = False
    ) -> tuple[list[int], list[int] | None]:
        try:
            out = self._tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=markers,
                **self._options,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadInput(f"the chat template refuses it ({type(error).__name__}: {error})") from error
        return out["input_ids"], out["assistant_masks"] if markers else None

    def _compared_spans(self, messages: Messages, row: np.ndarray, turns: list[int]) -> Iterator[tuple[int, int]]:
        for turn in turns:
            before = self.prompt(messages[:turn])
            after = row
            if turn + 1 < len(messages):
                after = np.array(self._render(messages[: turn + 1])[0], dtype=np.int32)
            if _is_prefix(before, after) and _is_prefix(after, row):
                yield len(before), self._end(row, len(before), len(after))

    def _end(self, row: np.ndarray, start: int, stop: int) -> int:
        """The end of a turn that fills [start, stop): behind its last special token if only white space follows."""
        last = next((k for k in range(stop - 1, start - 1, -1) if int(row[k]) in self._special), None)
        if last is None or self._tokenizer.decode(row[last + 1 : stop].tolist()).strip():
            return stop
        return last + 1

    def _marked_spans(
        self, messages: Messages, row: np.ndarray, turns: list[int], runs: list[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """The runs between the markers, without what the generation prompt holds, with the token that ends the turn."""
        own = len(runs) == len(turns)  # each run is a turn; otherwise a turn has several and they stay as they are
        for k, (start, stop) in enumerate(runs):
            if own:
                before = self.prompt(messages[: turns[k]])
                if start < len(before) <= stop and _is_prefix(before, row):
                    start = len(before)
            closed = stop > start and int(row[stop - 1]) in self._special
            if not closed and stop < len(row) and int(row[stop]) in self._special:
                stop += 1
            yield start, stop


def _is_prefix(part: np.ndarray, whole: np.ndarray) -> bool:
    return len(part) <= len(whole) and bool((whole[: len(part)] == part).all())


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of every run of ones."""
    edges = np.flatnonzero(np.diff(np.array([0, *mask, 0]))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def fingerprint(tokenizer: Any) -> dict[str, str]:
    """Digests of a tokenizer's vocabulary and of its chat template, to be compared between data, training and use."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    template = getattr(tokenizer, "chat_template", None) or ""
    return {"vocabulary": _short(vocabulary), "template": _short(json.dumps(template))}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

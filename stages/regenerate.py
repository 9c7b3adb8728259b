"""The stage that lets the target write the responses: prompts in, exact token ids out.

A drafter learns to predict the target, so it is trained on what the target itself says, token by token. What the
target generated is never turned into text and back: a row is prompt ids, generated ids, and so on through the turns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jinja2.exceptions import TemplateError
from transformers import GenerationConfig

from dflash_pipe import BadInput, Context, Footprint, Stage
from stages.footprints import forward_bytes
from stages.messages import Conversations, TokenRows
from stages.model_source import load_tokenizer, text_config
from stages.target_model import Dtype, load_full, resolve_dtype, weight_count
from stages.tuning import prepare_kernels

__all__ = ["Regenerate"]


@dataclass
class _Dialogue:
    """One conversation while it is answered. segments: what is said before each answer, earliest first."""

    id: str
    segments: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""  # of the open part: what the template makes of it, the last answer included
    ids: list[int] = field(default_factory=list)  # of the open part
    loss_mask: list[bool] = field(default_factory=list)
    parts: list[tuple[list[int], list[bool]]] = field(default_factory=list)  # closed parts

    def close_part(self) -> None:
        if self.ids:
            self.parts.append((self.ids, self.loss_mask))
        self.text, self.ids, self.loss_mask = "", [], []


class Regenerate(Stage):
    """Answer every user turn of a conversation with the target's own greedy words, in order, a payload as one batch.

    Responses that came with the conversation are left out. The loss mask is set from the first generated token
    through the end token. Where the chat template rewrites history (it drops an earlier turn's thinking, say), the
    next turn starts a further row `id#2`, `id#3`, ..., so that each row is exactly what a server would have seen.

    model, revision: the target. max_new_tokens: of one answer; an answer cut there ends its conversation.
    max_prompt_tokens: conversations with a longer first prompt are dropped and counted; a later turn that would be
    longer ends its conversation. thinking: passed to the template as `enable_thinking` (None: not passed).
    dtype: "auto" is float32 on a CPU and bfloat16 on a GPU.
    Reports rows, generated_tokens, cut_answers and turns_left_out since the run began.
    """

    model: str
    revision: str | None = None
    max_new_tokens: int = 1024
    max_prompt_tokens: int = 2048
    thinking: bool | None = None
    dtype: Dtype = "auto"

    def check(self, replicas: int) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}: expected at least 1, got {getattr(self, name)}")

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Weights; keys and values of the longest answers to the longest prompts, those of one layer twice, because
        they grow by being copied; what reading the prompts needs, its mask as bytes and as numbers. A checkpoint is
        read on the CPU. told: conversations in a message."""
        config, dtype = text_config(self.model, self.revision), resolve_dtype(self.dtype, ctx.device)
        rows, longest = told["conversations"] or 0, self.max_prompt_tokens + self.max_new_tokens
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * size
        cached = 2 * (config.num_hidden_layers + 1) * keys * longest * dtype.itemsize
        prompt = forward_bytes(config, (1, self.max_prompt_tokens), dtype.itemsize)
        prompt += self.max_prompt_tokens**2 * (1 + dtype.itemsize)
        # Logits are searched in float32; ids and their mask are copied with each token.
        tokens = config.vocab_size * (dtype.itemsize + 4) + longest * 32
        weights = weight_count(self.model, self.revision, None, ctx.device) * dtype.itemsize
        return Footprint(
            held={"weights": weights},
            working={
                f"keys and values of {rows} x {longest} tokens": rows * cached,
                f"prompts of {rows} x {self.max_prompt_tokens} tokens": rows * (prompt + tokens),
            },
            host={"weights, as they are read": 0 if ctx.device == "cpu" else weights},
        )

    def open(self, ctx: Context) -> None:
        """Load tokenizer and model. Raises `BadInput` for a target without a chat template or too short a context."""
        self._ctx = ctx
        self._counts = Counter[str]()
        self._tokenizer = load_tokenizer(self.model, self.revision)
        template = self._tokenizer.chat_template
        if template is None:
            raise BadInput(f"target {self.model!r}: its tokenizer has no chat template, so it cannot answer prompts")
        if self.thinking is not None and "enable_thinking" not in str(template):
            raise BadInput(f"thinking: the chat template of target {self.model!r} has no such switch; leave it out")
        self._model = load_full(self.model, self.revision, self.dtype, ctx.device)
        prepare_kernels(ctx)
        longest = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if longest is not None and self.max_prompt_tokens + self.max_new_tokens > longest:
            raise BadInput(
                f"max_prompt_tokens + max_new_tokens = {self.max_prompt_tokens + self.max_new_tokens}, but target "
                f"{self.model!r} has a context of {longest} tokens"
            )
        self._end, self._pad = self._end_ids()
        # Replaces the model's own defaults, which may sample or penalise repetition.
        greedy: Any = GenerationConfig
        self._model.generation_config = greedy(
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=sorted(self._end),
            pad_token_id=self._pad,
        )

    def _end_ids(self) -> tuple[set[int], int]:
        """The tokens that end an answer, and the padding token."""
        end: set[int] = set()
        for value in (self._model.generation_config.eos_token_id, self._tokenizer.eos_token_id):
            end.update([] if value is None else [value] if isinstance(value, int) else value)
        if not end:
            raise BadInput(f"target {self.model!r}: neither its generation config nor its tokenizer has an end token")
        pad = self._tokenizer.pad_token_id
        return end, min(end) if pad is None else pad

    def process(self, conversations: Conversations) -> TokenRows:
        """Conversations as text -> rows of exact token ids. Raises `BadInput` where the template refuses a row."""
        dropped, counts = Counter(conversations.dropped), self._counts
        dialogues = [d for row in conversations.rows if (d := _dialogue(row, dropped)) is not None]
        turn, live = 0, dialogues
        while live:
            live = self._prompt(live, turn, dropped, counts)
            answers = self._generate([d.ids for d in live]) if live else []
            for dialogue, answer in zip(live, answers, strict=True):
                self._take(dialogue, answer, turn, counts)
            turn += 1
            live = [d for d in live if d.ids and turn < len(d.segments)]
        return self._rows(dialogues, dropped, counts)

    def _prompt(self, live: list[_Dialogue], turn: int, dropped: Counter[str], counts: Counter[str]) -> list[_Dialogue]:
        """Append what is said before answer number `turn` to every dialogue; return those short enough to go on."""
        texts = []
        for dialogue in live:
            dialogue.messages += dialogue.segments[turn]
            text = self._render(dialogue)
            if not (dialogue.text and text.startswith(dialogue.text)):
                dialogue.close_part()
            texts.append(text[len(dialogue.text) :])
            dialogue.text = text
        goes_on = []
        for dialogue, added in zip(live, self._tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
            if len(dialogue.ids) + len(added) <= self.max_prompt_tokens:
                dialogue.ids += added
                dialogue.loss_mask += [False] * len(added)
                goes_on.append(dialogue)
            elif turn == 0:
                dropped["prompt over max_prompt_tokens"] += 1
            else:
                counts["turns_left_out"] += len(dialogue.segments) - turn
                dialogue.close_part()
        return goes_on

    def _render(self, dialogue: _Dialogue) -> str:
        switch = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            text: str = self._tokenizer.apply_chat_template(
                dialogue.messages, tokenize=False, add_generation_prompt=True, **switch
            )
        except (TemplateError, TypeError, KeyError) as error:
            complaint = BadInput(f"the chat template of target {self.model!r} refuses it: {error}")
            raise complaint.at(f"row {dialogue.id}") from error
        return text

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """The greedy continuation of each prompt, through its end token or max_new_tokens long."""
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), self._pad, dtype=np.int64)
        real = np.zeros((len(prompts), width), dtype=np.int64)
        for i, prompt in enumerate(prompts):  # padded on the left: every row's next token is in the last column
            ids[i, width - len(prompt) :] = prompt
            real[i, width - len(prompt) :] = 1
        device = self._ctx.device
        output = self._model.generate(
            input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(real).to(device)
        )
        written = output[:, width:].cpu().numpy()
        ends = np.isin(written, sorted(self._end))
        lengths = np.where(ends.any(1), ends.argmax(1) + 1, written.shape[1])
        return [row[:length].tolist() for row, length in zip(written, lengths, strict=True)]

    def _take(self, dialogue: _Dialogue, answer: list[int], turn: int, counts: Counter[str]) -> None:
        """Add an answer to its dialogue; one without an end token is its last."""
        dialogue.ids += answer
        dialogue.loss_mask += [True] * len(answer)
        counts["generated_tokens"] += len(answer)
        if answer[-1] in self._end:
            said = self._tokenizer.decode(answer[:-1], skip_special_tokens=True)
            dialogue.messages.append({"role": "assistant", "content": said})
            dialogue.text += self._tokenizer.decode(answer, skip_special_tokens=False)
        else:
            counts["cut_answers"] += 1
            counts["turns_left_out"] += len(dialogue.segments) - turn - 1
            dialogue.close_part()

    def _rows(self, dialogues: list[_Dialogue], dropped: Counter[str], counts: Counter[str]) -> TokenRows:
        rows = TokenRows(ids=[], input_ids=[], loss_mask=[], dropped=dict(dropped))
        for dialogue in dialogues:
            dialogue.close_part()
            for number, (ids, mask) in enumerate(dialogue.parts, start=1):
                rows.ids.append(dialogue.id if number == 1 else f"{dialogue.id}#{number}")
                rows.input_ids.append(np.array(ids, dtype=np.int32))
                rows.loss_mask.append(np.array(mask, dtype=bool))
        counts["rows"] += len(rows.ids)
        self._ctx.report({name: counts[name] for name in ("rows", "generated_tokens", "cut_answers", "turns_left_out")})
        return rows

    def close(self) -> None:
        self._model = None


def _dialogue(row: dict[str, Any], dropped: Counter[str]) -> _Dialogue | None:
    """Cut a row at its assistant messages; None, and counted, where there is nothing to answer."""
    segments: list[list[dict[str, Any]]] = [[]]
    for message in row["messages"]:
        if message["role"] == "tool" or message.get("tool_calls"):
            dropped["tool calls cannot be regenerated"] += 1
            return None
        if message["role"] != "assistant":
            segments[-1].append(message)
        elif any(said["role"] == "user" for said in segments[-1]):
            segments.append([])
    if not any(said["role"] == "user" for said in segments[-1]):
        segments.pop()  # nothing was asked after the last answer
    if not segments:
        dropped["no user turn"] += 1
        return None
    return _Dialogue(str(row["id"]), segments)

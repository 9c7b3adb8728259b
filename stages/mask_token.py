"""Which token stands for what is to be drafted: MASK, the same in training, export and serving."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from dflash_pipe import BadInput

__all__ = ["resolve_mask_token"]

_MASK_NAME = re.compile(r"[\W_]*mask[\W_]*", re.IGNORECASE)


def resolve_mask_token(wanted: int | str, tokenizer: Any, vocab_size: int, taken: Mapping[int, str]) -> int:
    """The id of MASK, the same in training, export and serving.

    wanted: an id, or "auto": the special token whose name says mask; failing that, the first row of the embedding
    that the tokenizer never produces. taken: ids that mean something else (pad, eos) -> what they mean.
    Raises BadInput for an id outside the embedding or taken, and where "auto" finds none.
    """
    token = _unused_token(tokenizer, vocab_size, taken) if wanted == "auto" else int(wanted)
    if not 0 <= token < vocab_size:
        raise BadInput(f"mask_token_id {token} is outside the embedding (0..{vocab_size - 1})")
    if token in taken:
        raise BadInput(f"mask_token_id {token} is the {taken[token]} token, expected an id that text never contains")
    return token


def _unused_token(tokenizer: Any, vocab_size: int, taken: Collection[int]) -> int:
    special = {**tokenizer.get_added_vocab(), **{t: tokenizer.get_vocab()[t] for t in tokenizer.all_special_tokens}}
    named = sorted(i for name, i in special.items() if _MASK_NAME.fullmatch(name) and i not in taken)
    if named:
        return int(named[0])
    beyond = max(tokenizer.get_vocab().values()) + 1
    if beyond < vocab_size:
        return int(beyond)
    choice = sorted((i, name) for name, i in special.items() if i not in taken)
    listed = ", ".join(f"{i} {name}" for i, name in choice[:8]) or "none is defined"
    raise BadInput(
        f'mask_token_id is "auto", but no special token is named mask and the embedding has no row beyond the '
        f"tokenizer's {beyond}: give the id of a special token that your data never uses ({listed})"
    )

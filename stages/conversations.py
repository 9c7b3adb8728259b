"""Conversations in JSON Lines: the forms that are in use, brought to one form, with the place of every mistake.

One JSON object a line, with one of
- `messages`: [{"role": "user", "content": "..."}, ...]
- `conversations`: [{"from": "human", "value": "..."}, ...] (ShareGPT)
- `turns`: ["...", ...], the user's turns only; `prompt`: "...", the only turn. These have no answers yet.
and, if there is one, `id`; without it a row is named by a digest of its messages.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dflash_pipe import BadInput
from dflash_pipe.errors import nearest
from stages.json_kinds import json_kind

__all__ = ["parse_conversation"]

_FORMS = ("messages", "conversations", "turns", "prompt")
_ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
_SPEAKERS = {**_ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}


def parse_conversation(line: bytes | str, where: str) -> dict[str, Any]:
    """{"id": str, "messages": [{"role", "content"}, ...], "split": the row's or None} of one line.

    Raises `BadInput` at `where` (`file:line`) for what is not JSON, not an object, or in none of the forms.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON, which has one object a line ({error})", where) from None
    if not isinstance(row, dict):
        raise BadInput(f"{json_kind(row)}, expected an object with one of {', '.join(_FORMS)}", where)
    form = next((name for name in _FORMS if name in row), None)
    if form is None:
        close = next((hint for key in row if "did you mean" in (hint := nearest(key, _FORMS))), "")
        raise BadInput(f"none of the keys {', '.join(_FORMS)}{close}", where)
    turns = [row[form]] if form == "prompt" else row[form]
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{form!r} is not a list of turns, or an empty one", where)
    read = {"messages": _message, "conversations": _share_gpt}.get(form, _user)
    messages = [read(turn, f"{form}[{k}]", where) for k, turn in enumerate(turns)]
    name = row.get("id")
    return {"id": _digest(messages) if name is None else str(name), "messages": messages, "split": row.get("split")}


def _digest(messages: list[dict[str, str]]) -> str:
    return hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=8).hexdigest()


def _message(turn: Any, place: str, where: str) -> dict[str, str]:
    return _turn(turn, "role", "content", _ROLES, place, where)


def _share_gpt(turn: Any, place: str, where: str) -> dict[str, str]:
    return _turn(turn, "from", "value", _SPEAKERS, place, where)


def _user(turn: Any, place: str, where: str) -> dict[str, str]:
    if not isinstance(turn, str):
        raise BadInput(f"{place} is {json_kind(turn)}, expected the text of a user's turn", where)
    return {"role": "user", "content": turn}


def _turn(turn: Any, who: str, what: str, roles: dict[str, str], place: str, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise BadInput(f"{place} is {json_kind(turn)}, expected an object with {who!r} and {what!r}", where)
    for key in (who, what):
        if key not in turn:
            raise BadInput(f"{place} has no {key!r}{nearest(key, turn)}", where)
        if not isinstance(turn[key], str):
            raise BadInput(f"{place}.{key} is {json_kind(turn[key])}, expected text", where)
    if turn[who] not in roles:
        raise BadInput(f"{place}.{who} is {turn[who]!r}{nearest(turn[who], roles)}", where)
    return {"role": roles[turn[who]], "content": turn[what]}

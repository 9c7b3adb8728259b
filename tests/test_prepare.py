"""Preparing data: conversations in their forms, masks from token positions, files that say how they were made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_pipe import BadInput, Context
from stages.arrow_rows import ArrowRows, recipe_of
from stages.chat_tokens import ChatTokens
from stages.conversations import parse_conversation
from stages.messages import Conversations, TokenRows
from stages.model_source import load_tokenizer
from stages.prepare import ArrowWriter, JsonlConversations, Tokenise

PLAIN = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As Qwen3 does it: an empty thinking block before the last answer only, and in the prompt where thinking is off.
THINKING = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}\
{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}\
{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
# Markers that are set badly: the header is inside, the token that ends the turn is outside.
HEADER_INSIDE = """{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}\
{{ '<|im_start|>assistant\\n' + m['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}\
{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TWO_TURNS = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "It is Rome."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("DFLASH_PIPE_CACHE")
    os.environ["DFLASH_PIPE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["DFLASH_PIPE_CACHE"]
    else:
        os.environ["DFLASH_PIPE_CACHE"] = before


def supervised(template: str | None, thinking: bool | None = None) -> tuple[list[str], int]:
    """The texts of the supervised runs of TWO_TURNS, and the turns left out."""
    tokenizer = load_tokenizer("tiny:qwen3")
    tokenizer.chat_template = template or tokenizer.chat_template
    ids, mask, left_out = ChatTokens(tokenizer, thinking).encode(TWO_TURNS)
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in edges], left_out


@pytest.mark.parametrize("template", [None, PLAIN, HEADER_INSIDE])
def test_mask_is_what_was_decoded(template: str | None) -> None:
    """From the first decoded token to the token that ends the turn: no header, no line break behind it."""
    assert supervised(template) == (["It is Rome.<|im_end|>", "Yes.<|im_end|>"], 0)


@pytest.mark.parametrize(("thinking", "first"), [(False, ""), (True, "<think>\n\n</think>\n\n")])
def test_mask_starts_behind_the_generation_prompt(thinking: bool, first: str) -> None:
    """With thinking off the prompt holds the empty block. The earlier answer was never decoded as it stands here."""
    assert supervised(THINKING, thinking) == ([first + "Yes.<|im_end|>"], 1)


NO_SPECIAL = """{% for m in messages %}{{ m['role'] + ':SEP' + m['content'] + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:SEP' }}{% endif %}"""


def test_mask_without_special_tokens() -> None:
    texts, left_out = supervised(NO_SPECIAL.replace("SEP", "\\n"))
    assert [text.strip() for text in texts] == ["It is Rome.", "Yes."] and left_out == 0


def test_a_prompt_that_merges_with_the_answer_is_left_out() -> None:
    """Decoding would start behind the prompt's own space token, which the row does not have."""
    assert supervised(NO_SPECIAL.replace("SEP", " "))[1] == 1


def test_template_that_refuses_or_is_missing() -> None:
    tokenizer = load_tokenizer("tiny:qwen3")
    tokenizer.chat_template = "{{ raise_exception('only user turns') }}"
    with pytest.raises(BadInput, match=r"refuses it .*only user turns"):
        ChatTokens(tokenizer).encode(TWO_TURNS)
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="no chat template"):
        ChatTokens(tokenizer)


def test_forms_of_conversations() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    share_gpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [{"messages": said}, {"conversations": share_gpt}]
    first, second = (parse_conversation(json.dumps(row), "f:1") for row in rows)
    assert first["messages"] == second["messages"] == said
    assert first["id"] == second["id"] and len(first["id"]) == 16  # named by what is said
    prompt = parse_conversation('{"id": 7, "turns": ["a", "b"], "split": "eval"}', "f:1")
    assert prompt == {"id": "7", "messages": [{"role": "user", "content": c} for c in "ab"], "split": "eval"}
    assert parse_conversation('{"prompt": "a"}', "f:1")["messages"] == said[:1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', "not JSON"),
        ("[1]", "a list, expected an object"),
        ('{"mesages": []}', "did you mean 'messages'?"),
        ('{"messages": []}', "an empty one"),
        (
            '{"messages": [{"role": "user", "contents": "a"}]}',
            "messages[0] has no 'content' (did you mean 'contents'?)",
        ),
        ('{"messages": [{"role": "asistant", "content": "a"}]}', "did you mean 'assistant'?"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "messages[0].content is a list, expected text"),
        ('{"conversations": [{"from": "human"}]}', "conversations[0] has no 'value'"),
        ('{"turns": [1]}', "turns[0] is a number, expected the text"),
    ],
)
def test_malformed_lines_are_placed(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(BadInput) as caught:
        list(reader(path).read(None))
    assert str(caught.value).startswith(f"{path}:3: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def reader(path: Path, **fields: Any) -> JsonlConversations:
    source = JsonlConversations(path=str(path), **fields)
    source.open(Context())
    return source


def prompts(path: Path, count: int) -> Path:
    rows = (
        {"id": f"row {k}", "turns": [f"Question {k}?"], "split": ("train", "eval")[k % 5 == 4]} for k in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def names(messages: list[tuple[Any, Conversations | None]]) -> list[str]:
    return [row["id"] for _, message in messages if message for row in message.rows]


def test_reader_goes_on_anywhere(tmp_path: Path) -> None:
    path = prompts(tmp_path / "p.jsonl", 23)
    for fields in ({"batch": 4}, {"batch": 4, "limit": 9}, {"batch": 3, "split": "train"}):
        whole = list(reader(path, **fields).read(None))
        for k, (cursor, _) in enumerate(whole):
            assert names(list(reader(path, **fields).read(json.loads(json.dumps(cursor))))) == names(whole[k + 1 :])
    assert len(names(list(reader(path, limit=9).read(None)))) == 9


@pytest.mark.parametrize("change", ["a row behind", "a row ahead", "another order of the same bytes", "cut off"])
def test_a_cursor_into_another_file_is_refused(tmp_path: Path, change: str) -> None:
    path = prompts(tmp_path / "p.jsonl", 20)
    cursor, _ = next(iter(reader(path, batch=4).read(None)))
    lines = path.read_text().splitlines(keepends=True)
    changed = {
        "a row behind": lines[:1] + lines,
        "a row ahead": lines + lines[:1],
        "another order of the same bytes": [lines[1], lines[0], *lines[2:]],
        "cut off": lines[:2],
    }
    path.write_text("".join(changed[change]))
    with pytest.raises(BadInput, match=r"cannot go on in .*p\.jsonl: it has changed"):
        list(reader(path, batch=4).read(cursor))


def test_reader_counts_other_splits(tmp_path: Path) -> None:
    path = prompts(tmp_path / "p.jsonl", 24)
    messages = [m for _, m in reader(path, split="eval", batch=3).read(None) if m]
    assert sum(len(m.rows) for m in messages) == 4
    assert sum(m.dropped.get("of another split", 0) for m in messages) == 20
    with pytest.raises(BadInput, match="no conversations of split 'test'"):
        list(reader(path, split="test").read(None))
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(BadInput, match=r"p\.jsonl:1: no 'split'"):
        list(reader(path, split="test").read(None))
    with pytest.raises(BadInput, match=r"did you mean 'p\.jsonl'"):
        reader(tmp_path / "q.jsonl")


def tokenise(reports: list[dict[str, Any]] | None = None, **fields: Any) -> Tokenise:
    stage = Tokenise(model="tiny:qwen3", **fields)
    stage.open(Context(report=(lambda m: None) if reports is None else reports.append))
    return stage


def test_tokenise_counts_what_it_drops() -> None:
    rows = [
        {"id": "good", "messages": TWO_TURNS},
        {"id": "prompt", "messages": TWO_TURNS[:1]},
        {"id": "long", "messages": [{"role": "user", "content": "word " * 200}, *TWO_TURNS[1:2]]},
        {"id": "cut", "messages": [*TWO_TURNS[:1], {"role": "assistant", "content": "word " * 200}]},
    ]
    reports: list[dict[str, Any]] = []
    stage = tokenise(reports, max_length=64)
    out = stage.process(Conversations(rows=rows, dropped={"of another split": 2}))
    stage.finish()
    assert out.ids == ["good", "cut"] and len(out.input_ids[1]) == 64
    assert out.dropped == {"no assistant turn": 1, "answer begins behind max_length": 1, "of another split": 2}
    assert reports == [{"turns_unsupervised": 0, "rows_truncated": 2}]


def writer(path: Path, reports: list[dict[str, Any]] | None = None, seed: int = 3, **fields: Any) -> ArrowWriter:
    stage = ArrowWriter(path=str(path), tokenizer="tiny:qwen3", **fields)
    stage.open(Context(seed=seed, report=(lambda m: None) if reports is None else reports.append))
    return stage


def token_rows(first: int, count: int, length: int = 8, mask: int = 1) -> TokenRows:
    ids = [np.arange(k, k + length, dtype=np.int32) for k in range(first, first + count)]
    return TokenRows([f"row {k}" for k in range(first, first + count)], ids, [np.full(length, mask, bool)] * count, {})


def content(file: Path) -> list[list[int]]:
    rows = ArrowRows(file)
    return [rows.ids(k).tolist() for k in range(len(rows))]


def write_all(path: Path, count: int = 200, **fields: Any) -> None:
    stage = writer(path, **fields)
    for first in range(0, count, 50):
        stage.process(token_rows(first, min(50, count - first)))
    stage.finish()


def test_held_out_rows_are_chosen_by_name(tmp_path: Path) -> None:
    write_all(tmp_path / "a", held_out=0.2)
    train, held_out = content(tmp_path / "a" / "train.arrow"), content(tmp_path / "a" / "eval.arrow")
    assert 20 < len(held_out) < 60
    assert sorted(train + held_out) == [list(range(k, k + 8)) for k in range(200)]
    write_all(tmp_path / "b", count=100, held_out=0.2)  # the same side, whatever else is in the data
    assert content(tmp_path / "b" / "eval.arrow") == [row for row in held_out if row[0] < 100]
    write_all(tmp_path / "c", held_out=0.2, seed=4)
    assert content(tmp_path / "c" / "eval.arrow") != held_out


def test_files_say_how_they_were_made(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    stage = writer(tmp_path, reports, thinking=False, max_length=32, recipe={"reader": {"path": "p.jsonl"}})
    stage.process(TokenRows(["a"], [np.arange(9, dtype=np.int32)], [np.arange(9) > 5], {"no assistant turn": 2}))
    stage.finish()
    recipe = recipe_of(tmp_path / "train.arrow")
    assert recipe["thinking"] is False and recipe["max_length"] == 32 and recipe["responses"] == "given"
    assert recipe["rows"] == 1 and recipe["tokens"] == 9 and recipe["supervised"] == 3
    assert recipe["dropped"] == {"no assistant turn": 2} and len(recipe["template"]) == 16
    assert recipe["recipe"] == {"reader": {"path": "p.jsonl"}}
    summary = (tmp_path / "summary.txt").read_text()
    assert "rows: 3 read, 2 dropped" in summary and "rows: 1, tokens: 9, 33.3% supervised" in summary
    counts = {"rows_read": 3, "rows_written": 1, "rows_dropped": 2, "rows_dropped.no_assistant_turn": 2}
    assert reports == [counts]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["summary.txt", "train.arrow"]


def test_another_data_set_is_not_overwritten(tmp_path: Path) -> None:
    write_all(tmp_path, held_out=0.2, thinking=True)
    before = content(tmp_path / "train.arrow")
    with pytest.raises(BadInput, match=r"train\.arrow holds another data set \(thinking True there, False here\)"):
        writer(tmp_path, held_out=0.2, thinking=False)
    assert content(tmp_path / "train.arrow") == before
    write_all(tmp_path, held_out=0.2, thinking=True)  # the same again is no other data set
    write_all(tmp_path, thinking=False, overwrite=True)
    assert len(content(tmp_path / "train.arrow")) == 200
    assert not (tmp_path / "eval.arrow").exists()  # it held rows that are trained on now


def test_nothing_supervised_is_an_error(tmp_path: Path) -> None:
    stage = writer(tmp_path)
    stage.process(token_rows(0, 3, mask=0))
    stage.dropped["no assistant turn"] += 4
    with pytest.raises(BadInput, match=r"no row to train on has a supervised token \(dropped: 4 no assistant turn\)"):
        stage.finish()
    assert not (tmp_path / "train.arrow").exists()


@pytest.mark.parametrize("after", ["killed at once", "killed later", "stopped"])
def test_a_broken_writer_goes_on_from_its_snapshot(tmp_path: Path, after: str) -> None:
    write_all(tmp_path / "whole", held_out=0.2)
    stage = writer(tmp_path / "broken", held_out=0.2)
    stage.process(token_rows(0, 50))
    state = json.loads(json.dumps(stage.state()))
    if after == "killed later":  # rows that the snapshot does not know
        stage.process(token_rows(50, 70))
        stage.state()
    elif after == "stopped":  # what was read until then is a data set, and the shards are gone
        stage.finish()
        assert len(content(tmp_path / "broken" / "train.arrow")) < 50
    for _ in range(2):  # going on twice from one snapshot
        resumed = writer(tmp_path / "broken", held_out=0.2)
        resumed.restore(state)
        for first in (50, 100, 150):
            resumed.process(token_rows(first, 50))
        resumed.finish()
        for name in ("train.arrow", "eval.arrow"):
            assert content(tmp_path / "broken" / name) == content(tmp_path / "whole" / name)


def test_a_shard_that_did_not_reach_the_disk_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = writer(tmp_path)
    stage.process(token_rows(0, 50))
    flushed: list[Path] = []

    def full(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        stage.state()
    assert [file.name for file in flushed] == [".train-0-50.arrow.unfinished"]
    assert list(stage.staging.glob("train-*")) == []
    monkeypatch.undo()
    stage.state()
    assert [file.name for file in stage.staging.iterdir()] == ["train-0-50.arrow"]


def test_runs_of_another_recipe_leave_shards_alone(tmp_path: Path) -> None:
    stage = writer(tmp_path)
    stage.process(token_rows(0, 50))
    state = stage.state()
    other = writer(tmp_path, thinking=True)
    other.process(token_rows(500, 50))
    other.state()
    resumed = writer(tmp_path)
    resumed.restore(state)
    resumed.finish()
    assert content(tmp_path / "train.arrow") == [list(range(k, k + 8)) for k in range(50)]


def test_a_snapshot_without_its_rows_is_refused(tmp_path: Path) -> None:
    stage = writer(tmp_path / "a")
    stage.process(token_rows(0, 50))
    state = stage.state()
    for path, thinking, said in ((tmp_path / "b", None, "is gone"), (tmp_path / "a", True, "in another way")):
        with pytest.raises(BadInput, match=said):
            writer(path, thinking=thinking).restore(state)


def test_rows_of_one_conversation_stay_together(tmp_path: Path) -> None:
    stage = writer(tmp_path, held_out=0.5)
    for number in ("", "#2", "#3"):
        rows = token_rows(0, 40)
        stage.process(TokenRows([name + number for name in rows.ids], rows.input_ids, rows.loss_mask, {}))
    stage.finish()
    sides = [{row[0] for row in content(tmp_path / name)} for name in ("train.arrow", "eval.arrow")]
    assert sides[0].isdisjoint(sides[1]) and len(sides[0] | sides[1]) == 40


def test_from_text_to_training_rows(tmp_path: Path) -> None:
    """Reader, tokenise, writer and data stage agree about one file."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": TWO_TURNS}) + "\n" + json.dumps({"messages": TWO_TURNS[:2]}) + "\n")
    tokens, out = tokenise(), writer(tmp_path / "data")
    for _, message in reader(chats).read(None):
        assert message is not None
        out.process(tokens.process(message))
    out.finish()
    rows, tokenizer = ArrowRows(tmp_path / "data" / "train.arrow"), load_tokenizer("tiny:qwen3")
    assert tokenizer.decode(rows.ids(1)[rows.mask(1) != 0].tolist()) == "It is Rome.<|im_end|>"
    assert rows.usable(100).tolist() == [True, True]

"""What Regenerate writes is what the target says: row by row, greedily, to the token."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from dflash_pipe import BadInput, Context
from dflash_pipe.stage import signature
from stages.messages import Conversations, TokenRows
from stages.model_source import load_tokenizer, locate
from stages.regenerate import Regenerate
from stages.target_model import load_full

FAMILIES = ("tiny:llama", "tiny:qwen3", "tiny:qwen3_5")
PROMPTS = (
    "What is a boat?",
    "Explain 2+2, step by step, in one sentence.",
    "hello",
    "Is it true?",
    "Name three rivers.",
)
END = 2


pytestmark = pytest.mark.usefixtures("model_cache")


@pytest.fixture
def reports():
    return []


@pytest.fixture
def opened(reports):
    def make(model, **fields):
        stage = Regenerate(model=str(model), **{"max_new_tokens": 24, "max_prompt_tokens": 200, **fields})
        stage.check(1)
        stage.open(Context(device="cpu", report=reports.append))
        return stage

    return make


@pytest.fixture
def copy(tmp_path):
    def make(model):
        return Path(shutil.copytree(locate(model).place, tmp_path / "model"))

    return make


def user(*turns):
    return [{"role": "user", "content": text} for text in turns]


def prompts(texts=PROMPTS):
    return Conversations(rows=[{"id": f"r{i}", "messages": user(text)} for i, text in enumerate(texts)])


@torch.no_grad()
def one_row_greedily(model, ids, count):
    """Token by token, the whole row through the model each time: no cache, no batch, no padding, no generate."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == END:
            break
    return ids


def test_ports():
    read = signature(Regenerate)
    assert [port.type for port in read.inputs.values()] == [Conversations]
    assert read.output is TokenRows and not read.stateful


@pytest.mark.parametrize("model", FAMILIES)
def test_a_batch_is_each_row_decoded_alone(opened, reports, model):
    got = opened(model).process(prompts())
    whole, tokenizer = load_full(model, None, "float32", "cpu"), load_tokenizer(model)
    assert got.ids == ["r0", "r1", "r2", "r3", "r4"] and got.dropped == {}
    ended = 0
    for text, ids, mask in zip(PROMPTS, got.input_ids, got.loss_mask, strict=True):
        prompt = tokenizer.apply_chat_template(user(text), add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ids.tolist() == one_row_greedily(whole, prompt, 24)
        assert mask.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        assert str(ids.dtype) == "int32" and str(mask.dtype) == "bool"
        assert END not in ids[len(prompt) : -1]
        ended += ids[-1] == END
    assert 0 < ended < len(PROMPTS)  # both ends of an answer are met
    made = sum(int(mask.sum()) for mask in got.loss_mask)
    assert reports == [{"rows": 5, "generated_tokens": made, "cut_answers": len(PROMPTS) - ended, "turns_left_out": 0}]


def test_sampling_defaults_of_the_model_do_not_matter(opened, copy):
    expected = opened("tiny:llama").process(prompts())
    folder = copy("tiny:llama")
    settings = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 9.0, "eos_token_id": 2, "max_length": 30}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    got = opened(folder).process(prompts())
    assert [ids.tolist() for ids in got.input_ids] == [ids.tolist() for ids in expected.input_ids]


def sections(mask):
    """(start, stop) of every run of True."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_every_turn_is_answered_and_old_answers_are_left_out(opened):
    old = {"role": "assistant", "content": "An old answer that nobody should see again."}
    questions = ["What is a boat?", "Is it true?", "hello"]
    messages = [m for question in user(*questions) for m in (question, old)]
    rows = [{"id": "chat", "messages": messages}, {"id": "short", "messages": user("hello")}]
    got = opened("tiny:llama", max_new_tokens=60).process(Conversations(rows=rows))
    assert got.ids == ["chat", "short"]
    ids, mask = got.input_ids[0].tolist(), got.loss_mask[0].tolist()
    tokenizer, whole = load_tokenizer("tiny:llama"), load_full("tiny:llama", None, "float32", "cpu")
    answers = sections(mask)
    assert len(answers) == 3 and answers[-1][1] == len(ids)
    for start, stop in answers:
        assert ids[:stop] == one_row_greedily(whole, ids[:start], 60)
    said = []
    for question, (start, stop) in zip(questions, answers, strict=True):
        answer = {"role": "assistant", "content": tokenizer.decode(ids[start : stop - 1])}
        said += [{"role": "user", "content": question}, answer]
    assert tokenizer.decode(ids) + "\n" == tokenizer.apply_chat_template(said, tokenize=False)
    assert "nobody should see" not in tokenizer.decode(ids)


def test_an_answer_without_an_end_is_the_last(opened, reports):
    messages = [*user("What is a boat?"), {"role": "assistant", "content": "x"}, *user("hello")]
    got = opened("tiny:qwen3").process(Conversations(rows=[{"id": "a", "messages": messages}]))
    assert len(sections(got.loss_mask[0].tolist())) == 1 and int(got.loss_mask[0].sum()) == 24
    assert (reports[0]["cut_answers"], reports[0]["turns_left_out"]) == (1, 1)


def test_a_template_that_rewrites_history_starts_a_new_row(opened, copy):
    folder = copy("tiny:llama")
    template = folder / "chat_template.jinja"
    kept, lost = ("{%- generation -%}{{- " + text for text in ("message['content']", "'...'"))
    forgetful = template.read_text().replace(kept, lost)
    assert forgetful != template.read_text()
    template.write_text(forgetful)
    messages = [*user("What is a boat?"), {"role": "assistant", "content": "x"}, *user("hello")]
    got = opened(folder, max_new_tokens=60).process(Conversations(rows=[{"id": "a", "messages": messages}]))
    assert got.ids == ["a", "a#2"]
    tokenizer = load_tokenizer(str(folder))
    for mask in got.loss_mask:
        assert len(sections(mask.tolist())) == 1 and mask[-1]
    start = sections(got.loss_mask[1].tolist())[0][0]
    shown = tokenizer.decode(got.input_ids[1][:start])
    assert shown == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_rows_that_cannot_be_answered_are_counted_by_reason(opened, reports):
    tool = [*user("hello"), {"role": "tool", "content": "42"}]
    greeting = [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hi"}]
    rows = [
        {"id": "long", "messages": user("boat " * 300)},
        {"id": "mute", "messages": greeting},
        {"id": "tool", "messages": tool},
        {"id": "kept", "messages": greeting + user("hello")},
    ]
    got = opened("tiny:llama").process(Conversations(rows=rows, dropped={"of another split": 3}))
    assert got.ids == ["kept"]
    assert got.dropped == {
        "of another split": 3,
        "prompt over max_prompt_tokens": 1,
        "no user turn": 1,
        "tool calls cannot be regenerated": 1,
    }
    shown = load_tokenizer("tiny:llama").decode(got.input_ids[0][~got.loss_mask[0]])
    assert shown.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello")
    stage = opened("tiny:llama")
    assert stage.process(Conversations(rows=[], dropped={"x": 1})).dropped == {"x": 1}
    stage.process(prompts(["hello"]))
    stage.process(prompts(["hello"]))
    assert [report["rows"] for report in reports[-3:]] == [0, 1, 2]


def test_a_later_turn_that_would_be_too_long_ends_its_conversation(opened, reports):
    messages = [*user("hello"), {"role": "assistant", "content": "x"}, *user("boat " * 300, "again")]
    got = opened("tiny:llama", max_new_tokens=60).process(Conversations(rows=[{"id": "a", "messages": messages}]))
    assert got.ids == ["a"] and len(sections(got.loss_mask[0].tolist())) == 1
    assert got.input_ids[0][-1] == END and reports[0]["turns_left_out"] == 1


def test_thinking_reaches_the_template(opened, copy):
    with pytest.raises(BadInput, match="has no such switch"):
        opened("tiny:llama", thinking=False)
    folder = copy("tiny:llama")
    template = folder / "chat_template.jinja"
    switch = "{%- if enable_thinking is defined and not enable_thinking -%}{{- 'no' -}}{%- endif -%}"
    template.write_text(template.read_text() + switch)
    for thinking, expected in ((False, "assistant\nno"), (True, "assistant\n"), (None, "assistant\n")):
        got = opened(folder, thinking=thinking).process(prompts(["hello"]))
        assert load_tokenizer("tiny:llama").decode(got.input_ids[0][~got.loss_mask[0]]).endswith(expected)


def test_targets_that_cannot_answer_are_refused(opened, copy):
    with pytest.raises(BadInput, match=r"max_prompt_tokens \+ max_new_tokens = 2049, but .* context of 2048"):
        opened("tiny:llama", max_new_tokens=49, max_prompt_tokens=2000)
    with pytest.raises(BadInput, match="max_new_tokens: expected at least 1, got 0"):
        opened("tiny:llama", max_new_tokens=0)
    folder = copy("tiny:llama")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(BadInput, match=r"^row r0: the chat template of target .* refuses it: no such role"):
        opened(folder).process(prompts())
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match="has no chat template"):
        opened(folder)

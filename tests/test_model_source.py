"""Where a target's files come from: tiny models that are made, names and directories that are refused, tokenizers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from dflash_pipe import BadInput
from stages.model_source import ModelSource, load_tokenizer, locate, text_config
from tests.tiny_targets import change, copied

ROOT = Path(__file__).parent.parent
NOT_ASKED = "the hub was not asked (offline mode): go online, or name a directory that has the model"


pytestmark = pytest.mark.usefixtures("model_cache")


def test_tiny_models_are_made_once_and_are_the_same_everywhere(monkeypatch, tmp_path):
    first = Path(locate("tiny:qwen3_5").place)
    monkeypatch.setenv("DFLASH_PIPE_CACHE", str(tmp_path))
    again = Path(locate("tiny:qwen3_5").place)
    assert first != again and sorted(p.name for p in tmp_path.iterdir()) == [again.name]
    for file in sorted(p.name for p in first.iterdir()):
        assert (first / file).read_bytes() == (again / file).read_bytes(), file
    written = (again / "model.safetensors").stat().st_mtime_ns
    assert locate("tiny:qwen3_5").place == str(again)
    assert (again / "model.safetensors").stat().st_mtime_ns == written


def test_the_tiny_tokenizer():
    tokenizer = load_tokenizer("tiny:llama")
    assert len(tokenizer) == 512
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    text = 'def f(x): return "naïve 東京"\n\t# 123'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello: 42!"}]
    got = tokenizer.apply_chat_template(chat * 2, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, mark in zip(got["input_ids"], got["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == "Hello: 42!<|im_end|>" * 2


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("/nowhere/at/all", "no such directory"),
        ("./nowhere", "no such directory"),
        ("~/nowhere", "no such directory"),
        ("a/b/c", "no such directory"),
        ("who?", "neither a directory nor a hub id of the form owner/name"),
        ("", "expected a directory, a hub id"),
        ("tiny:qwen4", r"no such model \(did you mean 'tiny:qwen3'\?\)"),
        ("package:smolm2", r"no such model \(did you mean 'package:smollm2'\?\)"),
    ],
)
def test_a_name_that_cannot_be_a_model_is_refused(model, complaint):
    with pytest.raises(BadInput, match=complaint):
        text_config(model)


def test_files_and_revisions_of_what_has_none_are_refused(tmp_path):
    folder = copied("tiny:qwen3", tmp_path)
    with pytest.raises(BadInput, match="is a file; expected a directory"):
        text_config(str(folder / "config.json"))
    with pytest.raises(BadInput, match="only models on the hub have revisions"):
        text_config(str(folder), "main")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"it has no tokenizer \(tokenizer\.json, "):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match="it has no usable tokenizer"):
        load_tokenizer(str(folder))


def python(script, **environment):
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=100)


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path):
    """huggingface_hub would ask again and again, say so on stderr, and need half a minute."""
    script = """
from dflash_pipe.errors import Missing
from stages.model_source import load_tokenizer, locate, text_config
for load in (text_config, load_tokenizer, lambda model: locate(model).file("generation_config.json")):
    try:
        load("nobody/nothing")
    except Missing as error:
        print(error)
"""
    nobody_listens = "http://127.0.0.1:9"
    ended = python(
        script, HF_ENDPOINT=nobody_listens, HF_HUB_OFFLINE="", TRANSFORMERS_OFFLINE="", HF_HOME=str(tmp_path)
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert len(lines) == 3 and all("and the hub cannot be reached (" in line for line in lines)
    assert all(line.endswith("): go online, or name a directory that has the model") for line in lines)


def test_a_hub_id_that_is_not_cached_says_what_was_tried(tmp_path):
    script = """
from dflash_pipe import BadInput
from stages.model_source import load_tokenizer, text_config
for load in (text_config, load_tokenizer):
    try:
        load("nobody/nothing", "v2")
    except BadInput as error:
        print(error)
"""
    ended = python(script, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("target 'nobody/nothing': tried the directory ")
        assert "local cache (no config.json of revision 'v2')" in line and line.endswith(NOT_ASKED)


def cache_of(home):
    """The empty folder of a model's files in the hub's cache."""
    cached = home / "hub" / "models--nobody--nothing"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    return cached / "snapshots" / "abc"


def test_what_of_a_cached_model_is_not_cached_is_not_said_to_be_missing(tmp_path):
    """Where nobody can be asked: a model may be fetched in part, or without asking for the files that it has not."""
    cached = cache_of(tmp_path)
    script = """
import torch
from dflash_pipe.errors import Missing
from stages.frozen import load_frozen
from stages.model_source import load_tokenizer
from stages.target_model import load_truncated
for load in (
    load_tokenizer,
    lambda model: load_frozen(model, None, torch.float32, "cpu"),
    lambda model: load_truncated(model, None, 2, "float32", "cpu"),
):
    try:
        load("nobody/nothing")
        print("loaded")
    except Missing as error:
        print(error)
"""
    whole = Path(locate("tiny:qwen3").place)
    shutil.copy(whole / "config.json", cached)
    index = "model.safetensors.index.json"
    sharded = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}

    def loaded():
        ended = python(script, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    def unknown(name):
        return f"the hub's local cache (no {name} of revision 'main'), and {NOT_ASKED}"

    for line, name in zip(loaded(), ("tokenizer.json", "model.safetensors", "model.safetensors"), strict=True):
        assert line.endswith(unknown(name))
    (cached / index).write_text(json.dumps(sharded))
    assert all(line.endswith(unknown("model-00001-of-00001.safetensors")) for line in loaded()[1:])
    for file in whole.iterdir():
        shutil.copy(file, cached)
    assert loaded() == ["loaded"] * 3  # of one file, as transformers does, although there is an index too
    (cached / index).unlink()
    (cached / "model.safetensors").rename(cached / "other.safetensors")
    change(transformers_weights="other.safetensors")(cached)
    assert loaded() == ["loaded"] * 3


def test_a_model_without_generation_config_is_used_offline(tmp_path):
    """`hf download` leaves no mark of the files that a model has not: then the ids of config and tokenizer count."""
    script = """
from stages.dflash_config import DrafterKeys
print(DrafterKeys(target="nobody/nothing", layers=2, num_layers=1, block_size=4).resolve().mask_token_id)
"""
    cached = cache_of(tmp_path)
    for file in Path(locate("tiny:qwen3").place).iterdir():
        shutil.copy(file, cached)
    (cached / "generation_config.json").unlink(missing_ok=True)
    ended = python(script, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (0, "3\n"), ended.stderr


def test_a_file_that_the_cache_knows_to_be_missing_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without network too: what a cached model lacks, such as generation_config.json, it lacks."""
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *place, **key: object())
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: pytest.fail("asked the hub"))
    assert ModelSource("a/b", "a/b", None, local=False).file("generation_config.json") is None

"""The truncated target computes what the whole one computes, and refuses what it cannot use with one line."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_pipe import BadInput
from stages import frozen, target_model
from stages.target_model import (
    load_frozen,
    load_full,
    load_tokenizer,
    load_truncated,
    reference_kernels_on_cpu,
    resolve_dtype,
    resolve_layers,
    text_config,
)

ROOT = Path(__file__).parent.parent
FAMILIES = ("tiny:llama", "tiny:qwen3", "tiny:qwen3_5")
ALL = list(range(7))  # every id of an 8-layer target that can be captured
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def models(tmp_path_factory):
    """A cache of this file's own, and no GPU kernels even where their package is installed."""
    reference_kernels_on_cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_PIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def copy(tmp_path):
    """A directory of one's own with a tiny model in it, to break."""

    def make(model):
        return Path(shutil.copytree(target_model.locate(model).place, tmp_path / "model"))

    return make


def some_ids(rows, length, seed=0):
    return torch.randint(4, 512, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(ids, rows):
    return torch.full((rows,), ids.shape[1])


@torch.no_grad()
def every_hidden_state(model, ids):
    return load_full(model, None, "float32", "cpu")(input_ids=ids, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("model", FAMILIES)
def test_a_captured_id_is_the_output_of_that_layer_and_of_no_neighbour(model):
    ids = some_ids(2, 33)
    hidden = load_truncated(model, None, ALL, "float32", "cpu")(ids, whole(ids, 2))
    states = every_hidden_state(model, ids)
    assert hidden.shape == (2, 33, 7 * 64) and len(states) == 9
    for i, captured in zip(ALL, hidden.split(64, dim=-1), strict=True):
        assert torch.equal(captured, states[i + 1])
        assert not torch.allclose(captured, states[i], atol=0.1)


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("layers", [[0], [1, 3], [2, 4, 5]])
def test_cutting_the_layers_above_changes_no_bit(model, layers):
    ids = some_ids(2, 21)
    deep = load_truncated(model, None, ALL, "float32", "cpu")(ids, whole(ids, 2)).split(64, dim=-1)
    target = load_truncated(model, None, layers, "float32", "cpu")
    assert torch.equal(target(ids, whole(ids, 2)), torch.cat([deep[i] for i in layers], -1))
    assert target.features == 64 * len(layers)
    names = [name for name, _ in target.decoder.named_parameters()]
    assert {int(name.split(".")[1]) for name in names if name.startswith("layers.")} == set(range(layers[-1] + 1))
    assert not [name for name in names if name.startswith(("norm", "lm_head"))]


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_right_padded_row_is_the_row_alone_whatever_the_padding_is(model, dtype):
    # A Gated DeltaNet's gated norm enlarges rounding at a row's first tokens; float64 shows that it is only that.
    tolerance = 1e-13 if dtype == torch.float64 else 1e-4 if model == "tiny:qwen3_5" else 1e-5
    target, lengths = load_truncated(model, None, [1, 3, 6], dtype, "cpu"), torch.tensor([40, 3, 17])
    for seed in (1, 2):
        ids = some_ids(3, 40, seed)
        ids[:, :17] = some_ids(3, 17)
        batch = target(ids, lengths)
        for row, length, got in zip(ids, lengths.tolist(), batch, strict=True):
            alone = target(row[None, :length], torch.tensor([length]))[0]
            assert (got[:length] - alone).abs().max() <= tolerance * alone.abs().max()
            assert not got[length:].any()


def test_the_result_can_be_saved_for_a_backward_and_is_nobody_elses_memory():
    target, ids = load_truncated("tiny:qwen3", None, [2], "float32", "cpu"), some_ids(1, 5)
    first, second = (target(ids, whole(ids, 1)) for _ in range(2))
    assert not first.is_inference() and not first.requires_grad
    weight = torch.ones(64, requires_grad=True)
    (first * weight).sum().backward()
    assert torch.equal(weight.grad, first.sum((0, 1)))
    assert first.data_ptr() != second.data_ptr()


def test_dtypes():
    target, ids = load_truncated("tiny:qwen3", None, [2], "bfloat16", "cpu"), some_ids(1, 5)
    assert target(ids, whole(ids, 1)).dtype == torch.bfloat16
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", "cuda:1") == torch.bfloat16
    with pytest.raises(BadInput, match=r"unknown dtype 'bfloat' \(did you mean 'bfloat16'\?\)"):
        resolve_dtype("bfloat", "cpu")


@pytest.mark.parametrize(
    ("layers", "total", "ids"),
    [
        (1, 36, [18]),
        (5, 36, [1, 9, 17, 25, 33]),
        (5, 64, [1, 16, 31, 46, 61]),
        (5, 30, [1, 8, 14, 20, 27]),
        (5, 8, [1, 2, 3, 4, 5]),
        ([0, 6], 8, [0, 6]),
    ],
)
def test_layer_ids(layers, total, ids):
    assert resolve_layers(layers, total) == ids


@given(st.integers(5, 200).flatmap(lambda total: st.tuples(st.just(total), st.integers(2, total - 3))))
def test_spread_layers_start_at_1_end_at_3_below_the_top_and_never_repeat(sizes):
    total, count = sizes
    ids = resolve_layers(count, total)
    assert len(set(ids)) == count and ids == sorted(ids) and ids[0] == 1 and ids[-1] == total - 3
    assert resolve_layers(ids, total) == ids


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ([7], r"id 7 is the target's last layer.*valid ids are 0\.\.6"),
        ([1, 8], r"no layer 8; it has 8 layers, valid ids are 0\.\.6"),
        ([-1], r"no layer -1.*0\.\.6"),
        ([3, 1], "increasing ids without duplicates"),
        ([1, 1], "increasing ids without duplicates"),
        ([], "expected a number of layers or a list"),
        ([1.0], "expected a number of layers or a list"),
        (True, "expected a number of layers or a list"),
        ("auto", "expected a number of layers or a list"),
        (0, r"0 layers cannot be spread over a target of 8; expected 1\.\.5"),
        (6, r"6 layers cannot be spread over a target of 8; expected 1\.\.5"),
    ],
)
def test_bad_layers_are_refused(layers, complaint):
    with pytest.raises(BadInput, match=complaint):
        load_truncated("tiny:qwen3", None, layers, "float32", "cpu")


@pytest.mark.parametrize("model", FAMILIES)
def test_frozen_matrices_are_the_models_own(model):
    full, got = load_full(model, None, "float32", "cpu"), load_frozen(model, None, torch.float32, CPU)
    assert torch.equal(got.embed, full.get_input_embeddings().weight)
    assert torch.equal(got.head, full.get_output_embeddings().weight)
    assert (got.head is got.embed) == full.config.tie_word_embeddings == (model == "tiny:llama")
    assert not got.embed.requires_grad and not got.head.requires_grad


class Recording:
    """An opened safetensors file that notes which tensors are read."""

    def __init__(self, file, read):
        self.file, self.read, self.keys = file, read, file.keys

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def get_tensor(self, name):
        self.read.append(name)
        return self.file.get_tensor(name)


@pytest.mark.parametrize("sharded", [False, True])
def test_frozen_reads_two_tensors_and_opens_no_other_shard(monkeypatch, tmp_path, sharded):
    full = load_full("tiny:qwen3", None, "float32", "cpu")
    full.save_pretrained(tmp_path, max_shard_size="150KB" if sharded else "1GB")
    read = []

    def recorded(*args, **kwargs):
        return Recording(safe_open(*args, **kwargs), read)

    monkeypatch.setattr(frozen, "safe_open", recorded)
    if sharded:
        shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        needed = {shards["model.embed_tokens.weight"], shards["lm_head.weight"]}
        assert len(set(shards.values())) > len(needed)
        for shard in set(shards.values()) - needed:
            (tmp_path / shard).unlink()
    got = load_frozen(str(tmp_path), None, torch.bfloat16, CPU)
    assert read == ["model.embed_tokens.weight", "lm_head.weight"]
    assert torch.equal(got.head, full.lm_head.weight.bfloat16())


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


@pytest.mark.parametrize("tied", [False, True])
def test_a_composite_model_is_its_text_model(tmp_path, tied):
    """Whether embedding and head are one is said by the whole model; its text part says the opposite here."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = text_config("tiny:qwen3_5").to_dict() | {"tie_word_embeddings": not tied}
    torch.manual_seed(1)
    whole_config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    composite = Qwen3_5ForConditionalGeneration(whole_config).eval()
    composite.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    assert text_config(str(tmp_path)).model_type == "qwen3_5_text"
    ids = some_ids(1, 9)
    with torch.no_grad():
        states = composite(input_ids=ids, output_hidden_states=True).hidden_states
    hidden = load_truncated(str(tmp_path), None, [1, 5], "float32", "cpu")(ids, whole(ids, 1))
    assert torch.equal(hidden, torch.cat([states[2], states[6]], -1))
    got = load_frozen(str(tmp_path), None, torch.float32, CPU)
    assert torch.equal(got.embed, composite.get_input_embeddings().weight)
    assert torch.equal(got.head, composite.lm_head.weight)
    assert (got.head is got.embed) == tied
    with torch.no_grad():
        logits = load_full(str(tmp_path), None, "float32", "cpu")(input_ids=ids).logits
        torch.testing.assert_close(logits, composite(input_ids=ids).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen2_5_VL"])
def test_matrices_of_a_composite_whose_text_part_says_nothing_of_a_tie(tmp_path, family, tied):
    text = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = VISION | ({"deepstack_visual_indexes": [0]} if family == "Qwen3VL" else {})
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    composite = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    composite.save_pretrained(tmp_path)
    got = load_frozen(str(tmp_path), None, torch.float32, CPU)
    assert torch.equal(got.embed, composite.get_input_embeddings().weight)
    assert torch.equal(got.head, composite.lm_head.weight)
    assert (got.head is got.embed) == tied
    random = load_frozen(str(tmp_path), None, torch.float32, CPU, weights="random")
    assert (random.head is random.embed) == tied


def test_a_head_in_the_checkpoint_counts_for_more_than_a_tie_in_the_config(copy):
    folder = copy("tiny:qwen3")
    change(tie_word_embeddings=True)(folder)
    got = load_frozen(str(folder), None, torch.float32, CPU)
    assert torch.equal(got.head, load_file(folder / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("model", FAMILIES)
def test_random_weights_need_a_config_only_and_are_always_the_same(copy, model):
    folder = copy(model)
    (folder / "model.safetensors").unlink()
    ids, before = some_ids(1, 9), torch.random.get_rng_state()
    one, two = (load_truncated(str(folder), None, [1, 4], "float32", "cpu", weights="random") for _ in range(2))
    assert torch.equal(one(ids, whole(ids, 1)), two(ids, whole(ids, 1)))
    assert one(ids, whole(ids, 1)).isfinite().all()
    assert torch.equal(torch.random.get_rng_state(), before)
    got = load_frozen(str(folder), None, torch.float32, CPU, weights="random")
    assert torch.equal(got.embed, one.decoder.embed_tokens.weight)
    assert (got.head is got.embed) == (model == "tiny:llama")


def test_tiny_models_are_made_once_and_are_the_same_everywhere(monkeypatch, tmp_path):
    first = Path(target_model.locate("tiny:qwen3_5").place)
    monkeypatch.setenv("DFLASH_PIPE_CACHE", str(tmp_path))
    again = Path(target_model.locate("tiny:qwen3_5").place)
    assert first != again and sorted(p.name for p in tmp_path.iterdir()) == [again.name]
    for file in sorted(p.name for p in first.iterdir()):
        assert (first / file).read_bytes() == (again / file).read_bytes(), file
    written = (again / "model.safetensors").stat().st_mtime_ns
    assert target_model.locate("tiny:qwen3_5").place == str(again)
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


def no_config(folder):
    (folder / "config.json").unlink()


def bad_json(folder):
    (folder / "config.json").write_text("{")


def change(**keys):
    def broken(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return broken


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def damaged(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def without(*names):
    def broken(folder):
        path = folder / "model.safetensors"
        save_file({k: v for k, v in load_file(path).items() if k not in names}, path, metadata={"format": "pt"})

    return broken


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (no_config, "the directory has no config.json, so it is not a model"),
        (bad_json, "config.json cannot be read"),
        (change(model_type="qwen33"), r"knows no model type 'qwen33' \(did you mean 'qwen3'\?\)"),
        (change(model_type=None), "has no model_type"),
        (change(model_type="vit"), "Unrecognized configuration class .*ViTConfig"),
        (no_weights, "its weights cannot be loaded"),
        (damaged, "its weights cannot be loaded"),
        (change(intermediate_size=32), "its weights cannot be loaded"),
        (without("model.layers.1.mlp.up_proj.weight"), r"its checkpoint lacks .*layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_a_broken_model_directory_is_refused_in_one_line(copy, broken, complaint):
    folder = copy("tiny:qwen3")
    broken(folder)
    with pytest.raises(BadInput, match=complaint) as caught:
        load_truncated(str(folder), None, [1, 3], "float32", "cpu")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_layers_above_may_be_missing_from_the_checkpoint(copy):
    folder = copy("tiny:qwen3")
    ids, lengths = some_ids(1, 7), torch.tensor([7])
    before = load_truncated(str(folder), None, [3], "float32", "cpu")(ids, lengths)
    without(*(name for name in load_file(folder / "model.safetensors") if ".layers.5." in name))(folder)
    assert torch.equal(load_truncated(str(folder), None, [3], "float32", "cpu")(ids, lengths), before)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (no_weights, "has neither model.safetensors nor model.safetensors.index.json"),
        (damaged, "model.safetensors is damaged"),
        (without("model.embed_tokens.weight"), r"no tensor model\.embed_tokens\.weight or"),
        (without("lm_head.weight"), r"no tensor lm_head\.weight"),
        (change(vocab_size=511), r"has shape \(512, 64\), its config says \(511, 64\)"),
        (change(model_type="gemma"), "Gemma models scale their embedding"),
        (change(model_type="granite", embedding_multiplier=12.0), r"scales or caps .*embedding_multiplier"),
    ],
)
def test_matrices_that_cannot_be_used_are_refused_in_one_line(copy, broken, complaint):
    folder = copy("tiny:qwen3")
    broken(folder)
    with pytest.raises(BadInput, match=complaint) as caught:
        load_frozen(str(folder), None, torch.float32, CPU)
    assert "\n" not in str(caught.value)


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


def test_files_and_revisions_of_what_has_none_are_refused(copy):
    folder = copy("tiny:qwen3")
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


def test_a_hub_id_that_is_not_cached_says_what_was_tried(tmp_path):
    script = """
from dflash_pipe import BadInput
from stages.target_model import load_tokenizer, text_config
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
        assert "nothing for revision 'v2'" in line and "the hub was not asked (offline mode)" in line


HYBRID = """
import torch
from stages.target_model import load_truncated
for _ in range(2):
    target = load_truncated("tiny:qwen3_5", None, [1, 5], "float32", "cpu")
    print(target(torch.arange(4, 24)[None], torch.tensor([20])).double().sum().item())
"""


@pytest.fixture
def kernels_for_a_gpu(tmp_path):
    """An importable `fla` whose kernels fail as triton's do where there is no GPU."""
    folder = tmp_path / "fla" / "ops" / "gated_delta_rule"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (tmp_path / "fla" / "__init__.py").write_text("from fla.ops import gated_delta_rule\n")
    (folder / "__init__.py").write_text(
        "def _fail(*args, **kwargs):\n    raise RuntimeError('0 active drivers ([]). There should only be one.')\n"
        "chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = _fail\n"
    )
    return f"{tmp_path}{os.pathsep}{ROOT}"


def test_gpu_kernels_are_not_taken_on_a_cpu(kernels_for_a_gpu):
    ended = python(HYBRID, PYTHONPATH=kernels_for_a_gpu)
    assert ended.returncode == 0, ended.stderr
    target, ids = load_truncated("tiny:qwen3_5", None, [1, 5], "float32", "cpu"), torch.arange(4, 24)[None]
    expected = target(ids, torch.tensor([20])).double().sum().item()
    assert [float(line) for line in ended.stdout.splitlines()] == pytest.approx([expected] * 2)
    assert ended.stderr.count("transformers' reference path is used") == 1
    assert "install" not in ended.stderr  # as transformers advises, which would be of no use on a CPU
    unprotected = HYBRID.replace("import load_truncated", "import load_truncated\nimport stages.target_model as m")
    unprotected = unprotected.replace("for _", "m.reference_kernels_on_cpu = lambda: None\nfor _")
    assert "0 active drivers" in python(unprotected, PYTHONPATH=kernels_for_a_gpu).stderr


def test_gpu_kernels_that_are_in_use_are_not_mixed_with_the_cpu(kernels_for_a_gpu):
    ended = python("import transformers.models.qwen3_5.modeling_qwen3_5\n" + HYBRID, PYTHONPATH=kernels_for_a_gpu)
    assert "BadInput: a model of this process runs on the GPU kernels of flash-linear-attention" in ended.stderr
    assert ended.stderr.rstrip().endswith("give both a GPU, both the CPU, or each a run of its own")


def test_a_gpu_model_that_has_to_share_the_reference_kernels_says_so(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    monkeypatch.delitem(sys.modules, "causal_conv1d", raising=False)
    with caplog.at_level(logging.WARNING, "dflash_pipe"):
        target_model._choose_kernels(torch.device("cuda"))
        assert not caplog.messages
        monkeypatch.setitem(sys.modules, "fla", None)
        target_model._choose_kernels(torch.device("cuda"))
    assert ["slow reference kernels" in message for message in caplog.messages] == [True]

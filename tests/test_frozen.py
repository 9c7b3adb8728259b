"""The target's embedding and head: its own, read without anything else, or refused with one line."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from dflash_pipe import BadInput
from stages import frozen
from stages.frozen import load_frozen
from stages.model_source import text_config
from stages.target_model import load_full, load_truncated
from tests import tiny_targets
from tests.tiny_targets import FAMILIES, change, copied, damaged, index, no_weights, some_ids, whole, without

CPU = torch.device("cpu")


models = tiny_targets.models  # the fixture


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


def test_a_head_in_the_checkpoint_counts_for_more_than_a_tie_in_the_config(tmp_path):
    folder = copied("tiny:qwen3", tmp_path)
    change(tie_word_embeddings=True)(folder)
    got = load_frozen(str(folder), None, torch.float32, CPU)
    assert torch.equal(got.head, load_file(folder / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (no_weights, r"has no model\.safetensors and no model\.safetensors\.index\.json"),
        (index([]), "is not an index"),
        (index({"weight_map": []}), "is not an index"),
        (index({"weight_map": {"lm_head.weight": 1}}), "is not an index: its weight_map names no file"),
        (damaged, "model.safetensors is damaged"),
        (without("model.embed_tokens.weight"), r"no tensor model\.embed_tokens\.weight or"),
        (without("lm_head.weight"), r"no tensor lm_head\.weight"),
        (change(vocab_size=511), r"has shape \(512, 64\), its config says \(511, 64\)"),
        (change(model_type="gemma"), "Gemma models scale their embedding"),
        (change(model_type="granite", embedding_multiplier=12.0), r"scales or caps .*embedding_multiplier"),
    ],
)
def test_matrices_that_cannot_be_used_are_refused_in_one_line(tmp_path, broken, complaint):
    folder = copied("tiny:qwen3", tmp_path)
    broken(folder)
    with pytest.raises(BadInput, match=complaint) as caught:
        load_frozen(str(folder), None, torch.float32, CPU)
    assert "\n" not in str(caught.value)

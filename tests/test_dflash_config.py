"""The drafter's numbers: read from a config, derived from a target; its RoPE; the resolution of MASK."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_pipe import BadInput
from stages.dflash_config import DrafterConfig, DrafterKeys
from stages.dflash_rope import inverse_frequencies
from stages.mask_token import resolve_mask_token
from stages.model_source import load_tokenizer, locate, text_config
from tests.drafters import config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", **YARN, "attention_factor": 1.5},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(scaling: dict[str, object] | None) -> None:
    of = config(head_dim=32, rope_theta=500.0, rope_scaling=scaling)
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=128,
            num_attention_heads=4,
            head_dim=32,
            max_position_embeddings=256,
            rope_parameters={"rope_theta": 500.0, **(scaling or {"rope_type": "default"})},
        )
    )
    frequencies, factor = inverse_frequencies(of)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


def test_scaling_without_its_numbers_is_refused() -> None:
    with pytest.raises(BadInput, match="of type 'yarn' lacks 'original_max_position_embeddings'"):
        inverse_frequencies(config(rope_scaling={"rope_type": "yarn", "factor": 2.0}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, "even number"),
        ({"block_size": 1}, "at least 2"),
        ({"mask_token_id": 61}, r"outside the embedding \(0..60\)"),
        ({"layer_types": ("full_attention",)}, "layer_types has length 1, but num_hidden_layers is 2"),
        ({"layer_types": ("full_attention", "slidng_attention")}, "did you mean 'sliding_attention'"),
        ({"sliding": 3}, "at least the block size"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"hidden_size": 0}, "hidden_size is 0"),
    ],
)
def test_numbers_that_cannot_be_a_drafter_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        config(**changes)


def test_keys_follow_the_target() -> None:
    of = DrafterKeys.pick({"target": "tiny:qwen3", "layers": [1], "num_layers": 3, "gamma": 7, "lr": 1}).resolve()
    target = text_config("tiny:qwen3", None)
    assert (of.hidden_size, of.vocab_size, of.head_dim) == (target.hidden_size, target.vocab_size, target.head_dim)
    assert of.rope_theta == target.rope_parameters["rope_theta"] and of.rope_scaling is None
    assert of.num_hidden_layers == 3 and of.target_layer_ids == (1,)
    assert of.num_target_layers == target.num_hidden_layers
    assert load_tokenizer("tiny:qwen3", None).convert_ids_to_tokens(of.mask_token_id) == "<|mask|>"


def test_partial_and_multi_axis_rope_are_not_taken_over() -> None:
    of = DrafterKeys(target="tiny:qwen3_5", layers=1, sliding_window=32, num_layers=3).resolve()
    assert of.rope_scaling is None
    assert of.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    one = DrafterKeys(target="tiny:qwen3_5", layers=1, sliding_window=32, num_layers=1, block_size=8).resolve()
    assert one.layer_types == ("sliding_attention",)
    other = DrafterKeys(target="tiny:qwen3_5", layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=6)
    assert (other.resolve().num_attention_heads, other.resolve().num_key_value_heads) == (2, 1)
    assert other.resolve().head_dim == 6


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": 100_000}, r"num_layers is 100000, expected 1\.\.100"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": 1 << 30}, r"block_size is 1073741824, expected 2\.\.1024"),
        ({"mask_token_id": "mask"}, 'expected a token id or "auto"'),
        ({"mask_token_id": 512}, "outside the embedding"),
        ({"mask_token_id": 0}, "is the pad token"),
        ({"mask_token_id": 2}, "is the eos token"),
        ({"sliding_layers": 1}, "sliding_window is not"),
        ({"sliding_window": 64, "sliding_layers": 6}, "expected 1..5"),
        ({"sliding_window": 8}, "at least the block size"),
    ],
)
def test_wrong_keys_are_refused(keys: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        DrafterKeys.pick({"target": "tiny:llama", "layers": 1, **keys}).resolve()
    with pytest.raises(BadInput, match="lack 'target'"):
        DrafterKeys.pick(keys)


def test_mask_is_none_of_the_ids_that_end_an_answer(tmp_path: Path) -> None:
    """generation_config.json may list more of them than the config and the tokenizer know."""
    folder = shutil.copytree(locate("tiny:llama").place, tmp_path / "target")
    generation = json.loads((folder / "generation_config.json").read_text())
    for ids, said in (([2, 3], "mask_token_id 3 is the eos token"), (3, "mask_token_id 3 is the eos token")):
        (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": ids}))
        with pytest.raises(BadInput, match=said):
            DrafterKeys(target=str(folder), layers=1, mask_token_id=3).resolve()
        with pytest.raises(BadInput, match="no special token is named mask"):
            DrafterKeys(target=str(folder), layers=1).resolve()
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(BadInput, match=r"its generation_config\.json is not usable"):
        DrafterKeys(target=str(folder), layers=1).resolve()
    (folder / "generation_config.json").unlink()
    assert DrafterKeys(target=str(folder), layers=1).resolve().mask_token_id == 3


class Vocabulary:
    """The part of a tokenizer that is asked for MASK."""

    def __init__(self, added: dict[str, int], size: int, special: tuple[str, ...] = ()) -> None:
        self.added, self.size, self.all_special_tokens = added, size, list(special)

    def get_added_vocab(self) -> dict[str, int]:
        return self.added

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(self.size)} | self.added


@pytest.mark.parametrize("name", ["<|mask|>", "[MASK]", "<mask>", "<|MASK|>", "<MASK_>"])
def test_auto_mask_is_the_token_that_says_so(name: str) -> None:
    assert resolve_mask_token("auto", Vocabulary({"<|im_end|>": 7, name: 9}, 10), 20, {7: "eos"}) == 9


def test_auto_mask_is_otherwise_the_first_row_beyond_the_tokenizer() -> None:
    assert resolve_mask_token("auto", Vocabulary({"<|image_mask_pad|>": 9}, 10), 20, {}) == 10
    with pytest.raises(BadInput, match=r"give the id of a special token .* \(9 <empty_output>\)"):
        resolve_mask_token("auto", Vocabulary({"<|im_end|>": 7, "<empty_output>": 9}, 10), 10, {7: "eos"})


def test_config_reads_old_and_new_rope_keys() -> None:
    data = json.loads((Path(__file__).parent / "data" / "no_decay.json").read_text())
    old = DrafterConfig.from_json(data | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    del data["rope_theta"]
    new = DrafterConfig.from_json(data | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}})
    assert old == new
    with pytest.raises(BadInput, match="rope_theta is missing"):
        DrafterConfig.from_json(data)

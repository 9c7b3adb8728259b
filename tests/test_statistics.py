"""The measured spread is the standard deviation over real tokens, at any scale and however the stream is cut."""

import json

import pytest
import torch
from safetensors import safe_open

from dflash_pipe import BadInput, Context
from stages.messages import FeatureBatch, TokenBatch
from stages.statistics import FILE, FeatureStatistics
from stages.target import TargetForward

pytestmark = pytest.mark.usefixtures("model_cache")


def tokens(ids, lengths):
    lengths = torch.tensor(lengths)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    return TokenBatch(input_ids=ids, loss_mask=mask, lengths=lengths, sample=torch.arange(len(ids)))


def features(hidden, lengths):
    return FeatureBatch(tokens=tokens(torch.zeros(hidden.shape[:2], dtype=torch.int64), lengths), hidden=hidden)


def opened(folder, **fields):
    stage = FeatureStatistics(**{"target": "tiny:qwen3", "layers": [1, 3], **fields})
    stage.check(1)
    stage.open(Context(folder=folder))
    return stage


def written(folder):
    with safe_open(folder / FILE, framework="pt") as file:
        return file.get_tensor("std"), file.metadata()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_is_left_out_and_large_means_do_no_harm(tmp_path, dtype):
    draw = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 2, 128)
    stage, real = opened(tmp_path), []
    for lengths in ([9, 4], [1, 0], [7, 9]):
        hidden = (torch.randn(2, 9, 128, generator=draw) * scale + 3000).to(dtype)
        for row, length in zip(hidden, lengths, strict=True):
            row[length:] = float("nan")
            real.append(row[:length].double())
        stage.process(features(hidden, lengths))
    stage.finish()
    std, metadata = written(tmp_path)
    assert std.dtype == torch.float32
    torch.testing.assert_close(std.double(), torch.cat(real).std(0, correction=0), rtol=1e-6, atol=1e-12)
    assert json.loads(metadata["layers"]) == [1, 3]
    assert (metadata["hidden_size"], metadata["target"], metadata["tokens"]) == ("64", "tiny:qwen3", "30")
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_after_the_target(tmp_path):
    ids = torch.randint(4, 512, (3, 20), generator=torch.Generator().manual_seed(0))
    target = TargetForward(model="tiny:qwen3", layers=[1, 3])
    target.open(Context())
    sent = target.process(tokens(ids, [20, 20, 11]))
    stage = opened(tmp_path)
    stage.process(sent)
    stage.finish()
    real = torch.cat([sent.hidden[0], sent.hidden[1], sent.hidden[2, :11]]).double()
    torch.testing.assert_close(written(tmp_path)[0].double(), real.std(0, correction=0), rtol=1e-6, atol=1e-12)


def test_features_of_other_layers_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"features are 64 wide, but 2 x 64 \(layers x hidden size\) make 128"):
        opened(tmp_path).process(features(torch.zeros(1, 2, 64), [2]))
    with pytest.raises(BadInput, match=r"valid ids are 0\.\.6"):
        opened(tmp_path, layers=[9])


def test_an_empty_stream_is_no_measurement(tmp_path):
    stage = opened(tmp_path)
    stage.process(features(torch.zeros(1, 2, 128), [0]))
    with pytest.raises(BadInput, match="no token was seen"):
        stage.finish()
    assert not list(tmp_path.iterdir())

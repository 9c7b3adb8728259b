"""Packed rows: where their tokens lie, that their states are those of padded rows, and that leaks are found."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipe import BadInput, Context
from stages import fused_decoder, truncated_target
from stages.fused_decoder import FusedDecoder
from stages.leakage import LENGTHS, refuse_leaks
from stages.messages import TokenBatch
from stages.packing import CHUNK, pack_rows
from stages.target import TargetForward
from stages.target_model import load_truncated
from tests import fused_twins, tiny_targets
from tests.tiny_targets import FAMILIES, some_ids

LAYERS = [0, 3, 6]
CPU = torch.device("cpu")
DELTA_NET = "tiny:qwen3_5"


models = tiny_targets.models  # the fixture


def packed(lengths, padded):
    return pack_rows(torch.tensor(lengths), padded, sum(lengths))


some_lengths = st.lists(st.integers(0, 150), min_size=1, max_size=6).filter(any)


@given(some_lengths, st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_a_pack_is_the_rows_one_after_another(lengths, more):
    padded = max(lengths) + more
    pack = packed(lengths, padded)
    rows = torch.arange(len(lengths) * padded).view(-1, padded)
    laid = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    assert torch.equal(pack.places, laid) and torch.equal(pack.positions, laid % padded)
    assert pack.starts.tolist() == [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    for row, length in enumerate(lengths):
        sources = pack.sources.view(-1, padded)[row]
        if length:
            assert torch.equal(sources, pack.starts[row] + torch.arange(padded).clamp(max=length - 1))
        assert sources.min() >= 0 and sources.max() < sum(lengths)


@given(some_lengths)
@settings(max_examples=100, deadline=None)
def test_its_chunks_are_those_of_all_rows_and_entries_behind_the_end_of_one(lengths):
    chunks = packed(lengths, max(lengths)).chunks.tolist()
    real = [[row, i] for row, length in enumerate(lengths) for i in range(-(-length // CHUNK))]
    assert chunks[: len(real)] == real
    assert all(number * CHUNK >= lengths[row] for row, number in chunks[len(real) :])
    assert len(chunks) == (sum(lengths) + (CHUNK - 1) * len(lengths)) // CHUNK  # from M and B alone


@pytest.mark.parametrize("wrong", [-1, 1])
def test_another_number_of_real_tokens_is_an_error(wrong):
    with pytest.raises(RuntimeError, match="the real tokens announced with a micro-batch are not those of its rows"):
        pack_rows(torch.tensor([3, 5]), 5, 8 + wrong)


def fused(model, dtype=torch.float64, kernels=fused_twins):
    return FusedDecoder(load_truncated(model, None, LAYERS, dtype, "cpu").decoder, LAYERS, kernels)


fused_once = functools.cache(fused)


@torch.no_grad()
def check(model, lengths, padded):
    decoder, ids = fused_once(model), some_ids(len(lengths), padded)
    got, expected = decoder(ids, pack=packed(lengths, padded)), decoder(ids)
    assert got.shape == expected.shape
    for row, length in enumerate(lengths):
        assert not got[row, length:].any()
        assert (got[row, :length] - expected[row, :length]).norm() <= 1e-6 * expected[row, :length].norm()


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [70, 1, 2, 33], [5, 67, 3]])
def test_packed_rows_have_the_states_of_padded_ones(model, lengths):
    check(model, lengths, max(lengths) + len(lengths) - 1)


@pytest.mark.parametrize("model", FAMILIES)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), more=st.integers(0, 5))
@settings(max_examples=8, deadline=None)
def test_rows_of_any_lengths_have_the_states_of_padded_ones(model, lengths, more):
    check(model, lengths, max(lengths) + more)


@torch.no_grad()
def test_it_overwrites_all_of_the_memory_that_it_is_given():
    decoder, ids, pack = fused("tiny:qwen3"), some_ids(2, 9), packed([9, 4], 9)
    expected = decoder(ids, pack=pack)
    given = torch.full_like(expected, float("nan"))
    assert decoder(ids, given, pack) is given and torch.equal(given, expected)


# --- the test at the start


def with_twins(**planted):
    """The twins, some of them replaced."""
    return SimpleNamespace(**{**vars(fused_twins), **planted})


def conv_over_rows(x, weight, shape, tokens, positions, normed):
    return fused_twins.short_conv(x, weight, shape, tokens, None, normed)


def rule_over_rows(q, k, v, a, b, decay, pack):
    return fused_twins.delta_rule(q, k, v, a, b, decay)


def refuse(decoder):
    refuse_leaks(decoder, 512, CPU)


@pytest.mark.parametrize("model", FAMILIES)
def test_nothing_leaks(model):
    refuse(fused(model))
    assert 1 in LENGTHS and min(set(LENGTHS) - {1}) < 4  # fewer tokens than the convolution has taps
    assert max(LENGTHS) > CHUNK and any(length % CHUNK for length in LENGTHS)


@pytest.mark.parametrize(
    ("planted", "step"),
    [({"short_conv": conv_over_rows}, "convolution"), ({"delta_rule": rule_over_rows}, "Gated DeltaNet")],
)
def test_a_leak_in_a_delta_net_is_found_and_named(planted, step):
    with pytest.raises(
        RuntimeError, match=rf"^packed: rows leak into each other in the {step} of layer 0: with the 70"
    ):
        refuse(fused(DELTA_NET, kernels=with_twins(**planted)))


@pytest.mark.parametrize(("model", "layer"), [("tiny:llama", 0), ("tiny:qwen3", 0), (DELTA_NET, 3)])
def test_attention_over_the_whole_pack_is_found_and_named(model, layer, monkeypatch):
    plain = fused_decoder._Attention._attended

    def whole(self, q, k, v, batch):
        line = dataclasses.replace(batch, rows=1, tokens=batch.line)
        return batch.padded(plain(self, *(batch.packed(each) for each in (q, k, v)), line))

    monkeypatch.setattr(fused_decoder._Attention, "_attended", whole)
    with pytest.raises(
        RuntimeError, match=rf"in the attention of layer {layer}: with the 70 tokens of row 0, .* 1 and 2"
    ):
        refuse(fused(model))


def test_states_written_into_another_row_are_found(monkeypatch):
    def shifted(self, hidden, states):
        states.index_copy_(0, self.pack.places.roll(-1), hidden)

    monkeypatch.setattr(fused_decoder._Batch, "write", shifted)
    with pytest.raises(RuntimeError, match="in the order in which rows are written"):
        refuse(fused("tiny:llama"))


def test_states_that_follow_no_token_show_nothing_and_are_refused(monkeypatch):
    begin = FusedDecoder._begin
    monkeypatch.setattr(FusedDecoder, "_begin", lambda self, ids, pack: begin(self, torch.zeros_like(ids), pack))
    with pytest.raises(RuntimeError, match="the states of a row of 70 tokens do not depend on them"):
        refuse(fused("tiny:llama"))


# --- the target and its stage, with twins of the kernels


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The layers are fused as on one, and few tokens suffice to tune kernels."""
    monkeypatch.setattr(truncated_target, "_WARM_UP", 70)
    monkeypatch.setattr(truncated_target, "_why_plain", lambda decoder: None)
    monkeypatch.setattr(truncated_target, "FusedDecoder", functools.partial(FusedDecoder, kernels=fused_twins))


@pytest.mark.parametrize("model", ["tiny:qwen3", DELTA_NET])
def test_a_packed_target_computes_no_padding_and_counts_it(on_a_gpu, model):
    target, ids, lengths = load_truncated(model, None, [1, 3], torch.float64, "cpu"), some_ids(3, 20), [20, 1, 7]
    expected = target(ids, torch.tensor(lengths))
    assert target.spared == (0, 0)
    target.pack()
    assert target.forward.endswith(" layers, packed (no leakage between rows)")
    for real in (28, None):  # None: counted there
        got = target(ids, torch.tensor(lengths), real)
        assert (got - expected).norm() <= 1e-6 * expected.norm()
        assert torch.equal(got == 0, expected == 0)
    assert target.spared == (2 * 32, 2 * 60)
    with pytest.raises(RuntimeError, match="the real tokens announced"):
        target(ids, torch.tensor(lengths), 29)


def test_a_packed_target_opens_only_if_nothing_leaks(on_a_gpu, monkeypatch):
    target = load_truncated(DELTA_NET, None, [1], "float32", "cpu")
    target._fused = fused(DELTA_NET, "float32", with_twins(delta_rule=rule_over_rows))
    with pytest.raises(RuntimeError, match="leak"):
        target.pack()
    assert "packed" not in target.forward


def test_the_stage_says_at_its_end_how_much_it_did_not_compute(on_a_gpu, capsys):
    tokens = TokenBatch(some_ids(2, 12), torch.ones(2, 12).bool(), torch.tensor([12, 7]), torch.arange(2), real=19)
    hidden = []
    for keys in ({}, {"packed": True}):
        stage = TargetForward(model="tiny:qwen3", **keys)
        stage.check(1)
        stage.open(Context(device="cpu"))
        hidden.append(stage.process(tokens).hidden)
        stage.finish()
        stage.close()
    assert (hidden[0] - hidden[1]).norm() <= 1e-5 * hidden[0].norm()
    assert capsys.readouterr().out.splitlines()[-1] == "target: tokens of padding, not computed: 5 of 24 (20.8%)"


def refusal(**keys):
    stage = TargetForward(**{"model": "tiny:qwen3", "packed": True, **keys})
    with pytest.raises(BadInput) as refused:
        stage.check(1)
        stage.open(Context(device="cpu"))
    (line,) = str(refused.value).splitlines()
    return line


def test_where_layers_are_not_fused_packed_is_refused(monkeypatch):
    needs = "packed: needs the fused layers; here: "
    assert refusal() == needs + "no GPU"
    assert refusal(forward="plain") == needs + "forward: plain"
    assert "packed: not together with shapes" in refusal(shapes=[[1, 512]])
    monkeypatch.setattr(truncated_target, "_why_plain", lambda decoder: "no kernels for mistral")
    assert refusal() == needs + "no kernels for mistral"

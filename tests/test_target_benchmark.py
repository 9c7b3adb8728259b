"""What the target benchmark counts, and what it calls missed. Its measuring needs a GPU."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.target import FUSED, GOALS, GRAPH, PLAIN, Case, Measured, Shape, captured_layers, missed, operations
from dflash_pipe import BadInput
from stages.model_source import text_config
from stages.target_model import resolve_layers, shortened

MODEL = "sizes:qwen3_6_27b"


def test_the_captured_layers_are_those_of_the_whole_model_and_end_with_the_last_that_is_computed():
    assert captured_layers(62) == resolve_layers(5, 64)
    for depth in range(6, 64):
        layers = captured_layers(depth)
        assert layers == sorted(set(layers)) and layers[0] == 1 and layers[-1] == depth - 1


def test_work_is_that_of_the_products_with_weights():
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(shortened(text_config(MODEL), 62)).get_decoder()
    mlp, delta = 3 * 5120 * 17408, 5120 * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48) + 48 * 128 * 5120
    attention = 5120 * 256 * (2 * 24 + 2 * 4) + 24 * 256 * 5120
    assert operations(SimpleNamespace(decoder=decoder)) == 2 * (62 * mlp + 47 * delta + 15 * attention)


def test_shapes_are_read_or_refused():
    assert Shape.parse("3x2000") == Shape(3, 2000) and str(Shape(3, 2000)) == "3x2000" and Shape(3, 2000).count == 6000
    for text in ("3", "0x5", "3x", "x3", "3X4", "3x-1"):
        with pytest.raises(BadInput, match="is not ROWSxTOKENS, such as 3x2000"):
            Shape.parse(text)


def case(share, same=True):
    """Of the cool card's rate; of that of a card that has slowed down it is always more."""
    return Case({GRAPH: Measured(1.0, 1.0, 1.2 * share, share, 1.0)}, 1.0, same)


def test_what_is_missed_is_said():
    good = {PLAIN: [0.02, 0.03], FUSED: [0.02, 0.02]}
    reached = {shape: case(goal) for shape, goal in GOALS.items()}
    assert missed(reached, MODEL, good) == []
    below = {shape: case(goal - 0.01) for shape, goal in GOALS.items()}
    assert [line.split(":")[0] for line in missed(below, MODEL, good)] == ["3x2000", "8x2048", "1x512"]
    assert missed(below, "sizes:qwen3_8b", good) == []  # the goals are stated for one model's sizes
    assert missed({Shape(9, 9): case(0.1, same=False)}, MODEL, good)[0].startswith("9x9: missed: the graph's bits")
    assert "error is larger" in missed({}, MODEL, {PLAIN: [0.02, 0.03], FUSED: [0.01, 0.04]})[0]

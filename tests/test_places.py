"""A complaint names the place of the value that was laid last, not of what it is laid over."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_pipe.check import check
from dflash_pipe.errors import BadInput
from dflash_pipe.graph import load
from dflash_pipe.located import located
from dflash_pipe.memory import estimate
from dflash_pipe.places import COMMAND_LINE, Places
from dflash_pipe.plan import plan

RANDOM = "graphs/targets/random_tiny_qwen3.yaml"
TWO_ODD = "def f(x: int) -> int:\n    return x\n\n\ndef g(x: str, y: int) -> None: ...\n"


def refused(*words: str) -> BadInput:
    """What `check` says of a graph, up to the memory that it needs. words: files and overrides."""
    with pytest.raises(BadInput) as caught:
        graph = load([word for word in words if "=" not in word], [word for word in words if "=" in word])
        check(graph)
        estimate(plan(graph))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_cache: None) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_places.py").write_text(TWO_ODD)
    return tmp_path


# what mine.yaml lays over graphs/overlapped.yaml, beginning on line 2 -> the line that is to be named, and a word of it
MINE = {
    "workers:\n  target: {replicas: 2, device: [cpu, cpu, cpu]}": (3, "3 devices for 2 replicas"),
    "workers:\n  drafter: {replicas: 2}": (3, "need take: round_robin"),
    "workers:\n  drafter:\n    take: round_robin\n    replicas: 3": (
        5,
        "expected a multiple of 3, the drafter's replicas",
    ),
    "workers:\n  optim: {device: cpu, replicas: 2}": (3, "expected 1 replica, not 2"),
    "workers:\n  loader:\n    device: cpu\n    replicas: 2": (5, "cannot be replicated"),
    "workers:\n  target:\n    kind: async": (4, "kind: async, but target"),
    "workers:\n  target: {order: completion}": (3, "order: completion needs replicas"),
    "workers:\n  target: {turn: gpu}": (3, "shared with nobody"),
    "workers:\n  loader: null": (3, "it is on no worker"),
    "stages:\n  export: null": (3, "channels.weights.to: no stage 'export'"),
    "stages:\n  export: null\nchannels:\n  weights: null": (3, "worker 'optim': no stage 'export'"),
    "channels:\n  params:\n    broadcast: true\n    initial: 0": (5, "a cycle without a token"),
    "channels:\n  params: {initial: 3}": (3, "do not fit into a capacity of 2"),
    "channels:\n  grads: {per: message}": (3, "sends nothing per message"),
    "channels:\n  features:\n    group: 3": (4, "never gathers in a capacity of 2"),
    "credits:\n  messages: 1\nchannels:\n  features: {group: 2}": (3, "cannot make a group of 2"),
    "channels:\n  metrics: null": (3, "no channel feeds its port"),
    "window: 3\nworkers: {drafter: {take: round_robin, replicas: 2}}": (3, "cannot be dealt evenly"),
    "stages:\n  target: {with: {layers: [99]}}": (3, "layer"),
    "stages:\n  drafter:\n    with:\n      num_layers: 1\n      mask_token_id: 99999999": (6, "mask_token_id"),
    "stages:\n  drafter: {with: {head_dim: 7}}": (3, "head_dim"),
    "stages:\n  target:\n    with:\n      layers:\n      - 0\n      - 99\n      - 1": (7, "no layer 99"),
    "stages:\n  target:\n    with:\n      layers:\n      - 0\n      - x": (
        7,
        "layers.1: should be a valid integer, got 'x'",
    ),
}
# over graphs/toy/overlapped.yaml
TOY = {
    "stages:\n  target:\n    use: odd_places:f": (
        4,
        "odd_places:f has no parameter 'seconds', which graphs/toy/dataflow.yaml:7",
    ),
    "stages:\n  target:\n    use: odd_places:g\n    with: {}": (4, "channels.batches.to: target has several ports"),
    "stages:\n  target:\n    use: odd_places:f\n    with: {}": (
        4,
        "channel 'batches': data sends Number, but target.x",
    ),
    "stages:\n  more: {use: odd_places:f, with: {}}": (3, "stage 'more': no channel feeds its port 'x'"),
    # of a list the entry
    "workers:\n  target:\n    stages:\n    - target\n    - nope": (6, "no stage 'nope'"),
    "workers:\n  target:\n    stages:\n    - target\n    - target": (6, "is on worker 'target' already"),
    "workers:\n  target:\n    stages:\n    - target\n    - data": (6, "is on worker 'loader' already"),
    "workers:\n  target:\n    replicas: 2\n    device:\n    - cpu\n    - nope": (
        7,
        "target.device.1: no device 'nope'",
    ),
    "workers:\n  target:\n    device:\n    - 7": (5, "workers.target.device.0: should be text, got 7"),
    "channels:\n  features:\n    to:\n    - drafter.features\n    - nope": (6, "features.to.1: no stage 'nope'"),
    "channels:\n  features:\n    to:\n    - drafter.features\n    - drafter.nope": (6, "drafter has no port 'nope'"),
    "channels:\n  features:\n    to:\n    - drafter.features\n    - data": (6, "data is a source"),
    "channels:\n  features:\n    to:\n    - drafter.features\n    - drafter.features": (6, "is fed by channel"),
    "channels:\n  features:\n    to:\n    - drafter.features\n    - optimizer": (
        6,
        "port optimizer.grads is fed by channel 'features'",
    ),
}


@pytest.mark.parametrize("text", [*MINE, *TOY])
def test_the_line_of_ones_own_file_is_named(text: str, folder: Path) -> None:
    bases = f"[overlapped.yaml, {RANDOM}]" if text in MINE else "graphs/toy/overlapped.yaml"
    (folder / "mine.yaml").write_text(f"extends: {bases}\n{text}\n")
    line, said = (MINE | TOY)[text]
    error = refused("mine.yaml")
    assert error.where == f"mine.yaml:{line}", error
    assert said in error.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("target.model=sizes:nope", "sizes:nope"),
        ("target.packed=true", "packed"),
        ("target.layers=[99]", "layer"),
        ("drafter.head_dim=7", "head_dim"),
        ("workers.drafter.replicas=2", "take: round_robin"),
        ("workers.drafter.replicas=3 workers.drafter.take=round_robin", "multiple of 3, the drafter's replicas"),
        ("params.initial=0", "a cycle without a token"),
        ("workers.loader=null", "it is on no worker"),
        ("workers.target.kind=async", "kind: async"),
        ("transport=stages.toy:Wait", "is not a Transport"),
    ],
)
def test_what_the_command_line_says_is_named_as_such(words: str, said: str, folder: Path) -> None:
    error = refused("graphs/overlapped.yaml", RANDOM, *words.split())
    assert error.where == COMMAND_LINE, error
    assert said in error.message


def test_of_a_reference_the_later_end_is_named(folder: Path) -> None:
    """In place of a number: what the base takes from another key, and what this file takes from the base."""
    toy = "graphs/toy/overlapped.yaml"
    (folder / "base.yaml").write_text(
        f"extends: {toy}\nname: much\nstages:\n  target: {{with: {{seconds: '${{name}}'}}}}\n"
        "  drafter: {with: {seconds: 1.0}}\n"
    )
    (folder / "over.yaml").write_text("extends: base.yaml\n\nname: more\n")
    (folder / "takes.yaml").write_text("extends: base.yaml\nstages: {drafter: {with: {seconds: '${name}'}}}\n")
    assert str(refused("base.yaml")).startswith("base.yaml:4: stages.target.with.seconds: should be a valid number")
    assert str(refused("over.yaml")).startswith("over.yaml:3: stages.target.with.seconds: should be a valid number")
    assert refused("base.yaml", "name=less").where == COMMAND_LINE
    assert refused("takes.yaml", "target.seconds=1").where == "takes.yaml:2"


def test_keys_of_one_file_are_ranked_by_who_asks() -> None:
    """The likeliest first; whatever is not written, or only a default, comes after what is."""
    tree = located({"a": {"x": 1}, "b": 2}, "one.yaml:3")
    tree.value["c"], tree.value["d"] = located(1, "two.yaml:1"), located(1, "two.yaml")
    places = Places(tree, ("one.yaml", "two.yaml"))
    assert places.of(("a", "x"), ("c",), ("b",)) == places.of(("d",), ("c",)) == "two.yaml:1"
    assert places.of(("d",), ("b",)) == places.of(("a", "y"), ("a", "x", "z"), ("b",)) == "one.yaml:3"
    assert places.of(("nothing",), otherwise="there") == "there"
    assert places.later("two.yaml:7", COMMAND_LINE, "one.yaml:1") == COMMAND_LINE
    assert places.later("two.yaml:7", "two.yaml:1") == "two.yaml:7"

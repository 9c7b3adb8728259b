"""YAML -> Graph: overrides, references, parameters, ports, devices, dump and dataflow."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_pipe import BadInput, Stage, Transport
from dflash_pipe.check import check
from dflash_pipe.graph import Capacity, Credits, PortRef, dataflow, difference, dump, load
from dflash_pipe.stage import FunctionStage
from stages.toy import Digest, Numbers, WaitStep

TOPOLOGIES = [f"graphs/toy/{name}.yaml" for name in ("sequential", "overlapped", "parallel_target", "data_parallel")]
OVERLAPPED = ["graphs/toy/overlapped.yaml"]


@dataclasses.dataclass(frozen=True)
class Inner:
    low: int
    high: float = 1.0


class Typed(Stage):
    rate: float = 1.0
    path: Path = Path("x")
    pair: tuple[int, ...] = (1, 2)
    kind: Literal["a", "b"] = "a"
    inner: Inner = Inner(0)
    layers: int | list[int] | None = None

    def process(self, x: Digest) -> Digest:
        return x


def scaled(x: Digest, *, by: int, note: str = "") -> Digest:
    return Digest(f"{x.digest}{by}{note}")


class Machine(Transport):
    """Two GPUs; auto is the first."""

    def __init__(self, threads=None):
        self.threads = threads

    def resolve(self, device):
        devices = {"auto": "cuda:0", "cpu": "cpu", "cuda:0": "cuda:0", "cuda:1": "cuda:1"}
        if device not in devices:
            raise BadInput(f"no device {device!r}")
        return devices[device]


@pytest.fixture
def over(tmp_path):
    """A file that extends the shipped toy graph."""

    def write(text, base="graphs/toy/overlapped.yaml"):
        (tmp_path / "over.yaml").write_text(f"extends: {base}\n{text}")
        return [tmp_path / "over.yaml"]

    return write


def bad(*arguments):
    with pytest.raises(BadInput) as caught:
        load(*arguments)
    return str(caught.value)


# --- what is read


def test_a_graph_is_what_the_files_say():
    graph = load(OVERLAPPED)
    assert (graph.name, graph.seed, graph.window, graph.threads) == ("overlapped", 20, 4, None)
    assert (graph.stall_after, graph.snapshot, graph.credits) == (10.0, None, Credits())
    assert list(graph.stages) == ["data", "target", "drafter", "optimizer"]
    assert graph.stages["data"].make is Numbers
    assert graph.stages["data"].parameters["count"] == 32
    params = graph.channels["params"]
    assert (params.sender, params.receivers, params.per) == ("optimizer", (PortRef("drafter", "params"),), "window")
    assert (params.broadcast, params.initial, params.capacity, params.group) == (True, 1, Capacity(2), 1)
    assert graph.channels["batches"].capacity == Capacity(8)
    assert graph.channels["batches"].receivers == (PortRef("target", "number"),)
    assert graph.workers["optim"].stages == ("optimizer",)
    assert graph.workers["optim"].device == {"optimizer": ("cpu",)}
    assert graph.files == ("graphs/toy/dataflow.yaml", "graphs/toy/overlapped.yaml")


def test_specs_know_their_places():
    graph = load(OVERLAPPED)
    text = Path("graphs/toy/dataflow.yaml").read_text().splitlines()
    stage_line = int(graph.stages["drafter"].where.removeprefix("graphs/toy/dataflow.yaml:"))
    channel_line = int(graph.channels["grads"].where.removeprefix("graphs/toy/dataflow.yaml:"))
    assert text[stage_line - 1].strip().startswith("drafter:")
    assert text[channel_line - 1].strip().startswith("grads:")
    assert graph.workers["target"].where.startswith("graphs/toy/overlapped.yaml:")


def test_capacity_in_items_bytes_or_both(over):
    text = "channels: {batches: {capacity: {bytes: 8GiB}}, features: {capacity: {items: 4, bytes: 512}}}\n"
    channels = load(over(text)).channels
    assert channels["batches"].capacity == Capacity(2, 8 * 2**30)
    assert channels["features"].capacity == Capacity(4, 512)


def test_several_receivers(over):
    text = 'stages: {tap: {use: "stages.toy:Wait"}}\nchannels: {batches: {to: [target, tap.number]}}\n'
    receivers = load(over(text)).channels["batches"].receivers
    assert receivers == (PortRef("target", "number"), PortRef("tap", "number"))


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("auto", ("cuda:0", "cuda:0")),
        ("cuda:1", ("cuda:1", "cuda:1")),
        ("[cuda:1, cpu]", ("cuda:1", "cpu")),
        ("{target: [cpu, cuda:0]}", ("cpu", "cuda:0")),
        ("[cuda:0]", ("cuda:0",)),  # refused by check: one for each replica
    ],
)
def test_devices_are_resolved_by_the_transport(over, device, expected):
    text = f'transport: "{__name__}:Machine"\nthreads: 3\nworkers: {{target: {{replicas: 2, device: {device}}}}}\n'
    graph = load(over(text))
    assert graph.workers["target"].device == {"target": expected}
    assert graph.workers["drafter"].device == {"drafter": ("cuda:0",)}
    assert graph.transport.threads == 3


# --- parameters


def test_parameters_take_their_annotated_types(over):
    values = "{rate: 2, path: a/b, pair: [3, 4, 5], kind: b, inner: {low: 1}, layers: [1, 2]}"
    spec = load(over(f'stages: {{target: {{use: "{__name__}:Typed", with: {values}}}}}\n', "graphs/toy/dataflow.yaml"))
    built = spec.stages["target"].build()
    assert (built.rate, built.path, built.pair, built.kind) == (2.0, Path("a/b"), (3, 4, 5), "b")
    assert (built.inner, built.layers) == (Inner(1, 1.0), [1, 2])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("rate: '2'", "rate: should be a valid number, got '2'"),
        ("rate: true", "rate: should be a valid number, got true"),
        ("rate: null", "rate: should be a valid number, got null"),
        ("pair: [1, x]", "pair.1: should be a valid integer, got 'x'"),
        ("kind: c", "kind: unknown value 'c' (known: a, b)"),
        ("inner: {}", "inner: key 'low' is missing"),
        ("inner: {low: 1.5}", "inner.low: should be a valid integer, got 1.5"),
        ("layers: some", "layers: should be a valid integer or a list, got 'some'"),
        ("path: [a]", 'path: should be text, got ["a"]'),
    ],
)
def test_parameters_of_other_types_are_refused_with_their_line(over, written, said):
    text = f'stages:\n  target:\n    use: "{__name__}:Typed"\n    with: {{{written}}}\n'
    line = bad(over(text))
    assert f"over.yaml:5: stages.target.with.{said}" in line
    assert "\n" not in line


def opaque(x: Digest, *, by: Machine) -> Digest:
    return x


def test_a_parameter_that_yaml_cannot_give_is_refused(over):
    line = bad(over(f'stages: {{target: {{use: "{__name__}:opaque", with: {{by: 3}}}}}}\n'))
    assert "stages.target.with.by: a parameter of type" in line
    assert line.endswith("Machine'> cannot be given in YAML")


def test_a_function_is_a_stage_with_keyword_parameters(over):
    text = f'stages: {{target: {{use: "{__name__}:scaled", with: {{by: 3}}}}}}\n'
    stage = load(over(text)).stages["target"].build()
    assert isinstance(stage, FunctionStage)
    assert stage.process(Digest("a")) == Digest("a3")
    without = f'stages: {{target: {{use: "{__name__}:scaled", with: null}}}}\n'
    assert "stages.target.with: scaled needs 'by'" in bad(over(without))


def test_no_two_built_stages_share_a_parameter(over):
    text = f'stages: {{target: {{use: "{__name__}:Typed", with: {{layers: [1]}}}}}}\n'
    spec = load(over("workers: {main: null}\n" + text, "graphs/toy/sequential.yaml")).stages["target"]
    assert spec.build().layers is not spec.build().layers


def test_stages_check_themselves_with_their_replicas(over):
    line = bad(
        over("workers:\n  drafter: {replicas: 4, take: round_robin}\nstages: {drafter: {with: {partials: 6}}}\n")
    )
    assert line.endswith("over.yaml:4: stages.drafter: partials: 6 is not a multiple of 4, the replicas")


def test_modules_of_the_current_folder_can_be_used(tmp_path, monkeypatch, over):
    (tmp_path / "my_stages_tg.py").write_text(
        "from stages.toy import Digest, Number\ndef mine(x: Number) -> Digest:\n    return Digest(str(x.index))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    graph = load(over('stages: {target: {use: "my_stages_tg:mine", with: null}}\n'))
    check(graph)
    assert graph.stages["target"].make.__name__ == "mine"


# --- overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("drafter.seconds=3e-3", lambda g: g.stages["drafter"].parameters["seconds"] == 3e-3),
        ("stages.drafter.with.seconds=1", lambda g: g.stages["drafter"].parameters["seconds"] == 1.0),
        ("target.replicas=3", lambda g: g.workers["target"].replicas == 3),
        ("workers.target.turn=gpu", lambda g: g.workers["target"].turn == "gpu"),
        ("features.capacity=7", lambda g: g.channels["features"].capacity == Capacity(7)),
        ("features.capacity.bytes=1MiB", lambda g: g.channels["features"].capacity == Capacity(2, 2**20)),
        ("channels.features.group=3", lambda g: g.channels["features"].group == 3),
        ("window=2", lambda g: g.window == 2),
        ("credits={messages: 3}", lambda g: g.credits == Credits(3, None)),
        ("credits.windows=1", lambda g: g.credits == Credits(None, 1)),
        ("name=a b", lambda g: g.name == "a b"),
        ("name=a=b", lambda g: g.name == "a=b"),
        ("threads=", lambda g: g.threads is None),
        ("workers.optim=null", lambda g: "optim" not in g.workers),
        ("workers.more={stages: [optimizer]}", lambda g: g.workers["more"].stages == ("optimizer",)),
    ],
)
def test_overrides(text, value):
    assert value(load(OVERLAPPED, [text]))


def test_later_overrides_win():
    assert load(OVERLAPPED, ["window=2", "window=3"]).window == 3


@pytest.mark.parametrize("text", ["window", "=3", ""])
def test_what_is_not_key_and_value_is_refused(text):
    assert bad(OVERLAPPED, [text]) == f"command line: {text!r}: expected key=value"


# --- references


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ('"${target.seconds}"', 0.011),
        ('"${data.count}"', 32),
        ('"${seed}"', 20),
        ('"${window}"', 4),
        ('"${threads}"', None),
        ('"${channels.batches.capacity}"', 8),
        ('"${workers.optim.stages}"', ["optimizer"]),
        ('"${optimizer}"', {"seconds": 0.002}),
        ('"${drafter.partials}-${name}"', "2-over"),
        ('"r${threads}"', "rnull"),
        ('"${target.nbytes}"', 32),  # its default
        ('["${seed}", {a: "${seed}"}]', [20, {"a": 20}]),
        ('"$seed $ {seed}"', "$seed $ {seed}"),
    ],
)
def test_references(over, reference, value):
    text = f'stages: {{target: {{use: "{__name__}:anything", with: {{by: {reference}}}}}}}\n'
    if "target." in reference:
        text = text.replace("target: {use", "tap: {use")
    stage = load(over(text)).stages["tap" if "target." in reference else "target"]
    assert stage.parameters["by"] == value
    assert type(stage.parameters["by"]) is type(value)


def anything(x: Digest, *, by: object) -> Digest:
    return x


def test_references_follow_overrides_and_one_another(over):
    text = "stages:\n  target: {with: {seconds: '${drafter.seconds}'}}\n"
    text += "  drafter: {with: {seconds: '${optimizer.seconds}'}}\n"
    assert load(over(text), ["optimizer.seconds=0.5"]).stages["target"].parameters["seconds"] == 0.5


# --- dump and dataflow


@pytest.mark.parametrize("file", TOPOLOGIES)
def test_a_dumped_graph_loads_to_the_same_graph_anywhere(file, tmp_path, monkeypatch):
    graph = load([file], ["target.seconds=1e-6", 'drafter.seconds="${target.seconds}"', "credits={messages: 3}"])
    (tmp_path / "copy.yaml").write_text(dump(graph))
    monkeypatch.chdir(tmp_path)
    copy = load(["copy.yaml"])
    assert copy == graph
    assert dump(copy) == dump(graph)
    assert dataflow(copy) == dataflow(graph)


def test_the_dataflow_is_that_of_the_dataflow():
    assert all(dataflow(load([file])) == dataflow(load([TOPOLOGIES[0]])) for file in TOPOLOGIES)


@pytest.mark.parametrize(
    "same",
    [
        "name=other",
        "stall_after=3",
        "snapshot=7",
        "target.replicas=2",
        "features.capacity=9",
        "features.group=2",
        "credits.messages=4",
        "target.turn=t",
        "drafter.seconds=0.006",
        "target.nbytes=32",  # what it is by default
    ],
)
def test_what_changes_no_result_leaves_the_dataflow(same):
    assert dataflow(load(OVERLAPPED, [same])) == dataflow(load(OVERLAPPED))


@pytest.mark.parametrize(
    "other",
    [
        "seed=21",
        "window=2",
        "partial_window=drop",
        "data.count=31",
        "drafter.partials=4",
        "params.initial=2",
        "params.broadcast=false",
        "target.nbytes=33",
    ],
)
def test_what_changes_the_result_changes_the_dataflow(other):
    assert dataflow(load(OVERLAPPED, [other])) != dataflow(load(OVERLAPPED))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**63 - 1), st.integers(1, 1000), st.floats(0, 86_400), st.integers(1, 9))
def test_numbers_survive_the_command_line_and_a_dump(seed, window, seconds, items):
    overrides = [f"seed={seed}", f"window={window}", f"target.seconds={seconds!r}", f"features.capacity={items}"]
    graph = load(OVERLAPPED, overrides)
    assert (graph.seed, graph.window, graph.channels["features"].capacity.items) == (seed, window, items)
    assert graph.stages["target"].parameters["seconds"] == seconds


def test_the_step_of_the_toy_has_the_ports_of_the_real_one():
    inputs = load(OVERLAPPED).stages["drafter"].signature.inputs
    assert list(inputs) == ["features", "params"]
    assert load(OVERLAPPED).stages["drafter"].make is WaitStep


def test_a_difference_is_named():
    there, here = dataflow(load(OVERLAPPED)), dataflow(load(OVERLAPPED, ["seed=7"]))
    assert difference(there, there) is None
    assert difference(there, here) == "seed is 20 there, 7 here"
    assert difference({**here, "more": 1}, here) == "more is only there"


def test_what_only_receives_does_not_count():
    files = ["graphs/overlapped.yaml", "graphs/targets/tiny_llama.yaml"]
    assert dataflow(load(files)) == dataflow(load(files, ["export.folder=elsewhere"]))
    assert difference(dataflow(load(files)), dataflow(load(files, ["optimizer.max_norm=2.0"])))

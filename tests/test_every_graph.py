"""Every graph that ships loads and checks, and topology files differ in the keys of a topology only."""

import os
from pathlib import Path

import pytest
import yaml

from dflash_pipe import BadInput
from dflash_pipe.check import check
from dflash_pipe.graph import dataflow, dump, load
from stages.batches import Cut

GRAPHS = Path(__file__).parent.parent / "graphs"
TARGETS = sorted(path.name for path in (GRAPHS / "targets").glob("*.yaml"))
TOPOLOGIES = ["sequential.yaml", "overlapped.yaml", "parallel_target.yaml", "data_parallel.yaml"]
WORKER_KEYS = {"stages", "kind", "replicas", "device", "take", "order", "turn"}
CHANNEL_KEYS = {"capacity", "group"}


def files():
    """Every YAML file that is a whole graph or becomes one with a target."""
    found = sorted(path.relative_to(GRAPHS).as_posix() for path in GRAPHS.rglob("*.yaml"))
    return [name for name in found if not name.startswith("targets/")]


def given(name, target="tiny_qwen3.yaml"):
    """The files to load for a graph: what trains needs a target beside it."""
    needs_target = "dataflow.yaml" in load_order(name)
    return [GRAPHS / name, *([GRAPHS / "targets" / target] if needs_target else [])]


def load_order(name):
    """The names of a file and of everything it extends, in the folder of graphs."""
    bases = yaml.safe_load((GRAPHS / name).read_text()).get("extends", [])
    folder = Path(name).parent
    bases = [os.path.normpath(folder / base) for base in ([bases] if isinstance(bases, str) else bases)]
    return [name, *(each for base in bases for each in load_order(base))]


@pytest.mark.parametrize("name", files())
def test_every_graph_loads_and_checks(name, tmp_path):
    graph = load(given(name))
    if graph.workers:
        check(graph)
    else:
        assert name.endswith("dataflow.yaml")
    (tmp_path / "copy.yaml").write_text(dump(graph))
    assert load([tmp_path / "copy.yaml"]) == graph


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_fits_the_dataflow(target):
    for name in TOPOLOGIES:
        check(load(given(name, target)))


@pytest.mark.parametrize("folder", ["", "toy/"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topologies_compute_the_same(folder, name):
    assert dataflow(load(given(folder + name))) == dataflow(load(given(folder + "dataflow.yaml")))


@pytest.mark.parametrize("folder", ["", "toy/"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topology_files_have_only_keys_of_a_topology(folder, name):
    text = yaml.safe_load((GRAPHS / folder / name).read_text())
    assert set(text) <= {"extends", "workers", "credits", "channels"}
    for worker in text["workers"].values():
        assert set(worker) <= WORKER_KEYS
    for channel in text.get("channels", {}).values():
        assert set(channel) <= CHANNEL_KEYS


@pytest.mark.parametrize("folder", ["", "toy/"])
def test_what_reports_and_exports_sits_with_the_optimizer(folder):
    for name in TOPOLOGIES:
        graph = load(given(folder + name))
        place = {stage: worker.name for worker in graph.workers.values() for stage in worker.stages}
        assert {place[stage] for stage in ("optimizer", "track", "export") if stage in place} == {place["optimizer"]}


@pytest.mark.parametrize(
    ("graph", "override", "said"),
    [
        ("sequential", "drafter.loss=dpcae", "did you mean 'dpace'"),
        ("sequential", "drafter.dpace=sufix", "did you mean 'suffix'"),
        ("sequential", "drafter.attention=flx", "did you mean 'flex'"),
        ("sequential", "drafter.dtype=float16", "did you mean 'bfloat16'"),
        ("sequential", "drafter.gamma=none", "should be a valid number or 'auto', got 'none'"),
        ("sequential", "target.weights=randm", "did you mean 'random'"),
        ("sequential", "target.dtype=fp32", "unknown value 'fp32' (known: auto, bfloat16, float16, float32)"),
        ("sequential", "optimizer.nonfinite=skp", "did you mean 'skip'"),
        ("regenerate", "target.dtype=float23", "did you mean 'float32'"),
        ("regenerate", "write.responses=targt", "did you mean 'target'"),
        ("evaluate", "drafter.weights=pretraind", "did you mean 'pretrained'"),
    ],
)
def test_a_word_that_is_no_choice_is_told_with_the_nearest(graph, override, said):
    with pytest.raises(BadInput) as caught:
        check(load(given(f"{graph}.yaml"), [override]))
    key, _, value = override.partition("=")
    assert f".with.{key.partition('.')[2]}: " in str(caught.value) and repr(value) in str(caught.value)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("target", TARGETS)
def test_the_shapes_that_a_target_captures_are_those_of_full_micro_batches(target):
    stages = load(given("overlapped.yaml", target)).stages
    shapes, told = stages["target"].parameters.get("shapes"), stages["data"].parameters
    if stages["data"].use == "stages.random_rows:RandomTokens":
        expected = [[told["rows"], told["length"]]]
    elif told.get("buckets"):
        cut = Cut(told["max_tokens"], told.get("max_rows"))
        expected = [[cut.rows(length), length] for length in told["buckets"]]
        assert told["buckets"][-1] == told["max_length"]
    else:
        expected = None
    assert shapes == expected

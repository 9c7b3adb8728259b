"""Whatever is wrong with a graph is told in one line: the place, what is wrong, what was expected, the nearest name."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_pipe import BadInput
from dflash_pipe.check import check
from dflash_pipe.cli import main
from dflash_pipe.graph import load
from dflash_pipe.located import dumps
from dflash_pipe.plan import plan

GOOD = """\
window: 4
stages:
  data: {use: "stages.toy:Numbers", with: {count: 8}}
  target: {use: "stages.toy:Wait", with: {seconds: 0.0}}
  drafter:
    use: "stages.toy:WaitStep"
    with:
      partials: 2
  optimizer: {use: "stages.toy:WaitOptimizer"}
channels:
  batches: {from: data, to: target}
  features: {from: target, to: drafter.features}
  grads: {from: drafter, to: optimizer, per: window}
  params: {from: optimizer, to: drafter.params, per: window, broadcast: true, initial: 1}
workers:
  main: {stages: [data, target]}
  step: {stages: [drafter, optimizer]}
"""


@dataclass(frozen=True)
class Case:
    """expected: the whole line. text: my.yaml, beside the good one. files: others, by name. given: the command line."""

    expected: str
    text: str | bytes = ""
    files: dict[str, str] = field(default_factory=dict)
    given: tuple[str, ...] = ("my.yaml",)


def over(text: str) -> str:
    return f"extends: good.yaml\n{text}"


CASES = {
    # --- files
    "missing file": Case("no such file: god.yaml (did you mean 'good.yaml'?)", given=("god.yaml",)),
    "missing shipped file": Case(
        "no such file: graphs/toy/overlaped.yaml (did you mean 'overlapped.yaml'?)",
        given=("graphs/toy/overlaped.yaml",),
    ),
    "a folder": Case("folder is a folder, not a YAML file", given=("folder",), files={"folder/x.yaml": ""}),
    "empty": Case("my.yaml: the file is empty (expected stages, channels, workers)", "# nothing but a comment\n"),
    "a list": Case("my.yaml:1: expected a mapping at the top (stages, channels, workers)", "- stages\n- channels\n"),
    "two documents": Case(
        "my.yaml:2: not valid YAML: expected a single document in the stream: but found another document",
        "window: 4\n---\nwindow: 5\n",
    ),
    "tab": Case("my.yaml:2: not valid YAML: a tab (YAML is indented with spaces)", "stages:\n\tdata: {use: x}\n"),
    "bad flow": Case(
        "my.yaml:3: not valid YAML: while parsing a flow mapping: expected ',' or '}', but got '<stream end>'",
        "window: 4\nstages: {data: {use: x}\n",
    ),
    "not UTF-8": Case("my.yaml:2: not UTF-8: byte 0xff", b"window: 4\nname: \xff\n"),
    "control character": Case("my.yaml:2: not valid YAML: character 7 is not allowed", "window: 4\nname: a\x07b\n"),
    "duplicate key": Case(
        "my.yaml:4: duplicate key 'window' (first on line 2)", over("window: 2\nseed: 1\nwindow: 3\n")
    ),
    "a key that is no name": Case("my.yaml:2: a key must be a name", over("{a: b}: 3\n")),
    "an alias in itself": Case("my.yaml:2: an alias contains itself", over("workers: &w {main: *w}\n")),
    "aliases that multiply": Case(
        "my.yaml:5: its aliases stand for more than 100,000 values",
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{own}: &{own} [{', '.join([f'*{last}'] * 10)}]\n" for last, own in itertools.pairwise("abcdefgh")),
    ),
    "a Python object": Case(
        "my.yaml:2: cannot read 'x' as !!python/object:os.system", over("name: !!python/object:os.system x\n")
    ),
    "extends nothing": Case("my.yaml:1: no such file: goood.yaml (did you mean 'good.yaml'?)", "extends: goood.yaml\n"),
    "extends a number": Case("my.yaml:1: extends: expected a file name, got 4", "extends: 4\n"),
    "extends in a circle": Case(
        "other.yaml:1: extends goes in a circle: my.yaml → other.yaml → my.yaml",
        "extends: other.yaml\n",
        {"other.yaml": "extends: [good.yaml, my.yaml]\n"},
    ),
    "null for nothing": Case(
        "my.yaml:3: workers.stop: null removes, but nothing has that name (did you mean 'step'?)",
        over("workers:\n  stop: null\n"),
    ),
    # --- keys
    "unknown top key": Case("my.yaml:2: windw: unknown key 'windw' (did you mean 'window'?)", over("windw: 4\n")),
    "unknown stage key": Case(
        "my.yaml:3: stages.drafter.wth: unknown key 'wth' (did you mean 'with'?)",
        over("stages:\n  drafter: {wth: {}}\n"),
    ),
    "unknown channel key": Case(
        "my.yaml:4: channels.features.capcity: unknown key 'capcity' (did you mean 'capacity'?)",
        over("channels:\n  features:\n    capcity: 3\n"),
    ),
    "unknown capacity key": Case(
        "my.yaml:3: channels.features.capacity.item: unknown key 'item' (did you mean 'items'?)",
        over("channels:\n  features: {capacity: {item: 3}}\n"),
    ),
    "unknown worker key": Case(
        "my.yaml:3: workers.main.replica: unknown key 'replica' (did you mean 'replicas'?)",
        over("workers:\n  main: {replica: 3}\n"),
    ),
    "unknown credits key": Case(
        "my.yaml:2: credits.message: unknown key 'message' (did you mean 'messages'?)", over("credits: {message: 3}\n")
    ),
    "a section that is a list": Case(
        'my.yaml:2: workers: should be a mapping, got ["main"]', over("workers: [main]\n")
    ),
    "a bad name": Case(
        "my.yaml:3: workers.a.b: a name begins with a letter and has letters, digits, '_' and '-'",
        over("workers:\n  a.b: {stages: [data]}\n"),
    ),
    "no use": Case(
        "my.yaml:3: stages.extra: it sets with, but the graph has no stage 'extra' (known: data, drafter, optimizer, "
        "target); a new one needs 'use'",
        over("stages:\n  extra: {with: {}}\n"),
    ),
    "no from": Case(
        "my.yaml:3: channels.extra: it sets to, but the graph has no channel 'extra' (known: batches, features, grads, "
        "params); a new one needs 'from'",
        over("channels:\n  extra: {to: target}\n"),
    ),
    "window is text": Case("my.yaml:2: window: should be a valid integer, got 'many'", over("window: many\n")),
    "window is zero": Case("my.yaml:2: window: should be at least 1, got 0", over("window: 0\n")),
    "seed beyond what generators take": Case(
        "command line: seed: should be at most 9223372036854775807, got 18446744073709551616",
        given=("good.yaml", "seed=18446744073709551616"),
    ),
    "more threads than any machine has": Case(
        "my.yaml:2: threads: should be at most 1024, got 100000", over("threads: 100000\n")
    ),
    "capacity without end": Case(
        "my.yaml:3: channels.features.capacity.items: should be at most 1000000, got 99999999999999999999999",
        over("channels:\n  features: {capacity: {items: 99999999999999999999999}}\n"),
    ),
    "a name that leads elsewhere": Case(
        "my.yaml:2: name: cannot be the name of a run folder (one part of a path, at most 100 bytes), got '../../böse'",
        over("name: ../../böse\n"),
    ),
    "a name with a folder": Case(
        "command line: name: cannot be the name of a run folder (one part of a path, at most 100 bytes), got "
        "'über/name'",
        given=("good.yaml", "name=über/name"),
    ),
    "capacity is zero": Case(
        "my.yaml:3: channels.features.capacity: should be at least 1, got 0",
        over("channels:\n  features: {capacity: 0}\n"),
    ),
    "capacity in unknown bytes": Case(
        "my.yaml:3: channels.features.capacity.bytes: could not interpret byte unit: QB, got '8 QB'",
        over("channels:\n  features: {capacity: {bytes: 8 QB}}\n"),
    ),
    "kind: process": Case(
        "my.yaml:3: workers.main.kind: unknown value 'process' (known: async, thread)",
        over("workers:\n  main: {kind: process}\n"),
    ),
    "order misspelt": Case(
        "my.yaml:3: workers.main.order: unknown value 'inputs' (did you mean 'input'?)",
        over("workers:\n  main: {order: inputs}\n"),
    ),
    "device of a wrong type": Case(
        "my.yaml:3: workers.main.device: should be text or a list, got 3", over("workers:\n  main: {device: 3}\n")
    ),
    "unknown device": Case(
        "my.yaml:3: workers.main.device.target: no device 'cuda:0' on this machine (known: auto, cpu)",
        over("workers:\n  main: {device: {data: cpu, target: cuda:0}}\n"),
    ),
    "device of another stage": Case(
        "my.yaml:3: workers.main.device.targt: worker main has no stage 'targt' (did you mean 'target'?)",
        over("workers:\n  main: {device: {targt: cpu}}\n"),
    ),
    "credits zero": Case("my.yaml:2: credits.messages: should be at least 1, got 0", over("credits: {messages: 0}\n")),
    "broadcast: yes": Case(
        "my.yaml:3: channels.params.broadcast: should be true or false, got 'yes'",
        over("channels:\n  params: {broadcast: yes}\n"),
    ),
    # --- use
    "use without a name": Case(
        "my.yaml:3: stages.target.use: expected \"module:Name\", got 'stages.toy'",
        over("stages:\n  target: {use: stages.toy}\n"),
    ),
    "unknown module": Case(
        "my.yaml:3: stages.target.use: there is no module 'stages.toys' (did you mean 'stages.toy'?)",
        over('stages:\n  target: {use: "stages.toys:Wait"}\n'),
    ),
    "unknown package": Case(
        "my.yaml:3: stages.target.use: there is no module 'nowhere.toy'",
        over('stages:\n  target: {use: "nowhere.toy:Wait"}\n'),
    ),
    "unknown class": Case(
        "my.yaml:3: stages.target.use: module stages.toy has no 'Wat' (did you mean 'Wait'?)",
        over('stages:\n  target: {use: "stages.toy:Wat"}\n'),
    ),
    "module fails": Case(
        "my.yaml:3: stages.target.use: importing fails_bi failed: ZeroDivisionError: division by zero",
        over('stages:\n  target: {use: "fails_bi:Wait"}\n'),
        {"fails_bi.py": "x = 1 / 0\n"},
    ),
    "module needs another": Case(
        "my.yaml:3: stages.target.use: importing needs_bi failed: ModuleNotFoundError: No module named 'not_there'",
        over('stages:\n  target: {use: "needs_bi:Wait"}\n'),
        {"needs_bi.py": "import not_there\n"},
    ),
    "module is not Python": Case(
        "my.yaml:3: stages.target.use: importing syntax_bi failed: SyntaxError: invalid syntax (syntax_bi.py, line 1)",
        over('stages:\n  target: {use: "syntax_bi:A"}\n'),
        {"syntax_bi.py": "def :\n"},
    ),
    "not a stage": Case(
        "my.yaml:3: stages.target.use: stages.toy:Number is no stage: Number is not a Stage (subclass "
        "dflash_pipe.Stage, or give a function)",
        over('stages:\n  target: {use: "stages.toy:Number"}\n'),
    ),
    "no annotation": Case(
        "my.yaml:3: stages.target.use: plain_bi:f is no stage: f: parameter 'x' needs an annotation (it is "
        "an input port)",
        over('stages:\n  target: {use: "plain_bi:f"}\n'),
        {"plain_bi.py": "def f(x):\n    return x\n"},
    ),
    "transport": Case(
        "my.yaml:2: transport: stages.toy:Wait is not a Transport", over('transport: "stages.toy:Wait"\n')
    ),
    "transport without its parameter": Case(
        "my.yaml:2: transport: transport_bi:Bad cannot be built with threads=None: TypeError: Bad.__init__() takes 1 "
        "positional argument but 2 were given",
        over('transport: "transport_bi:Bad"\n'),
        {
            "transport_bi.py": "from dflash_pipe import Transport\n\n\nclass Bad(Transport):\n"
            "    def __init__(self):\n        pass\n"
        },
    ),
    # --- with
    "a number for all parameters": Case(
        "my.yaml:3: stages.data.with: should be a mapping, got 3", over("stages:\n  data: {with: 3}\n")
    ),
    "a number for all parameters, one of which is referred to": Case(
        "my.yaml:3: stages.data.with: expected keys of Numbers such as 'count', got 3",
        over('stages:\n  data: {with: 3}\n  drafter: {with: {partials: "${data.count}"}}\n'),
    ),
    "digits beyond what a float holds": Case(
        "my.yaml:3: stages.target.with.seconds: should be a finite number, got Infinity",
        over("stages:\n  target: {with: {seconds: 1e999}}\n"),
    ),
    "a whole number beyond what a float holds": Case(
        f"my.yaml:3: stages.target.with.seconds: should be a finite number, got 1{'0' * 56}...",
        over(f"stages:\n  target: {{with: {{seconds: 1{'0' * 400}}}}}\n"),
    ),
    "an infinity of the graph's own": Case(
        "command line: stall_after: should be a finite number, got Infinity", given=("good.yaml", "stall_after=.inf")
    ),
    "unknown parameter": Case(
        "good.yaml:4: stages.target.with.second: Wait has no parameter 'second' (did you mean 'seconds'?)",
        files={"good.yaml": GOOD.replace("seconds: 0.0", "second: 0.0")},
        given=("good.yaml",),
    ),
    "unknown parameter in an overlay": Case(
        "my.yaml:4: stages.drafter.with.partial: the graph's drafter is stages.toy:WaitStep (good.yaml:6), which has "
        "no parameter 'partial' (did you mean 'partials'?)",
        over("stages:\n  drafter:\n    with: {partial: 3}\n"),
    ),
    "overlay of a stage that the graph has not": Case(
        "my.yaml:3: stages.draftr: it sets with.partials, but the graph has no stage 'draftr' (did you mean 'drafter'?)"
        "; a new one needs 'use'",
        over("stages:\n  draftr: {with: {partials: 2}}\n"),
    ),
    "overlay of a worker that the graph has not": Case(
        "my.yaml:3: workers.mian: it sets replicas, take, device.target, device.data and 1 more, but the graph has no "
        "worker 'mian' (did you mean 'main'?); a new one needs 'stages'",
        over("workers:\n  mian: {replicas: 2, take: round_robin, device: {target: cpu, data: cpu}, order: input}\n"),
    ),
    "missing parameter": Case(
        "my.yaml:3: stages.data.with: Numbers needs 'count' (in a file, or data.count=... on the command line)",
        over("stages:\n  data: {with: null}\n"),
    ),
    "text for a number": Case(
        "my.yaml:3: stages.target.with.seconds: should be a valid number, got 'fast'",
        over("stages:\n  target: {with: {seconds: fast}}\n"),
    ),
    "fraction for a whole number": Case(
        "my.yaml:3: stages.data.with.count: should be a valid integer, got 1.5",
        over("stages:\n  data: {with: {count: 1.5}}\n"),
    ),
    "refused by the stage": Case(
        "my.yaml:3: stages.drafter: partials: 0 is not a multiple of 1, the replicas",
        over("stages:\n  drafter: {with: {partials: 0}}\n"),
    ),
    "a time that nobody can wait for": Case(
        "my.yaml:3: stages.target: seconds is -1.0, expected 0 to 86400",
        over("stages:\n  target: {with: {seconds: -1}}\n"),
    ),
    "a factor on a time": Case(
        "my.yaml:3: stages.target: scale is 1e+308, expected 0 or more, and at most 86400 when times seconds",
        over("stages:\n  target: {with: {scale: 1.0e+308, seconds: 1}}\n"),
    ),
    # --- overrides
    "override of nothing": Case(
        "command line: windw: no key, stage, worker or channel 'windw' (did you mean 'window'?)",
        given=("good.yaml", "windw=3"),
    ),
    "override of no parameter": Case(
        "command line: drafter.partial: drafter has no 'partial' (did you mean 'partials'?)",
        given=("good.yaml", "drafter.partial=3"),
    ),
    "override of no stage": Case(
        "command line: stages.draftr.with.partials: no stage 'draftr' (did you mean 'drafter'?)",
        given=("good.yaml", "stages.draftr.with.partials=3"),
    ),
    "override of a stage": Case("command line: drafter: expected drafter.KEY=value", given=("good.yaml", "drafter=3")),
    "override of a wrong type": Case(
        "command line: stages.drafter.with.partials: should be a valid integer, got [2]",
        given=("good.yaml", "drafter.partials=[2]"),
    ),
    "override of a stage without use": Case(
        'my.yaml:2: stages.extra: expected use: "module:Name"',
        over("stages: {extra: {with: {seconds: 1}}}\n"),
        given=("my.yaml", "extra.seconds=2"),
    ),
    "override is bad YAML": Case(
        "command line: drafter.partials=[2: not valid YAML: while parsing a flow sequence: expected ',' or "
        "']', but got '<stream end>'",
        given=("good.yaml", "drafter.partials=[2"),
    ),
    "override is ambiguous": Case(
        "command line: order.order is ambiguous: write stages.order.with.order or workers.order.order",
        over("stages:\n  order: {use: 'order_bi:f', with: {}}\nworkers: {order: {stages: [order]}}\n"),
        {"order_bi.py": "def f(x: int, *, order: str = '') -> None: ...\n"},
        ("my.yaml", "order.order=input"),
    ),
    # --- references
    "reference to no stage": Case(
        "my.yaml:3: stages.target.with.seconds: ${drfter.seconds}: no stage or key 'drfter' (did you mean 'drafter'?)",
        over('stages:\n  target: {with: {seconds: "${drfter.seconds}"}}\n'),
    ),
    "reference to no parameter": Case(
        "my.yaml:3: stages.target.with.seconds: ${drafter.second}: WaitStep has no parameter 'second' (did "
        "you mean 'seconds'?)",
        over('stages:\n  target: {with: {seconds: "${drafter.second}"}}\n'),
    ),
    "reference to no key": Case(
        "my.yaml:3: stages.data.with.count: ${channels.features.capacity}: channels.features has no "
        "'capacity' (known: from, to)",
        over('stages:\n  data: {with: {count: "${channels.features.capacity}"}}\n'),
    ),
    "reference to itself": Case(
        "my.yaml:3: stages.target.with.seconds: ${target.seconds}: references go in a circle: "
        "stages.target.with.seconds → stages.target.with.seconds",
        over('stages:\n  target: {with: {seconds: "${target.seconds}"}}\n'),
    ),
    "references in a circle": Case(
        "my.yaml:3: stages.target.with.seconds: ${drafter.seconds}: references go in a circle: "
        "stages.drafter.with.seconds → stages.target.with → stages.drafter.with.seconds",
        over('stages:\n  target: {with: {seconds: "${drafter.seconds}"}}\n  drafter: {with: {seconds: "${target}"}}\n'),
    ),
    "reference to what is required": Case(
        "my.yaml:3: stages.data.with: Numbers needs 'count' (in a file, or data.count=... on the command line)",
        over('stages:\n  data: {with: null}\n  drafter: {with: {partials: "${data.count}"}}\n'),
    ),
    "a mapping inside text": Case(
        "my.yaml:2: name: ${drafter} is not a single value", over('name: "run-${drafter}"\n')
    ),
    # --- channels
    "from no stage": Case(
        "my.yaml:3: channels.features.from: no stage 'targt' (did you mean 'target'?)",
        over("channels:\n  features: {from: targt}\n"),
    ),
    "to no stage": Case(
        "my.yaml:3: channels.features.to: no stage 'draftr' (did you mean 'drafter'?)",
        over("channels:\n  features: {to: draftr.features}\n"),
    ),
    "to no port": Case(
        "my.yaml:4: channels.features.to: drafter has no port 'feature' (did you mean 'features'?)",
        over("channels:\n  features:\n    to: drafter.feature\n"),
    ),
    "to one of two ports": Case(
        "my.yaml:3: channels.features.to: drafter has several ports: drafter.features, drafter.params",
        over("channels:\n  features: {to: drafter}\n"),
    ),
    "to nothing": Case(
        "my.yaml:3: channels.features.to: needs at least one entry", over("channels:\n  features: {to: []}\n")
    ),
    "a worker without stages": Case(
        "my.yaml:3: workers.main.stages: needs at least one entry", over("workers:\n  main: {stages: []}\n")
    ),
    "to a source": Case(
        "my.yaml:3: channels.features.to: data is a source and receives nothing",
        over("channels:\n  features: {to: data}\n"),
    ),
    # --- the whole graph
    "unreached": Case(
        "my.yaml:3: stage 'target': source 'data' does not reach it",
        over("channels:\n  batches: {to: drafter.features}\n  features: {to: target}\n"),
    ),
    "wrong type": Case(
        "my.yaml:3: channel 'batches': data sends Number, but target.x receives float",
        over('stages:\n  target: {use: "double_bi:double", with: null}\n'),
        {"double_bi.py": "def double(x: float) -> float:\n    return 2 * x\n"},
    ),
    "no workers": Case(
        "graphs/toy/dataflow.yaml: no workers: take a topology file that extends this one (as "
        "graphs/sequential.yaml or graphs/overlapped.yaml extend graphs/dataflow.yaml), or write `workers:`",
        given=("graphs/toy/dataflow.yaml",),
    ),
    "no worker for a stage": Case(
        "my.yaml:3: stage 'optimizer': it is on no worker (workers: main, step)",
        over("workers:\n  step: {stages: [drafter]}\n"),
    ),
    "no such stage": Case(
        "my.yaml:3: worker 'step': no stage 'optimiser' (did you mean 'optimizer'?)",
        over("workers:\n  step: {stages: [drafter, optimiser]}\n"),
    ),
    "no token": Case(
        "my.yaml:2: a cycle without a token: drafter → optimizer → drafter; give 'grads' or 'params' an `initial:`",
        over("channels: {params: {initial: 0}}\n"),
    ),
}


def run_case(case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `dflash-pipe check` prints on standard error; it must exit with 2 and print nothing else."""
    monkeypatch.setattr(sys, "argv", ["dflash-pipe", "check", *case.given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the good graph in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading adds the current folder
    (tmp_path / "good.yaml").write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_with_its_place(name, folder, capsys, monkeypatch):
    case = CASES[name]
    for file, text in {"my.yaml": case.text, **case.files}.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert run_case(case, capsys, monkeypatch) == f"{case.expected}\n"


def paths(value, path=()):
    """Every place in a nested value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, entry in inside for each in paths(entry, (*path, key)))]


ODD = [None, 0, -1, 1.5, "", "x", "data", "${seed}", "${drafter}", "${}", "${stages}", [], ["data"], {}, {"a": 1}, True]
WORDS = ["use", "with", "from", "to", "initial", "group", "replicas", "device", "order", "extends", "data", "", "a.b"]
PLACES = paths(yaml.safe_load(GOOD))[1:]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PLACES), st.none() | st.sampled_from(WORDS), st.sampled_from(ODD))
def test_whatever_a_file_says_it_is_a_sound_graph_or_one_line(folder, place, key, odd):
    *above, last = place
    changed = parent = yaml.safe_load(GOOD)
    for part in above:
        parent = parent[part]
    if key is not None and isinstance(parent[last], dict):
        parent[last][key] = odd
    else:
        parent[last] = odd
    (folder / "my.yaml").write_text(dumps(changed))
    try:
        graph = load(["my.yaml"])
        check(graph)
    except BadInput as error:
        assert "\n" not in str(error)
        assert error.where
    else:
        plan(graph)


def test_the_good_one_is_good(folder):
    check(load(["good.yaml"]))


def test_the_installed_command_prints_no_traceback(folder):
    command = [sys.executable, "-m", "dflash_pipe", "check", "good.yaml", "windw=3"]
    root = str(Path(__file__).parent.parent)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": root})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"{CASES['override of nothing'].expected}\n"

"""Whatever is wrong with a graph is told in one line: the place, what is wrong, what was expected, the nearest name."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dflash_pipe import BadInput
from dflash_pipe.check import check
from dflash_pipe.graph import load

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
    "missing file": Case("?", given=("god.yaml",)),
    "missing shipped file": Case("?", given=("graphs/toy/overlaped.yaml",)),
    "no file at all": Case("?", given=()),
    "a folder": Case("?", given=("folder",), files={"folder/x.yaml": ""}),
    "empty": Case("?", "# nothing but a comment\n"),
    "a list": Case("?", "- stages\n- channels\n"),
    "two documents": Case("?", "window: 4\n---\nwindow: 5\n"),
    "tab": Case("?", "stages:\n\tdata: {use: x}\n"),
    "bad flow": Case("?", "window: 4\nstages: {data: {use: x}\n"),
    "not UTF-8": Case("?", b"window: 4\nname: \xff\n"),
    "control character": Case("?", "window: 4\nname: a\x07b\n"),
    "duplicate key": Case("?", over("window: 2\nseed: 1\nwindow: 3\n")),
    "a key that is no name": Case("?", over("{a: b}: 3\n")),
    "an alias in itself": Case("?", over("workers: &w {main: *w}\n")),
    "a Python object": Case("?", over("name: !!python/object:os.system x\n")),
    "extends nothing": Case("?", "extends: goood.yaml\n"),
    "extends a number": Case("?", "extends: 4\n"),
    "extends in a circle": Case("?", "extends: other.yaml\n", {"other.yaml": "extends: [good.yaml, my.yaml]\n"}),
    "null for nothing": Case("?", over("workers:\n  stop: null\n")),
    # --- keys
    "unknown top key": Case("?", over("windw: 4\n")),
    "unknown stage key": Case("?", over("stages:\n  drafter: {wth: {}}\n")),
    "unknown channel key": Case("?", over("channels:\n  features:\n    capcity: 3\n")),
    "unknown capacity key": Case("?", over("channels:\n  features: {capacity: {item: 3}}\n")),
    "unknown worker key": Case("?", over("workers:\n  main: {replica: 3}\n")),
    "unknown credits key": Case("?", over("credits: {message: 3}\n")),
    "a section that is a list": Case("?", over("workers: [main]\n")),
    "a bad name": Case("?", over("workers:\n  a.b: {stages: [data]}\n")),
    "no use": Case("?", over("stages:\n  extra: {with: {seconds: 1}}\n")),
    "no from": Case("?", over("channels:\n  extra: {to: target}\n")),
    "window is text": Case("?", over("window: many\n")),
    "window is zero": Case("?", over("window: 0\n")),
    "capacity is zero": Case("?", over("channels:\n  features: {capacity: 0}\n")),
    "capacity in unknown bytes": Case("?", over("channels:\n  features: {capacity: {bytes: 8 QB}}\n")),
    "kind: process": Case("?", over("workers:\n  main: {kind: process}\n")),
    "order misspelt": Case("?", over("workers:\n  main: {order: inputs}\n")),
    "device of a wrong type": Case("?", over("workers:\n  main: {device: 3}\n")),
    "unknown device": Case("?", over("workers:\n  main: {device: {data: cpu, target: cuda:0}}\n")),
    "device of another stage": Case("?", over("workers:\n  main: {device: {targt: cpu}}\n")),
    "credits zero": Case("?", over("credits: {messages: 0}\n")),
    "broadcast: yes": Case("?", over("channels:\n  params: {broadcast: yes}\n")),
    # --- use
    "use without a name": Case("?", over("stages:\n  target: {use: stages.toy}\n")),
    "unknown module": Case("?", over('stages:\n  target: {use: "stages.toys:Wait"}\n')),
    "unknown package": Case("?", over('stages:\n  target: {use: "nowhere.toy:Wait"}\n')),
    "unknown class": Case("?", over('stages:\n  target: {use: "stages.toy:Wat"}\n')),
    "module fails": Case("?", over('stages:\n  target: {use: "fails_bi:Wait"}\n'), {"fails_bi.py": "x = 1 / 0\n"}),
    "module needs another": Case(
        "?", over('stages:\n  target: {use: "needs_bi:Wait"}\n'), {"needs_bi.py": "import not_there\n"}
    ),
    "module is not Python": Case("?", over('stages:\n  target: {use: "syntax_bi:A"}\n'), {"syntax_bi.py": "def :\n"}),
    "not a stage": Case("?", over('stages:\n  target: {use: "stages.toy:Number"}\n')),
    "no annotation": Case(
        "?", over('stages:\n  target: {use: "plain_bi:f"}\n'), {"plain_bi.py": "def f(x):\n    return x\n"}
    ),
    "transport": Case("?", over('transport: "stages.toy:Wait"\n')),
    # --- with
    "unknown parameter": Case("?", over("stages:\n  drafter:\n    with: {partial: 3}\n")),
    "missing parameter": Case("?", over("stages:\n  data: {with: null}\n")),
    "text for a number": Case("?", over("stages:\n  target: {with: {seconds: fast}}\n")),
    "fraction for a whole number": Case("?", over("stages:\n  data: {with: {count: 1.5}}\n")),
    "refused by the stage": Case("?", over("stages:\n  drafter: {with: {partials: 0}}\n")),
    # --- overrides
    "no equals sign": Case("?", given=("good.yaml", "window")),
    "override of nothing": Case("?", given=("good.yaml", "windw=3")),
    "override of no parameter": Case("?", given=("good.yaml", "drafter.partial=3")),
    "override of no stage": Case("?", given=("good.yaml", "stages.draftr.with.partials=3")),
    "override of a stage": Case("?", given=("good.yaml", "drafter=3")),
    "override of a wrong type": Case("?", given=("good.yaml", "drafter.partials=[2]")),
    "override is bad YAML": Case("?", given=("good.yaml", "drafter.partials=[2")),
    "override is ambiguous": Case(
        "?",
        over("stages:\n  order: {use: 'order_bi:f', with: {}}\nworkers: {order: {stages: [order]}}\n"),
        {"order_bi.py": "def f(x: int, *, order: str = '') -> None: ...\n"},
        ("my.yaml", "order.order=input"),
    ),
    # --- references
    "reference to no stage": Case("?", over('stages:\n  target: {with: {seconds: "${drfter.seconds}"}}\n')),
    "reference to no parameter": Case("?", over('stages:\n  target: {with: {seconds: "${drafter.second}"}}\n')),
    "reference to no key": Case("?", over('stages:\n  data: {with: {count: "${channels.features.capacity}"}}\n')),
    "reference to itself": Case("?", over('stages:\n  target: {with: {seconds: "${target.seconds}"}}\n')),
    "references in a circle": Case(
        "?",
        over('stages:\n  target: {with: {seconds: "${drafter.seconds}"}}\n  drafter: {with: {seconds: "${target}"}}\n'),
    ),
    "reference to what is required": Case(
        "?", over('stages:\n  data: {with: null}\n  drafter: {with: {partials: "${data.count}"}}\n')
    ),
    "a mapping inside text": Case("?", over('name: "run-${drafter}"\n')),
    # --- channels
    "from no stage": Case("?", over("channels:\n  features: {from: targt}\n")),
    "to no stage": Case("?", over("channels:\n  features: {to: draftr.features}\n")),
    "to no port": Case("?", over("channels:\n  features:\n    to: drafter.feature\n")),
    "to one of two ports": Case("?", over("channels:\n  features: {to: drafter}\n")),
    "to a source": Case("?", over("channels:\n  features: {to: data}\n")),
    # --- the whole graph
    "wrong type": Case("?", over("channels:\n  batches: {to: drafter.features}\n  features: {to: target}\n")),
    "no workers": Case("?", given=("graphs/toy/dataflow.yaml",)),
    "no worker for a stage": Case("?", over("workers:\n  step: {stages: [drafter]}\n")),
    "no such stage": Case("?", over("workers:\n  step: {stages: [drafter, optimiser]}\n")),
    "no token": Case("?", over("channels: {params: {initial: 0}}\n")),
}


def run_case(case: Case) -> str:
    """The line that the command prints for what was given. (Files and overrides are told apart as the command does.)"""
    files = [word for word in case.given if "=" not in word and word != "window"]
    with pytest.raises(BadInput) as caught:
        check(load(files, [word for word in case.given if word not in files]))
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_with_its_place(name, tmp_path, monkeypatch):
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    for file, text in {"good.yaml": GOOD, "my.yaml": case.text, **case.files}.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = run_case(case)
    print(f"@@{name}\t{line}")
    assert "\n" not in line


def test_the_good_one_is_good(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD)
    check(load(["good.yaml"]))

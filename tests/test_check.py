"""The laws of a graph as a whole: each is broken once, and the line says how."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_pipe import BadInput, Source, Stage
from dflash_pipe.check import check, rate
from dflash_pipe.graph import load
from dflash_pipe.stage import Port
from stages.toy import Digest, Number

HERE = __name__
TOY = """\
window: 4
stages:
  data: {use: "stages.toy:Numbers", with: {count: 8}}
  target: {use: "stages.toy:Wait"}
  drafter: {use: "stages.toy:WaitStep", with: {partials: 4}}
  optimizer: {use: "stages.toy:WaitOptimizer"}
channels:
  batches: {from: data, to: target}
  features: {from: target, to: drafter.features}
  grads: {from: drafter, to: optimizer, per: window}
  params: {from: optimizer, to: drafter.params, per: window, broadcast: true, initial: 1}
workers:
  loader: {stages: [data]}
  target: {stages: [target]}
  drafter: {stages: [drafter]}
  optim: {stages: [optimizer]}
"""


# --- stages that are odd in one way each


class Echo(Stage):
    def process(self, x: Number) -> Number:
        return x


class Join(Stage):
    def process(self, a: Number, b: Number) -> Number:
        return a


class Tally(Stage):
    """Counts a window."""

    def process(self, x: Number) -> None: ...

    def end_window(self) -> Digest:
        return Digest("")


class Late(Stage):
    """Needs the tally of a window before its first message."""

    def process(self, x: Number, tally: Digest) -> None: ...


class Again(Stage):
    def process(self, x: Digest) -> Digest:
        return x


class Saved(Echo):
    def state(self) -> dict[str, Any]:
        return {}


class SavedSink(Saved):
    def process(self, x: Number) -> None: ...


class SavedSource(Source[Number]):
    def read(self, cursor: Any) -> Iterator[tuple[Any, Number]]:
        yield from ()

    def state(self) -> dict[str, Any]:
        return {}


class Gather(Stage):
    def process(self, x: tuple[Number, ...]) -> None: ...


class GatherDigests(Stage):
    def process(self, x: tuple[Digest, ...]) -> None: ...


class Waiting(Stage):
    async def process(self, x: Number) -> Number:
        return x


class Nowhere(Stage):
    def process(self) -> Number:
        return Number(0)


@pytest.fixture
def graph(tmp_path, monkeypatch):
    """Load YAML texts, each laid over the one before it."""
    monkeypatch.chdir(tmp_path)

    def make(*texts, overrides=()):
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.yaml").write_text(text)
        return load([f"{number}.yaml" for number in range(len(texts))], overrides)

    return make


def line(graph):
    with pytest.raises(BadInput) as caught:
        check(graph)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def chain(*stages, channels="", workers=None):
    """data -> stages of this file, each on its own per-message port; all on one worker unless said otherwise."""
    names = [name.lower() for name in stages]
    lines = ["window: 4", "stages:", '  data: {use: "stages.toy:Numbers", with: {count: 8}}']
    lines += [f'  {name.lower()}: {{use: "{HERE}:{name}"}}' for name in stages]
    lines += ["channels:", *(f"  {text}" for text in channels.splitlines())]
    workers = workers or f"main: {{stages: [{', '.join(['data', *names])}]}}"
    return "\n".join([*lines, "workers:", f"  {workers}", ""])


# --- what is right


@pytest.mark.parametrize(
    "overlay",
    [
        "",
        "workers: {target: {replicas: 3}}",
        "workers: {target: {replicas: 3, take: round_robin}}",
        "workers: {target: {replicas: 3, order: completion}}",
        "workers: {drafter: {replicas: 2, take: round_robin}}",
        "workers: {drafter: {replicas: 4, take: round_robin}, target: {replicas: 3}}",
        "workers: {drafter: null, target: {stages: [target, drafter], replicas: 2, take: round_robin}}",
        "workers: {target: null, drafter: null, loader: null, optim: {stages: [optimizer, drafter, target, data]}}",
        "workers: {target: {turn: gpu}, drafter: {turn: gpu}}",
        "workers: {target: {turn: gpu, replicas: 2}}",
        "credits: {messages: 1}",
        "credits: {windows: 1}",
        "credits: {messages: 2}\nchannels: {features: {group: 2}}",
        "credits: {windows: 1}\nchannels: {features: {group: 2}}",
        "credits: {windows: 2}\nchannels: {features: {group: 3, capacity: 3}}",
        "channels: {params: {initial: 2}}",
        "snapshot: 1",
    ],
)
def test_good_graphs_are_good(graph, overlay):
    check(graph(TOY, overlay) if overlay else graph(TOY))


def test_rates(graph):
    loaded = graph(TOY)
    assert [rate(loaded, stage) for stage in loaded.stages] == ["message", "message", "message", "window"]


def test_async_stages_are_good_on_async_workers(graph):
    text = chain("Waiting", channels="a: {from: data, to: waiting}", workers="w: {stages: [waiting], kind: async}")
    check(graph(text, "workers: {m: {stages: [data]}}"))


def test_a_stateful_terminal_stage_may_fire_per_message(graph):
    check(graph(chain("SavedSink", channels="a: {from: data, to: savedsink}")))


# --- what is wrong: overlays of the toy graph


@pytest.mark.parametrize(
    ("overlay", "expected"),
    [
        ("channels: {features: null}", "1.yaml:1: stage 'drafter': no channel feeds its port 'features'"),
        (
            "channels: {again: {from: target, to: drafter.features}}",
            "1.yaml:1: channel 'again': port drafter.features is fed by channel 'features' already",
        ),
        (
            'stages: {more: {use: "stages.toy:Numbers", with: {count: 1}}}',
            "1.yaml:1: stage 'more': a second source beside 'data': a graph has one, and one cursor",
        ),
        (
            "channels: {grads: {per: message}}",
            "1.yaml:1: channel 'grads': drafter sends nothing per message (its process returns None)",
        ),
        (
            "channels: {features: {per: window}}",
            "1.yaml:1: channel 'features': it is per window, but target works per message and has no end_window that "
            "returns one",
        ),
        (
            "channels: {params: {per: message}}",
            "1.yaml:1: channel 'params': it is per message, but optimizer reads only per-window channels: it sends "
            "once a window",
        ),
        (
            "channels: {features: {broadcast: true}}",
            "1.yaml:1: channel 'features': broadcast is for per: window channels (every replica would compute every "
            "message)",
        ),
        (
            "channels: {params: {initial: 0}}",
            "1.yaml:1: a cycle without a token: drafter → optimizer → drafter; give 'grads' or 'params' an `initial:`",
        ),
        (
            "channels: {batches: {initial: 1}}",
            "1.yaml:1: channel 'batches': initial is for feedback, but this channel closes no cycle",
        ),
        (
            "channels: {grads: {initial: 1}}",
            "1.yaml:1: channel 'grads': initial: 1, but drafter has no initial() to make the first token",
        ),
        (
            "channels: {params: {initial: 3}}",
            "1.yaml:1: channel 'params': initial: 3 tokens do not fit into a capacity of 2",
        ),
        (
            "workers: {optim: null}",
            "1.yaml:1: stage 'optimizer': it is on no worker (workers: loader, target, drafter)",
        ),
        (
            "workers: {optim: {stages: [optimizer, drafter]}}",
            "1.yaml:1: worker 'optim': stage 'drafter' is on worker 'drafter' already",
        ),
        (
            "workers: {optim: {stages: [optimize]}}",
            "1.yaml:1: worker 'optim': no stage 'optimize' (did you mean 'optimizer'?)",
        ),
        (
            "workers: {target: {kind: async}}",
            "1.yaml:1: worker 'target': kind: async, but target is not `async def`: it would hold up the event loop",
        ),
        (
            "workers: {target: {replicas: 2, device: [cpu]}}",
            "1.yaml:1: worker 'target': 1 device for 2 replicas of target",
        ),
        ("workers: {target: {turn: gpu}}", "1.yaml:1: worker 'target': turn 'gpu' is shared with nobody"),
        (
            "workers: {target: {turn: gpu}, drafter: {turn: gpv}}",
            "1.yaml:1: worker 'target': turn 'gpu' is shared with nobody (did you mean 'gpv'?)",
        ),
        (
            "workers: {target: {order: completion}}",
            "1.yaml:1: worker 'target': order: completion needs replicas: one alone completes in input order",
        ),
        (
            "workers: {loader: {replicas: 2}}",
            "1.yaml:1: worker 'loader': source data cannot be replicated: there is one stream",
        ),
        (
            "workers: {optim: {replicas: 2}}",
            "1.yaml:1: worker 'optim': optimizer has state(), so it cannot be replicated",
        ),
        (
            "workers: {drafter: {replicas: 2}}",
            "1.yaml:1: worker 'drafter': drafter works in windows: its replicas need take: round_robin",
        ),
        (
            "window: 6\nworkers: {drafter: {replicas: 4, take: round_robin}}",
            "1.yaml:2: worker 'drafter': window: 6 cannot be dealt evenly to 4 replicas of drafter",
        ),
        (
            "workers: {drafter: {replicas: 2, take: round_robin, order: completion}}",
            "1.yaml:1: worker 'drafter': order: completion, but what drafter sends once a window is gathered in "
            "replica order",
        ),
        (
            "workers: {drafter: {replicas: 2, take: round_robin}}\nchannels: {params: {broadcast: false}}",
            "1.yaml:2: channel 'params': drafter has 2 replicas that all need it: broadcast: true",
        ),
        (
            "workers: {target: {replicas: 2, order: completion}, drafter: {replicas: 2, take: round_robin}}",
            "1.yaml:1: channel 'features': target sends in order: completion, which several replicas cannot receive",
        ),
        (
            "channels: {params: {group: 2}}",
            "1.yaml:1: channel 'params': group counts messages, but the channel is per window",
        ),
        (
            "channels: {features: {group: 3}}",
            "1.yaml:1: channel 'features': a group of 3 never gathers in a capacity of 2",
        ),
        (
            "channels: {features: {group: 2}}\ncredits: {messages: 1}",
            "1.yaml:2: channel 'features': credits: 1 message cannot make a group of 2",
        ),
        (
            "channels: {features: {group: 3, capacity: 3}}\ncredits: {windows: 1}",
            "1.yaml:2: channel 'features': credits: 1 window of 4 cannot complete the last group of 3",
        ),
    ],
)
def test_overlays_that_are_refused(graph, overlay, expected):
    assert line(graph(TOY, overlay)) == expected


# --- what is wrong: graphs of odd stages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "stages: {echo: {use: 'HERE:Echo'}}\nchannels: {a: {from: echo, to: echo, initial: 1}}\nworkers: {}",
            "0.yaml:1: no stage is a source: nothing would ever flow",
        ),
        (
            chain("Nowhere", "Echo", channels="a: {from: nowhere, to: echo}"),
            "0.yaml:4: stage 'nowhere': it has no input port, so it must be a Source",
        ),
        (
            chain("Echo", channels="a: {from: echo, to: echo}"),
            "0.yaml:4: stage 'echo': source 'data' does not reach it",
        ),
        (
            chain("Join", channels="a: {from: data, to: join.a}\nb: {from: join, to: join.b}"),
            "0.yaml:7: a cycle without a token: join → join; give 'b' an `initial:`",
        ),
        (
            chain("Gather", channels="a: {from: data, to: gather}"),
            "0.yaml:6: channel 'a': gather.x gathers one payload from each replica, so the channel must be per: window",
        ),
        (
            chain("Again", channels="a: {from: data, to: again}"),
            "0.yaml:6: channel 'a': data sends Number, but again.x receives Digest",
        ),
        (
            chain("Waiting", channels="a: {from: data, to: waiting}"),
            "0.yaml:8: worker 'main': waiting is `async def`, so the worker needs kind: async",
        ),
        (
            chain("Saved", "Echo", channels="a: {from: data, to: saved}\nb: {from: saved, to: echo}"),
            "0.yaml:4: stage 'saved': it has state(), so it must fire once a window, or be the last (others have run "
            "ahead)",
        ),
        (
            chain("SavedSink", "Saved", channels="a: {from: data, to: [savedsink, saved]}"),
            "0.yaml:5: stage 'saved': it has state(), and so has 'savedsink'; a snapshot holds one stage's",
        ),
        (
            chain("Echo", channels="a: {from: data, to: echo}") + "snapshot: 3\n",
            "0.yaml:9: snapshot: no stage has state() to save",
        ),
        (
            chain(
                "Join",
                channels="a: {from: data, to: [join.a, join.b]}",
                workers="main: {stages: [data]}\n  two: {stages: [join], replicas: 2}",
            ),
            "0.yaml:9: worker 'two': join joins two per-message ports: its replicas need take: round_robin",
        ),
        (
            chain(
                "Echo",
                "Join",
                channels="a: {from: data, to: [echo, join.a]}\nb: {from: echo, to: join.b}",
                workers="main: {stages: [data, join]}\n  two: {stages: [echo], replicas: 2, order: completion}",
            ),
            "0.yaml:11: worker 'two': order: completion would mix up the ports that join joins",
        ),
        (
            chain(
                "Tally",
                "Again",
                channels="a: {from: data, to: tally}\nb: {from: tally, to: again, per: window}",
                workers="main: {stages: [data, again]}\n  two: {stages: [tally], replicas: 2, take: round_robin}",
            ),
            "0.yaml:11: channel 'b': tally has 2 replicas, but again.x does not gather (tuple[X, ...])",
        ),
        (
            chain(
                "Tally",
                "Again",
                channels="a: {from: data, to: tally}\nb: {from: tally, to: again, per: window}",
                workers="main: {stages: [data, tally]}\n  two: {stages: [again], replicas: 2}",
            ),
            "0.yaml:11: worker 'two': again fires once a window, so there is nothing to deal to its replicas",
        ),
        (
            chain(
                "Tally",
                "Late",
                channels="a: {from: data, to: [tally, late.x]}\nb: {from: tally, to: late.tally, per: window}",
            )
            + "credits: {messages: 3}\n",
            "0.yaml:11: channel 'b': credits: 3 messages cannot make a window of 4",
        ),
    ],
)
def test_graphs_that_are_refused(graph, text, expected):
    assert line(graph(text.replace("HERE", HERE))) == expected


def test_a_source_has_no_state(graph):
    text = chain("Echo", channels="a: {from: data, to: echo}").replace("stages.toy:Numbers", f"{HERE}:SavedSource")
    loaded = graph(text.replace(", with: {count: 8}", ""))
    assert line(loaded) == "0.yaml:3: stage 'data': a source has no state(): its cursor is its state"


def test_no_workers_says_what_to_take(graph):
    loaded = graph(TOY.partition("workers:")[0])
    assert line(loaded).startswith("0.yaml: no workers: take a topology file that extends this one")


def test_gathering_from_replicas_that_send_once_a_window_is_good(graph):
    text = chain(
        "Tally",
        "GatherDigests",
        channels="a: {from: data, to: tally}\nb: {from: tally, to: gatherdigests, per: window}",
        workers="main: {stages: [data, gatherdigests]}\n  two: {stages: [tally], replicas: 2, take: round_robin}",
    )
    check(graph(text))


# --- types of channels


@pytest.mark.parametrize(
    ("port", "fits"),
    [
        (Number, True),
        (Any, True),
        (object, True),
        (Number | None, True),
        (Number | Digest, True),
        (Digest, False),
        (Digest | None, False),
        (Digest | int, False),
        (list[Number], False),
    ],
)
def test_a_port_takes_its_type_or_a_part_of_it(graph, port, fits):
    assert accepts(graph(TOY), Number, port) is fits


@pytest.mark.parametrize(
    ("sent", "port", "fits"),
    [
        (Number | Digest, Number | Digest, True),
        (Number | Digest, Digest | int | Number, True),
        (Number | Digest, Number, False),
        (bool, int, True),
        (int, bool, False),
        (list[int], list, True),
        (list[int], list[int], True),
        (list[int], list[str], False),
        (list[int], object, True),
        (Any, Number, True),
    ],
)
def test_unions_generics_and_subclasses(graph, sent, port, fits):
    assert accepts(graph(TOY), sent, port) is fits


def accepts(graph, sent, port):
    """Whether `check` lets `sent` go from data to a port of that type."""

    def change(name, **parts):
        spec = graph.stages[name]
        graph.stages[name] = dataclasses.replace(spec, signature=dataclasses.replace(spec.signature, **parts))

    change("data", output=sent)
    change("target", inputs={"number": Port(port)})
    try:
        check(graph)
    except BadInput as error:
        assert str(error).startswith("0.yaml:8: channel 'batches': data sends ")
        return False
    return True


def test_a_group_that_its_receivers_own_worker_feeds_never_gathers():
    keys = ["features.group=2", "workers={loader: null, drafter: null, main: {stages: [data, drafter]}}"]
    with pytest.raises(BadInput, match="waits for a group of 2 that its own stage 'data' feeds"):
        check(load(["graphs/toy/overlapped.yaml"], keys))
    check(load(["graphs/toy/overlapped.yaml"], ["features.group=2"]))

"""The laws of workers: every stage has one, it suits its stages, and its replicas leave the result as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dflash_pipe.counted import counted
from dflash_pipe.errors import BadInput, nearest
from dflash_pipe.graph import Graph, WorkerSpec
from dflash_pipe.laws import KeyPath, bad, each, feeding, in_to, inputs_of, listed, owner, rate, reach

__all__ = ["PLACEMENT"]


def _every_stage_has_a_worker(graph: Graph) -> None:
    if not graph.workers:
        line = "no workers: take a topology file that extends this one (as graphs/sequential.yaml or "
        line += "graphs/overlapped.yaml extend graphs/dataflow.yaml), or write `workers:`"
        raise BadInput(line, graph.files[-1] if graph.files else "")
    place: dict[str, WorkerSpec] = {}
    for worker in graph.workers.values():
        for stage in worker.stages:
            if stage not in graph.stages:
                line = f"no stage {stage!r}{nearest(stage, graph.stages)}"
                raise bad(graph, worker, line, listed(worker, stage), ("stages",))
            if stage in place:
                line = f"stage {stage!r} is on worker {place[stage].name!r} already"
                raise bad(graph, worker, line, listed(worker, stage), listed(place[stage], stage))
            place[stage] = worker
    for spec in graph.stages.values():
        if spec.name not in place:
            lists = each("workers", graph.workers, "stages")
            line = f"it is on no worker (workers: {', '.join(graph.workers)})"
            raise bad(graph, spec, line, "use", ("workers",), *lists)


def _workers_suit_their_stages(graph: Graph) -> None:
    for w in graph.workers.values():
        for name in w.stages:
            use = ("stages", name, "use")
            if graph.stages[name].signature.is_async and w.kind != "async":
                line = f"{name} is `async def`, so the worker needs kind: async"
                raise bad(graph, w, line, "kind", listed(w, name), use)
            if w.kind == "async" and not graph.stages[name].signature.is_async:
                line = f"kind: async, but {name} is not `async def`: it would hold up the event loop"
                raise bad(graph, w, line, "kind", listed(w, name), use)
            if len(w.device[name]) != w.replicas:
                line = f"{counted(len(w.device[name]), 'device')} for {counted(w.replicas, 'replica')} of {name}"
                raise bad(graph, w, line, "replicas", "device")
    turns = Counter(w.turn for w in graph.workers.values() if w.turn is not None for _ in range(w.replicas))
    for w in graph.workers.values():
        if w.turn is not None and turns[w.turn] == 1:
            line = f"turn {w.turn!r} is shared with nobody{nearest(w.turn, [t for t in turns if t != w.turn])}"
            raise bad(graph, w, line, "turn", *each("workers", graph.workers, "turn"), ("workers",))


def _coroutines_share_a_device(graph: Graph) -> None:
    """They share a thread, and what is computed on is a matter of the thread."""
    first: tuple[str, str] | None = None
    for w in graph.workers.values():
        devices = [(name, number) for name in w.stages for number in range(w.replicas)] if w.kind == "async" else []
        for name, number in devices:
            device = w.device[name][number]
            first = first or (w.name, device)
            if device != first[1]:
                line = f"kind: async, on {device}, but {first[0]!r} is on {first[1]}: they share a thread"
                own: KeyPath = ("workers", w.name, "device")
                keys = [*each("workers", (w.name, first[0]), "device"), *each("workers", (w.name, first[0]), "kind")]
                raise bad(graph, w, line, (*own, name, number), (*own, name), (*own, number), *keys)


def _replicas_keep_the_result(graph: Graph) -> None:
    for w in graph.workers.values():
        if w.replicas == 1:
            if w.order == "completion":
                line = "order: completion needs replicas: one alone completes in input order"
                raise bad(graph, w, line, "order", "replicas")
            continue
        for name in w.stages:
            inputs, signature = inputs_of(graph, name), graph.stages[name].signature
            windowed = signature.window_output is not None or any(c.per == "window" for c, _ in inputs)
            keys = ("replicas", listed(w, name), ("stages", name, "use"))
            if signature.source:
                raise bad(graph, w, f"source {name} cannot be replicated: there is one stream", *keys)
            if signature.stateful:
                raise bad(graph, w, f"{name} has state(), so it cannot be replicated", *keys)
            if rate(graph, name) == "window":
                line = f"{name} fires once a window, so there is nothing to deal to its replicas"
                raise bad(graph, w, line, *keys, *feeding(graph, name, "per"))
            if w.take != "round_robin" and windowed:
                line = f"{name} works in windows: its replicas need take: round_robin"
                raise bad(graph, w, line, "take", *keys)
            if w.take != "round_robin" and sum(c.per == "message" for c, _ in inputs) > 1:
                line = f"{name} joins two per-message ports: its replicas need take: round_robin"
                raise bad(graph, w, line, "take", *keys)
            if windowed and graph.window % w.replicas:
                line = f"window: {graph.window} cannot be dealt evenly to {w.replicas} replicas of {name}"
                raise bad(graph, w, line, "replicas", ("window",), listed(w, name))
            if windowed and w.order == "completion":
                line = f"order: completion, but what {name} sends once a window is gathered in replica order"
                raise bad(graph, w, line, "order", *keys)


def _replicas_meet_at_ports(graph: Graph) -> None:
    for c in graph.channels.values():
        sender = owner(graph, c.sender)
        for to in c.receivers:
            receiver, gather = owner(graph, to.stage), graph.stages[to.stage].signature.inputs[to.port].gather
            sending, receiving = each("workers", (sender.name, receiver.name), "replicas")
            if c.per == "window" and sender.replicas > 1 and not gather:
                line = f"{c.sender} has {sender.replicas} replicas, but {to} does not gather (tuple[X, ...])"
                raise bad(graph, c, line, sending, *in_to(c, to), "per", ("stages", to.stage, "use"))
            if c.per == "window" and receiver.replicas > 1 and not c.broadcast:
                line = f"{to.stage} has {receiver.replicas} replicas that all need it: broadcast: true"
                raise bad(graph, c, line, "broadcast", receiving, *in_to(c, to), "per")
            if sender.order == "completion" and sender is not receiver and receiver.replicas > 1:
                line = f"{c.sender} sends in order: completion, which several replicas cannot receive"
                raise bad(graph, c, line, ("workers", sender.name, "order"), receiving, *in_to(c, to))
    for w in graph.workers.values():
        if w.order == "completion":
            for name in set().union(*(reach(graph, stage) for stage in w.stages)):
                if sum(c.per == "message" for c, _ in inputs_of(graph, name)) > 1:
                    line = f"order: completion would mix up the ports that {name} joins"
                    raise bad(graph, w, line, "order", *feeding(graph, name, "to"))


PLACEMENT: tuple[Callable[[Graph], None], ...] = (
    _every_stage_has_a_worker,
    _workers_suit_their_stages,
    _coroutines_share_a_device,
    _replicas_keep_the_result,
    _replicas_meet_at_ports,
)

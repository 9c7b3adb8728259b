"""The transport of torch graphs, as far as a CPU can show it; tests/gpu has the rest."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stages.cuda import Sent, Streams
from stages.devices import DeviceTransport, HostStagedTransport
from stages.tensors import mapped


def test_a_worker_computes_with_the_threads_of_the_graph() -> None:
    """Whatever the library would choose for a new thread; 3 first, so that it is not what another test has left."""
    before, counts = torch.get_num_threads(), []

    def work(threads: int) -> None:
        DeviceTransport(threads).enter("cpu")
        counts.append(torch.get_num_threads())

    try:
        for threads in (3, 2):
            worker = threading.Thread(target=work, args=(threads,))
            worker.start()
            worker.join()
    finally:
        torch.set_num_threads(before)  # what was set last is what new threads begin with
    assert counts == [3, 2]


def test_a_payload_without_tensors_stays_what_it_is():
    plain = object()
    assert DeviceTransport().on_receive(plain, "cpu") is plain
    assert DeviceTransport().on_receive((plain,), "cpu") == (plain,)


class FakeStreams:
    """What a transport asks of its streams, noted; "meta" stands for a GPU, whose tensors have shapes only."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def of(self, device: str) -> Any:
        return Stream(device, self.waited)

    def copies(self, source: str, target: str) -> Any:
        return FakeCopies(source, target)


@dataclass
class Stream:
    name: str
    waited: list[Any]
    device = torch.device("meta")

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


@dataclass
class FakeCopies:
    source: str
    target: str

    def begin(self, payload: Any, ready: Any) -> Sent:
        there = torch.device(self.target)
        copied = mapped(payload, lambda t: torch.empty_like(t, device=there) if str(t.device) == self.source else t)
        moment: Any = Moment(f"{self.source} to {self.target} after {ready}")
        return Sent(copied, ((self.target, moment),), ((Moment("before"), moment),))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Moment:
    what: str

    def synchronize(self) -> None:
        HOST.append(self)

    def __str__(self) -> str:
        return self.what


HOST: list[Moment] = []


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("stages.devices.moment", lambda stream: Moment(f"work on {stream.name}"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    HOST.clear()
    made = DeviceTransport()
    made._streams = FakeStreams()  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("order", [("cpu", "meta"), ("meta", "cpu")])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("to", "awaited"),
    [
        ("meta", {"work on meta", "cpu to meta after None"}),
        ("cpu", {"meta to cpu after work on meta"}),
    ],
)
def test_a_payload_on_several_devices_arrives_whole(
    transport: Any, order: tuple[str, str], known: bool, to: str, awaited: set[str]
) -> None:
    """In whatever order its tensors are, and whether or not the sender knew where to."""
    payload = [torch.zeros(3, device=device) for device in order]
    sent = transport.on_send(payload, "meta", to if known else None)
    assert len(transport.crossing(sent)) == known  # one of its tensors is on its way
    received = transport.on_receive(sent, to)
    assert [str(tensor.device) for tensor in received] == [to, to]
    waited = HOST if to == "cpu" else transport._streams.waited
    assert {str(moment) for moment in waited} == awaited


def test_inside_a_worker_it_is_brought_as_well(transport: Any) -> None:
    received = transport.on_receive([torch.zeros(3), torch.zeros(3, device="meta")], "meta")
    assert [str(tensor.device) for tensor in received] == ["meta", "meta"]
    there = [torch.zeros(3, device="meta")]
    assert transport.on_receive(there, "meta") is there


def asked(streams: Streams, *pairs: tuple[str, str]) -> None:
    """Two workers, each with streams of its own, copy between these devices."""
    for _ in range(2):
        worker = threading.Thread(target=lambda: [streams.copies(*pair) for pair in pairs])
        worker.start()
        worker.join()


def test_copies_that_must_go_through_the_host_are_said_once_a_pair(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apart = {"cuda:0", "cuda:2"}
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != apart)
    pairs = [("cuda:0", "cuda:1"), ("cuda:2", "cuda:0"), ("cuda:0", "cuda:2"), ("cpu", "cuda:0"), ("cuda:2", "cpu")]
    with caplog.at_level(logging.WARNING):
        asked(Streams(staged=False), *pairs)
        asked(Streams(staged=True), *pairs)  # asked for
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "cuda:0 and cuda:2 cannot reach each other's memory: copies go through the host"


def test_what_lies_on_the_host_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a GPU from anywhere that it cannot read: through pinned memory."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, to: to == "cuda:1")
    ways = [("cpu", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:0", "cuda:2"), ("cuda:0", "cuda:0"), ("cuda:0", "cpu")]
    assert [DeviceTransport().through_host(*way) for way in ways] == [True, False, True, False, False]
    assert [HostStagedTransport().through_host(*way) for way in ways] == [True, True, True, False, False]

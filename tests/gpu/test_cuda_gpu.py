"""Payloads between streams and devices: read when they are ready, kept until they are read, and no wait on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from stages.cuda import Sent
from stages.devices import DeviceTransport, HostStagedTransport
from stages.messages import Parameters

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
LONG = 400_000_000  # clock cycles: about a fifth of a second
SIZE = 1 << 24

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(params=[DeviceTransport, HostStagedTransport])
def transport(request: pytest.FixtureRequest) -> Iterator[DeviceTransport]:
    """Entered by this thread on the first GPU; what it launched is done afterwards."""
    made: DeviceTransport = request.param()
    before = torch.cuda.current_stream("cuda:0")
    made.enter("cuda:0")
    launched()  # what is loaded or allocated at the first time
    yield made
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


def elsewhere(work: Callable[[], Any]) -> Any:
    """The result of `work` in another thread, and so with another stream."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def launched() -> Parameters:
    """Ones that the GPU has only after a long time."""
    flat = torch.zeros(SIZE, device="cuda:0")
    torch.cuda._sleep(LONG)
    flat += 1.0
    return Parameters(flat, 7)


def late(transport: DeviceTransport, to: str | None) -> Any:
    """A payload that is ready long after it was sent; sending does not wait for it."""
    transport.finish("cuda:0")
    transport.on_send(launched(), "cuda:0", to)  # makes its copies' streams and memory
    transport.finish("cuda:0")
    begin = time.perf_counter()
    sent = transport.on_send(launched(), "cuda:0", to)
    assert isinstance(sent, Sent) and sent.nbytes == 4 * SIZE
    assert not any(event.query() for _, event in sent.ready)
    assert time.perf_counter() - begin < 0.1
    return sent


def total(transport: DeviceTransport, sent: Any, device: str) -> float:
    """What a receiver on `device` reads."""
    transport.enter(device)
    payload = transport.on_receive(sent, device)
    assert str(payload.flat.device) == device and payload.step == 7
    return float(payload.flat.sum())


@pytest.mark.parametrize("to", ["cuda:0", "cpu", None])
def test_it_is_read_when_it_is_ready(transport: DeviceTransport, to: str | None) -> None:
    sent = late(transport, to)
    assert elsewhere(lambda: total(transport, sent, to or "cuda:0")) == SIZE


@two_gpus
@pytest.mark.parametrize("to", ["cuda:1", None])
def test_on_another_gpu_it_is_read_when_it_is_there(transport: DeviceTransport, to: str | None) -> None:
    sent = late(transport, to)
    assert elsewhere(lambda: total(transport, sent, "cuda:1")) == SIZE


@two_gpus
def test_the_copy_starts_when_it_is_sent(transport: DeviceTransport) -> None:
    sent = late(transport, "cuda:1")
    assert str(sent.payload.flat.device) == "cuda:1"
    for _, event in sent.ready:
        event.synchronize()
    assert float(sent.payload.flat.sum()) == SIZE


def test_from_the_host(transport: DeviceTransport) -> None:
    flat = torch.ones(SIZE)
    sent = transport.on_send(Parameters(flat, 7), "cpu", "cuda:0")
    assert str(sent.payload.flat.device) == "cuda:0"
    assert elsewhere(lambda: total(transport, sent, "cuda:0")) == SIZE
    assert transport.on_send(Parameters(flat, 7), "cpu", None).flat is flat  # nobody knows yet where to
    assert elsewhere(lambda: total(transport, Parameters(flat, 7), "cuda:0")) == SIZE


@pytest.mark.parametrize("order", [("cpu", "cuda:0"), ("cuda:0", "cpu")])
@pytest.mark.parametrize("to", ["cpu", "cuda:0"])
def test_a_payload_on_both_arrives_whole(transport: DeviceTransport, order: tuple[str, str], to: str) -> None:
    late_one = launched().flat
    parts = [late_one if device == "cuda:0" else torch.ones(SIZE) for device in order]

    def sums(sent: Any) -> list[float]:
        transport.enter(to)
        return [float(part.sum()) for part in transport.on_receive(sent, to)]

    for known in (to, None):
        sent = transport.on_send(parts, "cuda:0", known)
        assert elsewhere(partial(sums, sent)) == [SIZE, SIZE]


def overwritten(transport: DeviceTransport, to: str) -> float:
    """What a slow receiver reads after its sender has asked for memory of the same size and written to it."""
    torch.cuda.empty_cache()
    read: list[torch.Tensor] = []
    sent = [transport.on_send(Parameters(torch.ones(SIZE, device="cuda:0"), 7), "cuda:0", to)]
    torch.cuda.synchronize()

    def receive() -> None:
        transport.enter(to)
        payload = transport.on_receive(sent.pop(), to)
        torch.cuda._sleep(LONG)
        read.append(payload.flat.sum())

    elsewhere(receive)  # has launched its work and dropped the payload
    for _ in range(3):
        torch.full((SIZE,), 2.0, device="cuda:0")
    torch.cuda.synchronize()
    return float(read[0])


def test_memory_is_not_given_away_before_it_was_read(transport: DeviceTransport) -> None:
    overwritten(transport, "cuda:0")
    assert overwritten(transport, "cuda:0") == SIZE


def test_without_the_record_it_is(transport: DeviceTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test before."""
    overwritten(transport, "cuda:0")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    assert overwritten(transport, "cuda:0") == 2 * SIZE


@two_gpus
def test_memory_is_not_given_away_before_it_was_copied(transport: DeviceTransport) -> None:
    """The copy waits for a slow kernel; meanwhile the sender asks for memory of the same size."""
    sent = late(transport, "cuda:1")
    for _ in range(3):
        torch.full((SIZE,), 2.0, device="cuda:0")
    assert elsewhere(lambda: total(transport, sent, "cuda:1")) == SIZE


def test_a_worker_is_one_message_ahead_of_its_device(transport: DeviceTransport) -> None:
    events = []
    for number in range(4):
        torch.cuda._sleep(LONG // 4)
        events.append(transport.mark("cuda:0"))
        transport.follow("cuda:0")
        assert [event.query() for event in events] == [True] * number + [False]
    transport.finish("cuda:0")
    assert events[-1].query()


def test_two_workers_of_a_gpu_do_not_wait_for_each_other(transport: DeviceTransport) -> None:
    torch.cuda._sleep(LONG)
    busy = transport.mark("cuda:0")

    def other() -> bool:
        transport.enter("cuda:0")
        torch.zeros(8, device="cuda:0")
        transport.finish("cuda:0")
        return busy.query()

    assert elsewhere(other) is False

"""The transport of torch graphs, as far as a CPU can show it; tests/gpu has the rest."""

from __future__ import annotations

import threading

import torch

from stages.devices import DeviceTransport


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

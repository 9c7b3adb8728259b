"""The transport of torch graphs: which devices there are, and payloads moved to where they are needed.

Nobody waits on the host for a payload: see `stages.cuda`. What a worker gives its GPU to do runs at most one message
behind what the worker itself has come to, so that capacities, credits and turns are about work and not about launches.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash_pipe import Transport
from stages.cuda import Copies, Sent, Streams, moment
from stages.tensors import tensors

__all__ = ["DeviceTransport", "HostStagedTransport"]


class DeviceTransport(Transport):
    """The CPU and the CUDA devices of this machine. Tensors are found in dataclasses, dicts, lists and tuples."""

    staged = False

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._streams = Streams()
        self._copies = Copies(staged=self.staged)

    def accelerators(self) -> list[str]:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]

    def enter(self, device: str) -> None:
        if self._threads is not None:
            # Sums over rows are split by thread, so the count is part of the result: the same in every worker.
            torch.set_num_threads(self._threads)
        if device != "cpu":
            torch.cuda.set_device(device)
            torch.cuda.set_stream(self._streams.of(device))

    def on_send(self, payload: Any, device: str, to: str | None) -> Any:
        """Notes the moment when the payload will be ready, and starts the copy if it is known where to."""
        lies = next((str(tensor.device) for tensor in tensors(payload)), "cpu")
        if lies == "cpu" and to in ("cpu", None):
            return payload
        ready = None if lies == "cpu" else moment(self._streams.of(lies))
        if ready is not None and to in (lies, None):
            return Sent(payload, lies, ready)
        assert to is not None
        return self._copies.begin(payload, lies, to, ready)

    def on_receive(self, payload: Any, device: str) -> Any:
        if isinstance(payload, tuple):
            return tuple(self.on_receive(item, device) for item in payload)
        here = None if device == "cpu" else self._streams.of(device)
        if not isinstance(payload, Sent):  # handed over inside a worker, or from a CPU that did not know where to
            away = next((str(t.device) for t in tensors(payload) if str(t.device) != device), None)
            if away is None:
                return payload
            ready = None if away == "cpu" else moment(self._streams.of(away))
            payload = self._copies.begin(payload, away, device, ready)
        elif payload.device != device:
            payload = self._copies.begin(payload.payload, payload.device, device, payload.ready)
        return payload.received(here)

    def follow(self, device: str) -> None:
        if device != "cpu":
            self._streams.follow(device)

    def finish(self, device: str) -> None:
        if device != "cpu":
            moment(self._streams.of(device)).synchronize()

    def mark(self, device: str) -> Any:
        """On a GPU an event on the stream that the calling worker computes on."""
        if device == "cpu":
            return super().mark(device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def elapsed(self, begin: Any, end: Any) -> float | None:
        """Asks events whether they have completed and never waits for them."""
        if not isinstance(end, torch.cuda.Event):
            return super().elapsed(begin, end)
        return float(begin.elapsed_time(end)) / 1e3 if end.query() and begin.query() else None

    def memory(self, device: str) -> tuple[int, int] | None:
        """What the caching allocator of this process had given out at once, and the GPU's whole memory."""
        if device == "cpu":
            return None
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


class HostStagedTransport(DeviceTransport):
    """Copies between GPUs go through pinned memory of the host, as they do where GPUs cannot reach each other."""

    staged = True

"""The transport of torch graphs: which devices there are, and payloads moved to where they are needed.

Nobody waits on the host for a payload: see `stages.cuda`. What a worker gives its GPU to do runs at most one message
behind what the worker itself has come to, so that capacities, credits and turns are about work and not about launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash_pipe import Transport
from stages.cuda import Sent, Streams, moment
from stages.tensors import tensors

__all__ = ["DeviceTransport", "HostStagedTransport"]


class DeviceTransport(Transport):
    """The CPU and the CUDA devices of this machine. Tensors are found in dataclasses, dicts, lists and tuples."""

    staged = False

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._streams = Streams(staged=self.staged)

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
        """Notes the moments when the payload will be ready, and starts the copies if it is known where to."""
        lies = _devices(payload)
        if lies <= {"cpu"} and to in ("cpu", None):
            return payload
        sent = Sent(payload, self._moments(lies))
        return sent if to is None else self._brought(sent, to)

    def crossing(self, sent: Any) -> Sequence[tuple[Any, Any]]:
        """The copies."""
        return sent.copying if isinstance(sent, Sent) else ()

    def on_receive(self, payload: Any, device: str) -> Any:
        if type(payload) is tuple:  # of several replicas
            return tuple(self.on_receive(item, device) for item in payload)
        if not isinstance(payload, Sent):  # handed over inside a worker, or from a CPU that did not know where to
            lies = _devices(payload)
            if lies <= {device}:
                return payload
            payload = Sent(payload, self._moments(lies))
        return self._brought(payload, device).received(None if device == "cpu" else self._streams.of(device))

    def _moments(self, devices: set[str]) -> tuple[tuple[str, torch.cuda.Event], ...]:
        """When the calling worker's work on each of the GPUs among `devices` will be done."""
        return tuple((device, moment(self._streams.of(device))) for device in sorted(devices - {"cpu"}))

    def _brought(self, sent: Sent, to: str) -> Sent:
        """What was sent, with copies to `to` begun of all that lies elsewhere."""
        ready, copying = tuple((device, event) for device, event in sent.ready if device == to), sent.copying
        for source in sorted(_devices(sent.payload) - {to}):
            begun = self._streams.copies(source, to).begin(sent.payload, dict(sent.ready).get(source))
            sent = Sent(begun.payload, sent.ready)
            ready, copying = (*ready, *begun.ready), (*copying, *begun.copying)
        return Sent(sent.payload, ready, copying)

    def through_host(self, device: str, to: str) -> bool:
        """As `stages.cuda.Lane` does it."""
        if device == to or to == "cpu":
            return False
        return device == "cpu" or self.staged or not torch.cuda.can_device_access_peer(device, to)

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


def _devices(payload: Any) -> set[str]:
    """Those on which the payload has tensors."""
    return {str(tensor.device) for tensor in tensors(payload)}

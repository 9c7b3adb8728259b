"""The transport of torch graphs: which devices there are, and payloads moved to where they are needed.

On a machine with GPUs every worker computes on its device's default stream, so a payload that was sent is ready for
whoever receives it without a wait on the host; a copy between two devices is ordered after the sender's work.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash_pipe import Transport

__all__ = ["DeviceTransport"]


class DeviceTransport(Transport):
    """The CPU and the CUDA devices of this machine. A payload with a `to(device)` is moved by it."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def accelerators(self) -> list[str]:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]

    def enter(self, device: str) -> None:
        if self._threads is not None:
            # Sums over rows are split by thread, so the count is part of the result: the same in every worker.
            torch.set_num_threads(self._threads)
        if device != "cpu":
            torch.cuda.set_device(device)

    def on_receive(self, payload: Any, device: str) -> Any:
        if isinstance(payload, tuple):
            return tuple(self.on_receive(item, device) for item in payload)
        # What holds no tensors has no place that it could be moved from.
        return payload.to(device) if hasattr(payload, "to") else payload

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

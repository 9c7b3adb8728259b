"""The transport of torch graphs: which devices there are, and payloads moved to where they are needed.

On a machine with GPUs every worker computes on its device's default stream, so a payload that was sent is ready for
whoever receives it without a wait on the host; a copy between two devices is ordered after the sender's work.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash_pipe import BadInput, Transport

__all__ = ["DeviceTransport"]


class DeviceTransport(Transport):
    """cpu, cuda:N; `auto` is the first GPU, or the CPU where there is none. Payloads have a `to(device)`."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def resolve(self, device: str) -> str:
        count = torch.cuda.device_count()
        known = ["cpu", *(f"cuda:{n}" for n in range(count))]
        found = {"auto": known[1] if count else "cpu", "cuda": known[1] if count else ""}.get(device, device)
        if found not in known:
            raise BadInput(f"no device {device!r} on this machine (known: auto, {', '.join(known)})")
        return found

    def enter(self, device: str) -> None:
        if self._threads is not None:
            # Sums over rows are split by thread, so the count is part of the result: the same in every worker.
            torch.set_num_threads(self._threads)
        if device != "cpu":
            torch.cuda.set_device(device)

    def on_receive(self, payload: Any, device: str) -> Any:
        if isinstance(payload, tuple):
            return tuple(self.on_receive(item, device) for item in payload)
        return payload.to(device)

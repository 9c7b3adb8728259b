"""The hand-off hook: which devices exist, and how a payload gets from one worker's device to another's.

The framework knows no device but "cpu". A graph names its own transport, such as
`transport: "stages.devices:DeviceTransport"`; everything device-specific (streams, events, copies, memory) happens
behind these methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

from dflash_pipe.errors import BadInput

__all__ = ["Elsewhere", "Transport"]


class Transport:
    """The identity: one device, "cpu", and payloads are handed over as they are."""

    def __init__(self, threads: int | None = None) -> None:
        """threads: intra-op threads of every worker, the same in every topology (the graph's `threads:`)."""

    def accelerators(self) -> list[str]:
        """Names of the devices there are besides "cpu", the first one first."""
        return []

    def resolve(self, device: str) -> str:
        """The device that `device` means here. Raises `BadInput` if there is no such device.

        "auto" is the first accelerator, "auto:N" the Nth, counted round if there are fewer, the CPU if there is none.
        """
        accelerators = self.accelerators()
        name, colon, number = device.partition(":")
        if name == "auto" and (not colon or number.isdecimal()):
            return accelerators[int(number or 0) % len(accelerators)] if accelerators else "cpu"
        if device not in ("cpu", *accelerators):
            raise BadInput(f"no device {device!r} on this machine (known: auto, {', '.join(('cpu', *accelerators))})")
        return device

    def enter(self, device: str) -> None:
        """Called on the worker's own thread whenever it turns to a stage on another device, and before it opens one."""

    def on_send(self, payload: Any, device: str, to: str | None) -> Any:
        """Called by the sender, a stage on `device`, before the payload enters the channel; returns what enters it.

        to: the device of whoever will receive it; None if that is not known yet.
        """
        return payload

    def crossing(self, sent: Any) -> Sequence[tuple[Any, Any]]:
        """Marks between which what `on_send` returned is on its way, each pair on one device, one after the other."""
        return ()

    def on_receive(self, payload: Any, device: str) -> Any:
        """Called by the receiver; returns the payload on the receiver's device."""
        return payload

    def through_host(self, device: str, to: str) -> bool:
        """Whether what goes from one device to another lies in the host's memory on its way."""
        return False

    def follow(self, device: str) -> None:
        """Called by a worker after it gave `device` work: wait until what it gave the time before is done."""

    def finish(self, device: str) -> None:
        """Wait until `device` has done all that the calling worker gave it."""

    def mark(self, device: str) -> Any:
        """A moment in the work of a device: when it has done what the calling worker has given it so far.

        A float is that moment on the host's clock (`perf_counter`); only other marks are asked how much lies between.
        """
        return perf_counter()

    def elapsed(self, begin: Any, end: Any) -> float | None:
        """Seconds between two marks on one device; None while the later one lies ahead. Never waits for the device."""
        return float(end - begin)

    def memory(self, device: str) -> tuple[int, int] | None:
        """Bytes of the device: the most that was held at once so far, and all there is; None if that is not known."""
        return None


class Elsewhere(Transport):
    """A machine of which only the names of its accelerators are known: to lay a graph out for it."""

    def __init__(self, devices: Iterable[str]) -> None:
        """devices: names as graphs have them."""
        super().__init__()
        numbers = [number or "0" for name, _, number in (each.partition(":") for each in devices) if name != "cpu"]
        self._count = max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)

    def accelerators(self) -> list[str]:
        return [f"cuda:{number}" for number in range(self._count)]

"""CUDA streams of workers, and copies between devices that are ordered by events instead of waits on the host.

Every thread computes on a stream of its own on each device. What it sends carries events; whoever receives it has its
own stream wait for them. Copies run on further streams: from the moment of sending, or where the receiver's device is
not known then (the first free of several replicas takes it), from that of receiving.

PyTorch's allocator gives freed memory to the next who asks on the stream that it was allocated on. So whatever another
stream reads is recorded on that stream (`Tensor.record_stream`), and then it is not given away before that has read it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.tensors import mapped, tensors

__all__ = ["CopyStreams", "Sent", "Streams", "moment"]

log = logging.getLogger("dflash_pipe")
Leg = tuple[torch.cuda.Event, torch.cuda.Event]  # before and after a copy


class Streams:
    """The streams of the calling thread: one on each device, and those of its copies; and how far each has come."""

    def __init__(self, *, staged: bool) -> None:
        """staged: copies between two GPUs go through the host, also where these could reach each other."""
        self._staged = staged
        self._own = threading.local()
        self._apart: set[frozenset[str]] = set()  # pairs of GPUs that it was said of
        self._saying = threading.Lock()

    def of(self, device: str) -> torch.cuda.Stream:
        """The calling thread's stream on `device`."""
        streams: dict[str, torch.cuda.Stream] = self._own.__dict__.setdefault("streams", {})
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        return streams[device]

    def copies(self, source: str, target: str) -> CopyStreams:
        """The calling thread's streams for copies from one device to another."""
        made: dict[tuple[str, str], CopyStreams] = self._own.__dict__.setdefault("copies", {})
        if (source, target) not in made:
            made[source, target] = CopyStreams(source, target, direct=self._direct(source, target))
        return made[source, target]

    def _direct(self, source: str, target: str) -> bool:
        """Whether copies go from GPU to GPU. Where they cannot, it is said once for each pair."""
        if self._staged or "cpu" in (source, target):
            return False
        if torch.cuda.can_device_access_peer(source, target):
            return True
        pair = frozenset((source, target))
        with self._saying:
            new = pair not in self._apart
            self._apart.add(pair)
        if new:
            log.warning("%s and %s cannot reach each other's memory: copies go through the host", *sorted(pair))
        return False

    def follow(self, device: str) -> None:
        """Wait until `device` has done what the calling thread had given it when it called this the last time."""
        before: dict[str, torch.cuda.Event] = self._own.__dict__.setdefault("before", {})
        last, before[device] = before.get(device), moment(self.of(device))
        if last is not None:
            last.synchronize()


def moment(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The moment when `stream` has done all it was given so far. Who waits for it on the host sleeps."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


@dataclass(frozen=True)
class Sent:
    """A payload on its way. ready: (device, event) for every device on which it has tensors that are not there before
    the event. copying: the legs of its way, one for each tensor and stream."""

    payload: Any
    ready: tuple[tuple[str, torch.cuda.Event], ...]
    copying: tuple[Leg, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of the payload, for the bound of its channel."""
        return getattr(self.payload, "nbytes", 0)

    def received(self, stream: torch.cuda.Stream | None) -> Any:
        """The payload for whoever computes on `stream`; None: on the host, which waits until it is there."""
        for _, event in self.ready:
            event.synchronize() if stream is None else stream.wait_event(event)
        if stream is not None:
            for tensor in tensors(self.payload):
                if tensor.device == stream.device:
                    tensor.record_stream(stream)
        return self.payload


class CopyStreams:
    """For copies from one device to another: a stream on each that is a GPU. One between two GPUs is ordered on both.

    direct: from GPU to GPU; otherwise the copy between two GPUs leads through pinned memory of the host.
    """

    def __init__(self, source: str, target: str, *, direct: bool) -> None:
        self._source, self._target = torch.device(source), torch.device(target)
        self._out = None if source == "cpu" else torch.cuda.Stream(source)
        self._into = None if target == "cpu" else torch.cuda.Stream(target)
        self._direct = direct

    def begin(self, payload: Any, ready: torch.cuda.Event | None) -> Sent:
        """Start copying what of the payload lies on the source, after the event `ready`; returns at once."""
        if self._out is not None and ready is not None:
            self._out.wait_event(ready)
        legs: list[Leg] = []
        copied = mapped(payload, lambda tensor: self._copied(tensor, legs))
        last = self._into or self._out
        assert last is not None  # one of the two devices is a GPU
        return Sent(copied, ((str(self._target), moment(last)),), tuple(legs))

    def _copied(self, tensor: Tensor, legs: list[Leg]) -> Tensor:
        if tensor.device != self._source:
            return tensor
        if self._out is not None:
            tensor.record_stream(self._out)
            if self._direct:
                with torch.cuda.stream(self._into), _timed(self._out, legs):
                    return tensor.to(self._target, non_blocking=True)
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
            with _timed(self._out, legs):
                tensor = pinned.copy_(tensor, non_blocking=True)
            if self._into is not None:
                self._into.wait_stream(self._out)
        if self._into is None:
            return tensor
        pinned = tensor.pin_memory()
        with _timed(self._into, legs):
            return pinned.to(self._target, non_blocking=True)


@contextmanager
def _timed(stream: torch.cuda.Stream, legs: list[Leg]) -> Iterator[None]:
    """What is done on `stream` becomes one of the legs."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record(stream)
        yield
        end.record(stream)
    legs.append((begin, end))

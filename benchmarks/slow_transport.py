"""How gradients and weights crossed in the first published schedule: each tensor by itself, through pageable memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stages.devices import DeviceTransport
from stages.messages import Gradients, Parameters
from stages.tensors import mapped

__all__ = ["EachThroughHost"]

_PIECES = 58  # tensors of a drafter of five layers: 11 a layer, and 3


class EachThroughHost(DeviceTransport):
    """`DeviceTransport`, but flat gradients and weights leave their GPU piece by piece, and the host waits for each."""

    def on_send(self, payload: Any, device: str, to: str | None) -> Any:
        if isinstance(payload, Gradients | Parameters) and to not in ("cpu", None):
            payload = mapped(payload, lambda tensor: self._crossed(tensor, str(to)) if tensor.is_cuda else tensor)
        return super().on_send(payload, device, to)

    def _crossed(self, tensor: Tensor, to: str) -> Tensor:
        with torch.cuda.stream(self._streams.of(to)):
            arrived = torch.empty_like(tensor, device=to)
            pieces = zip(tensor.chunk(_PIECES), arrived.chunk(_PIECES), strict=True)
            for piece, place in pieces:
                place.copy_(piece.to("cpu"))
        return arrived

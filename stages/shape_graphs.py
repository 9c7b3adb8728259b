"""CUDA graphs of one computation, one for each shape that is known to come: a replay costs the host a single launch.

Captured while a stage opens, when nothing else uses the GPU: a thread that waits for the whole device, as tuning does,
would break a capture. A graph computes what it has recorded, in the same order, so its bits are those without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ShapeGraphs"]


class ShapeGraphs:
    """compute(input_ids [B, S], states [B, S, features]) fills `states`, without waiting for the device.

    replayed, others: calls with a shape that was captured, and with another. One object serves one thread.
    """

    def __init__(
        self, compute: Callable[[Tensor, Tensor], Any], features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.replayed = self.others = 0
        self._compute, self._features, self._dtype, self._device = compute, features, dtype, device
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def capture(self, shapes: Sequence[tuple[int, int]]) -> int:
        """Run each shape (rows, tokens) once, the largest first, which builds and tunes its kernels; then record it.

        The graphs share their memory, because they never run at the same time: it is that of the largest. Returns how
        many there are.
        """
        device, most = self._device, max(rows * tokens for rows, tokens in shapes)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            memory = torch.empty(most * self._features, dtype=self._dtype, device=device)
            for rows, tokens in sorted(set(shapes), key=lambda shape: -shape[0] * shape[1]):
                ids = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
                states = memory[: rows * tokens * self._features].view(rows, tokens, -1)
                self._compute(ids, states)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._compute(ids, states)
                self._graphs[rows, tokens] = graph, ids, states
        torch.cuda.current_stream(device).wait_stream(stream)
        return len(self._graphs)

    def __call__(self, input_ids: Tensor) -> Tensor | None:
        """[B, S, features] in memory that the next call overwrites; None for a shape that was not captured."""
        rows, tokens = input_ids.shape
        known = self._graphs.get((rows, tokens))
        if known is None:
            self.others += 1
            return None
        graph, ids, states = known
        ids.copy_(input_ids)
        graph.replay()
        self.replayed += 1
        return states

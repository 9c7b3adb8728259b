"""How many bytes of tensors some code has made and not yet let go, at most: what an allocator would have to give it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that are made inside `with`. now, peak: bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and id(made.untyped_storage()) not in given | self._known:
                self._begin(made.untyped_storage())
        return out

    def _begin(self, storage: Any) -> None:
        self._known.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, id(storage), storage.nbytes())

    def _end(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size

"""The frozen target's layers up to the highest captured one, and what they compute at the captured ones.

On a GPU the layers of known architectures run as fused kernels (`stages.fused_decoder`), and announced shapes as CUDA
graphs of those, or, packed, of real tokens only; everywhere else they run as transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from dflash_pipe import BadInput
from stages.fused_decoder import FusedDecoder, not_fused
from stages.leakage import refuse_leaks
from stages.packing import pack_rows
from stages.shape_graphs import ShapeGraphs

__all__ = ["TruncatedTarget"]

_WARM_UP = 2048  # tokens of the batch that tunes kernels where no shapes are announced
# Models whose forward takes the attention mask as a dict {layer type: mask}: a dict of Nones is the plain causal
# mask without a look at the batch's data, which on a GPU would be a synchronisation a forward.
_TAKES_MASK_DICT = ("qwen3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


class TruncatedTarget:
    """The target up to its highest captured layer: no later layer, no final norm, no lm_head, no cache.

    layers: the captured ids. features: K·H. vocab_size: token ids are below it. decoder: the transformers model whose
    layers these are. forward: how they are computed, in words. spared: tokens of padding that were not computed so far,
    and all tokens, if it is packed. One object serves one thread.
    """

    def __init__(self, decoder: Any, layers: list[int], plain: bool = False) -> None:
        """plain: compute as transformers does, also where there are kernels of our own."""
        self.layers = layers
        self.decoder = decoder
        self.hidden_size: int = decoder.config.hidden_size
        self.features = len(layers) * self.hidden_size
        self.vocab_size: int = decoder.config.vocab_size
        self.spared = (0, 0)
        self._why = why = "asked for" if plain else _why_plain(decoder)
        self._packed = False
        self._fused: FusedDecoder | None = None
        self._compute: Callable[[Tensor], Tensor]
        self._graphs: ShapeGraphs | None = None
        if why:
            self._compute = _Plain(decoder, layers)
        else:
            self._compute = self._fused = fused = FusedDecoder(decoder, layers)
            self._graphs = ShapeGraphs(fused, self.features, self._weight.dtype, self._weight.device)
        self.forward = f"transformers' own forward ({why})" if why else f"fused {decoder.config.model_type} layers"

    @property
    def _weight(self) -> Tensor:
        weight: Tensor = self.decoder.get_input_embeddings().weight
        return weight

    @torch.no_grad()
    def prepare(self, shapes: list[tuple[int, int]]) -> int:
        """Build and tune the kernels, and capture these shapes (rows, tokens) in CUDA graphs if the layers are fused.

        Call it on the thread that will compute, while nothing else uses the GPU. Returns how many were captured.
        """
        if self._graphs is not None and shapes:
            return self._graphs.capture(shapes)
        for rows, tokens in shapes or [(1, self._longest())]:
            self._compute(torch.zeros(rows, tokens, dtype=torch.int64, device=self._weight.device))
        return 0

    @torch.no_grad()
    def pack(self) -> None:
        """From now on compute real tokens only. Builds and tunes the kernels, and tests that no row leaks into another.

        Call it like `prepare`, and instead of it. Raises `BadInput` where the layers are not fused, RuntimeError where
        rows leak.
        """
        if self._fused is None:
            raise BadInput(f"packed: needs the fused layers; here: {self._why}")
        device, longest = self._weight.device, self._longest()
        whole = pack_rows(torch.tensor([longest], device=device), longest, longest)
        self._fused(torch.zeros(1, longest, dtype=torch.int64, device=device), pack=whole)
        refuse_leaks(self._fused, self.vocab_size, device)
        self._packed = True
        self.forward += ", packed (no leakage between rows)"

    def _longest(self) -> int:
        return min(_WARM_UP, getattr(self.decoder.config, "max_position_embeddings", _WARM_UP))

    @property
    def counted(self) -> tuple[int, int]:
        """Calls so far that replayed a graph, and others."""
        return (self._graphs.replayed, self._graphs.others) if self._graphs else (0, 0)

    @torch.no_grad()  # not inference_mode: the drafter's backward saves what comes out of here
    def __call__(self, input_ids: Tensor, lengths: Tensor, real: int | None = None) -> Tensor:
        """Hidden states [B, S, K·H] of right-padded rows, captured layers side by side, in the target's dtype.

        input_ids: [B, S] int64. lengths: [B] int64, real tokens of each row; behind them the result is 0, whatever
        the padding is. No mask is needed: every layer is causal, so padding on the right reaches no real token.
        real: their sum, if it is known; without it a packed target waits for the device.
        """
        lengths = lengths.to(input_ids.device)
        if self._packed:
            return self._compute_packed(input_ids, lengths, int(lengths.sum()) if real is None else real)
        padding = torch.arange(input_ids.shape[1], device=input_ids.device) >= lengths[:, None]
        replayed = self._graphs(input_ids) if self._graphs else None
        if replayed is not None:  # the graph's own memory: what is given away is the copy that this makes
            return replayed.masked_fill(padding[..., None], 0)
        return self._compute(input_ids).masked_fill_(padding[..., None], 0)

    def _compute_packed(self, input_ids: Tensor, lengths: Tensor, real: int) -> Tensor:
        assert self._fused is not None  # `pack` saw to it
        spared, tokens = self.spared
        self.spared = spared + input_ids.numel() - real, tokens + input_ids.numel()
        return self._fused(input_ids, pack=pack_rows(lengths, input_ids.shape[1], real))


class _Plain:
    """The layers as transformers computes them, caught by hooks."""

    def __init__(self, decoder: Any, layers: list[int]) -> None:
        self._decoder = decoder
        self._mask = _no_mask(decoder.config)
        self._count = len(layers)
        self._states: Tensor | None = None
        for k, i in enumerate(layers):
            decoder.layers[i].register_forward_hook(self._keep(k))

    def _keep(self, k: int) -> Any:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            rows, tokens, size = hidden.shape
            if self._states is None:
                self._states = hidden.new_empty(rows, tokens, self._count * size)
            self._states[..., k * size : (k + 1) * size] = hidden

        return hook

    def __call__(self, input_ids: Tensor) -> Tensor:
        self._states = None
        self._decoder(input_ids=input_ids, attention_mask=self._mask, use_cache=False)
        states, self._states = self._states, None
        assert states is not None  # the hooks ran
        return states


def _why_plain(decoder: Any) -> str | None:
    weight = decoder.get_input_embeddings().weight
    if not weight.is_cuda:
        return "no GPU"
    return "float32" if weight.dtype == torch.float32 else not_fused(decoder)


def _no_mask(config: PretrainedConfig) -> dict[str, None] | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type in _TAKES_MASK_DICT and kinds and kinds <= {"full_attention", "linear_attention"}:
        return dict.fromkeys(sorted(kinds))
    return None

"""The DFlash drafter: a small block-diffusion decoder that reads the target's hidden states, and its flat weights.

DFlash (arXiv 2602.06036); tensor names and arithmetic as in the reference inference, z-lab/dflash.
Shape legend: B sequences, S context positions, K captured layers, H hidden size, N blocks a sequence, b block size,
P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dflash_pipe import BadInput
from dflash_pipe.errors import Missing, nearest_file
from stages.dflash_config import SLIDING, DrafterConfig, DrafterKeys
from stages.dflash_masks import Attention, BlockGeometry, attend, build_mask, resolve_attention
from stages.dflash_rope import half_rotation, inverse_frequencies, rotate, rotation
from stages.splitmix import mix_int

__all__ = [
    "DFlashModel",
    "DrafterConfig",
    "DrafterKeys",
    "FlatParameters",
    "Slot",
    "flatten",
    "initial_parameters",
    "parameter_layout",
    "read_feature_std",
]

INIT_STD = 0.02


class BlockAttention(nn.Module):
    """Queries from the block tokens; keys and values from the target's features and the block tokens alike."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, features: Tensor, rotations: Rotations, mask: Any, attention: str) -> Tensor:
        """x [B, N·b, H] normed, features [B, S, H] as they are -> [B, N·b, H]."""
        query = self._heads(self.q_proj(x))
        key = self._heads(torch.cat((self.k_proj(features), self.k_proj(x)), 1))
        value = self._heads(torch.cat((self.v_proj(features), self.v_proj(x)), 1))
        query = rotate(self.q_norm(query).transpose(1, 2), *rotations.queries)
        key = rotate(self.k_norm(key).transpose(1, 2), *rotations.keys)
        out = attend(query, key, value.transpose(1, 2), mask, attention)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class SwiGLU(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, features: Tensor, rotations: Rotations, mask: Any, attention: str) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), features, rotations, mask, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True)
class Rotations:
    """(cos, sin) of the queries' and of the keys' positions, each [B, 1, T, head_dim]."""

    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]


class DFlashModel(nn.Module):
    """The drafter without embedding and head, which are the target's. Has exactly 11 L + 3 parameters.

    device: where the parameters are made ("meta": shapes only). They are not initialised: load a checkpoint, or
    `flatten` the model and load `initial_parameters`.
    """

    def __init__(self, config: DrafterConfig, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
            self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
        self._frequencies, self._rope_factor = inverse_frequencies(config)  # float32 whatever the model's dtype

    def forward(
        self,
        block_embeds: Tensor,
        context: Tensor,
        anchors: Tensor,
        keep: Tensor,
        attention: Attention = "auto",
        alike: bool = False,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Draft all blocks in one pass.

        block_embeds: [B, N·b, H], embeddings of each block's tokens. context: [B, S, K·H], the target's hidden states.
        anchors: [B, N] int64, positions of the blocks' first tokens. keep: [B, N] bool, False for an unused block.
        attention: the backend (`resolve_attention`); "fused" computes all layers as `stages.fused_drafter` does.
        alike: the embeddings of all slots but each block's first are the same, which spares work. rows: [R] int64, the
        slots whose result is wanted, all different and counted through all sequences.
        -> [B, N·b, H] after the final norm, for the target's head; [R, H] of `rows`.
        """
        attention = resolve_attention(attention, block_embeds.device, self.config.head_dim)
        dtype = self.fc.weight.dtype
        geometry = BlockGeometry(anchors, keep, context.shape[1], block_embeds.shape[1] // anchors.shape[1])
        self._frequencies = self._frequencies.to(block_embeds.device)
        context, x = context.to(dtype), block_embeds.to(dtype)
        windows = {kind: self.config.sliding_window if kind == SLIDING else None for kind in self.config.layer_types}
        if attention == "fused":
            hidden = self._fused(x, context, geometry, windows, alike, rows)
            return hidden.view_as(x) if rows is None else hidden
        masks = {kind: build_mask(geometry, window, attention) for kind, window in windows.items()}
        rotations = self._rotations(geometry, dtype)
        features = self.hidden_norm(self.fc(context))
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            x = layer(x, features, rotations, masks[kind], attention)
        x = self.norm(x)
        return x if rows is None else x.flatten(0, 1)[rows]

    def _rotations(self, geometry: BlockGeometry, dtype: torch.dtype) -> Rotations:
        cos, sin = rotation(_positions(geometry), self._frequencies, self._rope_factor, dtype)
        queries = cos[:, :, geometry.context :], sin[:, :, geometry.context :]
        return Rotations(queries, (cos, sin))

    def _fused(
        self,
        x: Tensor,
        context: Tensor,
        geometry: BlockGeometry,
        windows: dict[str, int | None],
        alike: bool,
        rows: Tensor | None,
    ) -> Tensor:
        from stages.fused_attention import Sight  # needs Triton, which a CPU does without
        from stages.fused_drafter import Places, fused_forward

        turns = half_rotation(_positions(geometry), self._frequencies, self._rope_factor)
        places = Places(*turns, geometry.context, geometry.block_size)
        sights = {
            kind: Sight(geometry.seen, geometry.block_size, geometry.context, window)
            for kind, window in windows.items()
        }
        of_layers = [sights[kind] for kind in self.config.layer_types]
        return fused_forward(self, x.flatten(0, 1), context.flatten(0, 1), places, of_layers, alike, rows)


def _positions(geometry: BlockGeometry) -> Tensor:
    """[B, S + N·b] of all keys: the context's, then the block tokens'."""
    device = geometry.anchors.device
    block = (geometry.anchors[..., None] + torch.arange(geometry.block_size, device=device)).flatten(1)
    return torch.cat((torch.arange(geometry.context, device=device).expand(len(block), -1), block), 1)


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat buffer: [start, start + size), and its shape."""

    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """This parameter as a view of a flat buffer [P]."""
        return flat[self.start : self.start + self.size].view(self.shape)


def parameter_layout(model: nn.Module) -> dict[str, Slot]:
    """Name -> place of every parameter, in the order of `named_parameters`, without gaps; P is where the last ends."""
    layout: dict[str, Slot] = {}
    start = 0
    for name, parameter in model.named_parameters():
        layout[name] = Slot(start, tuple(parameter.shape))
        start += parameter.numel()
    return layout


class FlatParameters:
    """A model whose parameters are views of one buffer.

    values: [P] in the compute dtype. layout: name -> Slot.
    """

    def __init__(self, model: nn.Module, device: str | torch.device, dtype: torch.dtype) -> None:
        self.layout = parameter_layout(model)
        self.values = torch.empty(sum(slot.size for slot in self.layout.values()), device=device, dtype=dtype)
        self._parameters: list[Tensor] = []
        for slot, (module, leaf, old) in zip(self.layout.values(), list(_parameters(model)), strict=True):
            view = slot.of(self.values)
            if old.device.type != "meta":
                view.copy_(old.detach())
            new = nn.Parameter(view)
            new.register_post_accumulate_grad_hook(_add_to_sum)
            setattr(module, leaf, new)
            self._parameters.append(new)

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return self.values.numel()

    def load(self, flat: Tensor) -> None:
        """Copy [P] of any dtype and device into the parameters."""
        if flat.shape != self.values.shape:
            raise BadInput(f"{flat.numel()} parameters were given to a drafter that has {self.size}")
        self.values.copy_(flat)

    def sum_gradients_into(self, sums: Tensor | None) -> None:
        """Have every backward pass add its gradients to `sums` ([P] float32), parameter by parameter as they are made.

        No parameter keeps a gradient of its own, so one of them exists at a time, and the sum is float32 whatever the
        compute dtype. None: gradients stay in `.grad`.
        """
        for slot, parameter in zip(self.layout.values(), self._parameters, strict=True):
            parameter.gradient_sum = None if sums is None else slot.of(sums)  # type: ignore[attr-defined]


def _add_to_sum(parameter: Tensor) -> None:
    """Called with a gradient that was not added already where it was made (`stages.gradient_sums`)."""
    total = getattr(parameter, "gradient_sum", None)
    if total is not None and parameter.grad is not None:
        total.add_(parameter.grad)
        parameter.grad = None


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """(owning module, attribute, parameter) in the order of `named_parameters`."""
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        yield model.get_submodule(owner), leaf, parameter


def flatten(model: nn.Module, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> FlatParameters:
    """Make the model's parameters views of one flat buffer on `device`; values are kept (unless on "meta")."""
    return FlatParameters(model, device, dtype)


def initial_parameters(
    config: DrafterConfig, seed: int, feature_std: str | Path | None = None, final_norm_init: float = 1.0
) -> Tensor:
    """[P] float32 on the CPU: the same for a seed, wherever the drafter will be trained.

    Matrices are normal with standard deviation 0.02, norms 1, but the final norm `final_norm_init`: a small one (0.3)
    makes the first predictions less sure of themselves. feature_std: a .safetensors file whose tensor `std` [K·H] is
    the standard deviation of each feature; the columns of `fc` are divided by it, so that the few huge features of
    some targets do not drown the others. Raises BadInput for a file that does not fit.
    """
    layout = parameter_layout(DFlashModel(config, device="meta"))
    flat = torch.ones(sum(slot.size for slot in layout.values()))
    matrices = [slot.of(flat) for slot in layout.values() if len(slot.shape) == 2]
    # One generator draws on one core, and for seconds where there are billions: so each matrix has its own.
    draws = [torch.Generator().manual_seed(mix_int(mix_int(seed) + number)) for number in range(len(matrices))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda matrix, draw: matrix.normal_(0.0, INIT_STD, generator=draw), matrices, draws))
    layout["norm.weight"].of(flat).fill_(final_norm_init)
    if feature_std is not None:
        layout["fc.weight"].of(flat).div_(read_feature_std(feature_std, config.feature_size))
    return flat


def read_feature_std(path: str | Path, size: int) -> Tensor:
    """[K·H] float32; a feature that hardly varies counts as a thousandth of the median, so that nothing explodes.

    Raises `Missing` where there is no file, `BadInput` for one that is not of `size` features.
    """
    path = Path(path)
    if not path.exists():
        raise Missing(f"feature_std: no file {path}{nearest_file(path)}")
    try:
        with safe_open(path, "pt") as file:
            std = file.get_tensor("std").float()
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"feature_std: expected a .safetensors file with tensor 'std' [{size}] ({error})", str(path)
        ) from None
    if std.shape != (size,) or not bool(torch.isfinite(std).all()) or bool((std < 0).any()) or not bool(std.any()):
        raise BadInput(f"feature_std: 'std' is {tuple(std.shape)}, expected [{size}] positive numbers", str(path))
    return std.clamp_min(1e-3 * float(std[std > 0].median()))

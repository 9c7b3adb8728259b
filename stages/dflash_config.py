"""Which numbers a drafter is built from: read from an exported `config.json`, or derived from the target once named.

Form of the file and rules of derivation: DFlash (arXiv 2602.06036) and its reference inference, z-lab/dflash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_pipe import BadInput
from dflash_pipe.errors import nearest
from stages.mask_token import resolve_mask_token
from stages.sized_models import refuse_weights

__all__ = ["FULL", "MOST_ANCHORS", "SLIDING", "ArchitectureKeys", "DrafterConfig", "DrafterKeys"]

MOST_ANCHORS, _MOST_LAYERS, _MOST_DRAFTED = 1 << 20, 100, 1024  # far more takes minutes to size
FULL, SLIDING = "full_attention", "sliding_attention"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# A target may rotate a part of the head, or along several axes; a drafter never does, and no server may think so.
_ROPE_NOT_TAKEN_OVER = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
# Keys that follow the target's config where they are null.
_OF_TARGET = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


@dataclass(frozen=True)
class DrafterConfig:
    """The numbers of an exported drafter's `config.json`, under the names they have there.

    rope_scaling: None, or {"rope_type": "linear" | "llama3" | "yarn", ...} without `rope_theta`.
    layer_types: one of `full_attention`, `sliding_attention` a layer. num_target_layers: T, layers of the whole target.
    target_layer_ids: the K captured layers; id i is the output of decoder layer i. vocab_size: rows of the target's
    embedding. Raises BadInput for numbers that cannot be a drafter.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    attention_bias: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    block_size: int
    num_target_layers: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
            _positive(name, getattr(self, name))
        _positive("num_key_value_heads", self.num_key_value_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise BadInput(
                f"num_attention_heads is {self.num_attention_heads}, "
                f"expected a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise BadInput(f"head_dim is {self.head_dim}, expected an even number (RoPE rotates pairs)")
        if self.attention_bias:
            raise BadInput("attention_bias is true, expected false: a DFlash checkpoint has no bias tensors")
        if self.block_size < 2:
            raise BadInput(f"block_size is {self.block_size}, expected at least 2 (one anchor and one drafted token)")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise BadInput(f"mask_token_id {self.mask_token_id} is outside the embedding (0..{self.vocab_size - 1})")
        self._check_layers()
        kind = (self.rope_scaling or {}).get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise BadInput(f"rope_type {kind!r} is not supported{nearest(str(kind), _ROPE_TYPES)}")

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise BadInput(
                f"layer_types has length {len(self.layer_types)}, but num_hidden_layers is {self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in (FULL, SLIDING):
                raise BadInput(f"unknown layer type {kind!r}{nearest(kind, (FULL, SLIDING))}")
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < self.block_size):
            raise BadInput(
                f"sliding_window is {self.sliding_window}, "
                f"expected at least the block size ({self.block_size}) where layers are {SLIDING}"
            )
        if not self.target_layer_ids:
            raise BadInput("target_layer_ids is empty, expected the ids of the captured target layers")
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside:
            raise BadInput(
                f"target_layer_ids {outside} are outside 0..{self.num_target_layers - 1}, the target's layers"
            )

    @property
    def feature_size(self) -> int:
        """K·H, the width of what the target hands over."""
        return len(self.target_layer_ids) * self.hidden_size

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DrafterConfig:
        """Read the form that z-lab, SGLang and vLLM read. Raises BadInput on missing or contradictory keys.

        `target_layer_ids` is never guessed. RoPE may stand under the old keys (`rope_theta`, `rope_scaling`) or the new
        one (`rope_parameters`); keys of partial or multi-axis RoPE are refused, because they would change the network.
        """
        if not isinstance(data, Mapping):
            raise BadInput(f"a drafter's config is an object, not {type(data).__name__}")
        inner = data.get("dflash_config", {})
        if not isinstance(inner, Mapping):
            raise BadInput(f"dflash_config is {inner!r}, expected an object with mask_token_id and target_layer_ids")
        rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
        refused = [key for key in _ROPE_NOT_TAKEN_OVER if key in rope or key in data]
        if refused:
            raise BadInput(f"{refused[0]} is set: a DFlash drafter rotates whole heads along one axis")
        theta = data.get("rope_theta", rope.get("rope_theta"))
        if theta is None:
            raise BadInput("rope_theta is missing from the drafter's config")
        layers = _get(data, "num_hidden_layers", int)
        heads = _get(data, "num_attention_heads", int)
        return DrafterConfig(
            hidden_size=_get(data, "hidden_size", int),
            intermediate_size=_get(data, "intermediate_size", int),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_get(data, "num_key_value_heads", int),
            head_dim=_get(data, "head_dim", int),
            vocab_size=_get(data, "vocab_size", int),
            rms_norm_eps=_get(data, "rms_norm_eps", float),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope),
            max_position_embeddings=_get(data, "max_position_embeddings", int),
            attention_bias=bool(data.get("attention_bias", False)),
            layer_types=tuple(data.get("layer_types") or (FULL,) * layers),
            sliding_window=data.get("sliding_window"),
            block_size=_get(data, "block_size", int),
            num_target_layers=_get(data, "num_target_layers", int),
            mask_token_id=_get(inner, "mask_token_id", int, "dflash_config."),
            target_layer_ids=tuple(_get(inner, "target_layer_ids", list, "dflash_config.")),
        )


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise BadInput(f"{name} is {value}, expected a positive number")


def _get(data: Mapping[str, Any], key: str, kind: type, prefix: str = "") -> Any:
    if data.get(key) is None:
        raise BadInput(f"{prefix}{key} is missing from the drafter's config")
    value = data[key]
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise BadInput(f"{prefix}{key} is {value!r}, expected {kind.__name__}")
    return value


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """What changes the rotation besides its base; None for plain RoPE."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in (None, "default"):
        return None
    dropped = {"rope_theta", "type", *_ROPE_NOT_TAKEN_OVER}
    return {"rope_type": kind, **{key: value for key, value in rope.items() if key not in dropped}}


@dataclass(kw_only=True)
class ArchitectureKeys:
    """The keys of stage `drafter` that say what the drafter is (the others say how it is trained).

    target, revision: the model to be sped up. layers: how many of its layers are captured, or their ids.
    num_layers: of the drafter. block_size: tokens of a block, the known one included. mask_token_id: an unused id of
    the vocabulary, or "auto" (see `resolve_mask_token`). sliding_window: positions that sliding layers see at most.
    sliding_layers: how many of the first layers slide (null: all but the last, at least one).
    num_attention_heads, num_key_value_heads, head_dim, intermediate_size: null follows the target's config.
    feature_std: a .safetensors file with tensor `std` [K·H] by which the features are scaled at the start (written by
    graphs/statistics.yaml). final_norm_init: the final norm's weight at the start; less than 1 lowers the first losses.
    dtype: of the computation. weights: "random" reads nothing but the target's config.
    """

    target: str
    revision: str | None = None
    layers: int | list[int] = 5
    num_layers: int = 5
    block_size: int = 16
    mask_token_id: int | str = "auto"
    sliding_window: int | None = None
    sliding_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    feature_std: str | None = None
    final_norm_init: float = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: Literal["pretrained", "random"] = "pretrained"


@dataclass(kw_only=True)
class DrafterKeys(ArchitectureKeys):
    """The same keys, taken out of the whole mapping, and what follows from them."""

    @staticmethod
    def pick(mapping: Mapping[str, Any]) -> DrafterKeys:
        """The architecture keys of a whole `with:` mapping of stage `drafter`. Raises BadInput without `target`."""
        names = {field.name for field in dataclasses.fields(DrafterKeys)}
        if "target" not in mapping:
            raise BadInput("the drafter's keys lack 'target' (give the whole mapping: drafter: ${drafter})")
        return DrafterKeys(**{key: value for key, value in mapping.items() if key in names})

    def check(self) -> None:
        """Raise BadInput for values that no target could make right."""
        for name, least, most in (("num_layers", 1, _MOST_LAYERS), ("block_size", 2, _MOST_DRAFTED)):
            if not least <= getattr(self, name) <= most:
                raise BadInput(f"{name} is {getattr(self, name)}, expected {least}..{most}")
        for name in _OF_TARGET:
            if (size := getattr(self, name)) is not None and size < 1:
                raise BadInput(f"{name} is {size}, expected at least 1, or null: as the target has it")
        if isinstance(self.mask_token_id, str) and self.mask_token_id != "auto":
            raise BadInput(f'mask_token_id is {self.mask_token_id!r}, expected a token id or "auto"')
        refuse_weights(self.target, self.weights)
        if self.target.startswith("sizes:") and self.mask_token_id == "auto":
            raise BadInput(f'mask_token_id is "auto", but target {self.target!r} has no tokenizer: give an id')
        if self.sliding_layers is not None and self.sliding_window is None:
            raise BadInput("sliding_layers is set, but sliding_window is not")
        if self.sliding_layers is not None and not 1 <= self.sliding_layers <= self.num_layers:
            raise BadInput(f"sliding_layers is {self.sliding_layers}, expected 1..{self.num_layers}")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise BadInput(
                f"sliding_window is {self.sliding_window}, expected at least the block size ({self.block_size})"
            )

    def resolve(self) -> DrafterConfig:
        """Read the target's config (and its tokenizer, for its special tokens) and derive the drafter's numbers.

        Raises BadInput for a target whose config lacks a number, or a MASK id that is in use.
        """
        config = self._target_config()
        return self._derive(config, self._mask_token(config))

    def sizes(self) -> DrafterConfig:
        """The same numbers without a look at the tokenizer, for estimates: MASK is 0 where it is to be found.

        Raises BadInput as `resolve` does, and for a `feature_std` that does not fit.
        """
        from stages.dflash_model import read_feature_std

        config = self._derive(self._target_config(), 0 if isinstance(self.mask_token_id, str) else self.mask_token_id)
        if self.feature_std is not None:
            read_feature_std(self.feature_std, config.feature_size)
        return config

    def _target_config(self) -> Any:
        # Imported here: transformers takes seconds to import, and reading an exported config does not need it.
        from stages.model_source import text_config

        self.check()
        return text_config(self.target, self.revision)

    def _derive(self, config: Any, mask_token_id: int) -> DrafterConfig:
        from stages.target_model import resolve_layers

        target_layers = int(_from_target(config, "num_hidden_layers", self.target))
        hidden = int(_from_target(config, "hidden_size", self.target))
        heads = self.num_attention_heads or int(_from_target(config, "num_attention_heads", self.target))
        rope = _target_rope(config)
        theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
        if theta is None:
            raise BadInput(f"{self.target}: its config has no rope_theta, which the drafter would take over")
        return DrafterConfig(
            hidden_size=hidden,
            intermediate_size=self.intermediate_size or int(_from_target(config, "intermediate_size", self.target)),
            num_hidden_layers=self.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=self.head_dim or int(getattr(config, "head_dim", None) or hidden // heads),
            vocab_size=int(_from_target(config, "vocab_size", self.target)),
            rms_norm_eps=float(_from_target(config, "rms_norm_eps", self.target)),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope),
            max_position_embeddings=int(_from_target(config, "max_position_embeddings", self.target)),
            attention_bias=False,
            layer_types=self._layer_types(),
            sliding_window=self.sliding_window,
            block_size=self.block_size,
            num_target_layers=target_layers,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(resolve_layers(self.layers, target_layers)),
        )

    def _layer_types(self) -> tuple[str, ...]:
        if self.sliding_window is None:
            return (FULL,) * self.num_layers
        sliding = self.sliding_layers or max(1, self.num_layers - 1)
        return (SLIDING,) * sliding + (FULL,) * (self.num_layers - sliding)

    def _mask_token(self, config: Any) -> int:
        from stages.model_source import ending_ids, load_tokenizer

        # A target with random weights may be a config alone; then only the ids in the config are known to be taken.
        tokenizer = None
        if self.mask_token_id == "auto" or self.weights == "pretrained":
            tokenizer = load_tokenizer(self.target, self.revision)
        taken: dict[int, str] = {}
        for source in (config, tokenizer):
            for name in ("pad_token_id", "eos_token_id"):
                ids = getattr(source, name, None)
                for token in ids if isinstance(ids, list | tuple) else [ids]:
                    if token is not None:
                        taken[token] = name.removesuffix("_token_id")
        taken |= dict.fromkeys(ending_ids(self.target, self.revision), "eos")
        return resolve_mask_token(self.mask_token_id, tokenizer, int(config.vocab_size), taken)


def _from_target(config: Any, key: str, target: str) -> Any:
    value = getattr(config, key, None)
    if value is None:
        raise BadInput(f"{target}: its config has no {key}, which the drafter would take over")
    return value


def _target_rope(config: Any) -> dict[str, Any]:
    """The target's RoPE keys, of its full-attention layers where they differ by layer type."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope = dict(rope.get(FULL, rope))
    # A rotation along several axes is plain RoPE for text, whose axes all carry the same position.
    if rope.get("rope_type", rope.get("type")) in ("axial", "mrope"):
        rope["rope_type"] = "default"
    return rope

"""`sizes:NAME`: architectures at full size without weights and tokenizer, to measure speed and memory with.

The folder `sizes` holds the text part of the `config.json` that each model was published with. Such a model is built
with random weights only; what is trained for it is worthless.
"""

from __future__ import annotations

from pathlib import Path

from dflash_pipe.errors import BadInput, nearest

__all__ = ["SIZED_MODELS", "refuse_weights", "sized_directory"]

_FOLDER = Path(__file__).parent / "sizes"
SIZED_MODELS = tuple(sorted(folder.name for folder in _FOLDER.iterdir() if (folder / "config.json").is_file()))


def sized_directory(name: str) -> Path:
    """The directory that holds the config.json of `sizes:name`. Raises `BadInput` for a name that is not there."""
    if name not in SIZED_MODELS:
        known = [f"sizes:{model}" for model in SIZED_MODELS]
        raise BadInput(f"target 'sizes:{name}': no such model{nearest(f'sizes:{name}', known)}")
    return _FOLDER / name


def refuse_weights(model: str, weights: str) -> None:
    """Raise `BadInput` where weights other than random ones are asked of a model that has none."""
    if model.startswith("sizes:") and weights != "random":
        raise BadInput(f"target {model!r} has no weights, it is for measurements only: expected weights: random")

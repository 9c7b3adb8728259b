"""Where a target comes from: a directory, the hub, or a model made on this machine; its config and its tokenizer.

Every way in which the name of a model can be wrong is answered here, with one line.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from dflash_pipe.errors import BadInput, Missing, nearest
from stages.sized_models import sized_directory
from stages.smollm2 import smollm2_directory
from stages.tiny_models import TINY_MODELS, tiny_directory

__all__ = [
    "ModelSource",
    "Weights",
    "ending_ids",
    "first_line",
    "load_tokenizer",
    "locate",
    "quiet",
    "refuse_unreachable",
    "text_config",
]

Weights = Literal["pretrained", "random"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PATH_LIKE = re.compile(r"[/~]|\.\.?(/|$)|.*/.*/|.*/$")
_INSTEAD = "go online, or name a directory that has the model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found. name: as the user wrote it. place: a directory, or a hub id. local: which of the two."""

    name: str
    place: str
    revision: str | None
    local: bool

    def file(self, *names: str) -> Path | None:
        """The first of these files that the model has (fetched from the hub where it is not cached), or None.

        Raises Missing where none is here and the hub does not say whether the model has one.
        """
        unknown: Missing | None = None
        for name in names:
            try:
                if (path := self._file(name)) is not None:
                    return path
            except Missing as error:  # another of them may be here
                unknown = unknown or error
        if unknown is not None:
            raise unknown
        return None

    def _file(self, name: str) -> Path | None:
        if self.local:
            path = Path(self.place, name)
            return path if path.is_file() else None
        cached = huggingface_hub.try_to_load_from_cache(self.place, name, revision=self.revision)
        if cached is not None and not isinstance(cached, str):  # it is known that the model has no such file
            return None
        refuse_unreachable(self, name)
        try:
            return Path(huggingface_hub.hf_hub_download(self.place, name, revision=self.revision))
        except huggingface_hub.errors.LocalEntryNotFoundError as error:  # it could not be asked for
            raise _not_fetched(self, name, error) from error
        except huggingface_hub.errors.EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _not_fetched(self, name, error) from error

    def complaint(self, what: str) -> BadInput:
        return BadInput(f"target {self.name!r}: {what}")


def locate(model: str, revision: str | None = None) -> ModelSource:
    """Find `model`: a directory, `tiny:NAME`, `sizes:NAME`, `package:smollm2`, or a hub id such as `Qwen/Qwen3-8B`.

    Nothing is fetched from the hub yet. Raises `BadInput` for a name that cannot be a model, for a file, for a
    directory without config.json, and for a revision of something that is not on the hub.
    """
    if not isinstance(model, str) or not model.strip():
        raise BadInput(f"target {model!r}: expected a directory, a hub id, package:smollm2, tiny:NAME or sizes:NAME")
    kind, colon, name = model.partition(":")
    path = Path(model).expanduser()
    if colon and kind == "sizes":
        place = str(sized_directory(name))
    elif colon and kind in ("tiny", "package"):
        place = _made_here(model, kind, name)
    elif path.is_dir() or path.exists():
        place = str(path)
        if not path.is_dir():
            raise BadInput(f"target {model!r}: is a file; expected a directory with config.json and *.safetensors")
        if not (path / "config.json").is_file():
            raise BadInput(f"target {model!r}: the directory has no config.json, so it is not a model")
    elif _PATH_LIKE.match(model):
        raise Missing(f"target {model!r}: no such directory")
    elif not _HUB_ID.fullmatch(model):
        raise BadInput(f"target {model!r}: neither a directory nor a hub id of the form owner/name")
    else:
        return ModelSource(model, model, revision, local=False)
    if revision is not None:
        raise BadInput(f"target {model!r}: revision {revision!r} is given, but only models on the hub have revisions")
    return ModelSource(model, place, None, local=True)


def _made_here(model: str, kind: str, name: str) -> str:
    known = TINY_MODELS if kind == "tiny" else ("smollm2",)
    if name not in known:
        raise BadInput(f"target {model!r}: no such model{nearest(model, [f'{kind}:{k}' for k in known])}")
    with quiet():
        return str(tiny_directory(name) if kind == "tiny" else smollm2_directory())


def text_config(model: str, revision: str | None = None) -> PretrainedConfig:
    """The config of the text model; of a composite (multimodal) model, its text part. Reads no weights.

    Raises `BadInput` where there is no readable config, or one of an architecture that transformers does not know.
    """
    source = locate(model, revision)
    with quiet():
        _check_model_type(source)
        try:
            config = AutoConfig.from_pretrained(source.place, revision=source.revision)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise source.complaint(f"its config.json is not usable: {first_line(error)}") from error
    text: PretrainedConfig = config.get_text_config(decoder=True)
    # Whether the head is the embedding is said by the whole model's config; its text part may say nothing, or another.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(getattr(text, key, None), int):
            raise source.complaint(f"its config.json describes no causal language model ({key} is missing)")
    return text


def _check_model_type(source: ModelSource) -> None:
    refuse_unreachable(source, "config.json")
    try:
        raw, _ = PretrainedConfig.get_config_dict(source.place, revision=source.revision)
    except (OSError, ValueError) as error:
        if source.local:
            raise source.complaint(f"config.json cannot be read: {first_line(error)}") from error
        raise _not_fetched(source, "config.json", error) from error
    kind = raw.get("model_type")
    if kind is None:
        raise source.complaint("its config.json has no model_type")
    if kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING.keys()), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise source.complaint(f"transformers {transformers.__version__} knows no model type {kind!r}{hint}")


def refuse_unreachable(source: ModelSource, name: str) -> None:
    """Raise Missing at once where a file is to come from a hub that nobody may ask, or reaches: asked for the file
    itself, huggingface_hub would try again for half a minute, and say so each time; transformers, that there is none.
    """
    if source.local or huggingface_hub.try_to_load_from_cache(source.place, name, revision=source.revision) is not None:
        return
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise _missing(source, name, f"the hub was not asked (offline mode): {_INSTEAD}")
    try:
        url = huggingface_hub.hf_hub_url(source.place, name, revision=source.revision)
        huggingface_hub.get_hf_file_metadata(url)
    except (huggingface_hub.errors.HfHubHTTPError, ValueError):
        return  # it answered, or would not be asked; the same is told where the file is read
    except Exception as error:
        raise _missing(source, name, f"the hub cannot be reached ({first_line(error)}): {_INSTEAD}") from error


def _not_fetched(source: ModelSource, name: str, error: Exception) -> Missing:
    return _missing(source, name, f"asked the hub: {first_line(error)}")


def _missing(source: ModelSource, name: str, hub: str) -> Missing:
    return Missing(
        f"target {source.name!r}: tried the directory {os.path.abspath(source.place)} (none), the hub's local cache "
        f"(no {name} of revision {source.revision or 'main'!r}), and {hub}"
    )


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """The model's own tokenizer (a `PreTrainedTokenizerBase`). Raises `BadInput` where it has none."""
    source = locate(model, revision)
    _check_model_type(source)
    if source.file(*_TOKENIZER_FILES) is None:  # transformers would make up an empty one
        raise source.complaint(f"it has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(source.place, revision=source.revision)
    except (OSError, ValueError, KeyError, TypeError, ImportError, json.JSONDecodeError) as error:
        raise source.complaint(f"it has no usable tokenizer: {first_line(error)}") from error


def ending_ids(model: str, revision: str | None = None) -> list[int]:
    """The ids that end an answer by the model's generation_config.json, which may list more than its config does.

    [] where it has none, or, in offline mode, none is cached: `hf download` leaves no word of what it did not find.
    """
    source = locate(model, revision)
    try:
        file = source.file("generation_config.json")
    except Missing:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            raise
        _say_unknown(source)
        file = None
    if file is None:
        return []
    try:
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") or []
    except (ValueError, AttributeError) as error:
        raise source.complaint(f"its generation_config.json is not usable: {first_line(error)}") from error
    return list(ids) if isinstance(ids, list) else [ids]


@cache
def _say_unknown(source: ModelSource) -> None:
    """Once for each model."""
    line = "target %r: no generation_config.json is cached, and offline the hub is not asked; taken to have none"
    logging.get_logger(__name__).warning(line, source.name)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and load reports: what they would report is checked and raised here."""
    talk: Any = logging
    verbosity, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        talk.set_verbosity(verbosity)
        if bars:
            talk.enable_progress_bar()

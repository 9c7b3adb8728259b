"""Compare this drafter with what another implementation computed from the same inputs.

A folder holds pairs: NAME.json, a drafter's config with its loss settings under `loss`, and NAME.safetensors, the
inputs (`input_ids`, `target_hidden`, `loss_mask`, `anchors`, `keep`, `embed_tokens.weight`, `lm_head.weight`,
`weight.*`) and the results in float32 (`draft_hidden`, `loss`, `accuracy`, `grad.*`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import torch.nn.functional as F
import typer
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.terminal import output
from dflash_pipe import BadInput
from dflash_pipe.counted import counted
from dflash_pipe.errors import nearest
from stages.dflash_loss import LossConfig, Supervision, block_inputs, block_loss
from stages.dflash_masks import Attention
from stages.dflash_model import DFlashModel, DrafterConfig, FlatParameters, flatten

__all__ = ["TOLERANCE", "Case", "Difference", "cases", "compare", "parity"]

TOLERANCE = 1e-5  # of max(1, the largest reference value)
_INPUTS = ("input_ids", "target_hidden", "loss_mask", "anchors", "keep", "embed_tokens.weight", "lm_head.weight")
_RESULTS = ("draft_hidden", "loss", "accuracy")


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity, and the largest that is accepted."""

    case: str
    quantity: str
    value: float
    accepted: float

    @property
    def good(self) -> bool:
        return self.value <= self.accepted  # False for NaN


@dataclass(frozen=True)
class Case:
    """One pair of files: the drafter's config, its loss, and all tensors of the .safetensors file."""

    name: str
    config: DrafterConfig
    loss: LossConfig
    tensors: dict[str, Tensor]


def cases(folder: Path) -> list[Case]:
    """Read every pair of a folder. Raises BadInput, with the file's name, for whatever is missing or malformed."""
    if not folder.is_dir():
        raise BadInput(f"no folder {str(folder)!r}, expected one with NAME.json and NAME.safetensors")
    names = {path.stem for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
    if not names:
        raise BadInput(f"folder {str(folder)!r} is without pairs, expected NAME.json and NAME.safetensors")
    return [_read(folder, name) for name in sorted(names)]


def _read(folder: Path, name: str) -> Case:
    config_path, tensors_path = folder / f"{name}.json", folder / f"{name}.safetensors"
    for path in (config_path, tensors_path):
        if not path.is_file():
            raise BadInput("half of a pair is missing", str(path))
    try:
        data = json.loads(config_path.read_text())
        config = DrafterConfig.from_json(data)
        loss = _loss(data.get("loss"))
    except (ValueError, OSError) as error:
        raise BadInput(f"not a drafter's config: {error}", str(config_path)) from None
    except BadInput as error:
        raise error.at(str(config_path)) from None
    try:
        tensors = load_file(tensors_path)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"not a .safetensors file: {error}", str(tensors_path)) from None
    case = Case(name, config, loss, tensors)
    try:
        _check_shapes(case)
    except BadInput as error:
        raise error.at(str(tensors_path)) from None
    return case


def _loss(data: Any) -> LossConfig:
    if not isinstance(data, dict) or "type" not in data:
        raise BadInput("'loss' is missing, expected {type, decay_gamma, alpha}")
    gamma, alpha = data.get("decay_gamma"), data.get("alpha", 0.5)
    for key, value in (("decay_gamma", gamma), ("alpha", alpha)):
        if value is not None and not isinstance(value, int | float):
            raise BadInput(f"loss.{key} is {value!r}, expected a number")
    return LossConfig(data["type"], gamma, alpha)


def _check_shapes(case: Case) -> None:
    tensors, config = case.tensors, case.config
    model = DFlashModel(config, device="meta")
    weights = {name: tuple(p.shape) for name, p in model.named_parameters()}
    needed = (*_INPUTS, *_RESULTS, *(f"{kind}.{name}" for name in weights for kind in ("weight", "grad")))
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise BadInput(f"tensor {missing[0]!r} is missing" + (f" (and {len(missing) - 1} more)" if missing[1:] else ""))
    if tensors["input_ids"].dim() != 2 or tensors["anchors"].dim() != 2:
        raise BadInput("input_ids and anchors have to be [B, S] and [B, N]")
    (batch, length), blocks = tensors["input_ids"].shape, tensors["anchors"].shape[1]
    expected: dict[str, tuple[int, ...]] = {
        "target_hidden": (batch, length, config.feature_size),
        "loss_mask": (batch, length),
        "anchors": (batch, blocks),
        "keep": (batch, blocks),
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.vocab_size, config.hidden_size),
        "draft_hidden": (batch, blocks * config.block_size, config.hidden_size),
        **{f"{kind}.{name}": shape for name, shape in weights.items() for kind in ("weight", "grad")},
    }
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise BadInput(f"tensor {name!r} is {list(tensors[name].shape)}, expected {list(shape)}")
    for name, end in (("input_ids", config.vocab_size), ("anchors", length)):
        ids = tensors[name]
        if ids.is_floating_point() or ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= end:
            raise BadInput(f"tensor {name!r} has to hold integers in 0..{end - 1}")
    for name in ("loss", "accuracy"):
        if tensors[name].numel() != 1:
            raise BadInput(f"tensor {name!r} is {list(tensors[name].shape)}, expected one number")


def compare(case: Case, attention: str = "auto", device: str = "cpu", gradients: bool = True) -> Iterator[Difference]:
    """Compute the case in float32 and yield the largest difference of each quantity; unused blocks are not compared."""
    t = {name: tensor.to(device) for name, tensor in case.tensors.items()}
    config = case.config
    flat = _flat(case, device)
    sums_of_gradients = torch.zeros_like(flat[1].values)
    flat[1].sum_gradients_into(sums_of_gradients)
    keep, b = t["keep"].bool(), config.block_size
    ids = block_inputs(t["input_ids"], t["anchors"], config.mask_token_id, b)
    embeds = F.embedding(ids.flatten(1), t["embed_tokens.weight"].float())
    what = Supervision.of(t["input_ids"], t["loss_mask"].bool(), t["anchors"], keep, b, case.loss)
    with torch.set_grad_enabled(gradients):
        hidden = flat[0](embeds, t["target_hidden"].float(), t["anchors"], keep, attention)
        supervised = hidden.flatten(0, 1)[what.rows]
        loss, sums = block_loss(supervised, t["lm_head.weight"].float(), what, case.loss, chunk=16)
    used = keep.repeat_interleave(b, 1)
    metrics = sums.metrics()
    yield _difference(case.name, "draft_hidden", hidden[used], t["draft_hidden"][used])
    yield _difference(case.name, "loss", torch.tensor(metrics["loss"]), t["loss"])
    yield _difference(case.name, "accuracy", torch.tensor(metrics["accuracy"]), t["accuracy"])
    if gradients:
        loss.backward()
        for name, slot in flat[1].layout.items():
            yield _difference(case.name, f"grad.{name}", slot.of(sums_of_gradients) / sums.weight, t[f"grad.{name}"])


def _flat(case: Case, device: str) -> tuple[DFlashModel, FlatParameters]:
    model = DFlashModel(case.config, device="meta")
    flat = flatten(model, device)
    for name, slot in flat.layout.items():
        slot.of(flat.values).copy_(case.tensors[f"weight.{name}"])
    return model, flat


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch reports a build without CUDA by an assertion
        raise BadInput(f"no device {device!r} ({str(error).splitlines()[0]})") from None


def _difference(case: str, quantity: str, ours: Tensor, reference: Tensor) -> Difference:
    ours, reference = ours.detach().double().cpu().flatten(), reference.double().cpu().flatten()
    largest = float((ours - reference).abs().max()) if len(reference) else 0.0
    return Difference(
        case, quantity, largest, TOLERANCE * max(1.0, float(reference.abs().max()) if len(reference) else 0.0)
    )


def parity(
    folder: Annotated[Path, typer.Argument(help="A folder with NAME.json and NAME.safetensors pairs.")],
    attention: Annotated[str, typer.Option(help="auto, flex, sdpa or eager.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda:0, ...")] = "cpu",
) -> None:
    """Losses and gradients against another implementation's.

    Hidden states and accuracy, too; the exit code is 1 if anything differs.
    """
    if attention not in get_args(Attention):
        raise BadInput(
            f"--attention {attention}: no such backend{nearest(attention, get_args(Attention))}", "command line"
        )
    _check_device(device)
    found = [difference for case in cases(folder) for difference in compare(case, attention, device)]
    table = Table(title=f"largest differences, {device}, float32 (accepted: {TOLERANCE:g} x max(1, largest reference))")
    table.add_column("case")
    table.add_column("quantity")
    table.add_column("difference", justify="right")
    table.add_column("accepted", justify="right")
    table.add_column("")
    for d in found:
        table.add_row(d.case, d.quantity, f"{d.value:.1e}", f"{d.accepted:.1e}", "ok" if d.good else "DIFFERS")
    console = output()
    console.print(table)
    bad = [d for d in found if not d.good]
    quantities, differ = counted(len(found), "quantity", "quantities"), counted(len(bad), "differs", "differ")
    console.print(f"{quantities} of {counted(len({d.case for d in found}), 'case')} compared, {differ}")
    if bad:
        raise typer.Exit(1)

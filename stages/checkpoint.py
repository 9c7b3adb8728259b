"""The stage that keeps the newest weights and exports them at the end, in the form that servers load."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from dflash_pipe import BadInput, Context, Footprint, Stage, refuse_other_form
from stages.arrow_rows import recipe_of
from stages.dflash_model import DrafterKeys
from stages.drafter_files import export, launch_lines, load_drafter, read_record, refuse_what_is_no_export
from stages.footprints import parameter_count
from stages.messages import Parameters
from stages.model_source import locate

__all__ = ["Export", "export", "launch_lines", "load_drafter"]

# What the data says about itself and a user of the drafter has to match.
_OF_THE_DATA = ("tokenizer", "revision", "vocabulary", "template", "thinking", "max_length", "responses")


class Export(Stage):
    """Export the drafter of the last optimizer step (form and checks: `stages.drafter_files`).

    A resumed run begins with the weights that were saved, so one that had ended exports the same again. Prints how to
    serve the result. Where an earlier part of the same run exported, config.json, model.safetensors and
    dflash_pipe.json are replaced, and whatever else lies in that folder is kept. A folder that this run did not export
    is in the way, and so is anything but a file under one of these names: the run is refused before it trains.

    drafter: the whole `with:` mapping of stage drafter. data: path of the training data, whose template and thinking
    flag are recorded (null: none are). folder: where to; a relative one lies in the run's folder.
    """

    untimed = ("data", "folder")
    drafter: dict[str, Any]
    data: str | None = None
    folder: str = "export"

    def check(self, replicas: int) -> None:
        if replicas != 1:
            raise BadInput(f"Export writes one folder, expected 1 replica, not {replicas}")
        DrafterKeys.pick(self.drafter).check()

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """On the host, in bfloat16, what is written and what is read again. What it keeps is the message that it has in
        hand, which counts among those on their way."""
        size = parameter_count(DrafterKeys.pick(self.drafter).sizes())
        return Footprint(host={"weights, as they are exported": 2 * 2 * size})

    def open(self, ctx: Context) -> None:
        keys = DrafterKeys.pick(self.drafter)
        self.to = ctx.folder / self.folder
        self.config = keys.resolve()
        self.target = locate(keys.target, keys.revision).place
        self.worthless = keys.weights == "random"
        recipe = recipe_of(self.data) if self.data else {}
        self.record: dict[str, Any] = {
            "target": keys.target,
            "revision": keys.revision,
            "drafter": self.drafter,
            "data": {key: recipe[key] for key in _OF_THE_DATA if key in recipe},
        }
        self._refuse_foreign(ctx.restored is not None)
        self.newest: Parameters | None = None
        if ctx.restored is not None and "masters" in ctx.restored:
            refuse_other_form({"step": 0}, ctx.restored, "state")
            self.newest = Parameters(torch.from_numpy(ctx.restored["masters"]), ctx.restored["step"])

    def _refuse_foreign(self, resumed: bool) -> None:
        """Raise BadInput, before anything is trained, where the export would replace what this run did not make."""
        refuse_what_is_no_export(self.to)
        try:
            self.to.parent.mkdir(parents=True, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(dir=self.to if self.to.exists() else self.to.parent))
        except OSError as error:
            raise BadInput(f"{self.to}: nothing can be exported there ({error.strerror})") from None
        there = read_record(self.to)
        there.pop("step", None)
        if self.to.exists() and not (resumed and there == self.record):
            raise BadInput(f"{self.to} is the export of another run: choose another folder")

    def process(self, params: Parameters) -> None:
        self.newest = params

    def finish(self) -> None:
        if self.newest is None:
            print("no optimizer step was made: nothing is exported")
            return
        export(self.config, {**self.record, "step": self.newest.step}, self.newest.flat, self.to)
        said = f"drafter of step {self.newest.step} exported to {self.to}"
        if self.worthless:
            print(f"{said}; it is WORTHLESS, because the target's weights are random")
            return
        print(f"{said}; serve it with")
        for line in launch_lines(self.to, self.target, self.config.block_size):
            print(f"  {line}")

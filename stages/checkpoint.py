"""The stage that keeps the newest weights and exports them at the end, in the form that servers load."""

from __future__ import annotations

from typing import Any

from dflash_pipe import BadInput, Context, Stage
from stages.arrow_rows import recipe_of
from stages.dflash_model import DrafterKeys
from stages.drafter_files import export, launch_lines, load_drafter
from stages.messages import Parameters
from stages.model_source import locate

__all__ = ["Export", "export", "launch_lines", "load_drafter"]

# What the data says about itself and a user of the drafter has to match.
_OF_THE_DATA = ("tokenizer", "revision", "vocabulary", "template", "thinking", "max_length", "responses")


class Export(Stage):
    """Export the drafter of the last optimizer step (form and checks: `stages.drafter_files`).

    Prints how to serve the result.

    drafter: the whole `with:` mapping of stage drafter. data: path of the training data, whose template and thinking
    flag are recorded (null: none are). folder: where to; a relative one lies in the run's folder.
    """

    drafter: dict[str, Any]
    data: str | None = None
    folder: str = "export"

    def check(self, replicas: int) -> None:
        if replicas != 1:
            raise BadInput(f"Export writes one folder, expected 1 replica, not {replicas}")
        DrafterKeys.pick(self.drafter).check()

    def open(self, ctx: Context) -> None:
        keys = DrafterKeys.pick(self.drafter)
        self.to = ctx.folder / self.folder
        self.config = keys.resolve()
        self.target = locate(keys.target, keys.revision).place
        recipe = recipe_of(self.data) if self.data else {}
        self.record: dict[str, Any] = {
            "target": keys.target,
            "revision": keys.revision,
            "drafter": self.drafter,
            "data": {key: recipe[key] for key in _OF_THE_DATA if key in recipe},
        }
        self.newest: Parameters | None = None

    def process(self, params: Parameters) -> None:
        self.newest = params

    def finish(self) -> None:
        if self.newest is None:
            print("no optimizer step was made: nothing is exported")
            return
        export(self.config, {**self.record, "step": self.newest.step}, self.newest.flat, self.to)
        print(f"drafter of step {self.newest.step} exported to {self.to}; serve it with")
        for line in launch_lines(self.to, self.target, self.config.block_size):
            print(f"  {line}")

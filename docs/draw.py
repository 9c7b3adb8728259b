"""Draws docs/live_view.svg: the live view of a run, as it was after three quarters of its windows.

python -m docs.draw                                     # the toy graph, seconds
python -m docs.draw graphs/overlapped.yaml key=value    # any other
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from dflash_pipe.cli import opened
from dflash_pipe.picture import live_view, scalars
from dflash_pipe.plan import plan
from dflash_pipe.runtime import Run
from dflash_pipe.stats import View

FOLDER = Path(__file__).parent
TOY = ["graphs/toy/parallel_target.yaml", "data.count=240"]


def views(arguments: list[str]) -> list[View]:
    """Run a graph and look at it whenever metrics are reported."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(plan(opened(arguments)), Path(folder))
        seen: list[View] = []
        run.on_report = lambda metrics: seen.append(run.view())
        run.execute()
    return seen


def picture(seen: list[View]) -> RenderableType:
    """The live view of the last of these moments, with the curves that lead to it."""
    curves: dict[str, list[float]] = {}
    for view in seen:
        for name, value in scalars(view):
            curves.setdefault(name, []).append(value)
    return live_view(seen[-1], {name: values[-48:] for name, values in curves.items()})


def svg(what: RenderableType, title: str, width: int = 96) -> str:
    """The renderable as a terminal window in SVG that loads nothing from elsewhere (its font is any monospace one)."""
    console = Console(record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    console.print(what)
    text = console.export_svg(title=title, theme=MONOKAI, unique_id="live-view")
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)


def main(arguments: list[str]) -> None:
    seen = views(arguments)
    title = f"dflash-pipe run {' '.join(a for a in arguments if '=' not in a)}"
    (FOLDER / "live_view.svg").write_text(svg(picture(seen[: len(seen) * 3 // 4]), title))


if __name__ == "__main__":
    main(sys.argv[1:] or TOY)

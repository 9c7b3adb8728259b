"""Draws docs/live_view.svg: the live view of a real run of a graph without torch.

python -m docs.draw
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

FOLDER = Path(__file__).parent


def svg(what: RenderableType, title: str, width: int = 96) -> str:
    """The renderable as a terminal window in SVG that loads nothing from elsewhere (its font is any monospace one)."""
    console = Console(record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    console.print(what)
    text = console.export_svg(title=title, theme=MONOKAI, unique_id="live-view")
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)

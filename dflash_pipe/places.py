"""Which place a complaint names: where the value that is wrong was written, in the file that was laid last.

Where several keys do not go together, the one that was laid last made it so: an overlay's rather than the base's, the
command line's rather than any file's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_pipe.located import Located, at, under

__all__ = ["COMMAND_LINE", "Places"]

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Places:
    """The places of a merged tree. files: in the order of overlaying, as the places name them."""

    tree: Located
    files: tuple[str, ...]

    def later(self, *places: str) -> str:
        """Of places the one that was laid last; of those in one file the first that is given."""
        return max(places, key=self._layer, default="")

    def of(self, *paths: Sequence[str | int], otherwise: str = "") -> str:
        """The place of the key, or entry of a list, that was laid last; of those in one file the first that is given:
        the likeliest. A section stands for its last null. otherwise: if none of them is written."""
        found = (at(self.tree, path) for path in paths)
        written = [w for (w, shown), path in zip(found, paths, strict=True) if shown == ".".join(map(str, path))]
        return self.later(*written) or otherwise

    def of_stage(self, stage: str, said: str) -> str:
        """Of a stage's own complaint: the place of a key that it names, in a list of the entry that it names first, or
        else of the key that was laid last."""
        plain = re.sub(r"'[^']*'|\S*/\S*", "", said)  # what is quoted, and paths, are values
        written, words = under(self.tree, "stages", stage, "with"), re.findall(r"\w+", plain)
        keys = [key for word in words for key in (word, f"{word}s") if key in written]
        named: list[tuple[str | int, ...]] = [("stages", stage, "with", k, *_entry(written[k], said)) for k in keys]
        if {"replica", "replicas"} & {*words}:
            named += [("workers", name, "replicas") for name in self._owners(stage)]
        every = [("stages", stage, "with", key) for key in written]
        return self.of(*named) or self.of(*every, ("stages", stage, "use"))

    def _owners(self, stage: str) -> list[str]:
        workers = under(self.tree, "workers")
        lists = {name: under(worker).get("stages", worker).value for name, worker in workers.items()}
        return [name for name, owned in lists.items() if isinstance(owned, list) and stage in [s.value for s in owned]]

    def _layer(self, where: str) -> int:
        """The number of the layer in which a place is; -1 for what nobody has written."""
        file = where.rpartition(":")[0]
        if where == COMMAND_LINE:
            return len(self.files)
        return self.files.index(file) if file in self.files else -1


def _entry(written: Located, said: str) -> tuple[int, ...]:
    """The number of that entry of a list which a complaint names first; of what is no list, or not named, nothing."""
    entries = [str(entry.value) for entry in written.value] if isinstance(written.value, list) else []
    named = {number: re.search(rf"(?<![\w.]){re.escape(text)}(?!\w|\.\S)", said) for number, text in enumerate(entries)}
    begins = {number: match.start() for number, match in named.items() if match and match[0]}
    return (min(begins, key=begins.__getitem__),) if begins else ()

"""What one Arrow row costs, read at random: time, and memory that stays resident. Each way in a process of its own.

A row is what training needs of it: its token ids and its loss mask. "Handed out" ends when the reader has given both in
its own form (a list, a view); "in a batch" when they lie in the padded arrays of a micro-batch, where all have to end.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import Out, described, keep
from benchmarks.terminal import output
from dflash_pipe import BadInput
from dflash_pipe.counted import counted
from stages.arrow_rows import ArrowRows
from stages.arrow_shards import SCHEMA

__all__ = ["WAYS", "Cost", "measure", "read_way", "rows", "write"]

MICROSECONDS, IN_MEMORY = 2.0, 1.1  # goals: for a row handed out, and of the file's size
ROWS, TOKENS = 100_000, 2000  # the size that the goals are stated for
_LISTS = 10_000  # rows that the lists are made of: Python objects take many times the file's size
_OURS = "this project's reader"
_BATCH, _PART = 8, 100  # rows of a micro-batch; rows timed at once

# What gives (ids, mask) of a row.
Reader = Callable[[int], tuple[Any, Any]]


@dataclass(frozen=True)
class Cost:
    """way: how rows were read. rows: of the file that were read from. resident: memory that reading added / bytes of
    those rows in the file, None where the system does not tell."""

    way: str
    rows: int
    handed_out: float
    in_batch: float
    opened: float
    resident: float | None


def write(file: Path, rows: int, tokens: int) -> None:
    """A file of `rows` rows of `tokens` random tokens, as Arrow stream: all ways can read that."""
    draw = np.random.default_rng(0)
    with pa.ipc.new_stream(str(file), SCHEMA) as out:
        for first in range(0, rows, 500):
            count = min(500, rows - first)
            starts = pa.array(np.arange(count + 1) * tokens)
            ids = draw.integers(0, 248_320, count * tokens, dtype=np.int32)
            mask = np.ones(count * tokens, dtype=np.uint8)
            lists = [pa.LargeListArray.from_arrays(starts, pa.array(values)) for values in (ids, mask)]
            names = pa.array([str(first + row) for row in range(count)])
            out.write_batch(pa.record_batch([*lists, names], schema=SCHEMA))


# --- the ways


def _table(file: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()


def _row_by_row(file: Path, rows: int) -> Reader:
    table = _table(file)
    ids, mask = table["input_ids"], table["loss_mask"]
    return lambda row: (ids[row].as_py(), mask[row].as_py())


def _lists(file: Path, rows: int) -> Reader:
    table = _table(file).slice(0, rows)
    ids, mask = table["input_ids"].to_pylist(), table["loss_mask"].to_pylist()
    return lambda row: (ids[row], mask[row])


def _datasets(file: Path, rows: int) -> Reader:
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]

    data = Dataset.from_file(str(file))

    def read(row: int) -> tuple[Any, Any]:
        found = data[row]
        return found["input_ids"], found["loss_mask"]

    return read


def _ours(file: Path, rows: int) -> Reader:
    data = ArrowRows(file)
    return lambda row: (data.ids(row), data.mask(row))


WAYS: dict[str, Callable[[Path, int], Reader]] = {
    "pyarrow, row by row": _row_by_row,
    "lists made at the start": _lists,
    "Hugging Face datasets": _datasets,
    _OURS: _ours,
}


# --- measuring


def read_way(way: str, file: Path, rows: int, reads: int) -> Cost:
    """Read rows at random in this process. Memory is measured after every row was in a batch once."""
    kept = min(rows, _LISTS) if WAYS[way] is _lists else rows
    before = _resident()
    began = time.perf_counter()
    read = WAYS[way](file, kept)
    opened = time.perf_counter() - began
    order = np.random.default_rng(1).permutation(kept).tolist()
    some = (order * (-(-reads // kept)))[:reads]
    handed_out = _hand_out(read, some)
    in_batch = _fill(read, some)
    if WAYS[way] is _ours:  # the others' memory does not grow with what was read, or is a multiple of it already
        _fill(read, order)
    after = _resident()
    size = file.stat().st_size * kept / rows
    resident = None if before is None or after is None else (after - before) / size
    return Cost(way, kept, handed_out * 1e6, in_batch * 1e6, opened, resident)


def _hand_out(read: Reader, order: list[int]) -> float:
    """Seconds a row: the median over parts of the order, so that a moment in which others ran says nothing."""
    times = []
    for first in range(0, len(order), _PART):
        part = order[first : first + _PART]
        began = time.perf_counter()
        for row in part:
            read(row)
        times.append((time.perf_counter() - began) / len(part))
    return statistics.median(times)


def _fill(read: Reader, order: list[int]) -> float:
    """Seconds a row until it lies in the padded arrays of a micro-batch; median over parts of the order."""
    width = len(read(order[0])[0])
    ids, mask = np.zeros((_BATCH, width), dtype=np.int64), np.zeros((_BATCH, width), dtype=bool)
    times = []
    for first in range(0, len(order), _PART):
        part = order[first : first + _PART]
        began = time.perf_counter()
        for number, row in enumerate(part):
            own_ids, own_mask = read(row)
            ids[number % _BATCH, : len(own_ids)] = own_ids
            mask[number % _BATCH, : len(own_mask)] = own_mask
        times.append((time.perf_counter() - began) / len(part))
    return statistics.median(times)


def _resident() -> int | None:
    """Bytes of memory that the process holds now, pages of mapped files among them."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def measure(way: str, file: Path, rows: int, reads: int) -> Cost:
    """Read rows one way in a process of its own. Raises subprocess.CalledProcessError if it fails."""
    read = f"read_way({way!r}, Path({str(file.absolute())!r}), {rows}, {reads})"
    call = (
        f"import json; from pathlib import Path; from benchmarks.rows import read_way; print(json.dumps(vars({read})))"
    )
    root = Path(__file__).parents[1]  # where `benchmarks` can be imported from, wherever we were started
    # A session of its own: Ctrl-C is for this process, which ends the other one without a word from it.
    ended = subprocess.run(
        [sys.executable, "-c", call], cwd=root, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True
    )
    return Cost(**json.loads(ended.stdout))


def rows(
    count: Annotated[int, typer.Option("--rows", help="rows in the file", min=100)] = ROWS,
    tokens: Annotated[int, typer.Option(help="tokens in a row", min=1)] = TOKENS,
    reads: Annotated[int, typer.Option(help="rows read for the times", min=100)] = 5000,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if a goal is missed")] = False,
    out: Out = None,
) -> None:
    """Ways to read one Arrow row at random: time and memory."""
    stated = (count, tokens) == (ROWS, TOKENS)
    if check and not stated:
        raise BadInput(f"--check: the goal is stated for {ROWS:,} rows of {TOKENS:,} tokens", "command line")
    console = output()
    installed = [way for way in WAYS if WAYS[way] is not _datasets or importlib.util.find_spec("datasets")]
    with tempfile.TemporaryDirectory() as folder, console.status("writing the file") as status:
        file = Path(folder) / "rows.arrow"
        write(file, count, tokens)
        size = file.stat().st_size
        costs = []
        for way in installed:
            status.update(way)
            costs.append(measure(way, file, count, reads))
    ours = next(cost for cost in costs if cost.way == _OURS)
    good = ours.handed_out <= MICROSECONDS and (ours.resident is None or ours.resident <= IN_MEMORY)
    _print(console, costs, f"{counted(count, 'row')} of {counted(tokens, 'token')}, {size / 1e6:,.0f} MB")
    for way in WAYS:
        if way not in installed:
            console.print(f"not run: {way} (not installed: pip install datasets)", highlight=False)
    goal = f"goal of {_OURS}: ≤ {MICROSECONDS:g} µs a row and ≤ {IN_MEMORY:g} times the file in memory"
    verdict = ("met" if good else "missed") if stated else f"stated for {ROWS:,} rows of {TOKENS:,} tokens"
    console.print(f"{goal}: {verdict}", highlight=False)
    if out:
        figures = {"rows": count, "tokens": tokens, "reads": reads, "bytes": size, "ways": [vars(c) for c in costs]}
        console.print(f"results: {keep(out, 'rows', figures)}", highlight=False)
    if check and not good:
        raise typer.Exit(1)


def _print(console: Console, costs: list[Cost], about: str) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("way", "µs a row, handed out", "µs a row, in a batch", "s to open", "resident / file"):
        table.add_column(head, justify="left" if head == "way" else "right")
    table.add_column("")
    for cost in costs:
        resident = "not known" if cost.resident is None else f"{cost.resident:.2f}"
        times = (f"{cost.handed_out:.2f}", f"{cost.in_batch:.2f}", f"{cost.opened:.2f}")
        table.add_row(cost.way, *times, resident, f"of {counted(cost.rows, 'row')}")
    console.print(described(), about, sep="\n", highlight=False)
    console.print(table)

"""Writing Arrow files: shards while a run goes on, and one whole file of them at its end (see `stages.arrow_rows`)."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages.arrow_rows import RECIPE

__all__ = ["SCHEMA", "assemble", "copy_rows", "shard_totals", "write_shard"]

SCHEMA = pa.schema(
    [("input_ids", pa.large_list(pa.int32())), ("loss_mask", pa.large_list(pa.uint8())), ("id", pa.string())]
)
_BATCH_TOKENS = 1 << 20  # tokens in a record batch of the finished file


def write_shard(file: Path, rows: list[tuple[np.ndarray, np.ndarray, str]]) -> dict[str, int]:
    """Write (ids [S], mask [S], name) rows as one record batch; returns {rows, tokens, supervised} of it.

    The file appears whole or not at all.
    """
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids, _, _ in rows], out=offsets[1:])
    tokens = np.concatenate([ids for ids, _, _ in rows]).astype(np.int32, copy=False)
    mask = np.concatenate([mask for _, mask, _ in rows]).astype(np.uint8, copy=False)
    lists = [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (tokens, mask)]
    names = pa.array([name for _, _, name in rows], pa.string())
    with _whole(file, SCHEMA) as out:
        out.write_batch(pa.record_batch([*lists, names], schema=SCHEMA))
    return {"rows": len(rows), "tokens": len(tokens), "supervised": int(np.count_nonzero(mask))}


def assemble(shards: list[Path], file: Path, recipe: dict[str, Any]) -> None:
    """Put the shards together as `file`, which appears whole or not at all. recipe: what `recipe_of` will say."""
    schema = SCHEMA.with_metadata({RECIPE: json.dumps(recipe)})
    with _whole(file, schema) as out:
        for table in _tables(shards):
            out.write_table(table.combine_chunks().replace_schema_metadata(schema.metadata))


def copy_rows(file: Path, start: int, stop: int, shard: Path) -> None:
    """Write rows start..stop of an assembled file as a shard again. Raises IndexError where it has fewer rows."""
    with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_file(source).read_all()
        if table.num_rows < stop:
            raise IndexError(f"{file} ends at row {table.num_rows}, not {stop}")
        with _whole(shard, SCHEMA) as out:
            out.write_table(table.slice(start, stop - start).replace_schema_metadata(None))


@contextlib.contextmanager
def _whole(file: Path, schema: pa.Schema) -> Iterator[Any]:
    """A writer of `file`, which gets its name once it is whole and on the disk."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    with pa.ipc.new_file(str(unfinished), schema) as out:
        yield out
    with open(unfinished, "rb") as written:
        os.fsync(written.fileno())
    os.replace(unfinished, file)


def _tables(files: list[Path]) -> Iterator[pa.Table]:
    """The shards' rows in order, in tables of about `_BATCH_TOKENS`."""
    held: list[pa.RecordBatch] = []
    tokens = 0
    for file in files:
        with pa.memory_map(str(file)) as source:
            for batch in pa.ipc.open_file(source).read_all().to_batches(max_chunksize=1024):
                held.append(batch)
                tokens += len(batch.column("input_ids").flatten())
                if tokens >= _BATCH_TOKENS:
                    yield pa.Table.from_batches(held)
                    held, tokens = [], 0
    if held:
        yield pa.Table.from_batches(held)


def shard_totals(shards: list[dict[str, Any]], split: str | None = None) -> dict[str, int]:
    """Rows, tokens and supervised tokens of the shards of a split (None: of all)."""
    chosen = [shard for shard in shards if split in (None, shard["split"])]
    return {key: sum(shard[key] for shard in chosen) for key in ("rows", "tokens", "supervised")}

"""Tokenised rows in Arrow IPC files: read through a memory map as numpy views, and what such a file says about itself.

A data set is one file or a folder of `*.arrow` shards (in the order of their names), in the file or the stream format.
Columns: `input_ids`, a list of integers, and `loss_mask`, a list of the same length of bool or integers (non-zero: the
token is supervised). Other columns are ignored. What a row costs is one slice of a list column's values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dflash_pipe import BadInput
from dflash_pipe.errors import Missing, nearest, nearest_file

__all__ = ["RECIPE", "ArrowRows", "data_files", "recipe_of"]

RECIPE = b"dflash_pipe"  # schema metadata key: JSON that says how the rows were made
_SCAN_TOKENS = 1 << 22  # tokens looked at in one go; bounds the memory of a scan


class _Values(Protocol):
    def __getitem__(self, part: slice) -> np.ndarray: ...


class _Bits:
    """Arrow booleans, eight to a byte, sliced as bytes 0 and 1."""

    def __init__(self, array: pa.BooleanArray) -> None:
        self._bytes = np.frombuffer(array.buffers()[1], dtype=np.uint8)
        self._offset = array.offset

    def __getitem__(self, part: slice) -> np.ndarray:
        first, last = self._offset + part.start, self._offset + part.stop
        bits: np.ndarray = np.unpackbits(self._bytes[first >> 3 : (last + 7) >> 3], bitorder="little")
        return bits[first & 7 : (first & 7) + last - first]


class ArrowRows:
    """All rows of a data set, in order. `lengths`: [R] int64 tokens in each row. `files`: where they come from.

    `ids(row)` and `mask(row)` are views of the mapped file (a boolean mask is unpacked: a small copy); files that were
    written compressed are unpacked into memory instead. Raises `BadInput` for a missing or empty data set, a column
    that is missing or of another type, and a row with nulls or with a mask of another length.
    """

    def __init__(self, path: str | Path) -> None:
        self.files = data_files(Path(path))
        self._ids: list[_Values] = []
        self._masks: list[_Values] = []
        chunks: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        rows = 0
        for file in self.files:
            for batch in filter(len, _batches(file)):
                ids, id_lengths = _column(batch, "input_ids", file, rows)
                mask, mask_lengths = _column(batch, "loss_mask", file, rows)
                _same_lengths(id_lengths, mask_lengths, file, rows)
                chunks.append(np.full(len(id_lengths), len(self._ids), dtype=np.int32))
                starts.append(np.cumsum(id_lengths) - id_lengths)
                lengths.append(id_lengths)
                self._ids.append(ids)
                self._masks.append(mask)
                rows += len(id_lengths)
        if rows == 0:
            raise BadInput(f"{path}: the data set has no rows")
        self._chunk, self._start, self.lengths = map(np.concatenate, (chunks, starts, lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, row: int, limit: int | None = None) -> np.ndarray:
        """[min(length, limit)] token ids of a row, in the file's integer type; not to be written to."""
        return self._slice(self._ids, row, limit)

    def mask(self, row: int, limit: int | None = None) -> np.ndarray:
        """[min(length, limit)] loss mask of a row, in the file's type, 0 = not supervised; not to be written to."""
        return self._slice(self._masks, row, limit)

    def _slice(self, values: list[_Values], row: int, limit: int | None) -> np.ndarray:
        start, length = self._start[row], self.lengths[row]
        view: np.ndarray = values[self._chunk[row]][start : start + (length if limit is None else min(length, limit))]
        return view

    def id_range(self, most: int, limit: int) -> tuple[int, int]:
        """The lowest and the highest of the first `limit` token ids of at most `most` rows, spread over all; (0, 0) if
        they are empty."""
        rows = np.unique(np.linspace(0, len(self) - 1, min(most, len(self)), dtype=int))
        seen = [ids for row in rows if len(ids := self.ids(row, limit))]
        return min((int(ids.min()) for ids in seen), default=0), max((int(ids.max()) for ids in seen), default=0)

    def usable(self, limit: int) -> np.ndarray:
        """[R] bool: rows with two adjacent supervised tokens among their first `limit`. Reads every mask once."""
        usable = np.zeros(len(self), dtype=bool)
        for chunk, values in enumerate(self._masks):
            first = int(np.searchsorted(self._chunk, chunk))
            last = int(np.searchsorted(self._chunk, chunk, side="right"))
            while first < last:
                start = int(self._start[first])
                stop = int(np.searchsorted(self._start[first:last], start + _SCAN_TOKENS)) + first
                stop = max(stop, first + 1)
                length = self.lengths[first:stop]
                mask = values[slice(start, start + int(length.sum()))] != 0
                usable[first:stop] = _has_pair(mask, length, limit)
                first = stop
        return usable


def _has_pair(mask: np.ndarray, lengths: np.ndarray, limit: int) -> np.ndarray:
    """Whether each of the rows laid end to end in `mask` has two adjacent set places among its first `limit`."""
    found = np.zeros(len(lengths), dtype=bool)
    starts = np.cumsum(lengths) - lengths
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return found
    pair = np.zeros(len(mask), dtype=bool)
    np.logical_and(mask[:-1], mask[1:], out=pair[:-1])
    pair[(starts + lengths - 1)[filled]] = False  # a row's last token has no neighbour in its row
    for row in np.flatnonzero(lengths > limit):
        pair[starts[row] + max(limit - 1, 0) : starts[row] + lengths[row]] = False
    found[filled] = np.logical_or.reduceat(pair, starts[filled])
    return found


def data_files(path: Path) -> list[Path]:
    """The Arrow files that `path` names: itself, or the `*.arrow` files in it. Raises `BadInput` if there are none."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise Missing(f"no data set at {path}{nearest_file(path)}")
    files = sorted(path.glob("*.arrow"))
    if not files:
        raise BadInput(f"{path}: a folder without *.arrow files")
    if {"train.arrow", "eval.arrow"} <= {file.name for file in files}:
        raise BadInput(f"{path} holds train.arrow and eval.arrow: name one of the two files, not their folder")
    return files


def recipe_of(path: str | Path) -> dict[str, Any]:
    """What the data set says about how it was made (tokenizer, template, thinking, ...); {} if it says nothing.

    Raises `BadInput` where shards of one folder say different things.
    """
    found: dict[str, Any] | None = None
    for file in data_files(Path(path)):
        with pa.memory_map(str(file)) as source:
            text = (_open(file, source).schema.metadata or {}).get(RECIPE, b"{}")
        recipe = json.loads(text)
        if found is not None and recipe.get("key") != found.get("key"):
            raise BadInput(f"{file} was made in another way than {data_files(Path(path))[0].name} beside it")
        found = found or recipe
    return found or {}


def _open(file: Path, source: pa.MemoryMappedFile) -> Any:
    """A reader of either IPC format: both have `schema`."""
    try:
        if file.stat().st_size and source.read(6) == b"ARROW1":
            source.seek(0)
            return pa.ipc.open_file(source)
        source.seek(0)
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid as error:
        raise BadInput(f"{file}: not an Arrow IPC file ({str(error).splitlines()[0]})") from None


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    if file.stat().st_size == 0:
        raise BadInput(f"{file}: an empty file, not an Arrow IPC file")
    source = pa.memory_map(str(file))
    reader = _open(file, source)
    try:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
        else:
            yield from reader
        schema = reader.schema
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{file}: cut off or damaged ({str(error).splitlines()[0]})") from None
    for name in ("input_ids", "loss_mask"):  # also where there is no batch to look at
        _require(schema, name, file)


def _require(schema: pa.Schema, name: str, file: Path) -> None:
    if name not in schema.names:
        raise BadInput(f"{file}: no column {name!r}{nearest(name, schema.names)}")
    kind = schema.field(name).type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not listed or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise BadInput(f"{file}: column {name!r} is {kind}, expected a list of integers")


def _column(batch: pa.RecordBatch, name: str, file: Path, first_row: int) -> tuple[_Values, np.ndarray]:
    """The values of a list column, beginning with its first row's, and the length of each row."""
    _require(batch.schema, name, file)
    column = batch.column(name)
    if column.null_count:
        row = first_row + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise BadInput(f"column {name!r} is null", f"{file}: row {row}")
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values[int(offsets[0]) : int(offsets[-1])]
    if values.null_count:
        place = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))) + offsets[0]
        row = first_row + int(np.searchsorted(offsets, place, side="right")) - 1
        raise BadInput(f"column {name!r} holds a null", f"{file}: row {row}")
    array: _Values = _Bits(values) if pa.types.is_boolean(values.type) else values.to_numpy()
    return array, np.diff(offsets)


def _same_lengths(ids: np.ndarray, mask: np.ndarray, file: Path, first_row: int) -> None:
    different = np.flatnonzero(ids != mask)
    if len(different):
        row = int(different[0])
        raise BadInput(f"{ids[row]} input_ids, but {mask[row]} loss_mask", f"{file}: row {first_row + row}")

"""The data stage: every usable row once an epoch, budgets kept, and a cursor that goes on exactly where it stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_pipe import BadInput, Context
from stages.arrow_rows import RECIPE, ArrowRows, recipe_of
from stages.data import TokenBatches
from stages.messages import TokenBatch

Row = tuple[Sequence[int], Sequence[int]]


def write(
    path: Path,
    rows: Sequence[Row],
    *,
    ids: pa.DataType | None = None,
    mask: pa.DataType | None = None,
    batch: int = 3,
    stream: bool = False,
    metadata: dict[bytes, bytes] | None = None,
) -> Path:
    """Rows as an Arrow file of several record batches."""
    fields = [("input_ids", ids or pa.large_list(pa.int32())), ("loss_mask", mask or pa.large_list(pa.uint8()))]
    schema = pa.schema(fields, metadata=metadata)
    to_bool = pa.types.is_boolean(schema.field("loss_mask").type.value_type)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), schema) as out:
        for first in range(0, len(rows), batch):
            part = rows[first : first + batch]
            masks = [[bool(m) for m in mask] if to_bool else list(mask) for _, mask in part]
            columns = [pa.array([list(i) for i, _ in part], fields[0][1]), pa.array(masks, fields[1][1])]
            out.write_batch(pa.record_batch(columns, schema=schema))
    return path


def row(length: int, first: int = 0, supervised: int | None = None) -> Row:
    """`length` tokens counted up from `first`; the last `supervised` (default: all) are trained."""
    supervised = length if supervised is None else supervised
    return range(first, first + length), [0] * (length - supervised) + [1] * supervised


def source(path: Path, seed: int = 7, reports: list[dict[str, Any]] | None = None, **fields: Any) -> TokenBatches:
    stage = TokenBatches(**{"path": str(path), "max_tokens": 64, "max_length": 32, **fields})
    stage.open(Context(seed=seed, report=(lambda m: None) if reports is None else reports.append))
    return stage


def digest(batch: TokenBatch) -> tuple[Any, ...]:
    tensors = (batch.input_ids, batch.loss_mask, batch.lengths, batch.sample)
    return (*(tuple(t.flatten().tolist()) for t in tensors), batch.epoch, batch.progress)


row_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=40)
laws = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@laws
@given(
    lengths=row_lengths,
    supervised=st.integers(0, 5),
    max_tokens=st.integers(8, 100),
    max_rows=st.none() | st.integers(1, 4),
    sort_pool=st.integers(1, 50),
    multiple=st.sampled_from([1, 4, 8]),
    epochs=st.integers(1, 3),
    cut=st.integers(0, 200),
)
def test_laws(tmp_path: Path, lengths: list[int], supervised: int, cut: int, **fields: Any) -> None:
    """Each usable row once an epoch, whole, within the budget; everything read is batched or dropped; any cursor
    gives the identical remainder."""
    rows = [row(n, 100 * k, min(n, supervised + k % 2)) for k, n in enumerate(lengths)]
    path = write(tmp_path / "rows.arrow", rows)
    limit = min(32, fields["max_tokens"] // fields["multiple"] * fields["multiple"])
    fields["pad_to_multiple"] = fields.pop("multiple")
    heads = [mask[:limit] for _, mask in rows]
    usable = {k for k, head in enumerate(heads) if any(a and b for a, b in pairwise(head))}
    if not usable:
        with pytest.raises(BadInput, match="two adjacent supervised"):
            source(path, **fields)
        return
    stage = source(path, **fields)
    everything = list(stage.read(None))
    for epoch in range(fields["epochs"]):
        seen = Counter(k for _, b in everything if b and b.epoch == epoch for k in b.sample.tolist())
        assert seen == Counter(usable)
    for cursor, batch in everything:
        assert batch is not None
        size, padded = batch.input_ids.shape
        assert size * padded <= fields["max_tokens"] and size <= (fields["max_rows"] or size)
        assert padded % fields["pad_to_multiple"] == 0 and padded - int(batch.lengths.max()) < fields["pad_to_multiple"]
        counts = cursor["rows"]
        assert counts["read"] == counts["batched"] + sum(counts["dropped"].values())
        for k, ids, mask, n in zip(batch.sample, batch.input_ids, batch.loss_mask, batch.lengths, strict=True):
            assert ids[:n].tolist() == list(rows[k][0])[:limit] and not ids[n:].any()
            assert mask[:n].tolist() == [bool(m) for m in heads[k]] and not mask[n:].any()
    last = everything[-1][0]["rows"]
    assert last["read"] == len(rows) * fields["epochs"]
    assert last["truncated"] == sum(lengths[k] > limit for k in usable) * fields["epochs"]
    progress = [b.progress for _, b in everything if b]
    assert progress[0][0] == 0 and progress[-1][1] == 1
    assert all(a[1] == b[0] for a, b in pairwise(progress))
    cut %= len(everything)
    cursor = json.loads(json.dumps(everything[cut][0]))
    rest = list(source(path, **fields).read(cursor))
    assert [(c, digest(b)) for c, b in rest if b] == [(c, digest(b)) for c, b in everything[cut + 1 :] if b]


@laws
@given(
    lengths=row_lengths,
    max_tokens=st.integers(8, 100),
    max_rows=st.none() | st.integers(1, 4),
    buckets=st.lists(st.integers(2, 50), min_size=1, max_size=4, unique=True).map(sorted),
    cut=st.integers(0, 200),
)
def test_laws_of_buckets(tmp_path: Path, lengths: list[int], cut: int, **fields: Any) -> None:
    """Each row once an epoch, padded to the least bucket that holds it; all micro-batches of a bucket have its number
    of rows, but for at most one an epoch, of the same size in every epoch; any cursor gives the identical remainder."""
    path = write(tmp_path / "rows.arrow", [row(n + 2) for n in lengths])
    stage = source(path, epochs=2, **fields)
    limit = min(32, fields["max_tokens"])
    buckets = [*(n for n in fields["buckets"] if n < limit), limit]
    full = {n: min(fields["max_tokens"] // n, fields["max_rows"] or 100) for n in buckets}
    everything = list(stage.read(None))
    batches = [b for _, b in everything if b]
    seen = Counter((b.epoch, k) for b in batches for k in b.sample.tolist())
    assert seen == Counter((epoch, k) for epoch in (0, 1) for k in range(len(lengths)))
    for b in batches:
        assert all(b.input_ids.shape[1] == min(n for n in buckets if n >= length) for length in b.lengths.tolist())
    shapes = [Counter(tuple(b.input_ids.shape) for b in batches if b.epoch == epoch) for epoch in (0, 1)]
    assert shapes[0] == shapes[1]
    short = {shape: count for shape, count in shapes[0].items() if shape[0] < full[shape[1]]}
    assert all(rows <= full[length] for rows, length in shapes[0]) and set(short.values()) <= {1}
    assert len({length for _, length in short}) == len(short)
    assert everything[-1][0]["short"] == 2 * len(short)
    assert f"; shapes: {len(shapes[0])}, {2 * len(short)} of {len(batches)} " in stage.account(*[everything[-1][0]] * 2)
    cut %= len(everything)
    rest = list(source(path, epochs=2, **fields).read(json.loads(json.dumps(everything[cut][0]))))
    assert [(c, digest(b)) for c, b in rest if b] == [(c, digest(b)) for c, b in everything[cut + 1 :] if b]


def order(stage: TokenBatches, epoch: int = 0) -> list[list[int]]:
    return [b.sample.tolist() for _, b in stage.read(None) if b and b.epoch == epoch]


def test_order_is_keyed_by_seed_and_epoch(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", [row(4 + k % 9) for k in range(200)])
    assert order(source(path, epochs=2)) == order(source(path, epochs=2))
    assert order(source(path)) != order(source(path, seed=8))
    assert order(source(path, epochs=2)) != order(source(path, epochs=2), epoch=1)


def test_order_is_frozen(tmp_path: Path) -> None:
    """The order a seed means must not change with a library: runs are resumed and compared across versions."""
    frozen = [[10, 9], [8, 6], [5, 0], [11, 7], [3, 2], [4, 1]]
    path = write(tmp_path / "rows.arrow", [row(4 + k) for k in range(12)])
    assert order(source(path, sort_pool=4, max_tokens=32)) == frozen


def test_length_pools_save_padding(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", [row(2 + (k * 7) % 30) for k in range(300)])

    reports: list[dict[str, Any]] = []
    stage = source(path, reports=reports, sort_pool=100)
    lengths = stage.lengths[np.concatenate(order(stage))].reshape(-1, 4)
    shuffled = np.random.default_rng(0).permutation(lengths.ravel()).reshape(-1, 4)
    assert reports[-1]["padding_share"] < 0.1 < 1 - (shuffled / shuffled.max(1, keepdims=True)).mean()


def test_steps_end_the_epochs(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", [row(16) for _ in range(8)])  # 2 batches an epoch
    batches = [b for _, b in source(path, epochs=None, steps=3, window=2).read(None) if b]
    assert [b.epoch for b in batches] == [0, 0, 1, 1, 2, 2]
    assert batches[-1].progress[1] == 1
    assert len(list(source(path, epochs=2, steps=3, window=2).read(None))) == 4


def test_report_counts_dropped_by_reason(tmp_path: Path) -> None:
    rows = [row(8), row(0), row(8, supervised=1), ([1, 2, 3, 4], [1, 0, 1, 0]), row(40, supervised=3)]
    reports: list[dict[str, Any]] = []
    list(source(write(tmp_path / "rows.arrow", rows), reports=reports, epochs=2).read(None))
    assert [r["epoch"] for r in reports] == [1, 2]
    last = reports[-1]
    assert last["rows_read"] == 10 and last["rows_batched"] == 2 and last["rows_dropped"] == 8
    assert last["rows_dropped.empty"] == 2
    assert last["rows_dropped.no_two_adjacent_supervised_tokens"] == 6  # the 40-token row is trained beyond max_length


def test_pairs_lie_inside_a_row(tmp_path: Path) -> None:
    rows = [([1, 2], [0, 1]), ([3, 4], [1, 0]), ([5], [1]), ([], []), ([6, 7], [1, 1])]
    assert ArrowRows(write(tmp_path / "rows.arrow", rows, batch=9)).usable(8).tolist() == [False] * 4 + [True]


def test_a_batch_owns_its_memory(tmp_path: Path) -> None:
    stage = source(write(tmp_path / "rows.arrow", [row(16, k) for k in range(8)]))
    batch = next(b for _, b in stage.read(None) if b)
    for tensor in (batch.input_ids, batch.loss_mask, batch.lengths, batch.sample):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.zero_()
    assert stage.rows.ids(3).tolist() == list(range(3, 19))


@pytest.mark.parametrize("ids", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16())])
@pytest.mark.parametrize("mask", [pa.list_(pa.bool_()), pa.large_list(pa.uint8()), pa.list_(pa.int64())])
@pytest.mark.parametrize("stream", [False, True])
def test_accepted_files(tmp_path: Path, ids: pa.DataType, mask: pa.DataType, stream: bool) -> None:
    rows = [row(5 + k, 10 * k, supervised=k) for k in range(11)]
    arrow = ArrowRows(write(tmp_path / "rows.arrow", rows, ids=ids, mask=mask, stream=stream))
    for k in reversed(range(11)):
        assert arrow.ids(k).tolist() == list(rows[k][0])
        assert arrow.mask(k).astype(bool).tolist() == [bool(m) for m in rows[k][1]]
    assert arrow.usable(32).tolist() == [k > 1 for k in range(11)]


def test_rows_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    before = pa.total_allocated_bytes()
    arrow = ArrowRows(write(tmp_path / "rows.arrow", [row(1000) for _ in range(100)]))
    assert not arrow.ids(3).flags.owndata and np.shares_memory(arrow.ids(3), arrow.ids(3, 10))
    assert pa.total_allocated_bytes() - before < 100 * 1000


def test_shards_in_name_order(tmp_path: Path) -> None:
    for shard in (1, 0, 2):
        write(tmp_path / f"part-{shard}.arrow", [row(4, 100 * shard + 10 * k) for k in range(4)])
    arrow = ArrowRows(tmp_path)
    assert [arrow.ids(k)[0] for k in range(12)] == [100 * s + 10 * k for s in range(3) for k in range(4)]


def test_recipe(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", [row(4)], metadata={RECIPE: b'{"key": "x", "thinking": true}'})
    assert recipe_of(path)["thinking"] is True
    write(tmp_path / "b.arrow", [row(4)], metadata={RECIPE: b'{"key": "y"}'})
    with pytest.raises(BadInput, match=r"b\.arrow was made in another way than a\.arrow"):
        recipe_of(tmp_path)


def refused(path: Path, **fields: Any) -> str:
    with pytest.raises(BadInput) as caught:
        source(path, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_data(tmp_path: Path) -> None:
    write(tmp_path / "train.arrow", [row(4)])
    assert "did you mean 'train.arrow'?" in refused(tmp_path / "trian.arrow")
    (tmp_path / "empty").mkdir()
    assert "without *.arrow" in refused(tmp_path / "empty")
    write(tmp_path / "eval.arrow", [row(4)])
    assert "name one of the two" in refused(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    path.write_bytes(b"")
    assert "empty file" in refused(path)
    path.write_text('{"input_ids": [1, 2]}\n')
    assert "not an Arrow IPC file" in refused(path)
    whole = write(path, [row(4) for _ in range(100)]).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "rows.arrow" in refused(path)
    write(path, [])
    assert "no rows" in refused(path)


def test_wrong_schema(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_file(str(path), pa.schema([("input_id", pa.list_(pa.int32()))])):
        pass
    assert "no column 'input_ids' (did you mean 'input_id'?)" in refused(path)
    write(path, [row(4)], ids=pa.list_(pa.float32()))
    assert "column 'input_ids' is list<item: float>, expected a list of integers" in refused(path)


def test_bad_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    good = [row(4)] * 4
    write(path, [*good, ([1, 2, 3], [1, 1])])
    assert refused(path).endswith("row 4: 3 input_ids, but 2 loss_mask")
    kind = pa.list_(pa.int32())
    for bad, said in (
        ([None, [1]], "row 0: column 'input_ids' is null"),
        ([[1], [2, None]], "row 1: column 'input_ids'"),
    ):
        table = pa.table({"input_ids": pa.array(bad, kind), "loss_mask": pa.array([[1], [1, 1]], kind)})
        with pa.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table)
        assert said in refused(path)
    write(path, [row(4, supervised=0)] * 3)
    assert "none of its rows (3)" in refused(path)


def test_bad_parameters(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", [row(8) for _ in range(8)])
    assert "max_rows is 0" in refused(path, max_rows=0)
    assert "both null" in refused(path, epochs=None)
    assert "pad_to_multiple is 128" in refused(path, pad_to_multiple=128)
    assert "at least 2" in refused(path, max_length=1)
    for buckets in ([], [0, 8], [16, 8], [8, 8]):
        assert f"buckets are {buckets}, expected increasing lengths" in refused(path, buckets=buckets)
    assert "expected one of the two" in refused(path, buckets=[8], pad_to_multiple=8)


@pytest.mark.usefixtures("model_cache")
@pytest.mark.parametrize(
    ("made_for", "highest", "refused"),
    [
        ("other/model", 512, True),
        ("other/model", 511, False),  # another name of the same, perhaps
        ("tiny:qwen3", 512, False),  # its own are not looked through
        (None, 512, False),  # nor are rows that do not say
    ],
)
def test_rows_of_another_tokenizer_are_refused_before_anything_runs(
    tmp_path: Path, made_for: str | None, highest: int, refused: bool
) -> None:
    recipe = {RECIPE: json.dumps({"tokenizer": made_for} if made_for else {}).encode()}
    path = write(tmp_path / "rows.arrow", [row(0), row(9, 20), row(4, highest - 3), row(5)], metadata=recipe, batch=2)
    stage = source(path, target="tiny:qwen3")
    if not refused:
        assert stage.footprint(Context(), {}).told
        return
    with pytest.raises(BadInput) as caught:
        stage.footprint(Context(), {})
    said = f"{path} was made with the tokenizer of 'other/model': its token ids 0..512 do not fit target 'tiny:qwen3'"
    assert said in str(caught.value) and str(caught.value).endswith("which has 0..511")


def test_rows_of_another_tokenizer_are_said_where_their_ids_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for made_for, told in (("other/model", True), ("tiny:qwen3", False)):
        recipe = {RECIPE: json.dumps({"tokenizer": made_for}).encode()}
        path = write(tmp_path / "rows.arrow", [row(9, 20)], metadata=recipe)
        caplog.clear()
        source(path, target="tiny:qwen3").open(Context())
        assert ("made with the tokenizer of other/model; the target is tiny:qwen3" in caplog.text) == told


def test_cursor_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.arrow", [row(8) for _ in range(32)])
    cursor = next(iter(source(path).read(None)))[0]
    others: list[dict[str, Any]] = [{"seed": 8}, {"max_tokens": 32}, {"max_length": 7}, {"buckets": [16]}]
    for fields in others:
        with pytest.raises(BadInput, match="cannot go on"):
            next(source(path, **fields).read(cursor))
    longer = source(path, epochs=5)  # more epochs do not change which batches come next
    assert torch.equal(
        next(b.sample for _, b in longer.read(cursor) if b),
        next(b.sample for _, b in islice(source(path).read(None), 1, None) if b),
    )


def test_every_row_is_accounted_for(tmp_path):
    rows = [row(4, supervised=3), row(3, supervised=1), row(4)] * 4
    stage = source(write(tmp_path / "rows.arrow", rows), max_tokens=8, epochs=2)
    cursors = [cursor for cursor, _ in stage.read(None)]
    assert stage.account(None, None) == ""
    assert stage.account(cursors[1], None).endswith(" + 4 in flight")
    line, padding = stage.account(cursors[-1], cursors[-1]).splitlines()
    assert line.startswith("rows: 24 read = 16 finished + 8 dropped (") and line.endswith(" + 0 in flight")
    assert padding == "tokens: 64 finished + 0 of padding (0.0% of all)"
    lost = {**cursors[-1], "rows": {**cursors[-1]["rows"], "read": 25}}
    with pytest.raises(RuntimeError, match="does not add up"):
        stage.account(lost, cursors[-1])

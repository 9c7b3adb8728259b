"""Snapshots are whole or absent, keep what they were given, and are refused where they do not fit."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from dflash_pipe.errors import BadInput
from dflash_pipe.graph import load
from dflash_pipe.message import Message, Stamp
from dflash_pipe.run_folder import RunFolder, fresh
from dflash_pipe.runtime import Run
from dflash_pipe.snapshot import Snapshot, Snapshots, has_snapshot, newest, read, write
from dflash_pipe.stage import Stage
from tests.pipeline import executed, toy

STATE = {
    "flat": np.arange(6, dtype=np.float32)[::2],  # not contiguous
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 4), dtype=np.int64),
    "step": 7,
    "names": ["a", "b"],
}


class Stateful(Stage):
    saved: int = 0

    def process(self, value: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        self.saved += 1
        return {"saved": self.saved}


def ends(window: int) -> Message:
    """The last message of a window of 4."""
    return Message(Stamp(4 * window + 3, window, 3, True), {"row": window}, "payload")


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    written = Snapshot(8, 2, {"epoch": 1, "dropped": {"too long": 3}}, STATE, {"seed": 1})
    got = read(write(tmp_path, written))
    assert (got.index, got.window, got.cursor, got.dataflow) == (8, 2, written.cursor, {"seed": 1})
    assert got.state.keys() == STATE.keys()
    for key, value in STATE.items():
        if isinstance(value, np.ndarray):
            assert (got.state[key].dtype, got.state[key].shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(got.state[key], value)
        else:
            assert got.state[key] == value


ARRAYS = st.builds(
    lambda array, axes, step, order: np.asarray(np.moveaxis(array, *axes)[..., ::step], order=order),
    arrays(
        st.sampled_from("?bhiqBHIQefd").flatmap(lambda kind: st.sampled_from([f"<{kind}", f">{kind}"])),
        array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=3),
    ),
    st.sampled_from([(0, 1), (0, -1), (0, 0)]),
    st.sampled_from([1, 2, -1]),
    st.sampled_from("ACF"),
)


@given(ARRAYS)
def test_an_array_is_read_whatever_its_type_byte_order_and_layout(array: np.ndarray) -> None:
    with tempfile.TemporaryDirectory() as folder:
        got = read(write(Path(folder), Snapshot(8, 2, 4, {"array": array}, {}))).state["array"]
    assert got.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("call", ["mkdir", "write_text", "rename", "rmtree"])
def test_a_kill_at_any_moment_leaves_a_whole_one(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of writing dies in turn, in the same window again and in the next; the older one stays readable."""
    write(tmp_path / "snapshots", Snapshot(4, 1, 4, {"step": 1}, {"seed": 1}))
    place = shutil if call == "rmtree" else Path

    def die(*arguments: Any, **keywords: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(place, call, die)
        with pytest.raises(InterruptedError):
            write(tmp_path / "snapshots", Snapshot(8, 2, 8, {"step": 2}, {"seed": 1}))
    assert read(newest(tmp_path)).window == 1
    write(tmp_path / "snapshots", Snapshot(8, 2, 8, {"step": 2}, {"seed": 1}))
    write(tmp_path / "snapshots", Snapshot(8, 2, 8, {"step": 3}, {"seed": 1}))
    assert read(newest(tmp_path)).state == {"step": 3}
    assert sorted(p.name for p in (tmp_path / "snapshots").iterdir()) == ["window-00000001", "window-00000002"]


@pytest.mark.parametrize("damage", ["cut", "missing", "text", "not UTF-8", "nested"])
def test_what_is_not_whole_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    folder = write(tmp_path, Snapshot(4, 1, 4, STATE, {"seed": 1}))
    about, arrays = folder / "snapshot.json", folder / "state.safetensors"
    if damage == "cut":
        os.truncate(arrays, 20)
    elif damage == "missing":
        arrays.unlink()
    else:
        about.write_bytes({"text": b"{", "not UTF-8": b"\xff", "nested": b"[" * 99_999}[damage])
    with pytest.raises(BadInput, match="not a whole snapshot") as refused:
        read(folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 99}, "format is 99, expected a whole number from 1 to 2"),
        ({"format": None}, "format is null, expected a whole number from 1 to 2"),
        ({"window": "2"}, 'window is "2", expected 2'),
        ({"window": -1}, "window is -1, expected 2"),
        ({"window": 0}, "window is 0, expected 2"),
        ({"index": True}, "index is true, expected a whole number from 2"),
        ({"index": 1}, "index is 1, expected a whole number from 2"),
        ({"dataflow": ["seed"]}, 'dataflow is ["seed"], expected an object'),
        ({"state": None}, "state is null, expected an object"),
        ({"cursor": None}, "cursor is null, expected where the source goes on"),
        ({"crc32": {"flat": 1}}, "is missing (known: flat)"),
        ({"crc32": {"snapshot.json": "1"}}, 'crc32.snapshot.json is "1", expected a whole number from 0'),
        ({"index": 9}, "the text is not as it was written: its crc32 is "),
        ({"cursor": 5}, "the text is not as it was written: its crc32 is "),
        ({"state": {"step": 6}}, "the text is not as it was written: its crc32 is "),
        ({"crc32": None}, "crc32 is null, expected an object"),
        (["window"], 'all of it is ["window"], expected an object'),
        (None, "is missing"),
    ],
)
def test_what_a_snapshot_says_has_its_form(changes: Any, said: str, tmp_path: Path) -> None:
    """As hand-edited: one line with file and key, what is there, what was expected. None: each key left out in turn."""
    folder = write(tmp_path, Snapshot(8, 2, 4, STATE, {"seed": 1}))
    file = folder / "snapshot.json"
    good = json.loads(file.read_text())
    changed = [{**good, **changes}] if isinstance(changes, dict) else [changes]
    if changes is None:
        changed = [{key: good[key] for key in good if key != left_out} for left_out in good]
    for content in changed:
        file.write_text(json.dumps(content))
        with pytest.raises(BadInput) as refused:
            read(folder)
        line = str(refused.value)
        assert line.startswith(f"{file}: ") and said in line and "\n" not in line


@pytest.mark.parametrize("where", ["flat", "scalar", "header"])
def test_a_flipped_bit_in_an_array_is_noticed(where: str, tmp_path: Path) -> None:
    folder = write(tmp_path, Snapshot(8, 2, 4, STATE, {"seed": 1}))
    file, about = folder / "state.safetensors", folder / "snapshot.json"
    stored = bytearray(file.read_bytes())
    if where == "header":  # another type of as many bytes
        stored = stored.replace(b'"F32"', b'"I32"')
    else:
        stored[stored.index(np.ascontiguousarray(STATE[where]).tobytes()) + 2] ^= 4
    file.write_bytes(stored)
    with pytest.raises(BadInput) as refused:
        read(folder)
    name = "flat" if where == "header" else where
    said = f"{about}: array {name} of state.safetensors is not as it was written: its crc32 is "
    assert str(refused.value).startswith(said)
    about.write_text(json.dumps({**json.loads(about.read_text()), "format": 1}))  # older versions had no checksums
    assert read(folder).window == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cursor": np.int64(3)}, "cursor is np.int64(3), of type numpy.int64: expected a JSON value"),
        ({"cursor": [{"at": {1}}]}, "cursor[0].at is {1}, of type set: expected"),
        ({"state": {"seen": {"rows": {1: "a"}}}}, "state.seen.rows has the key 1, which would come back as text"),
        ({"state": {"step": np.int32(3)}}, "state.step is np.int32(3), of type numpy.int32: expected"),
        ({"state": {"nested": {"a": np.zeros(2)}}}, "state.nested.a is array([0., 0.]), of type numpy.ndarray"),
        ({"state": {"raw": b"x"}}, "state.raw is b'x', of type bytes"),
        ({"state": {"names": np.array(["a"])}}, "state.names is an array of <U1: expected numbers"),
        (
            {"state": {"z": np.zeros(1, complex)}},
            "state.z is an array of complex128: expected numbers",
        ),
        ({"state": {"r": np.zeros(1, "i4,f4")}}, "state.r is an array of [('f0', '<i4'), ('f1', '<f4')]: expected"),
        ({"state": {"__metadata__": np.zeros(1)}}, "state.__metadata__: an array cannot have this name"),
        ({"state": {"snapshot.json": np.zeros(1)}}, "state.snapshot.json: an array cannot have this name"),
    ],
)
def test_what_a_snapshot_cannot_hold_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    whole: dict[str, Any] = {"cursor": {"at": [1, None, 0.5]}, "state": {"a": [{"b": None}], "c": (1, 2), "d": True}}
    write(tmp_path, Snapshot(4, 1, dataflow={}, **whole))
    with pytest.raises(TypeError) as refused:
        write(tmp_path, Snapshot(8, 2, dataflow={}, **(whole | changes)))
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert read(newest_in(tmp_path)).state == {"a": [{"b": None}], "c": [1, 2], "d": True}


def newest_in(folder: Path) -> Path:
    return max(path for path in folder.iterdir() if path.suffix != ".tmp")


def test_what_is_no_snapshot_is_left_alone(tmp_path: Path) -> None:
    """It blocks no resume, is no snapshot to go on from, is not counted among those that are kept, and not removed."""
    folder = tmp_path / "snapshots"
    strays = ("window-00000009.bak", "window-00000009 copy", "window-x", "window-99", "mine.tmp", "other")
    for stray in strays:
        (folder / stray).mkdir(parents=True)
    files = (".DS_Store", "window-00000007", "window-00000008~", "window-00000005.tmp", "notes.tmp")
    for stray in files:
        (folder / stray).write_text("")
    assert not has_snapshot(tmp_path)
    snapshots = Snapshots(folder, {"seed": 1}, every=1)
    for window in range(4):
        snapshots.window_done(Stateful(), ends(window))
    own = {"window-00000003", "window-00000004"}
    assert {path.name for path in folder.iterdir()} == {*strays, *files, *own}
    assert newest(tmp_path).name == "window-00000004"
    (folder / "window-00000011").mkdir()  # but this is one, and damaged
    with pytest.raises(BadInput, match=r"window-00000011: not a whole snapshot .*; window-00000004 is whole: remove"):
        read(newest(tmp_path))
    for window in ("window-100000000", "window-99999999"):
        (folder / window).mkdir()
    assert newest(tmp_path).name == "window-100000000"


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such run folder"):
        newest(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="it has no snapshot"):
        newest(tmp_path)
    assert not has_snapshot(tmp_path)


def test_they_are_written_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    snapshots, stage = Snapshots(tmp_path / "snapshots", {"seed": 1}, every=3), Stateful()
    for window in range(7):
        snapshots.window_done(stage, ends(window))
    assert (stage.saved, newest(tmp_path).name) == (2, "window-00000006")
    snapshots.finish(stage)
    snapshots.finish(stage)  # nothing has happened since
    got = read(newest(tmp_path))
    assert (stage.saved, got.window, got.index, got.cursor) == (3, 7, 28, {"row": 6})
    assert snapshots.written == newest(tmp_path)
    assert len(list((tmp_path / "snapshots").iterdir())) == 2  # the newest two are kept


def test_they_keep_no_payload(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, {"seed": 1}, every=None)
    snapshots.window_done(Stateful(), ends(0))
    assert "'payload'" not in repr(vars(snapshots))


def test_another_dataflow_is_refused_and_another_topology_is_not(tmp_path: Path) -> None:
    executed(toy(tmp_path, "overlapped"))
    restored = read(newest(tmp_path))
    for change in ("seed=21", "window=8", "drafter.partials=4", "partial_window=drop"):
        with pytest.raises(BadInput, match="another dataflow"):
            toy(tmp_path, "overlapped", change, restored=restored)
    for topology in ("sequential", "data_parallel"):
        assert isinstance(toy(tmp_path, topology, restored=restored), Run)


def test_a_finished_run_that_is_resumed_has_nothing_to_do(tmp_path: Path) -> None:
    executed(toy(tmp_path, "overlapped", "data.count=30"))
    before = read(newest(tmp_path))
    run = toy(tmp_path, "parallel_target", "data.count=30", restored=before)
    result = executed(run)
    assert run.metrics == {} and result.snapshot is None and read(newest(tmp_path)) == before


# --- the run's folder


def test_a_name_that_was_chosen_is_not_changed(tmp_path: Path) -> None:
    assert fresh(tmp_path, "demo", chosen=True) == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert fresh(tmp_path, "demo", chosen=False) == tmp_path / "demo-3"


def made(folder: Path, what: str | None) -> Path:
    """A folder that a run has left with a file of one of its stages, and with `what`."""
    with RunFolder(folder) as opened:
        opened.log("failed")
    (folder / "some_stages_cache.json").write_text("{}")
    if what == "snapshot":
        write(folder / "snapshots", Snapshot(4, 1, 4, {"step": 1}, {"seed": 1}))
    elif what is not None:
        (folder / what).write_text("{}")
    return folder


@pytest.mark.parametrize("what", [None, "tuning.json", ".tuning.json.lock", "graph.yaml.tmp"])
def test_a_name_is_free_again_if_its_run_made_no_result(tmp_path: Path, what: str | None) -> None:
    """Whatever its stages have put there."""
    folder = made(tmp_path / "demo", what)
    before = {path: path.read_text() for path in folder.iterdir()}
    assert fresh(tmp_path, "demo", chosen=True) == folder
    assert {path: path.read_text() for path in folder.iterdir()} == before


def test_a_name_that_was_not_chosen_is_that_of_a_run_that_made_nothing(tmp_path: Path) -> None:
    """Else mistakes would leave a row of folders. One that is in use is left alone."""
    made(tmp_path / "demo", "metrics.jsonl")
    assert fresh(tmp_path, "demo", chosen=False) == tmp_path / "demo-2"
    folder = made(tmp_path / "demo-2", None)
    assert fresh(tmp_path, "demo", chosen=False) == folder
    with RunFolder(folder):
        assert fresh(tmp_path, "demo", chosen=False) == tmp_path / "demo-3"


@pytest.mark.parametrize("what", ["snapshot", "metrics.jsonl", "profile.json"])
def test_a_name_is_taken_by_results_and_only_a_snapshot_can_be_resumed(tmp_path: Path, what: str) -> None:
    folder = made(tmp_path / "demo", what)
    with pytest.raises(BadInput) as refused:
        fresh(tmp_path, "demo", chosen=True)
    line = str(refused.value)
    assert line.startswith(f"{folder} exists already: choose another name=") and "\n" not in line
    assert (f"go on with --resume {folder}" in line) is has_snapshot(folder) is (what == "snapshot")


def test_what_no_run_has_made_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "graph.yaml").write_text("stages: {}")
    (tmp_path / "file").write_text("")
    for name in ("mine", "file"):
        with pytest.raises(BadInput, match=f"{name} exists already: choose another name="):
            fresh(tmp_path, name, chosen=True)


def test_a_folder_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"), pytest.raises(BadInput, match="in use by another run"):
        RunFolder(tmp_path / "run")
    with RunFolder(tmp_path / "run") as again:
        again.report({"loss": 1.5})
        again.report({"device": Path("cpu")})
        again.log("one")
        again.keep_graph("a: 1\n")
        again.keep_graph("a: 2\n")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("loss") for line in lines] == [1.5, None] and lines[1]["device"] == "cpu"
    assert (tmp_path / "run" / "graph.yaml").read_text() == "a: 2\n"
    assert (tmp_path / "run" / "log.txt").read_text().endswith(" one\n")


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be used in a run folder"):
        RunFolder(tmp_path / "file")
    for name in ("log.txt", "metrics.jsonl"):
        (tmp_path / name).mkdir()
        with pytest.raises(BadInput, match=rf"{name}: cannot be used in a run folder \(Is a directory\)"):
            RunFolder(tmp_path)
        (tmp_path / name).rmdir()
    RunFolder(tmp_path).__exit__(None, None, None)  # none of these has kept it locked


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", ".", "", "two\nlines", "x" * 101])
def test_a_name_is_that_of_one_folder(name: str) -> None:
    with pytest.raises(BadInput, match="name: cannot be the name of a run folder"):
        load(["graphs/toy/sequential.yaml"], [f"name={json.dumps(name)}"])


def test_a_damaged_snapshot_says_how_to_go_on_from_an_older_one(tmp_path: Path) -> None:
    folders = [write(tmp_path, Snapshot(4 * window, window, 4, STATE, {"seed": 1})) for window in (1, 2, 3)]
    for folder in folders[1:]:
        os.truncate(folder / "state.safetensors", 20)
    for folder in reversed(folders[1:]):
        with pytest.raises(BadInput) as refused:
            read(folder)
        way = f"; window-00000001 is whole: remove the damaged one (rm -r {folder}) and resume again to go on from "
        assert str(refused.value).endswith(f"{way}there")
        shutil.rmtree(folder)
    assert read(folders[0]).window == 1

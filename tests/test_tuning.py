"""What was tuned is kept in a file, and used again only where it was made for the same GPU, versions and kernels."""

import atexit
import collections
import importlib
import inspect
import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dflash_pipe import BadInput, Context, Stage
from stages import tuning
from stages.autotune import keep_in, make_thread_safe, patch, way_taken
from stages.tuning import TunedConfigs, keep_tuning, prepare_kernels, tuning_file
from tests import autotuned
from tests.autotuned import GPU, launch, messages

make = autotuned.make  # the fixture


def counted(make, count, best, **more):
    """A kernel whose configuration with BT = `best` is the fastest, and whose benchmarks are counted."""
    last = []

    def launched(arguments):
        last[:] = [arguments["BT"]]
        return arguments["BT"]

    def bench(call, quantiles):
        count["benchmarks"] += 1
        call()
        return [1.0 if last == [best] else 2.0] * 3

    return make(bench, launched, **more)


def kept_once(make, folder, function):
    """A file that holds one tuned configuration, BT = 32, of a kernel; a counter of benchmarks; what the file says."""
    make_thread_safe()
    file, count = folder / "tuning.json", collections.Counter()
    keep_tuning(file, GPU)
    launch(counted(make, count, 32, function=function), None, 1)
    return file, count, json.loads(file.read_text())


def tuned(file):
    """The rows of the file."""
    return json.loads(file.read_text())["tuned"]


@pytest.mark.parametrize("way", ["lock-free", "lock per instance"])
def test_what_one_process_tuned_the_next_one_uses(make, tmp_path, way):
    def mine(x, T, BT):
        pass

    patch(way)
    file, count = tmp_path / "run" / "tuning.json", collections.Counter()
    keep_tuning(file, GPU)
    first = counted(make, count, 32, function=mine)
    x = torch.zeros(1)
    assert [launch(first, x, T) for T in (1, None, True, 1)] == [32] * 4
    assert count["benchmarks"] == 4  # 1 and True are the same key
    rows = [row for row in tuned(file) if row["kernel"].endswith("mine")]
    assert sorted(map(str, (row["key"] for row in rows))) == ["[1, 'torch.float32']", "[None, 'torch.float32']"]
    assert all(row["config"]["BT"] == 32 and row["config"]["num_warps"] == 4 for row in rows)
    made_with = json.loads(file.read_text())["made_with"]
    assert (made_with["gpu"], made_with["triton"]) == (GPU, metadata.version("triton"))

    keep_in(None)  # as if a new process began, where the other configuration would win
    del first
    keep_tuning(tmp_path / "elsewhere.json", GPU)
    second = counted(make, count, 16, function=mine)
    assert launch(second, x, 1) == 16
    keep_tuning(file, GPU)
    count.clear()
    late = counted(make, count, 16, function=mine)  # made after the file was read
    for tuner in (second, late):
        assert [launch(tuner, x, T) for T in (1, None)] == [32, 32]
    assert count["benchmarks"] == 0
    assert launch(late, x, 9) == 16 and count["benchmarks"] == 2  # a new key is tuned, and added
    assert {row["key"][0] for row in tuned(file) if row["kernel"].endswith("mine")} == {None, 1, 9}


@pytest.mark.parametrize("what", ["gpu", "triton", "fla-core"])
def test_a_file_made_on_another_gpu_or_version_is_refused_in_one_line(make, tmp_path, caplog, what):
    def mine(x, T, BT):
        pass

    file, count, whole = kept_once(make, tmp_path, mine)
    whole["made_with"][what] = "another"
    file.write_text(json.dumps(whole))
    before = file.read_text()
    keep_tuning(tmp_path / "elsewhere.json", GPU)
    assert keep_tuning(file, GPU) is None
    (line,) = messages(caplog)
    assert "another" in line and GPU in line and "not used" in line and "\n" not in line
    assert launch(counted(make, count, 16, function=mine), None, 1) == 16  # tuned by itself
    assert file.read_text() == before


@pytest.mark.parametrize("text", ["", "[]", '{"made_with": {}}', '{"made_with": {}, "tuned": [{"kernel": "k"}]}'])
def test_a_file_that_holds_something_else_is_bad_input(make, tmp_path, text):
    file = tmp_path / "tuning.json"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"tuning.json: no file of tuned configurations"):
        keep_tuning(file, GPU)


@pytest.mark.parametrize("change", ["source", "config"])
def test_a_configuration_of_another_form_of_the_kernel_is_not_used(make, tmp_path, caplog, change):
    def mine(x, T, BT):
        pass

    file, count, whole = kept_once(make, tmp_path, mine)
    for row in whole["tuned"]:
        row[change] = "0" * 16 if change == "source" else {**row["config"], "BT": 64}
    file.write_text(json.dumps(whole))
    keep_tuning(tmp_path / "elsewhere.json", GPU)
    keep_tuning(file, GPU)
    tuner = counted(make, count, 16, function=mine)
    assert launch(tuner, None, 1) == 16
    assert sum("mine: 1 configurations belong to another form" in line for line in messages(caplog)) == 1


def test_a_key_that_json_does_not_know_is_not_kept_and_said_once(make, tmp_path, caplog):
    def mine(x, T, BT):
        pass

    make_thread_safe()
    file = tmp_path / "tuning.json"
    keep_tuning(file, GPU)
    tuner = make(function=mine)
    for T in (torch.float32, torch.bfloat16):
        launch(tuner, None, T)
    lines = [line for line in messages(caplog) if "mine" in line]
    assert len(lines) == 1 and "cannot be kept" in lines[0]
    assert not file.exists() or not any(row["kernel"].endswith("mine") for row in tuned(file))


def test_processes_that_write_one_file_keep_what_the_others_wrote(make, tmp_path):
    file, made_with = tmp_path / "tuning.json", {"gpu": GPU}
    processes = [TunedConfigs(file, made_with, {}) for _ in range(3)]  # all began before there was a file
    for process, key, config in zip(processes, (1, 1, 2), (0, 1, 1), strict=True):
        tuner = make()
        tuner.cache[(key,)] = tuner.configs[config]
        process.add(tuner)
    assert [(row["key"], row["config"]["BT"]) for row in tuned(file)] == [([1], 16), ([2], 32)]
    assert not list(tmp_path.glob("*.tmp"))


def test_where_triton_is_left_alone_the_file_is_written_at_the_end(make, tmp_path, monkeypatch):
    def mine(x, T, BT):
        pass

    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    file = tmp_path / "tuning.json"
    keep_tuning(file, GPU)
    launch(make(function=mine), None, 1)
    assert not file.exists()
    (save,) = at_exit
    save()
    assert [row["key"] for row in tuned(file) if row["kernel"].endswith("mine")] == [[1]]


def test_a_file_that_another_gpu_has_written_meanwhile_stays(make, tmp_path, caplog):
    file, tuner = tmp_path / "tuning.json", make()
    tuner.cache[(1,)] = tuner.configs[0]
    mine, other = TunedConfigs(file, {"gpu": GPU}, {}), TunedConfigs(file, {"gpu": "NVIDIA B200"}, {})
    other.add(tuner)
    before = file.read_text()
    mine.add(tuner)
    assert file.read_text() == before and "NVIDIA B200" in messages(caplog)[0]


def test_the_runs_folder_holds_the_file_unless_the_variable_names_another(tmp_path, monkeypatch):
    monkeypatch.delenv("DFLASH_PIPE_TUNING", raising=False)
    assert tuning_file(tmp_path) == tmp_path / "tuning.json"
    monkeypatch.setenv("DFLASH_PIPE_TUNING", str(tmp_path / "shared.json"))
    assert tuning_file(tmp_path / "run") == tmp_path / "shared.json"


# --- a file that cannot be written


@pytest.mark.parametrize("in_the_way", [".tuning.json.lock", "tuning.json.tmp"])
def test_a_file_that_cannot_be_written_is_bad_input_before_anything_is_tuned(make, tmp_path, in_the_way):
    (tmp_path / "sub" / in_the_way).mkdir(parents=True)
    file = tmp_path / "sub" / "tuning.json"
    with pytest.raises(BadInput) as refused:
        keep_tuning(file, GPU)
    line = str(refused.value)
    assert line.startswith(f"{file}: tuned configurations cannot be written here (Is a directory)")
    assert "DFLASH_PIPE_TUNING" in line and "\n" not in line


def test_trying_leaves_no_file(make, tmp_path):
    keep_tuning(tmp_path / "new" / "tuning.json", GPU)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".tuning.json.lock"]


def test_a_file_that_is_there_may_be_read_only(make, tmp_path):
    """One that several machines share: what it holds is used, and the run starts."""

    def mine(x, T, BT):
        pass

    file, count, _ = kept_once(make, tmp_path / "run", mine)
    lock = file.with_name(".tuning.json.lock")
    lock.unlink()
    lock.mkdir()
    keep_tuning(tmp_path / "elsewhere.json", GPU)
    assert keep_tuning(file, GPU) is not None
    before = count.copy()
    tuner = counted(make, count, 16, function=mine)
    assert launch(tuner, None, 1) == 32
    assert count == before


def obstruct(file, how):
    if how == "another file":
        file.write_text("{")
    elif how == "no folder":
        shutil.rmtree(file.parent)
        file.parent.write_text("")
    else:
        file.with_name(f"{file.name}.tmp").mkdir()


@pytest.mark.parametrize("how", ["another file", "no folder", "in the way"])
def test_a_file_that_can_no_longer_be_written_ends_no_run_and_is_said_once(make, tmp_path, caplog, how):
    def mine(x, T, BT):
        pass

    file, count, _ = kept_once(make, tmp_path / "run", mine)
    keep_tuning(tmp_path / "elsewhere.json", GPU)
    keep_tuning(file, GPU)
    tuner = counted(make, count, 16, function=mine)
    obstruct(file, how)
    before = file.read_text() if file.exists() else None
    assert [launch(tuner, None, T) for T in (1, 2, 3)] == [32, 16, 16]
    (line,) = messages(caplog)
    assert line.startswith(f"what is tuned from now on is not kept: {file}: ") and "\n" not in line
    assert (file.read_text() if file.exists() else None) == before
    late = counted(make, count, 16, function=mine)
    assert launch(late, None, 1) == 32  # what was read at the start is used on


# --- GPUs of several kinds


def test_a_gpu_of_another_kind_runs_the_firsts_configurations_and_that_is_said_once(
    make, tmp_path, caplog, monkeypatch
):
    def mine(x, T, BT):
        pass

    monkeypatch.setattr(tuning, "_models", [])
    file, count, _ = kept_once(make, tmp_path, mine)
    assert messages(caplog) == []
    kept = keep_tuning(file, GPU)
    assert keep_tuning(file, "NVIDIA B200") is keep_tuning(file, "NVIDIA B200") is keep_tuning(file, GPU) is kept
    (line,) = messages(caplog)
    assert GPU in line and "NVIDIA B200" in line and "\n" not in line
    launch(counted(make, count, 16, function=mine), None, 2)
    assert json.loads(file.read_text())["made_with"]["gpu"] == GPU
    assert sorted(row["key"] for row in tuned(file) if row["kernel"].endswith("mine")) == [[1], [2]]


# --- every stage that loads a target


def loaders():
    """The stages whose module can load a target: (module, stage, the function that loads)."""
    found = []
    for path in sorted(Path(tuning.__file__).parent.glob("*.py")):
        if "from stages.target_model import" not in (text := path.read_text()) or "(Stage)" not in text:
            continue
        module = importlib.import_module(f"stages.{path.stem}")
        names = [name for name in ("load_full", "load_truncated") if hasattr(module, name)]
        kinds = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
        found += [(module, kind, name) for name in names for kind in kinds if issubclass(kind, Stage)]
    return found


LOADERS = loaders()
KEYS = {"Regenerate": {"max_prompt_tokens": 200, "max_new_tokens": 24}}  # what is asked of a tiny target


def test_the_stages_that_load_a_target_are_found():
    assert {"TargetForward", "Regenerate"} <= {stage.__name__ for _, stage, _ in LOADERS}


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """The context of a GPU, whose name is known, as long as nothing computes there."""
    monkeypatch.delenv("DFLASH_PIPE_TUNING", raising=False)
    monkeypatch.setenv("DFLASH_PIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    return Context(device="cuda:0", folder=tmp_path / "run")


@pytest.mark.parametrize(("module", "stage", "name"), LOADERS, ids=lambda each: getattr(each, "__name__", each))
def test_whoever_loads_a_target_on_a_gpu_prepares_its_kernels(make, fake_gpu, monkeypatch, module, stage, name):
    real, loaded = getattr(module, name), []

    def load(*arguments, **more):
        assert way_taken() == "unchanged", "before the model's code is imported, there is nothing to prepare"
        loaded.append(real(*("cpu" if each == fake_gpu.device else each for each in arguments), **more))
        return loaded[0]

    monkeypatch.setattr(module, name, load)
    opened = stage(model="tiny:qwen3", **KEYS.get(stage.__name__, {}))
    opened.open(fake_gpu)
    assert len(loaded) == 1 and way_taken() != "unchanged"
    launch(make(), None, 1)
    assert tuned(fake_gpu.folder / "tuning.json")
    opened.close()


def test_on_a_cpu_there_is_nothing_to_prepare(make, tmp_path):
    prepare_kernels(Context(device="cpu", folder=tmp_path))
    assert way_taken() == "unchanged" and not list(tmp_path.iterdir())

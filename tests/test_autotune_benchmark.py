"""`python -m benchmarks autotune`, stopped: what was measured is shown and kept, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import autotune
from benchmarks.autotuned_launches import OURS, WAYS, Launches, at_once
from tests.called import called

FOUND = {"errors": [], "wrong": 0, "cold": [2.0, 1.0], "one": 0.01, "all": 0.011, "digest": "d", "gpus": 2}


class Ways:
    """Stands for the processes of the layers. ends: in which one what happens."""

    def __init__(self, ends: dict[int, BaseException | signal.Signals]) -> None:
        self.ends, self.calls = ends, list[str]()

    def __call__(self, call: str, **environment: str) -> dict[str, Any]:
        self.calls.append(call)
        end = self.ends.get(len(self.calls))
        if isinstance(end, BaseException):
            raise end
        if end is not None:
            signal.raise_signal(end)
        return dict(FOUND)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ways]:
    """A machine with Triton and GPUs, as far as the command can tell."""
    made = Ways({})
    each = dict.fromkeys((1, 2, 4, 8), 1000.0)
    monkeypatch.setattr(autotune, "launches", lambda *_: dict.fromkeys(WAYS, Launches(40, 0, 0, each, each)))
    monkeypatch.setattr(autotune, "layers", partial(autotune.layers, run=made))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    yield made


def test_what_was_measured_before_ctrl_c_is_shown_and_kept(ways: Ways, tmp_path: Path) -> None:
    ways.ends[3] = signal.SIGINT
    result = called("autotune", "--out", tmp_path, "--check")
    assert result.exit_code == 130
    assert "Stopped after 2 of 5 ways, before as Triton does it, one lock, a lock for each kernel." in result.output
    kept = json.loads((tmp_path / "autotune.json").read_text())
    assert kept["stopped"] and set(kept["launches"]) == set(WAYS)
    assert list(kept["layers"]) == list(autotune.LAYERS[:2])
    assert all(0 <= found.pop("seconds") < 10 and found == FOUND for found in kept["layers"].values())
    assert "ours 0 of 16 0 2.0 1.0 10.0 11.0 0" in [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "2 GPUs; ours, with saved tuning: the same bits" in result.output


def test_stopped_in_the_first_way_it_shows_the_launches(ways: Ways, tmp_path: Path) -> None:
    ways.ends[1] = signal.SIGINT
    result = called("autotune", "--out", tmp_path)
    assert result.exit_code == 130 and "launches; thousands a second" in result.output
    assert "Stopped after 0 of 5 ways, before ours, " in result.output
    kept = json.loads((tmp_path / "autotune.json").read_text())
    assert kept["stopped"] and kept["layers"] == {} and kept["launches"]


def test_a_way_that_fails_does_not_cost_the_others(ways: Ways, tmp_path: Path) -> None:
    ways.ends[3] = subprocess.TimeoutExpired("way", 180)
    with pytest.raises(subprocess.TimeoutExpired):
        called("autotune", "--out", tmp_path)
    kept = json.loads((tmp_path / "autotune.json").read_text())
    assert kept["stopped"] and len(kept["layers"]) == 2


def test_ours_runs_first_and_again_with_what_it_has_tuned(ways: Ways, tmp_path: Path) -> None:
    result = called("autotune", "--threads", 3, "--out", tmp_path)
    assert result.exit_code == 0 and "Stopped" not in result.output
    kept = json.loads((tmp_path / "autotune.json").read_text())
    assert not kept["stopped"] and set(kept["layers"]) == {*WAYS, autotune.LAYERS[1]}
    first, again, *others = ways.calls
    assert first == again and first.startswith(f"stress({OURS!r}, 3, Path(")
    assert all(call.endswith(", 3, None)") for call in others)


def test_check_fails_where_saved_tuning_gives_other_bits(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    assert called("autotune", "--check").exit_code == 0
    monkeypatch.setitem(FOUND, "digest", "other")
    before = autotune.layers
    changed = lambda *words: ((way, r | {"digest": way}) for way, r in before(*words))  # noqa: E731
    monkeypatch.setattr(autotune, "layers", changed)
    result = called("autotune", "--check")
    assert result.exit_code == 1 and "ours, with saved tuning: OTHER bits" in result.output


# --- processes and threads --------------------------------------------------------------------------------------------


def test_a_process_that_is_interrupted_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports its own id, interrupts whoever started it, takes no notice of that itself and waits for ever."""
    file = tmp_path / "id"
    (tmp_path / "waiting.py").write_text(
        "import os, signal\n"
        f"open({str(file)!r}, 'w').write(str(os.getpid()))\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "signal.pause()\n"
    )
    with pytest.raises(KeyboardInterrupt):
        autotune.separately("__import__('waiting')", PYTHONPATH=str(tmp_path))
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_what_a_process_says_is_shown_only_if_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    said = "__import__('sys').stderr.write('falling back') and {}('0')"
    found = autotune.separately(f"__import__('types').SimpleNamespace(a={said.format('int')})")
    assert found == {"a": 0} and capfd.readouterr() == ("", "")
    with pytest.raises(subprocess.CalledProcessError):
        autotune.separately(said.format("vars"))
    assert "falling back" in capfd.readouterr().err


class Interrupted(list[Any]):
    """Ctrl-C comes after the first of them."""

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_before_all_threads_have_begun_leaves_none_waiting() -> None:
    ran = list[int]()
    with pytest.raises(KeyboardInterrupt):
        at_once(Interrupted([lambda: ran.append(1), lambda: ran.append(2)]))
    assert ran == []

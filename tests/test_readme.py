"""What the documents tell a reader to type works: commands run (small), servers' launch lines parse, examples hold."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.commands import app as benchmarks
from dflash_pipe import cli
from stages.messages import FeatureBatch, TokenBatch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGET = "target.model=tiny:qwen3"
SMALL = [  # what makes a training command short
    "drafter.num_layers=1",
    "drafter.block_size=4",
    "drafter.num_anchors=4",
    "data.max_tokens=256",
    "data.steps=2",
    "window=2",
    "threads=1",
    "snapshot=1",
]
# graph -> overrides that make a command on it end in seconds
TINY = {
    "regenerate.yaml": ["threads=1", "target.max_new_tokens=64"],
    "evaluate.yaml": ["threads=1"],
    "overlapped.yaml": SMALL,
    "parallel_target.yaml": SMALL,
    "data_parallel.yaml": [*SMALL, "drafter.partials=2"],
}

# benchmark -> options that make it short
BRIEF = {
    "topologies": ["--repeat", "1", "--steps", "4"],
    "verdicts": ["--graphs", "1"],
    "rows": ["--rows", "200", "--tokens", "20", "--reads", "100"],
    "recording": ["--repeat", "2", "--steps", "4"],
}


def blocks(page, *languages):
    """Texts of the fenced blocks in these languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def commands(page):
    """Words of every command of a page, in order."""
    text = "\n".join(blocks(page, "console", "bash")).replace("\\\n", " ")
    parts = (part for line in text.splitlines() for part in re.split(r"\s&&\s", line))
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def commands_of(first):
    found = [(page, words) for page in PAGES for words in commands(page) if words[0] == first]
    return [pytest.param(words, id=f"{page.name}: {shlex.join(words)[:60]}") for page, words in found]


def test_every_command_is_of_a_known_kind():
    known = {"dflash-pipe", "make", "pip", "uv", "python3", "python", "vllm", ".", ".venv/bin/python", ".venv/bin/ruff"}
    assert {words[0] for page in PAGES for words in commands(page)} <= known


@pytest.mark.parametrize("words", commands_of("make"))
def test_make_knows_the_goal(words):
    ended = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("words", commands_of("vllm"))
def test_the_launch_line_of_vllm(words):
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert (
        config["method"] == "dflash" and config["num_speculative_tokens"] == 15 and config["model"].startswith("runs/")
    )


@pytest.mark.parametrize("words", [p for p in commands_of("python") if "sglang.launch_server" in p.values[0]])
def test_the_launch_line_of_sglang(words):
    assert words[1:3] == ["-m", "sglang.launch_server"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--speculative-algorithm"] == "DFLASH"
    assert options["--speculative-draft-model-path"].startswith("runs/")
    assert options["--speculative-num-draft-tokens"] == "16"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    asked = [{"role": "user", "content": "Say something."}, {"role": "assistant", "content": "Something, then."}]
    rows = [{"id": str(number), "messages": asked} for number in range(24)]
    Path("conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("benchmarks").mkdir()
    Path("benchmarks/results").symlink_to(ROOT / "benchmarks" / "results")
    examples(page)
    for words in commands(page):
        if words[0] == "dflash-pipe":
            assert dflash_pipe(words[1:], monkeypatch) == 0, shlex.join(words)
        elif words[:3] == ["python", "-m", "benchmarks"]:
            result = CliRunner().invoke(benchmarks, [*small(words[3:]), *BRIEF[words[3]]])
            assert result.exit_code == 0, shlex.join(words)


def small(words):
    """The command with a tiny model and few steps; one that names a target with its own rows stays."""
    if any(word.startswith("graphs/targets/random_") for word in words):
        return words
    words = [TARGET if word.startswith("target.model=") else word for word in words]
    return [*words, *(o for name, overrides in TINY.items() for o in overrides if f"graphs/{name}" in words)]


def dflash_pipe(words, monkeypatch):
    """Exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["dflash-pipe", *small(words)])
    interval = sys.getswitchinterval()
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.setswitchinterval(interval)
    return 0


def examples(page):
    """Write the page's files: the YAML and Python that it shows, if they begin with a name."""
    (code, *more) = blocks(page, "python") or [""]
    for text in [code + "".join(more), *blocks(page, "yaml")]:
        if name := re.match(r"# ([\w.]+)\n", text):
            Path(name[1]).write_text(text)


def test_the_example_stages_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples(ROOT / "docs" / "write_a_stage.md")
    names = {"__name__": "my_stages"}
    exec(compile(Path("my_stages.py").read_text(), "my_stages.py", "exec", dont_inherit=True), names)
    ones = torch.ones(2, 4, dtype=torch.long)
    tokens = TokenBatch(ones, ones.bool(), ones.sum(1), ones[:, 0])
    names["test_norms"](FeatureBatch(tokens, torch.randn(2, 4, 3 * 8)))
    Path("lines.txt").write_text("one\ntwo\nthree\n")
    lines = list(names["Lines"](path="lines.txt").read(None))
    assert [payload.text for _, payload in lines] == ["one\n", "two\n", "three\n"]
    assert list(names["Lines"](path="lines.txt").read(lines[0][0])) == lines[1:]


def test_what_the_example_transport_takes_is_measured_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    page = ROOT / "docs" / "write_a_transport.md"
    examples(page)
    for words in commands(page):
        assert dflash_pipe(words[1:], monkeypatch) == 0, shlex.join(words)
        assert "bound by hand-off of features" in capsys.readouterr().out


def test_the_example_topology_runs_without_gpus_as_it_is_said_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (topology,) = (text for text in blocks(ROOT / "README.md", "yaml") if "cuda:0" in text)
    Path("mine.yaml").write_text(
        topology.replace("cuda:", "auto:").replace("overlapped.yaml", "graphs/overlapped.yaml")
    )
    target = "graphs/targets/random_tiny_qwen3.yaml"
    assert dflash_pipe(["run", "mine.yaml", target, "data.steps=2"], monkeypatch) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not link.startswith("https://"):
            assert os.path.exists(page.parent / link), f"{page.name}: {link}"

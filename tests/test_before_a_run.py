"""What can be known before a run begins is told by `check`, and `run` refuses it before it has a folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stages.checkpoint import export
from stages.dflash_model import DrafterKeys, initial_parameters
from tests.test_data import RECIPE, row, write
from tests.test_random_targets import called

RANDOM = "graphs/overlapped.yaml graphs/targets/random_tiny_qwen3.yaml"
TINY = "graphs/overlapped.yaml graphs/targets/tiny_qwen3.yaml"
EVALUATE = "graphs/evaluate.yaml target.model=tiny:qwen3 drafter.path=export data.path=own.arrow"


@pytest.fixture(scope="module")
def written(model_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows of this target and of another, and with a drafter that reads layers 1, 3 and 5."""
    folder = tmp_path_factory.mktemp("written")
    for name, made_for, first in (("own.arrow", "tiny:qwen3", 20), ("foreign.arrow", "package:smollm2", 40_000)):
        write(
            folder / name,
            [row(9, first), row(9, first)],
            metadata={RECIPE: json.dumps({"tokenizer": made_for}).encode()},
        )
    drafter = DrafterKeys(target="tiny:qwen3", layers=[1, 3, 5], num_layers=1, block_size=4, mask_token_id=3).resolve()
    export(drafter, {}, initial_parameters(drafter, 0), folder / "export")
    (folder / "chats.jsonl").write_text('{"prompt": "fine"}\n')
    save_file({"std": torch.ones(3)}, folder / "narrow.safetensors")
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{RANDOM} drafter.num_layers=100000", "stages.drafter: num_layers is 100000, expected 1..100"),
        (f"{RANDOM} data.vocabulary=600000", "stages.data: vocabulary is 600000, expected at most 512"),
        (f"{TINY} data.path=foreign.arrow", "was made with the tokenizer of 'package:smollm2'"),
        (EVALUATE, "the drafter was trained with target layers [1, 3, 5], not [1, 2, 3, 4, 5]: set target.layers="),
        (f"{EVALUATE} target.layers=[1,3,5] drafter.block_size=9", "block_size is 9, expected 2..4"),
        (f"{RANDOM} drafter.head_dim=0", "stages.drafter: head_dim is 0, expected at least 1, or null"),
        (f"{RANDOM} drafter.head_dim=3", "stages.drafter: head_dim is 3, expected an even number"),
        (f"{RANDOM} drafter.feature_std=own.arrow", "feature_std: expected a .safetensors file with tensor 'std'"),
        (f"{RANDOM} drafter.feature_std=.", "feature_std: expected a .safetensors file with tensor 'std' [192]"),
        (f"{RANDOM} drafter.feature_std=narrow.safetensors", "feature_std: 'std' is (3,), expected [192]"),
        (f"{EVALUATE} drafter.path=own.arrow", "own.arrow is not a directory"),
        ("graphs/prepare.yaml conversations.path=export", "path: export is a folder, expected a JSON Lines file"),
        ("graphs/prepare.yaml conversations.path=chats.jsonl conversations.limit=0", "limit is 0, expected at least 1"),
        (
            "graphs/prepare.yaml conversations.path=chats.jsonl target.model=sizes:qwen3_8b",
            "target 'sizes:qwen3_8b': it has no tokenizer",
        ),
    ],
)
def test_it_is_refused_in_one_line(
    words: str,
    said: str,
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(written)
    for command in (["check"], ["run", "--plain", "--runs", str(tmp_path)]):
        assert called(monkeypatch, *command, *words.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
        where = line.partition(": ")[0]
        assert ".yaml:" in where or where in ("command line", words.rpartition("=")[2])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{TINY} data.path=ow.arrow", "stages.data: no data set at ow.arrow (did you mean 'own.arrow'?)"),
        (
            f"{RANDOM} drafter.feature_std=narow.safetensors",
            "stages.drafter: feature_std: no file narow.safetensors (did you mean 'narrow.safetensors'?)",
        ),
        (f"{EVALUATE} drafter.path=exports", "stages.drafter: path: no drafter at exports (did you mean 'export'?)"),
        (
            f"{EVALUATE} drafter.path=null drafter.keys={{feature_std:\\ none.safetensors}}",
            "stages.drafter: feature_std: no file none.safetensors",
        ),
        ("graphs/prepare.yaml conversations.path=chat.jsonl", "chat.jsonl (did you mean 'chats.jsonl'?)"),
        ("graphs/regenerate.yaml prompts.path=chat.jsonl", "chat.jsonl (did you mean 'chats.jsonl'?)"),
    ],
)
def test_what_is_not_there_is_told_by_check_and_refused_by_a_run(
    words: str,
    said: str,
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may be made before the graph is run."""
    monkeypatch.chdir(written)
    assert called(monkeypatch, "check", *shlex.split(words)) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert said in first and last.endswith("sound, as far as can be told without what is not here")
    assert called(monkeypatch, "run", "--plain", "--runs", str(tmp_path), *shlex.split(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.startswith("command line: ")
    assert not list(tmp_path.iterdir())


def test_what_fits_is_not(written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(written)
    for words in (RANDOM, f"{TINY} data.path=own.arrow", f"{EVALUATE} target.layers=[1,3,5]"):
        assert called(monkeypatch, "check", *words.split()) == 0, capsys.readouterr().err

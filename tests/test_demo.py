"""The demo without its model: which graphs it runs, and the numbers that it tells. `make demo` runs the whole of it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dflash_pipe import Context
from dflash_pipe.runtime import Result
from stages.data import TokenBatches
from stages.demo import Demo
from tests.training import TINY, run_of, write_rows


def test_one_dtype_for_the_answers_and_for_what_is_measured_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another dtype the target's greedy continuation may be another than the answers."""
    given: dict[str, tuple[str, ...]] = {}

    def graph(demo: Demo, graph: str, *overrides: str, name: str | None = None, seconds: float | None = None) -> None:
        given[name or graph] = overrides
        (tmp_path / (name or graph)).mkdir()
        (tmp_path / (name or graph) / "evaluation.json").write_text("{}")

    monkeypatch.setattr(Demo, "graph", graph)
    for dtype in ("float32", "bfloat16"):
        demo = Demo(tmp_path, 1.0, Console(file=io.StringIO()))
        demo.dtype = dtype
        demo.answer()
        demo.train("training", 3)
        demo.evaluate("after", "drafter.path=somewhere")
        assert set(given) == {"answers", "training", "after"}
        assert all(f"target.dtype={dtype}" in overrides for overrides in given.values())
        given.clear()
        for folder in ("answers", "training", "after"):
            (tmp_path / folder / "evaluation.json").unlink()
            (tmp_path / folder).rmdir()


def told(folder: Path, training: Result) -> dict[str, str]:
    """The rows of the closing table."""
    text = io.StringIO()
    tau = {"tau": 1.0, "responses": 2, "tokens": 30}
    Demo(folder, 1.0, Console(file=text, width=120)).tell(training, tau, tau)
    rows = re.findall(r"│ (.+?) +│ (.+?) +│", text.getvalue())
    return dict(rows)


@pytest.mark.parametrize("stopped_after", [None, 1])
def test_what_was_trained_is_counted_wherever_the_training_ended(tmp_path: Path, stopped_after: int | None) -> None:
    """Also within the first epoch, where the data stage has not reported anything yet."""
    (tmp_path / "data").mkdir()
    data = write_rows(tmp_path / "data" / "train.arrow", vocabulary=300)
    settings = [f"data.path={data}", *TINY, "window=1", "data.epochs=2", "batches.capacity=1"]
    run = run_of(["overlapped", "targets/tiny_llama"], settings, tmp_path / "training")
    lines: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any]) -> None:
        lines.append(metrics)
        if "step" in metrics and metrics["step"] == stopped_after:
            run.stop()

    run.on_report = report
    training = run.execute()
    (tmp_path / "training" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = max(line["step"] for line in lines if "digest" in line)
    sizes = [batch.measures for _, batch in batches(str(data))[:steps]]
    tokens, rows = (sum(size[name] for size in sizes) for name in ("tokens", "rows"))
    assert (rows == 2 * 24) == (stopped_after is None)
    table = told(tmp_path, training)
    assert table["trained tokens a second"] == f"{tokens / training.view.elapsed:,.0f}"
    assert table["steps, epochs"] == f"{steps}, {rows / 24:.1f}"


def batches(data: str) -> list[tuple[Any, Any]]:
    """What the run's data stage had to send, from the beginning."""
    source = TokenBatches(path=data, max_tokens=192, epochs=2)
    source.open(Context(seed=20))
    return list(source.read(None))


@pytest.mark.parametrize(("done", "said"), [(251, True), (318, False)])
def test_why_fewer_steps_were_trained_than_announced_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int, said: bool
) -> None:
    text = io.StringIO()
    trained = SimpleNamespace(view=SimpleNamespace(metrics={"step": done}))
    for name, result in {"answer": None, "evaluate": {}, "steps": 318, "train": trained, "tell": None}.items():
        monkeypatch.setattr(Demo, name, lambda *given, result=result, **named: result)
    Demo(tmp_path, 1.0, Console(file=text, width=120)).run()
    assert "Training for 318 steps" in text.getvalue()
    assert ("Ended at step 251 of 318: the time for training was up" in text.getvalue()) == said

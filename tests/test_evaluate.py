"""τ counted on a known continuation equals τ of a decode that really verifies block after block."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_pipe import BadInput, Context, Stamp
from stages.arrow_rows import RECIPE
from stages.checkpoint import export
from stages.dflash_loss import block_inputs
from stages.drafter import DrafterStep
from stages.drafter_files import load_drafter
from stages.evaluate import AcceptanceReport, AcceptanceWalk, summary
from stages.frozen import load_frozen
from stages.messages import AcceptanceCounts, FeatureBatch, TokenBatch
from stages.optimizer import AdamW
from stages.stacked import stacked
from stages.target_model import load_full, load_truncated
from tests.test_data import row, write

TARGET = "tiny:llama"
LAYERS = [1, 3, 5]
BLOCK = 4
KEYS: dict[str, Any] = {
    "target": TARGET,
    "layers": LAYERS,
    "num_layers": 1,
    "block_size": BLOCK,
    "mask_token_id": 3,
    "final_norm_init": 0.3,
}
PROMPTS = [list(range(5 + 7 * k, 9 + 7 * k)) + [20 + k] * k for k in range(4)]
NEW = 24  # tokens of each response


@dataclass
class Trained:
    """A drafter that has seen a few greedy continuations for some steps, and what it has seen."""

    folder: Path
    features: FeatureBatch
    target: Any


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trained]]:
    """A half trained and an overfitted drafter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_PIPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        target = load_full(TARGET, None, "float32", "cpu")
        features = features_of([*(p + greedy(target, p) for p in PROMPTS)], [[(len(p), len(p) + NEW)] for p in PROMPTS])
        made = {}
        for name, weights in overfit(features, {"half": 25, "whole": 300}).items():
            folder = tmp_path_factory.mktemp("drafter") / name
            export(*weights, folder)
            made[name] = Trained(folder, features, target)
        yield made


def greedy(target: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """Plain greedy decoding, one whole forward a token."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def features_of(rows: list[list[int]], spans: list[list[tuple[int, int]]]) -> FeatureBatch:
    width = max(map(len, rows)) + 3  # padding, which must not matter
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.bool)
    for k, (tokens, responses) in enumerate(zip(rows, spans, strict=True)):
        ids[k, : len(tokens)] = torch.tensor(tokens)
        for start, stop in responses:
            mask[k, start:stop] = True
    batch = TokenBatch(ids, mask, torch.tensor([len(r) for r in rows]), torch.arange(len(rows)), progress=(0.0, 1.0))
    return FeatureBatch(batch, load_truncated(TARGET, None, LAYERS, "float32", "cpu")(ids, batch.lengths))


def overfit(features: FeatureBatch, steps: dict[str, int]) -> dict[str, tuple[Any, dict[str, Any], Tensor]]:
    drafter = DrafterStep(**KEYS, num_anchors=64, gamma=None)
    optimizer = AdamW(drafter=KEYS, lr=4e-3, warmup=0.05)
    for stage in (drafter, optimizer):
        stage.open(Context(seed=1))
    params = optimizer.initial()
    kept: dict[str, tuple[Any, dict[str, Any], Tensor]] = {}
    last = max(steps.values())
    for step in range(last):
        tokens = features.tokens
        progress = (step / last, (step + 1) / last)
        batch = TokenBatch(tokens.input_ids, tokens.loss_mask, tokens.lengths, tokens.sample, step, progress)
        drafter.process(FeatureBatch(batch, features.hidden), params, Stamp(step, step, 0, True))
        params = optimizer.process((drafter.end_window(),))
        kept |= {name: (drafter.config, {}, params.flat) for name, at in steps.items() if at == step + 1}
    return kept


def walk(folder: Path | None, features: FeatureBatch, **fields: Any) -> AcceptanceCounts:
    fields = {"target": TARGET, "layers": LAYERS, "keys": KEYS, **fields}
    stage = AcceptanceWalk(path=None if folder is None else str(folder), **fields)
    stage.open(Context(seed=1))
    return stage.process(features)


def speculative(trained: Trained, prompt: list[int], block: int = BLOCK) -> tuple[list[int], list[int]]:
    """Step by step: draft, let the target run the block, keep what agrees and one token of its own.

    Returns the NEW tokens, and how many tokens each verification added.
    """
    config, model = load_drafter(trained.folder)
    model, frozen = model.float(), load_frozen(TARGET, None, torch.float32, "cpu")

    def run(ids: list[int]) -> tuple[Tensor, Tensor]:
        out = trained.target(torch.tensor([ids]), output_hidden_states=True)
        return torch.cat([out.hidden_states[i + 1] for i in LAYERS], -1), out.logits[0].argmax(-1)

    context, answers = run(prompt)
    ids, out, emitted = list(prompt), [int(answers[-1])], []
    while len(out) < NEW:
        anchor = torch.tensor([[len(ids)]])
        tokens = block_inputs(torch.tensor([[*ids, out[-1]]]), anchor, config.mask_token_id, block)
        drafted = model(F.embedding(tokens[0], frozen.embed), context, anchor, torch.tensor([[True]]))
        drafts = (drafted[0, 1:] @ frozen.head.T).argmax(-1).tolist()
        seen, answers = run([*ids, out[-1], *drafts])
        verified = answers[len(ids) :].tolist()
        accepted = next((k for k in range(block - 1) if drafts[k] != verified[k]), block - 1)
        ids, context = [*ids, out[-1], *drafts[:accepted]], seen[:, : len(ids) + 1 + accepted]
        added = [*drafts[:accepted], verified[accepted]][: NEW - len(out)]
        out += added
        emitted.append(len(added))
    return out, emitted


@torch.no_grad()
@pytest.mark.parametrize("name", ["half", "whole"])
@pytest.mark.parametrize("block", [BLOCK, 3])
def test_walk_equals_speculative_decoding(trained: dict[str, Trained], name: str, block: int) -> None:
    made = trained[name]
    counts = walk(made.folder, made.features, block_size=block)
    steps = []
    for k, prompt in enumerate(PROMPTS):
        out, emitted = speculative(made, prompt, block)
        assert out == greedy(made.target, prompt)
        assert int(counts.tokens[k]) == sum(emitted) == NEW - 1
        assert int(counts.verifications[k]) == len(emitted)
        steps.append(emitted)
    result = summary([counts])
    assert result["tau"] == sum(map(sum, steps)) / sum(map(len, steps))
    assert result["tau_mean"] == pytest.approx(np.mean([np.mean(emitted) for emitted in steps]))
    # A verification adds the accepted drafts and one more token, but for the last, which the response's end may cut.
    inner = np.bincount([n - 1 for emitted in steps for n in emitted[:-1]], minlength=block)
    assert (np.array(result["accepted"]) >= inner).all() and sum(result["accepted"]) == result["verifications"]
    if name == "half":
        assert len(set(np.flatnonzero(inner))) > 1  # blocks of several lengths, or the comparison shows little


def test_a_drafter_that_overfits_comes_close_to_its_block_size(trained: dict[str, Trained]) -> None:
    """Labels shifted by one, blocks that see one another, or layers off by one would all keep τ low."""
    counts = walk(trained["whole"].folder, trained["whole"].features)
    assert summary([counts])["tau"] > 0.9 * BLOCK
    fresh = walk(None, trained["whole"].features)
    assert summary([fresh])["tau"] < 1.5


def equal(a: AcceptanceCounts, b: AcceptanceCounts) -> bool:
    pairs = ((a.tokens, b.tokens), (a.verifications, b.verifications), (a.accepted, b.accepted), (a.offered, b.offered))
    return all(torch.equal(*pair) for pair in pairs) and a.unverified == b.unverified


@pytest.mark.parametrize("anchors", [1, 2, 7])
def test_blocks_drafted_ahead_change_nothing(trained: dict[str, Trained], anchors: int) -> None:
    made = trained["half"]
    assert equal(walk(made.folder, made.features, anchors=anchors), walk(made.folder, made.features))


@pytest.mark.parametrize("name", ["half", "whole"])
def test_every_response_of_a_row_is_walked(trained: dict[str, Trained], name: str) -> None:
    """Several responses in a row, a row without, one of a single token: as if each stood alone."""
    made = trained[name]
    tokens = made.features.tokens
    rows = [ids[:n].tolist() for ids, n in zip(tokens.input_ids, tokens.lengths, strict=True)]
    spans = [[(4, 9), (10, 22), (23, 28)], [], [(2, 3), (8, 27)], [(7, 9), (11, 31)]]
    together = walk(made.folder, features_of(rows, spans), anchors=3)
    alone = [walk(made.folder, features_of([rows[k]], [[s]])) for k, row_spans in enumerate(spans) for s in row_spans]
    assert together.tokens.tolist() == [4, 11, 4, 18, 1, 19] and together.unverified == 1
    assert together.verifications.tolist() == [n for counts in alone for n in counts.verifications.tolist()]
    assert together.accepted.tolist() == torch.stack([c.accepted for c in alone]).sum(0).tolist()
    assert together.offered.tolist() == torch.stack([c.offered for c in alone]).sum(0).tolist()
    assert int(together.accepted.sum()) == int(together.offered[0]) == int(together.verifications.sum())


def test_nothing_is_accepted_behind_the_end(trained: dict[str, Trained]) -> None:
    """The drafter is right about the next three tokens, but the response has only two more."""
    made = trained["whole"]
    tokens = made.features.tokens
    row, start = tokens.input_ids[0, : int(tokens.lengths[0])].tolist(), len(PROMPTS[0])
    for stop, accepted, offered in ((4, [0, 0, 0, 1], [1, 1, 1, 1]), (3, [0, 0, 1, 0], [1, 1, 1, 0])):
        counts = walk(made.folder, features_of([row], [[(start, start + stop)]]))
        assert counts.accepted.tolist() == accepted and counts.offered.tolist() == offered


@pytest.mark.parametrize("name", ["half", None])
def test_matrices_that_meet_the_same_input_lie_below_each_other(trained: dict[str, Trained], name: str | None) -> None:
    """Or the fused layers would copy all of them at each draft."""
    made = trained[name or "half"]
    stage = AcceptanceWalk(path=name and str(made.folder), target=TARGET, layers=LAYERS, keys=KEYS)
    stage.open(Context(seed=1))
    features = made.features
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        stage.process(dataclasses.replace(features, hidden=features.hidden.to(dtype)))
        assert {weight.dtype for weight in stage.model.parameters()} == {dtype}
        assert not any(weight.requires_grad for weight in stage.model.parameters())
        for layer in stage.model.layers:
            part, mlp = layer.self_attn, layer.mlp
            for together in ((part.q_proj, part.k_proj, part.v_proj), (mlp.gate_proj, mlp.up_proj)):
                weights = [each.weight for each in together]
                assert stacked(*weights).data_ptr() == weights[0].data_ptr()


def counted(tokens: list[int], passes: list[int], accepted: list[int], offered: list[int], **more: int) -> Any:
    of = {"tokens": tokens, "verifications": passes, "accepted": accepted, "offered": offered}
    return AcceptanceCounts(**{name: torch.tensor(values) for name, values in of.items()}, **more)  # type: ignore[arg-type]


def test_report(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    stage = AcceptanceReport(about={"drafter": "d"})
    stage.open(Context(folder=tmp_path, report=reports.append))
    stage.process(counted([6, 4], [2, 4], [4, 0, 2], [6, 6, 5], unverified=1))
    stage.process(counted([2], [1], [0, 1, 0], [1, 1, 0]))
    stage.finish()
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["tau"] == pytest.approx(12 / 7) and result["tau_mean"] == pytest.approx((3 + 1 + 2) / 3)
    assert result["accepted"] == [4, 1, 2] and result["acceptance_by_slot"] == pytest.approx([3 / 7, 2 / 5])
    assert result["responses"] == 3 and result["responses_of_one_token"] == 1 and result["about"] == {"drafter": "d"}
    assert reports[0]["tau"] == result["tau"] and "accepted" not in reports[0]
    empty = AcceptanceReport()
    empty.open(Context(folder=tmp_path))
    empty.process(counted([], [], [0, 0], [0, 0], unverified=1))
    with pytest.raises(BadInput, match="no response has two tokens"):
        empty.finish()


def test_another_template_is_warned_of(
    trained: dict[str, Trained], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = {"key": "k", "template": "t", "thinking": True, "responses": "target"}
    data = write(tmp_path / "eval.arrow", [row(4)], metadata={RECIPE: json.dumps(recipe).encode()})
    config, _ = load_drafter(trained["half"].folder)
    _, _, flat = overfit(trained["half"].features, {"one": 1})["one"]
    export(config, {"data": {"template": "t", "thinking": True}}, flat, tmp_path / "same")
    export(config, {"data": {"template": "t", "thinking": False}}, flat, tmp_path / "other")
    with caplog.at_level(logging.WARNING):
        walk(tmp_path / "same", trained["half"].features, data=str(data))
        assert not caplog.records
        walk(tmp_path / "other", trained["half"].features, data=str(data))
    assert ["trained with thinking False, the data has True" in r.getMessage() for r in caplog.records] == [True]
    caplog.clear()
    given = write(tmp_path / "given.arrow", [row(4)], metadata={RECIPE: b'{"responses": "given"}'})
    walk(tmp_path / "same", trained["half"].features, data=str(given))
    assert "not the target's own" in caplog.text


def test_what_does_not_fit_is_refused(trained: dict[str, Trained]) -> None:
    made = trained["half"]
    with pytest.raises(BadInput, match="num_layers is 0"):
        AcceptanceWalk(path=None, target=TARGET, keys={"num_layers": 0}).check(1)
    with pytest.raises(BadInput, match=r"trained with target layers \[1, 3, 5\], not \[1, 3, 6\]: set target.layers="):
        walk(made.folder, made.features, layers=[1, 3, 6])
    with pytest.raises(BadInput, match=r"no drafter at nowhere"):
        walk(Path("nowhere"), made.features)
    with pytest.raises(BadInput, match=r"block_size is 5, expected 2\.\.4"):
        walk(made.folder, made.features, block_size=5)
    for fields, said in (({"layers": [1, 3, 6]}, "set target.layers="), ({"block_size": 5}, "expected 2..4")):
        stage = AcceptanceWalk(**{"path": str(made.folder), "target": TARGET, "layers": LAYERS, **fields})
        with pytest.raises(BadInput, match=said):  # before anything runs, too
            stage.footprint(Context(), {"features": None})
    narrow = FeatureBatch(made.features.tokens, made.features.hidden[..., :64])
    with pytest.raises(BadInput, match=r"features are 64 wide, but the drafter reads 192 .*\[1, 3, 5\]"):
        walk(made.folder, narrow)

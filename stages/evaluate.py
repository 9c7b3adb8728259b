"""Exact acceptance length of greedy speculative decoding, without decoding.

Greedy speculative decoding emits the target's own greedy continuation. Where that is known, each verification is known
before it is made: of the block drafted at an anchor, the target accepts what agrees with the continuation, and the next
anchor is the token behind. So τ is counted on the continuation itself: one target pass, no cache, no rollback.

Shape legend: B sequences, S padded length, W responses, N anchors drafted at once for a response, b block size.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_pipe import BadInput, Context, Footprint, Stage
from stages.arrow_rows import recipe_of
from stages.dflash_config import MOST_ANCHORS, DrafterConfig
from stages.dflash_loss import block_inputs
from stages.dflash_masks import resolve_attention
from stages.dflash_model import DFlashModel, DrafterKeys, flatten, initial_parameters
from stages.drafter_files import load_drafter, read_config, read_record, refuse_other_target
from stages.footprints import drafter_step_bytes, parameter_count
from stages.frozen import load_frozen
from stages.messages import AcceptanceCounts, FeatureBatch
from stages.model_source import Weights, text_config
from stages.target_model import resolve_dtype, resolve_layers

__all__ = ["AcceptanceReport", "AcceptanceWalk"]

_HEAD_ROWS = 1024  # drafted tokens that meet the head at once
_MUST_MATCH = ("vocabulary", "template", "thinking")
log = logging.getLogger("dflash_pipe")


@dataclass
class _Walks:
    """W responses on their way, ordered by row. row, stop: [W] int64; response w is tokens of row[w] before stop[w].

    anchor: [W] int64, the last token that is known; a walk ends when that is the response's last.
    """

    row: np.ndarray
    stop: np.ndarray
    anchor: np.ndarray

    @staticmethod
    def of(loss_mask: Tensor) -> _Walks:
        """Every run of supervised tokens in [B, S] is one response; its first token is its first anchor."""
        edges = np.diff(np.pad(loss_mask.cpu().numpy().astype(np.int8), ((0, 0), (1, 1))))
        row, first = np.nonzero(edges == 1)
        return _Walks(row, np.nonzero(edges == -1)[1], first)

    def going(self, most: int) -> np.ndarray:
        """Numbers of the walks that have not ended: of each row the first `most`."""
        live = np.flatnonzero(self.anchor < self.stop - 1)
        return live[_places(self.row[live]) < most]


def _places(row: np.ndarray) -> np.ndarray:
    """[W] ordered -> a walk's number among those of its row."""
    _, first, of_row = np.unique(row, return_index=True, return_inverse=True)
    return np.arange(len(row)) - first[of_row]


class AcceptanceWalk(Stage):
    """Walk along the known responses of a batch as greedy speculative decoding would, all of them side by side.

    A response is a run of supervised tokens. What a pass accepts is counted up to the response's end only.

    path: folder of an exported drafter; null: a fresh one, to know where training begins. target, revision: whose
    embedding and head it drafts with. layers: the captured layers, which must be the ones it was trained with. keys:
    what a fresh drafter is built from (those of stage drafter, such as num_layers, block_size and mask_token_id). data:
    the data set that is walked; a warning is logged where the drafter was trained with another template or thinking
    flag, or where the responses are not the target's own. block_size: a smaller one than was trained (null: the same).
    anchors: blocks drafted in one pass for a row, at its responses' anchors and at the tokens behind, most of which the
    walk then needs no further pass for; the result is the same for every number. weights: "random" reads no checkpoint.
    """

    path: str | None
    target: str
    revision: str | None = None
    layers: int | list[int] = 5
    keys: dict[str, Any] | None = None
    data: str | None = None
    block_size: int | None = None
    anchors: int = 64
    weights: Weights = "pretrained"

    def check(self, replicas: int) -> None:
        if not 1 <= self.anchors <= MOST_ANCHORS:
            raise BadInput(f"anchors is {self.anchors}, expected 1..{MOST_ANCHORS}")
        if self.block_size is not None and self.block_size < 2:
            raise BadInput(f"block_size is {self.block_size}, expected at least 2, or null: as it was trained")
        if self.path is None:
            self._keys().check()

    def _keys(self) -> DrafterKeys:
        of_target = {"target": self.target, "revision": self.revision, "layers": self.layers, "weights": self.weights}
        return DrafterKeys.pick({**(self.keys or {}), **of_target})

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Weights and the frozen matrices in the dtype that a target of dtype auto computes in; what one pass needs.
        Drafting keeps no more of a layer than training does; a part of the rows is drafted with a copy of theirs."""
        config = self._keys().sizes() if self.path is None else read_config(self.path)
        self._refuse_misfit(config)
        device, dtype = torch.device(ctx.device), resolve_dtype("auto", ctx.device)
        shapes, parameters = told["features"] or [], parameter_count(config)
        attention = resolve_attention("auto", device, config.head_dim)
        kinds = {"fused": attention == "fused", "dense": attention == "sdpa"}
        one = dataclasses.replace(config, num_hidden_layers=1, layer_types=config.layer_types[:1])
        drafting = drafter_step_bytes(one, shapes, self.anchors, dtype, **kinds)
        some = max(((rows - 1) * length for rows, length in shapes), default=0) * config.feature_size * dtype.itemsize
        matrix = config.vocab_size * config.hidden_size * dtype.itemsize
        tied = text_config(self.target, self.revision).tie_word_embeddings
        return Footprint(
            held={"weights": parameters * dtype.itemsize, "frozen embedding and head": matrix * (1 if tied else 2)},
            working={
                f"drafting of {self.anchors} blocks a row": drafting + some,
                "logits": _HEAD_ROWS * config.vocab_size * dtype.itemsize,
            },
            host={"weights, as they are read": 4 * parameters},
        )

    def open(self, ctx: Context) -> None:
        """Raises BadInput where drafter, target, layers and block size do not fit together."""
        self.check(replicas=1)
        self.device = torch.device(ctx.device)
        if self.path is not None:
            self.config, self.model = load_drafter(self.path)
            self._warn_of_differences(read_record(self.path))
        else:
            self._open_fresh(ctx.seed)
        self._refuse_misfit(self.config)
        self.block = self.config.block_size if self.block_size is None else self.block_size
        self.dtype: torch.dtype | None = None

    def _refuse_misfit(self, config: DrafterConfig) -> None:
        """Raise BadInput where a drafter of these numbers is for another target, other layers or smaller blocks."""
        refuse_other_target(config, self.target, self.revision)
        here, trained = resolve_layers(self.layers, config.num_target_layers), list(config.target_layer_ids)
        if here != trained:
            raise BadInput(
                f"the drafter was trained with target layers {trained}, not {here}: set target.layers={trained}"
            )
        if self.block_size is not None and not 2 <= self.block_size <= config.block_size:
            raise BadInput(f"block_size is {self.block_size}, expected 2..{config.block_size}, which was trained")

    def _open_fresh(self, seed: int) -> None:
        keys = self._keys()
        self.config = keys.resolve()
        self.model = DFlashModel(self.config, device="meta")
        flatten(self.model).load(initial_parameters(self.config, seed, keys.feature_std, keys.final_norm_init))
        self.model.requires_grad_(False)

    def _warn_of_differences(self, record: dict[str, Any]) -> None:
        if record.get("target") not in (None, self.target):
            log.warning("the drafter was trained for %s; the target is %s", record["target"], self.target)
        walked = recipe_of(self.data) if self.data else {}
        trained = record.get("data", {})
        for key in _MUST_MATCH:
            if key in walked and key in trained and walked[key] != trained[key]:
                log.warning(
                    "the drafter was trained with %s %r, the data has %r: expect a low acceptance length",
                    *(key, trained[key], walked[key]),
                )
        if walked and walked.get("responses") != "target":
            log.warning("the responses in %s are not the target's own: τ on them is no decoding speed", self.data)

    @torch.no_grad()
    def process(self, features: FeatureBatch) -> AcceptanceCounts:
        """Raises BadInput for features of another width than the drafter reads."""
        self._fit(features.hidden)
        walks = _Walks.of(features.tokens.loss_mask)
        first = walks.anchor.copy()
        verifications = np.zeros(len(first), dtype=np.int64)
        accepted, offered = np.zeros((2, self.block), dtype=np.int64)
        most = min(self.anchors, features.hidden.shape[1] - 1)
        while len(live := walks.going(most)):
            start = walks.anchor[live]
            agreed = self._agreement(features, walks.row[live], walks.stop[live], start, most)
            while True:
                at = walks.anchor[live] - start
                here = np.flatnonzero((at < agreed.shape[1]) & (walks.anchor[live] < walks.stop[live] - 1))
                if not len(here):
                    break
                walk, count = live[here], agreed[here, at[here]]
                room = np.minimum(walks.stop[walk] - 1 - walks.anchor[walk], self.block - 1)
                verifications[walk] += 1
                accepted += np.bincount(count, minlength=self.block)
                offered += np.bincount(room, minlength=self.block)[::-1].cumsum()[::-1]
                # The target's own token behind the accepted ones, unless the response ends with them.
                walks.anchor[walk] = np.minimum(walks.anchor[walk] + count + 1, walks.stop[walk] - 1)
        walked = verifications > 0
        emitted = (walks.stop - 1 - first)[walked]
        by_response = torch.from_numpy(emitted), torch.from_numpy(verifications[walked])
        by_slot = torch.from_numpy(accepted), torch.from_numpy(offered)
        return AcceptanceCounts(*by_response, *by_slot, unverified=int((~walked).sum()))

    def _fit(self, hidden: Tensor) -> None:
        """Compute in the dtype of the features, which is known with the first batch."""
        if hidden.shape[2] != self.config.feature_size:
            raise BadInput(
                f"features are {hidden.shape[2]} wide, but the drafter reads {self.config.feature_size}"
                f" (target layers {list(self.config.target_layer_ids)})"
            )
        if self.dtype != hidden.dtype:
            self.dtype = hidden.dtype
            flatten(self.model, self.device, self.dtype)  # matrices that are multiplied as one lie below each other
            self.model.requires_grad_(False)
            self.frozen = load_frozen(self.target, self.revision, self.dtype, self.device, self.weights)

    def _agreement(
        self, features: FeatureBatch, row: np.ndarray, stop: np.ndarray, start: np.ndarray, most: int
    ) -> np.ndarray:
        """[W, N'] int64: drafted tokens that agree with the response in the blocks at start, start + 1, ...

        row, stop, start: [W], ordered by row. most: blocks a row, at least as many as it has walks. 0 where no block is
        drafted, because the response has no token behind.
        """
        rows, of_row = np.unique(row, return_inverse=True)
        place = _places(row)
        width = min(most // (int(place.max()) + 1), int((stop - 1 - start).max()))
        spot = start[:, None] + np.arange(width)
        anchors, keep, ends = np.zeros((3, len(rows), place.max() + 1, width), dtype=np.int64)
        keep[of_row, place] = spot < stop[:, None] - 1
        anchors[of_row, place] = spot * keep[of_row, place]
        ends[of_row, place] = stop[:, None]
        flat = (x.reshape(len(rows), -1) for x in (anchors, keep.astype(bool), ends))
        return self._draft(features, rows, *flat).reshape(anchors.shape)[of_row, place]

    def _draft(
        self, features: FeatureBatch, rows: np.ndarray, anchors: np.ndarray, keep: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """[R, N] int64 agreeing tokens of one block at each anchor [R, N] of the batch's rows [R]; ends: [R, N]."""
        tokens, hidden = features.tokens.input_ids, features.hidden
        if len(rows) < len(tokens):
            some = torch.from_numpy(rows).to(self.device)
            tokens, hidden = tokens[some], hidden[some]
        anchor, kept, end = (torch.from_numpy(x).to(self.device) for x in (anchors, keep, ends))
        ids = block_inputs(tokens, anchor, self.config.mask_token_id, self.block)
        out = self.model(F.embedding(ids.flatten(1), self.frozen.embed), hidden, anchor, kept)
        drafts = out.unflatten(1, (-1, self.block))[kept][:, 1:]  # [blocks, b-1, H]
        guess = torch.cat([(part @ self.frozen.head.T).argmax(-1) for part in drafts.flatten(0, 1).split(_HEAD_ROWS)])
        position = anchor[kept][:, None] + torch.arange(1, self.block, device=self.device)
        row = kept.nonzero()[:, :1]
        label = tokens[row, position.clamp(max=tokens.shape[1] - 1)]
        agrees = (guess.view_as(label) == label) & (position < end[kept][:, None])
        counts = torch.zeros(anchors.shape, dtype=torch.int64, device=self.device)
        counts[kept] = agrees.cumprod(1).sum(1)
        return counts.cpu().numpy()


class AcceptanceReport(Stage):
    """Write evaluation.json into the run's folder: both means of τ, and how far blocks were accepted.

    about: anything that says what was measured, such as the drafter and the data; kept as it is.
    """

    about: dict[str, Any] | None = None

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Next to nothing: a few numbers of each response."""
        return Footprint()

    def open(self, ctx: Context) -> None:
        self.ctx = ctx
        self.batches: list[AcceptanceCounts] = []

    def process(self, counts: AcceptanceCounts) -> None:
        self.batches.append(counts)

    def finish(self) -> None:
        """Raises BadInput if there was no response of at least two tokens."""
        if not self.batches:
            return  # stopped before anything was walked
        if not any(len(counts.tokens) for counts in self.batches):
            raise BadInput("no response has two tokens: there is nothing to verify a draft with")
        result = summary(self.batches)
        self.ctx.report({name: value for name, value in result.items() if isinstance(value, int | float)})
        text = json.dumps({**result, "about": self.about or {}}, indent=2)
        self.ctx.folder.mkdir(parents=True, exist_ok=True)
        (self.ctx.folder / "evaluation.json").write_text(text + "\n", encoding="utf-8")


def summary(batches: list[AcceptanceCounts]) -> dict[str, Any]:
    """tau: tokens a verification, over everything; tau_mean: mean over responses of each one's own (z-lab's way).

    accepted: verifications by accepted drafts, 0..b-1. acceptance_by_slot: of the verifications in which slot k had a
    token to be compared with, the share that accepted slots 1..k (k = 1..b-1; null: there were none).
    """
    tokens = torch.cat([counts.tokens.cpu() for counts in batches]).double()
    verifications = torch.cat([counts.verifications.cpu() for counts in batches]).double()
    accepted = torch.stack([counts.accepted.cpu() for counts in batches]).sum(0)
    offered = torch.stack([counts.offered.cpu() for counts in batches]).sum(0).tolist()
    reached = accepted.flip(0).cumsum(0).flip(0).tolist()
    return {
        "tau": float(tokens.sum() / verifications.sum()),
        "tau_mean": float((tokens / verifications).mean()),
        "responses": len(tokens),
        "responses_of_one_token": sum(counts.unverified for counts in batches),
        "tokens": int(tokens.sum()),
        "verifications": int(verifications.sum()),
        "block_size": len(accepted),
        "accepted": accepted.tolist(),
        "acceptance_by_slot": [n / of if of else None for n, of in zip(reached[1:], offered[1:], strict=True)],
    }

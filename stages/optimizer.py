"""The optimizer: AdamW on flat float32 master weights, one step a window; the only stage that holds state.

Decoupled weight decay (arXiv 1711.05101); linear warm-up, then half a cosine. P is the number of drafter parameters.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dflash_pipe import BadInput, Context, Footprint, Stage, refuse_other_form
from dflash_pipe.errors import BadSnapshot
from stages.dflash_loss import Sums
from stages.dflash_model import DFlashModel, DrafterKeys, initial_parameters, parameter_layout
from stages.footprints import parameter_count
from stages.messages import Gradients, Parameters, Partial
from stages.splitmix import AT_ONCE, digest
from stages.target_model import resolve_dtype

__all__ = ["AdamW", "learning_rate"]

_FLAT = ("masters", "exp_avg", "exp_avg_sq")
_COUNTERS = ("step", "skipped", "empty")


def learning_rate(peak: float, warmup: float, before: float, after: float) -> float:
    """The rate of a window that covers the shares `before`..`after` of the training.

    Rises linearly over the share `warmup`, then falls along half a cosine. The rise looks at the window's end and the
    fall at its begin, so that neither the first nor the last window has a rate of zero.
    """
    rise = min(1.0, after / warmup) if warmup > 0 else 1.0
    fallen = min(1.0, max(0.0, (before - warmup) / (1.0 - warmup)))
    return peak * rise * 0.5 * (1.0 + math.cos(math.pi * fallen))


class AdamW(Stage):
    """Add the partial gradients in order of their number, divide by the window's weight, clip, step, publish.

    drafter: the whole `with:` mapping of stage drafter. lr: peak rate. betas, eps: of Adam's moments. warmup: share of
    the training. max_norm: of the gradient (null: no clipping). weight_decay: of matrices; norms never decay.
    nonfinite: what to do about a loss or gradient that is not finite: "halt" raises FloatingPointError and names the
    step, "skip" leaves weights and moments as they are, counts the window and says so in the metrics. A window without
    any supervised token changes nothing either and is counted as `empty`.
    digest: put a hash of the summed gradient's bits into the metrics.

    The published weights are a fresh copy in the drafter's compute dtype; masters and moments stay float32.
    """

    untimed = ("lr", "betas", "eps", "weight_decay", "max_norm", "warmup")
    drafter: dict[str, Any]
    lr: float = 6.0e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1.0e-8
    weight_decay: float = 0.01
    max_norm: float | None = 1.0
    warmup: float = 0.04
    nonfinite: Literal["halt", "skip"] = "halt"
    digest: bool = False

    def check(self, replicas: int) -> None:
        if replicas != 1:
            raise BadInput(f"the optimizer holds state, expected 1 replica, not {replicas}")
        if not 0.0 <= self.warmup < 1.0:
            raise BadInput(f"warmup is {self.warmup}, expected a share of the training, 0 <= warmup < 1")
        if not self.lr > 0:
            raise BadInput(f"lr is {self.lr}, expected a positive number")
        if self.max_norm is not None and not self.max_norm > 0:
            raise BadInput(f"max_norm is {self.max_norm}, expected a positive number (or null: no clipping)")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise BadInput(f"betas are {self.betas}, expected two numbers, 0 <= beta < 1")
        if self.weight_decay < 0 or self.eps < 0:
            raise BadInput(f"weight_decay is {self.weight_decay} and eps {self.eps}, expected numbers >= 0")
        DrafterKeys.pick(self.drafter).check()

    def footprint(self, ctx: Context, told: dict[str, Any]) -> Footprint:
        """Masters and two moments in float32; while it steps, the partials' sum and that divided by the weight, and
        three 64-bit numbers for each that is hashed at once (`stages.splitmix.digest`)."""
        keys = DrafterKeys.pick(self.drafter)
        size = parameter_count(keys.sizes())
        sums = 2 if self.drafter.get("partials", 1) > 1 else 1  # a single partial is used as it came
        sent = size * resolve_dtype(keys.dtype, ctx.device).itemsize
        working = {"gradient": 4 * size * sums}
        if self.digest:
            working["digest"] = 24 * min(size, AT_ONCE)
        host = {"state, as it is saved": 12 * size}
        return Footprint({"float32 weights and moments": 12 * size}, working, host=host, sent=sent)

    def open(self, ctx: Context) -> None:
        keys = DrafterKeys.pick(self.drafter)
        self.config = keys.resolve()
        self._device = torch.device(ctx.device)
        self._dtype = resolve_dtype(keys.dtype, self._device)
        self._layout = parameter_layout(DFlashModel(self.config, device="meta"))
        start = initial_parameters(self.config, ctx.seed, keys.feature_std, keys.final_norm_init)
        self._flats = {name: torch.zeros_like(start, device=self._device) for name in _FLAT}
        self._flats["masters"].copy_(start)
        self._counters = dict.fromkeys(_COUNTERS, 0)

    def initial(self) -> Parameters:
        """The first token of the feedback channel: the initial weights, or the restored ones."""
        return self._publish({})

    def process(self, grads: tuple[Gradients, ...]) -> Parameters:
        gradient, summed = _add_partials(grads)
        sums = Sums(summed.vector.cpu())  # once: each look at them on a GPU would wait for it
        before = min(g.progress[0] for g in grads)
        after = max(g.progress[1] for g in grads)
        metrics: dict[str, Any] = sums.metrics()
        if self.digest:
            metrics["digest"] = digest(gradient)
        metrics["lr"] = learning_rate(self.lr, self.warmup, before, after)
        if not float(sums.counts.sum()):  # the weight may be above zero all the same: D-PACE's counts sequences
            self._counters["empty"] += 1
            return self._publish(metrics | {"grad_norm": 0.0})
        weight = float(sums.weight)
        metrics["grad_norm"] = norm = float(torch.linalg.vector_norm(gradient)) / weight
        if not (math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["loss"])):
            return self._not_finite(metrics)
        clipped = 1.0 if self.max_norm is None else min(1.0, self.max_norm / max(norm, self.max_norm))
        self._update(gradient * (clipped / weight), metrics["lr"])
        return self._publish(metrics)

    def _not_finite(self, metrics: dict[str, Any]) -> Parameters:
        if self.nonfinite == "halt":
            raise FloatingPointError(
                f"step {self._counters['step'] + 1}: loss is {metrics['loss']}, norm of the gradient is "
                f"{metrics['grad_norm']} (nonfinite: skip would leave such windows out and count them)"
            )
        self._counters["skipped"] += 1
        return self._publish(metrics)

    @torch.no_grad()
    def _update(self, gradient: Tensor, lr: float) -> None:
        """One AdamW step. Matrices and norms are two lists, because only matrices decay."""
        for matrices in (True, False):
            slots = [slot for slot in self._layout.values() if (len(slot.shape) == 2) == matrices]
            # One count each, because torch adds one to every count it is given.
            done = torch.full((len(slots),), float(self._counters["step"]), device=self._device)
            adamw(
                params=[slot.of(self._flats["masters"]) for slot in slots],
                grads=[slot.of(gradient) for slot in slots],
                exp_avgs=[slot.of(self._flats["exp_avg"]) for slot in slots],
                exp_avg_sqs=[slot.of(self._flats["exp_avg_sq"]) for slot in slots],
                max_exp_avg_sqs=[],
                state_steps=list(done.unbind()),
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=self.weight_decay if matrices else 0.0,
                eps=self.eps,
                maximize=False,
            )
        self._counters["step"] += 1

    def _publish(self, metrics: dict[str, Any]) -> Parameters:
        counters = {name: self._counters[name] for name in ("skipped", "empty")} if metrics else {}
        flat = self._flats["masters"].to(self._dtype, copy=True)
        return Parameters(flat, self._counters["step"], metrics | counters)

    def state(self) -> dict[str, Any]:
        """float32 masters and moments [P], the counters, and the drafter's numbers, so that `restore` can compare."""
        arrays = {name: flat.to("cpu", copy=True).numpy() for name, flat in self._flats.items()}
        return {**arrays, **self._counters, "drafter": _plain(self.config)}

    def state_digest(self) -> str:
        """Of the masters, the moments and the counters, made where they are: copying them takes many seconds."""
        counters = "-".join(str(self._counters[name]) for name in _COUNTERS)
        return "".join(digest(self._flats[name]) for name in _FLAT) + f"-{counters}"

    def restore(self, state: dict[str, Any]) -> None:
        """Raises BadSnapshot for a state of another drafter, or one that is not complete."""
        missing = sorted({*_FLAT} - set(state))
        if missing:
            raise BadSnapshot(f"the saved optimizer state lacks {', '.join(missing)}")
        refuse_other_form({**dict.fromkeys(_COUNTERS, 0), "drafter": {}}, state, "state")
        here = _plain(self.config)
        for key, value in here.items():
            if state["drafter"].get(key) != value:
                raise BadSnapshot(
                    f"the saved optimizer state is of another drafter: "
                    f"its {key} is {state['drafter'].get(key)!r}, here it is {value!r}"
                )
        for name, flat in self._flats.items():
            saved = np.asarray(state[name])
            if saved.shape != tuple(flat.shape) or saved.dtype != np.float32:
                raise BadSnapshot(
                    f"the saved {name} is {saved.dtype}{list(saved.shape)}, expected float32{list(flat.shape)}"
                )
            flat.copy_(torch.from_numpy(saved))
        self._counters = {name: state[name] for name in _COUNTERS}


def _plain(config: Any) -> dict[str, Any]:
    """A config as JSON would give it back."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(config).items()
    }


def _add_partials(grads: tuple[Gradients, ...]) -> tuple[Tensor, Sums]:
    """([P] float32, Sums) of the window: all partials, added in order of their number whoever held them.

    The payloads are not written to. Raises RuntimeError unless the numbers are 0..n-1, once each.
    """
    partials: dict[int, Partial] = {}
    numbers = sorted(number for g in grads for number in g.partials)
    if numbers != list(range(len(numbers))) or not numbers:
        raise RuntimeError(f"partials {numbers} arrived, expected 0..n-1, each once")
    for g in grads:
        partials |= g.partials
    gradient, sums = partials[0].gradient, partials[0].sums
    for number in numbers[1:]:
        if number == 1:
            gradient, sums = gradient + partials[1].gradient, sums + partials[1].sums
        else:
            gradient.add_(partials[number].gradient)
            sums.add_(partials[number].sums)
    return gradient, Sums(sums)

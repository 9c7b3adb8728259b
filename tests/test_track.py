"""Metrics of a step reach the run as plain numbers; weights that no step made are passed over."""

from __future__ import annotations

import json
from typing import Any

import torch

from dflash_pipe import Context
from stages.messages import Parameters
from stages.track import Track


def test_track_reports_plain_numbers_of_steps() -> None:
    reports: list[dict[str, Any]] = []
    stage = Track()
    stage.open(Context(report=reports.append))
    stage.process(Parameters(torch.zeros(2), 0))
    stage.process(Parameters(torch.zeros(2), 1, {"loss": torch.tensor(1.5), "lr": 0.1, "digest": "ab"}))
    assert reports == [{"step": 1, "loss": 1.5, "lr": 0.1, "digest": "ab"}]
    assert type(reports[0]["loss"]) is float and json.dumps(reports)

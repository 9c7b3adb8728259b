"""On a GPU service times come from events on the worker's stream, read when they have completed, never waited for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_pipe.trace import critical, write_chrome
from stages.devices import DeviceTransport, HostStagedTransport
from stages.messages import Parameters
from tests.test_trace import broken_rules
from tests.training import TINY, train, write_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # compilers and kernel packages warn of what is not ours
]


def test_marks_are_events_that_nobody_waits_for() -> None:
    transport = DeviceTransport()
    transport.enter("cuda:0")
    begin = transport.mark("cuda:0")
    torch.cuda._sleep(200_000_000)
    end = transport.mark("cuda:0")
    assert transport.elapsed(begin, end) is None
    torch.cuda.synchronize()
    elapsed = transport.elapsed(begin, end)
    assert elapsed is not None and 0.02 < elapsed < 2.0
    memory = transport.memory("cuda:0")
    assert memory is not None and 0 <= memory[0] < memory[1]


@pytest.mark.parametrize("topology", ["sequential", "overlapped"])
def test_a_recorded_training_has_a_profile_a_valid_trace_and_knows_its_memory(topology: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "train.arrow", vocabulary=300)
    settings = [f"data.path={rows}", *TINY, "data.epochs=12"]
    result = train([topology, "targets/tiny_llama"], settings, tmp_path / "run").result
    profile, timeline = result.profile, result.timeline
    assert profile is not None and timeline is not None, result.unmeasured
    assert profile.memory["cuda:0"].peak > 0 and "target" in profile.memory["cuda:0"].stages
    assert all(samples.mean > 0 for parts in profile.stages.values() for samples in parts.values())
    busy = sum(samples.total for parts in profile.stages.values() for samples in parts.values())
    assert busy < 4 * profile.steps.total  # four workers
    write_chrome(timeline, tmp_path / "trace.json")
    assert broken_rules(json.loads((tmp_path / "trace.json").read_text())) == []
    assert critical(timeline)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(("to", "legs"), [("cpu", 1), pytest.param("cuda:1", 1, marks=two_gpus)])
@pytest.mark.parametrize("staged", [False, True])
def test_the_way_of_what_is_sent_is_timed_on_the_device(to: str, legs: int, staged: bool) -> None:
    transport = HostStagedTransport() if staged else DeviceTransport()
    transport.enter("cuda:0")
    payload = Parameters(torch.ones(1 << 26, device="cuda:0"), 1)
    for _ in range(2):  # the first one asks for memory
        sent = transport.on_send(payload, "cuda:0", to)
        for _, event in sent.ready:
            event.synchronize()
    marks = transport.crossing(sent)
    assert len(marks) == legs + (staged and to != "cpu")  # through the host: out and in
    seconds = [transport.elapsed(*pair) for pair in marks]
    assert all(took is not None and 1e-5 < took < 1.0 for took in seconds)
    assert transport.crossing(transport.on_send(payload, "cuda:0", "cuda:0")) == ()


def test_hand_offs_of_a_training_are_in_its_profile(tmp_path: Path) -> None:
    """With a transport that keeps the sender of gradients and weights, and nobody else."""
    rows = write_rows(tmp_path / "train.arrow", vocabulary=300)
    settings = [f"data.path={rows}", *TINY, "data.epochs=12", "transport=benchmarks.slow_transport:EachThroughHost"]
    result = train(["overlapped", "targets/tiny_llama"], settings, tmp_path / "run").result
    assert result.profile is not None and not result.profile.fault()
    took = {name: max(samples.mean for samples in ways.values()) for name, ways in result.profile.handed.items()}
    assert min(took["grads"], took["params"]) > 2 * took["features"]

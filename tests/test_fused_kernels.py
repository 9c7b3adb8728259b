"""The Triton kernels compute what plain PyTorch does, by Triton's interpreter on the CPU in processes of their own."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreted import FOLDERS, ROOT, TRITONS, interpreted, with_every_triton

BEGIN = """
import torch
import torch.nn.functional as F
from stages import fused_kernels as kernels
from tests import fused_twins as twins
from tests.interpreted import mend_loops

mend_loops()
torch.manual_seed(0)

def same(got, expected, tolerance=1e-6):
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert got.isfinite().all() and (got - expected).norm() <= tolerance * expected.norm(), (got - expected).abs().max()

def strided(rows, columns):
    return torch.randn(rows, columns + 13)[:, 5 : 5 + columns]
"""

EACH = f"""{BEGIN}
B, S, n, D, R = 2, 37, 3, 16, 8
x, weight = strided(5, 72), torch.randn(72)
for one in (0, 1):
    same(kernels.rms_norm(x, weight, 1e-6, one), twins.rms_norm(x, weight, 1e-6, one))

both = torch.randn(3, 2 * 1500)
gate, up = both[:, :1500], both[:, 1500:]
expected = twins.silu_mul(gate, up)
assert kernels.silu_mul(gate, up) is gate
same(gate, expected)

angles = torch.rand(S, R // 2).repeat(1, 2)
q, weight = strided(B * S, n * 2 * D).view(B * S, n, 2 * D)[..., :D], torch.randn(D)
for arguments in ((weight, 1e-6, 1), (weight, 1e-6, 0), (None, 1e-6, 0)):
    arguments = (q, *arguments, angles.cos(), angles.sin())
    same(kernels.norm_rope(*arguments), twins.norm_rope(*arguments))

x, gate = torch.randn(B * S, n, D), torch.randn(B * S, n, 2 * D)[..., D:]
same(kernels.gate_heads(x, gate), twins.gate_heads(x, gate))
arguments = (x, strided(B * S, n * D), weight, 1e-6)
same(kernels.gated_rms_norm(*arguments), twins.gated_rms_norm(*arguments))

for normed in (True, False):
    for tokens in (1, 2, 37):
        arguments = (strided(B * tokens, 2 * n * D), torch.randn(4, 2 * n * D), (2, n, D), tokens, None, normed)
        same(kernels.short_conv(*arguments), twins.short_conv(*arguments))

tokens, m = 70, 5
a, b = (strided(B * tokens, 2 * m) * 10).split(m, 1)
a_log, dt_bias = torch.randn(m), torch.randn(m)
decay, strength = kernels.delta_gates(a, b, a_log, dt_bias, tokens)
each = (-a_log.exp() * F.softplus(a + dt_bias)).view(B, tokens, m) / torch.log(torch.tensor(2.0))
same(decay, torch.cat([each[:, :64].cumsum(1), each[:, 64:].cumsum(1)], 1))
same(strength, b.sigmoid().view(B, tokens, m))
"""


@with_every_triton
def test_a_triton_that_is_named_is_the_one_that_runs():
    printed = interpreted("-c", "import triton; print(triton.__file__)")
    for folder, found in zip(FOLDERS, printed, strict=True):
        assert not folder or Path(found.strip()).is_relative_to(Path(folder).resolve())


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("make"), reason="neither Triton nor make everywhere")
def test_where_make_runs_the_tests_none_of_these_is_skipped():
    printed = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"{TRITONS}=/\S+/triton-\S+ .*pytest", printed)


@with_every_triton
def test_each_kernel():
    interpreted("-c", EACH)


SCAN = f"""{BEGIN}
def chunk_writes(k, v, g, beta):
    '''What flash-linear-attention computes in a chunk: w, u.'''
    k = k.repeat_interleave(v.shape[2] // k.shape[2], 2).transpose(1, 2)
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2)[..., None], beta.transpose(1, 2)[..., None]
    mixed = (beta * (k @ k.mT) * torch.exp2(g - g.mT)).tril(-1)
    solved = torch.linalg.inv(torch.eye(k.shape[2]) + mixed)
    return (solved @ (k * beta * torch.exp2(g))).transpose(1, 2), (solved @ (v * beta)).transpose(1, 2)

B, n, m, D, V = 2, 2, 6, 16, 32
for tokens in (1, 64, 150):
    q, k = (F.normalize(torch.randn(B, tokens, n, D), dim=-1) for _ in range(2))
    v, (a, b) = torch.randn(B, tokens, m, V), strided(B * tokens, 2 * m).split(m, 1)
    decay = (torch.rand(m).log(), torch.randn(m))
    summed, strength = kernels.delta_gates(a, b, *decay, tokens)
    parts = [chunk_writes(*(each[:, t : t + 64] for each in (k, v, summed, strength))) for t in range(0, tokens, 64)]
    w, u = (torch.cat(part, 1) for part in zip(*parts))
    same(kernels.delta_scan(q, k, w, u, summed), twins.delta_rule(q, k, v, a, b, decay), 1e-5)
"""


@with_every_triton
def test_the_scan_over_chunks_is_the_rule_token_by_token():
    interpreted("-c", SCAN)


PACKED = f"""{BEGIN}
from hypothesis import Phase, given, settings, strategies as st
from stages.packing import pack_rows

n, m, D, R = 2, 4, 16, 8

@given(st.lists(st.integers(0, 140), min_size=1, max_size=4).filter(any))
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
def law(lengths):
    M, padded = sum(lengths), max(lengths)
    pack = pack_rows(torch.tensor(lengths), padded, M)
    rows = [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths)) if lengths[i]]
    angles = torch.rand(padded, R // 2).repeat(1, 2)
    arguments = (strided(M, n * D).view(M, n, D), None, 1e-6, 0, angles.cos(), angles.sin(), pack.positions)
    same(kernels.norm_rope(*arguments), twins.norm_rope(*arguments))

    x, taps = strided(M, 2 * n * D), torch.randn(4, 2 * n * D)
    got = kernels.short_conv(x, taps, (2, n, D), M, pack.positions, True)
    alone = [twins.short_conv(x[row], taps, (2, n, D), len(x[row]), None, True) for row in rows]
    same(got, torch.cat(alone, 2))

    a, b = strided(M, 2 * m).split(m, 1)
    decay = (torch.rand(m).log(), torch.randn(m))
    summed, strength = kernels.delta_gates(a, b, *decay, M, pack)
    gates = [kernels.delta_gates(a[row], b[row], *decay, len(a[row])) for row in rows]
    same(summed, torch.cat([each for each, _ in gates], 1), 0)
    same(strength, torch.cat([each for _, each in gates], 1), 0)

    given = (torch.randn(1, M, *shape) for shape in ((n, D), (n, D), (m, D), (m, 2 * D)))
    given = [*given, summed]
    alone = [kernels.delta_scan(*(each[:, row].contiguous() for each in given)) for row in rows]
    same(kernels.delta_scan(*given, pack.starts), torch.cat(alone, 1), 0)

law()
"""


@with_every_triton
def test_packed_rows_of_any_lengths_are_computed_as_if_alone():
    interpreted("-c", PACKED)


WITH_FLA = f"""{BEGIN}
from triton.runtime import autotuner
from stages.packing import pack_rows

# The interpreter has no GPU to tune for.
autotuner.Autotuner.run = lambda self, *args, **more: self.fn.run(*args, **more, **self.configs[0].all_kwargs())
n, m, D = 1, 2, 16
for lengths in ([70, 1, 2, 65], [64, 128], [1, 1]):
    M = sum(lengths)
    pack = pack_rows(torch.tensor(lengths), max(lengths), M)
    q, k = (F.normalize(torch.randn(1, M, n, D), dim=-1) for _ in range(2))
    v, (a, b) = torch.randn(1, M, m, D), torch.randn(M, 2 * m).split(m, 1)
    arguments = (q, k, v, a, b, (torch.rand(m).log(), torch.randn(m)))
    for more in ((), (pack,)):
        same(kernels.delta_rule(*arguments, *more), twins.delta_rule(*arguments, *more), 1e-5)
"""


@pytest.mark.skipif(not importlib.util.find_spec("fla"), reason="flash-linear-attention is not installed here")
@with_every_triton
def test_the_delta_rule_of_packed_rows_with_the_kernel_packages_own_part():
    interpreted("-W", "ignore", "-c", WITH_FLA)


WHOLE = """
import tempfile, os
os.environ["DFLASH_PIPE_CACHE"] = tempfile.mkdtemp()
import torch
from stages import fused_kernels as kernels
from stages.fused_decoder import FusedDecoder
from stages.target_model import load_truncated, reference_kernels_on_cpu
from tests import fused_twins

reference_kernels_on_cpu()
kernels.delta_rule = fused_twins.delta_rule
ids = torch.randint(4, 512, (2, 19), generator=torch.Generator().manual_seed(0))
for model in ("tiny:llama", "tiny:qwen3", "tiny:qwen3_5"):
    target = load_truncated(model, None, [1, 3], "float32", "cpu")
    expected = target(ids, torch.tensor([19, 19]))
    with torch.no_grad():
        got = FusedDecoder(target.decoder, [1, 3], kernels)(ids)
    assert (got - expected).norm() <= 2e-5 * expected.norm(), model
"""


@pytest.mark.slow
@with_every_triton
def test_whole_layers():
    interpreted("-c", WHOLE)

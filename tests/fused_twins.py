"""What `stages.fused_kernels` computes, in plain PyTorch and the model code's own words."""

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps, one):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (one + weight)


def silu_mul(gate, up):
    return F.silu(gate) * up


def norm_rope(x, weight, eps, one, cos, sin, positions=None):
    if weight is not None:
        x = rms_norm(x, weight, eps, one)
    if positions is None:
        positions = torch.arange(len(cos)).repeat(len(x) // len(cos))
    cos, sin = (each[positions, None] for each in (cos, sin))
    size = cos.shape[-1]
    left, right = x[..., : size // 2], x[..., size // 2 : size]
    turned = x[..., :size] * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([turned, x[..., size:]], -1)


def gate_heads(x, gate):
    return (x * gate.sigmoid()).flatten(1)


def gated_rms_norm(x, gate, weight, eps):
    return (rms_norm(x, weight, eps, 0) * F.silu(gate.reshape(x.shape))).flatten(1)


def short_conv(x, weight, shape, tokens, positions, normed):
    parts, n, size = shape
    if positions is not None:  # one row after another
        rows = rows_of(x, positions.eq(0).nonzero().flatten())
        return torch.cat([short_conv(row, weight, shape, len(row), None, normed) for row in rows], dim=2)
    rows, (taps, channels) = len(x) // tokens, weight.shape
    x = x.reshape(rows, tokens, channels).transpose(1, 2)
    x = F.silu(F.conv1d(x, weight.t()[:, None], padding=taps - 1, groups=channels)[..., :tokens])
    x = x.transpose(1, 2).reshape(rows, tokens, parts, n, size).permute(2, 0, 1, 3, 4)
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) if normed else x


def rows_of(x, starts, dim=0):
    """The parts of x that begin at `starts`, the first of them at 0."""
    return x.tensor_split(starts[1:].tolist(), dim)


def delta_rule(q, k, v, a, b, decay, pack=None):
    """Token by token; of packed rows one after another."""
    if pack is not None:
        starts = pack.starts[:-1]
        rows = zip(*(rows_of(x, starts, 1) for x in (q, k, v)), *(rows_of(x, starts) for x in (a, b)), strict=True)
        return torch.cat([delta_rule(*row, decay) for row in rows], dim=1)
    a_log, dt_bias = decay
    a, b = (each.reshape(*v.shape[:2], -1) for each in (a, b))
    shares = v.shape[2] // q.shape[2]
    q, k = (each.repeat_interleave(shares, dim=2) for each in (q, k))
    keep, write = (-a_log.exp() * F.softplus(a + dt_bias)).exp(), b.sigmoid()
    state, out = v.new_zeros(*v.shape[::2], q.shape[-1], v.shape[-1]), v.new_empty(v.shape)
    for t in range(v.shape[1]):
        state = state * keep[:, t, :, None, None]
        known = torch.einsum("bnk,bnkv->bnv", k[:, t], state)
        change = (v[:, t] - known) * write[:, t, :, None]
        state = state + k[:, t, :, :, None] * change[:, :, None]
        out[:, t] = torch.einsum("bnk,bnkv->bnv", q[:, t] * q.shape[-1] ** -0.5, state)
    return out

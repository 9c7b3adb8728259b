"""Run in a process of its own by test_fused_drafter.py, under Triton's interpreter: kernels against plain PyTorch."""

import sys

import torch
import torch.nn.functional as F

from stages import fused_attention, fused_training
from stages.dflash_loss import LossConfig, Supervision, block_loss
from stages.dflash_masks import BlockGeometry, dense_mask
from stages.dflash_model import DFlashModel, flatten, initial_parameters
from stages.dflash_rope import rotate
from stages.footprints import drafter_step_bytes
from tests.drafters import batch, config, normal
from tests.interpreted import mend_loops


def same(got, expected, tolerance=2e-6):
    got, expected = got.detach(), expected.detach()
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert got.isfinite().all() and (got - expected).norm() <= tolerance * expected.norm(), (got - expected).abs().max()


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def norms():
    """Not a power of two wide; more rows than programs share them."""
    x, delta, given, residual = (normal(600, 24, seed=seed) for seed in range(4))
    weight = normal(24, seed=5)
    total, y, scale = fused_training.add_norm(x, delta, weight, 1e-6)
    plain, of = leaves(x + delta, weight)
    expected = F.rms_norm(plain, (24,), of, 1e-6)
    expected.backward(given)
    same(total, plain)
    same(y, expected)
    for added in (residual, None):
        dx, d_weight = fused_training.norm_backward(total, scale, weight, given, added)
        same(dx, plain.grad if added is None else plain.grad + added)
        same(d_weight, of.grad)
    assert fused_training.add_norm(x, None, weight, 1e-6)[0] is x
    same(fused_training.add_norm(x, None, weight, 1e-6)[1], F.rms_norm(x, (24,), weight, 1e-6))


def heads():
    """Three heads of ten in rows that are longer, into a part of a buffer."""
    rows, length, count, size = 2, 11, 3, 10
    wide, weight = normal(rows * length, (count + 2) * size), normal(size, seed=1)
    source = wide[:, size : (count + 1) * size]
    angle = normal(rows, length + 5, size // 2, seed=2)
    turns = angle.cos()[:, 5:], angle.sin()[:, 5:]
    buffer = torch.zeros(rows, length + 3, count, size)
    fused_training.rotated_heads(source, weight, turns, 1e-6, buffer[:, 3:])
    plain, of = leaves(source, weight)
    both = [torch.cat((turn, turn), -1)[:, None] for turn in turns]
    expected = rotate(F.rms_norm(plain.view(rows, length, count, size), (size,), of, 1e-6).transpose(1, 2), *both)
    given = normal(rows, length, count, size, seed=3)
    expected.backward(given.transpose(1, 2))
    same(buffer[:, 3:], expected.transpose(1, 2))
    assert not buffer[:, :3].any()
    result = torch.zeros_like(wide)
    part = result[:, size : (count + 1) * size]
    same(fused_training.rotated_heads_backward(source, weight, turns, 1e-6, given, part), of.grad)
    same(part, plain.grad)
    assert not result[:, :size].any() and not result[:, -size:].any()


def swiglu():
    (both,) = leaves(normal(5, 2 * 72))
    expected = F.silu(both[:, :72]) * both[:, 72:]
    given = normal(5, 72, seed=1)
    expected.backward(given)
    same(fused_training.swiglu(both.detach()), expected)
    gate_up = both.detach().clone()
    fused_training.swiglu_backward_(gate_up, given)
    same(gate_up, both.grad)
    same(given, expected)


def cross_entropy():
    """More than one block of the vocabulary, ties among the greatest, huge logits."""
    rows, vocabulary = 24, 5003
    logits = (normal(rows, vocabulary) * 4).round()
    logits[-1] *= 1e4
    labels = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    labels[:10] = logits[:10].argmax(1)
    labels[10:14] = vocabulary - 1 - logits.flip(1)[10:14].argmax(1)  # the last of the greatest
    (plain,) = leaves(logits)
    expected = F.cross_entropy(plain, labels, reduction="none")
    expected.sum().backward()
    loss, hit, kept = torch.empty(rows), torch.empty(rows, dtype=torch.bool), logits.clone()
    fused_training.cross_entropy_(kept, labels, loss, hit, False)
    same(loss, expected)
    assert torch.equal(kept, logits)
    assert torch.equal(hit, logits.argmax(1) == labels) and 0 < int(hit.sum()) < 14
    fused_training.cross_entropy_(kept, labels, loss, hit, True)
    same(kept, plain.grad)


def attention():
    """Anchors ascending and others, unused blocks, one beyond the features, windows, straddled tiles, one block."""
    tiles = fused_attention._TILES_FLOAT32
    for rows, blocks, b, length, window, ascending in (
        (2, 9, 16, 130, None, True),
        (2, 9, 16, 130, 33, True),
        (1, 11, 7, 70, None, True),
        (2, 12, 4, 90, 11, False),
        (2, 12, 4, 90, None, False),
        (1, 1, 16, 40, None, True),
    ):
        fused_attention._TILES_FLOAT32 = ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)) if rows == 2 else tiles
        _attention(rows, blocks, b, length, window, ascending)
    fused_attention._TILES_FLOAT32 = tiles


def _attention(rows, blocks, b, length, window, ascending):
    draw = torch.Generator().manual_seed(0)
    anchors = torch.randint(0, length - 1, (rows, blocks), generator=draw)
    anchors[0, -1] = length + 3  # it sees all features there are
    keep = torch.rand(rows, blocks, generator=draw) < 0.8
    keep[0, -1] = True
    if ascending:
        anchors, keep = anchors.sort(1).values, keep.sort(1, descending=True).values
    geometry = BlockGeometry(anchors, keep, length, b)
    slots, heads, groups, size = blocks * b, 4, 2, 16
    query, before, own, given = (
        normal(rows, tokens, count, size, seed=seed)
        for seed, (tokens, count) in enumerate([(slots, heads), (length, groups), (slots, groups), (slots, heads)])
    )
    wide = normal(rows * length, 3 * groups * size, seed=7)  # values are columns of a wider product
    v_before, v_own = wide[:, : groups * size].view(rows, length, groups, size), normal(*own.shape, seed=8)
    plain = leaves(query, before, own, v_before, v_own)
    k, v = (torch.cat(plain[at : at + 2], 1).repeat_interleave(heads // groups, 2).transpose(1, 2) for at in (1, 3))
    scores = plain[0].transpose(1, 2) @ k.transpose(-1, -2) * size**-0.5
    expected = (scores.masked_fill(~dense_mask(geometry, window), -torch.inf).softmax(-1) @ v).transpose(1, 2)
    expected.backward(given)
    sight = fused_attention.Sight(geometry.seen, b, length, window)
    keys, values = fused_attention.Keys(before, own), fused_attention.Keys(v_before, v_own)
    result = fused_attention.attention(query, keys, values, sight)
    same(result[0], expected)
    blank = [torch.full_like(tensor, torch.nan) for tensor in (before, own, v_before, v_own)]
    d_keys, d_values = fused_attention.Keys(*blank[:2]), fused_attention.Keys(*blank[2:])
    d_query = fused_attention.attention_backward(query, keys, values, sight, result, given, d_keys, d_values)
    for got, leaf in zip((d_query, *blank), plain, strict=True):
        same(got, leaf.grad)


ANCHORS = torch.tensor([[2, 7, 15, 0], [5, 6, 19, 20]])
KEEP = torch.tensor([[True, True, True, False], [True, True, True, True]])


def model():
    """The whole step against the modules: with and without sums, alike slots, a window, rows and all slots."""
    loss = LossConfig("dflash", 2.0)
    tokens = batch(length=24)
    what = Supervision.of(tokens.input_ids, tokens.loss_mask, ANCHORS, KEEP, 4, loss)
    for layers, alike, summed in ((1, True, True), (2, False, True), (2, True, False)):
        of = config(head_dim=16, num_hidden_layers=layers, layer_types=("full_attention",) * layers)
        if layers == 2:
            of = config(head_dim=16, sliding=6)
        embeds, context = normal(2, 4, 4, 16), normal(2, 24, of.feature_size, seed=1)
        if alike:
            embeds[:, :, 1:] = normal(16, seed=3)
        results = []
        for attention in ("sdpa", "fused"):
            net = DFlashModel(of, device="meta")
            flat = flatten(net)
            values = initial_parameters(of, 0)
            flat.load(values.where(values == 1.0, values * 8.0) + normal(len(values), seed=7) / 10)
            sums = torch.zeros(flat.size)
            flat.sum_gradients_into(sums if summed else None)
            for _ in range(layers):  # of two layers twice: the second adds to the sums
                hidden = net(embeds.flatten(1, 2), context, ANCHORS, KEEP, attention, alike, what.rows)
                block_loss(hidden, normal(61, 16, seed=5), what, loss, 7)[0].backward()
            if not summed:
                sums = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
            whole = net(embeds.flatten(1, 2), context, ANCHORS, KEEP, attention, alike)
            results.append((flat.layout, hidden, whole, sums))
        (layout, *expected), (_, *got) = results
        for ours, theirs in zip(got[:2], expected[:2], strict=True):
            same(ours, theirs, 1e-5)
        for slot in layout.values():
            same(slot.of(got[2]), slot.of(expected[2]), 1e-5)
        try:
            hidden.sum().backward()
        except RuntimeError:
            continue
        raise AssertionError("backward ran twice over tensors that it overwrites")


def saved(layers, rows, length):
    """Numbers that are kept for the backward pass, and how many the table says.

    Not those of weights and inputs, nor the sums of rows and of what a head sees, which are [R] and [B, n, Q].
    """
    of = config(head_dim=16, block_size=8, num_hidden_layers=layers, layer_types=("full_attention",) * layers)
    net = DFlashModel(of, device="meta")
    flatten(net).load(initial_parameters(of, 0))
    anchors = torch.arange(4).expand(rows, -1) + 1
    embeds, context = normal(rows, 32, of.hidden_size), normal(rows, length, of.feature_size)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), embeds, context)}
    kept = {}

    def keep(tensor):
        if tensor.dim() in (2, 4) and tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nodes = [net(embeds, context, anchors, anchors > 0, "fused").grad_fn]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "gate_up"):  # what backward overwrites is not among what autograd saves
            keep(node.gate_up)
        nodes += [before for before, _ in node.next_functions if before]
    said = drafter_step_bytes(of, [(1, 5), (rows, length)], 4, torch.int8, fused=True, dense=False)
    return sum(tensor.numel() for tensor in kept.values()), said


def kept():
    """What one more layer keeps is exactly what the table in stages/footprints.py says."""
    for rows, length in ((2, 40), (1, 20)):
        (one, said_of_one), (two, said_of_two) = (saved(layers, rows, length) for layers in (1, 2))
        assert two - one == said_of_two - said_of_one, (two - one, said_of_two - said_of_one)
        assert one < said_of_one < 1.7 * one, (one, said_of_one)  # a step needs more than it keeps


def nothing():
    """A micro-batch without any supervised slot adds nothing."""
    of = config(head_dim=16)
    net = DFlashModel(of, device="meta")
    flat = flatten(net)
    flat.load(initial_parameters(of, 0))
    sums = torch.zeros(flat.size)
    flat.sum_gradients_into(sums)
    rows = torch.zeros(0, dtype=torch.int64)
    unused = torch.zeros_like(KEEP)
    hidden = net(normal(2, 16, 16), normal(2, 24, of.feature_size), ANCHORS, unused, "fused", False, rows)
    hidden.sum().backward()
    assert hidden.shape == (0, 16) and not sums.any()


if __name__ == "__main__":
    mend_loops()
    for case in sys.argv[1:]:
        globals()[case]()

"""Run in a process of its own by test_working_memory.py: the drafter's fused step in full size, counted on any machine.

Its tensors have no data (device "meta") and its kernels are left out; what is allocated is the same.
"""

import torch
import torch.nn.functional as F

from stages import dflash_loss, fused_attention, fused_training
from stages.dflash_config import DrafterKeys
from stages.dflash_loss import LossConfig, Supervision, block_inputs, block_loss
from stages.dflash_model import DFlashModel, flatten
from stages.footprints import drafter_step_bytes
from tests.live_bytes import LiveBytes

DRAFTERS = {
    "qwen3_8b": {},
    "qwen3_6_27b": {
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 2048
    },
}  # fmt: skip
# Drafter, its layers, rows, padded length, anchors.
CASES = (
    ("qwen3_6_27b", 5, 3, 2000, 512),
    ("qwen3_8b", 5, 4, 3072, 512),
    ("qwen3_8b", 5, 2, 768, 256),
    ("qwen3_8b", 1, 8, 64, 512),  # nearly all of it is draft tokens
    ("qwen3_6_27b", 5, 1, 65536, 128),  # and these are nearly all context
    ("qwen3_8b", 3, 2, 3072, 16),
    ("qwen3_8b", 1, 1, 16384, 1),
    ("qwen3_6_27b", 2, 1, 16384, 1),
)


class NoKernel:
    """In a kernel's place: launched on any grid with anything, it does nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: None


def leave_kernels_out():
    for module in (fused_attention, fused_training):
        for name, value in list(vars(module).items()):
            if type(value).__module__.startswith("triton") and hasattr(value, "run"):
                setattr(module, name, NoKernel())
    # What is not on a GPU computes the entropy by torch's own operations, which need more.
    dflash_loss._PlainEntropy = lambda logits: lambda *arguments: None


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def peak(config, rows, length, anchors):
    """Bytes of a step at most, without weights, sums and features, for a vocabulary of one: logits are another part."""
    model = DFlashModel(config, device="meta")
    flat = flatten(model, "meta", torch.bfloat16)
    flat.sum_gradients_into(meta(flat.size, dtype=torch.float32))
    head, features = meta(1, config.hidden_size), meta(rows, length, config.feature_size)
    ids, mask = meta(rows, length, dtype=torch.int64), meta(rows, length, dtype=torch.bool)
    slots, size = min(anchors, length - 1), config.block_size
    with LiveBytes() as live:
        places, keep = meta(rows, slots, dtype=torch.int64), meta(rows, slots, dtype=torch.bool)
        labels, weights = (meta(rows, slots, size, dtype=dtype) for dtype in (torch.int64, torch.float32))
        supervised = meta(rows * slots * (size - 1), dtype=torch.int64)  # all there can be
        what = Supervision(labels, weights, supervised, mask, places, keep)
        embeds = F.embedding(block_inputs(ids, places, 0, size).flatten(1), head)
        hidden = model(embeds, features, places, keep, "fused", alike=True, rows=supervised)
        loss, _ = block_loss(hidden, head, what, LossConfig("dflash", 7.0, 0.5, "suffix"), chunk=4224)
        loss.backward()
    return live.peak


def main():
    leave_kernels_out()
    for name, layers, *case in CASES:
        of = {"target": f"sizes:{name}", "weights": "random", "mask_token_id": 0, **DRAFTERS[name]}
        config = DrafterKeys(**of, num_layers=layers).sizes()
        rows, length, anchors = case
        said = drafter_step_bytes(config, [(1, 5), (rows, length)], anchors, torch.bfloat16, fused=True, dense=False)
        share = peak(config, *case) / said
        print(name, layers, *case, f"{share:.3f}")
        assert 0.75 < share <= 1, (name, layers, *case, share)


if __name__ == "__main__":
    main()

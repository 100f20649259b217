"""A transformer block in plain torch, as one would write it for one device, without mega: the other side of `host_overhead.py`.

python benchmarks/bare_block.py WIDTH FFN HEADS LENGTH STEPS
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, FFN, HEADS, LENGTH, STEPS = map(int, sys.argv[1:6])


class PlainBlock(nn.Module):
    """Fused projections, no groups."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * FFN, bias=False), nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)) for t in self.qkv(F.rms_norm(x, (WIDTH,), self.norm1, 1e-5)).chunk(3, -1)
        )
        q, k = (rotate(t, cos, sin) for t in (q, k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        gate, up = self.up(F.rms_norm(x, (WIDTH,), self.norm2, 1e-5)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def main() -> None:
    """Answer each line on standard input with a step's seconds of the processor."""
    torch.set_num_threads(1)
    size = WIDTH // HEADS
    angles = torch.outer(torch.arange(LENGTH), 10_000.0 ** (-torch.arange(0, size, 2) / size))[None, :, None]
    block, x = PlainBlock(), torch.randn(1, LENGTH, WIDTH, requires_grad=True)
    cos, sin = angles.cos(), angles.sin()
    for _ in sys.stdin:
        begin = time.process_time()
        for _ in range(STEPS):
            block(x, cos, sin).sum().backward()
        print(json.dumps({"cpu": (time.process_time() - begin) / STEPS}), flush=True)


if __name__ == "__main__":
    main()

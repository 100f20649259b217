"""Host overhead: what one block costs the processor that drives it, against the same block in plain torch.

    python benchmarks/host_overhead.py [--rounds 9]

The tensors are tiny, so that the time is that of Python and of torch's dispatch, which on a GPU must stay ahead of the
device. With tp = 2 the collectives go to torch's `fake` process group, which returns at once: what is left is our code
around them. Forward and backward, interleaved in one process, in processor time (there is one thread), so that a busy
machine counts little; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import record
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

from mega_common.model_config import ModelConfig
from mega_trainer.layout import Layout
from mega_trainer.mesh import Groups, build_groups
from mega_trainer.model.block import Block
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context, Sequences
from mega_trainer.model.rope import Rotary

WIDTH, FFN, HEADS, LENGTH, STEPS = 16, 32, 4, 8, 100
CONFIG = ModelConfig(
    num_layers=1, hidden_size=WIDTH, ffn_hidden_size=FFN, num_attention_heads=HEADS, vocab_size=32, max_position=LENGTH
)


class PlainBlock(nn.Module):
    """The same block as one would write it for one device: fused projections, no groups."""

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


def plain(context: Context) -> Callable[[], object]:
    block, x = PlainBlock(), torch.randn(1, LENGTH, WIDTH, requires_grad=True)
    assert context.rotation is not None
    cos, sin = context.rotation.cos, context.rotation.sin
    return lambda: block(x, cos, sin).sum().backward()


def ours(context: Context, groups: Groups, *, sp: bool = False) -> Callable[[], object]:
    block = Block(Builder(CONFIG, groups, sp=sp), 0)
    x = torch.randn(1, LENGTH // 2 if sp else LENGTH, WIDTH, requires_grad=True)
    return lambda: block(x, context).sum().backward()


def seconds(step: Callable[[], object]) -> float:
    begin = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - begin) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    context = Context(
        Sequences(LENGTH, torch.device("cpu")),
        Rotary.of(CONFIG, CONFIG.rope).at(torch.arange(LENGTH)[None], torch.float32),
    )
    two = build_groups(Layout(tp=2), 0, heads=[HEADS])
    contestants = {
        "plain": plain(context),
        "tp=1": ours(context, Groups()),
        "tp=2": ours(context, two),
        "tp=2, sp": ours(context, two, sp=True),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for step in contestants.values():
        step()
    for _ in range(rounds):
        for name, step in contestants.items():
            times[name].append(seconds(step))
    results = {"microseconds": {name: round(1e6 * statistics.median(values)) for name, values in times.items()}}
    for name in list(contestants)[1:]:
        ratios = [mine / other for mine, other in zip(times[name], times["plain"], strict=True)]
        results[f"{name} over plain"] = {
            "median": round(statistics.median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3),
        }  # fmt: skip
    print(results)
    print("written to", record.write("host_overhead", results, ["torch"]))


if __name__ == "__main__":
    main()

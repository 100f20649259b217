"""Host overhead: what one block costs the processor that drives it, against the same block in plain torch.

    python benchmarks/host_overhead.py [--rounds 9]

The tensors are tiny, so that the time is that of Python and of torch's dispatch, which on a GPU must stay ahead of the
device. With tp = 2 the collectives go to torch's `fake` process group, which returns at once: what is left is our code
around them. Forward and backward, each side in a process of its own, in turn, in processor time (there is one thread), so
that a busy machine counts little; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
from sides import Side, spread, times_in_turn
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

from mega_common.model_config import ModelConfig
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.distributed.process_groups import ParallelGroups, build_parallel_groups
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.rotary_embedding import RotaryEmbedding
from mega_trainer.model.transformer_layer import TransformerLayer

LAYOUTS = ("tp=1", "tp=2", "tp=2, sp")
WIDTH, FFN, HEADS, LENGTH, STEPS = 16, 32, 4, 8, 100
CONFIG = ModelConfig(
    num_layers=1, hidden_size=WIDTH, ffn_hidden_size=FFN, num_attention_heads=HEADS, vocab_size=32, max_position=LENGTH
)


def ours(context: ForwardContext, groups: ParallelGroups, *, sp: bool = False) -> Callable[[], object]:
    block = TransformerLayer(LayerBuilder(CONFIG, groups, sp=sp), 0)
    x = torch.randn(1, LENGTH // 2 if sp else LENGTH, WIDTH, requires_grad=True)
    return lambda: block(x, context).sum().backward()


def serve(name: str) -> None:
    """Answer each line on standard input with a step's seconds of the processor, for one of `LAYOUTS`."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    context = ForwardContext(
        SequenceMask(LENGTH, torch.device("cpu")),
        RotaryEmbedding.from_model_config(CONFIG, CONFIG.rope).compute_rotation(
            torch.arange(LENGTH)[None], torch.float32
        ),
    )
    groups = ParallelGroups() if name == "tp=1" else build_parallel_groups(ParallelLayout(tp=2), 0, heads=[HEADS])
    step = ours(context, groups, sp=name.endswith("sp"))
    for _ in sys.stdin:
        begin = time.process_time()
        for _ in range(STEPS):
            step()
        print(json.dumps({"cpu": (time.process_time() - begin) / STEPS}), flush=True)


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    sizes = [str(size) for size in (WIDTH, FFN, HEADS, LENGTH, STEPS)]
    sides = {name: Side(__file__, "--serve", name) for name in LAYOUTS}
    sides["plain"] = Side(str(Path(__file__).parent / "bare_block.py"), *sizes)
    times = times_in_turn(sides, "", rounds, "cpu")
    results: dict[str, Any] = {
        "microseconds": {name: round(1e6 * statistics.median(values)) for name, values in times.items()}
    }
    for name in LAYOUTS:
        ratios = [mine / other for mine, other in zip(times[name], times["plain"], strict=True)]
        results[f"{name} over plain"] = spread(ratios)
    print(results)
    print("written to", record.write("host_overhead", results, ["torch"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()

"""transformers' own training step, for `train_step.py` to be judged against: it imports nothing of mega.

    python benchmarks/bare_step.py SETTINGS.json

SETTINGS: `model` (a configuration of transformers), `tokens` (rows of ids), `dtype`, `compiled`, `threads`. Each line on
standard input is a call to train so many steps; wall and processor seconds of one step come back, a JSON line a call.
"""

import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def step_of(model, ids, *, compiled=False, recompute=False):
    """A step by transformers' own loss, torch's clipping and its fused AdamW: weights, gradients and moments are the model's."""
    if compiled:
        model.compile()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main(file):
    with open(file) as stream:
        settings = json.load(stream)
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings["model"])).train()
    answer_calls(
        step_of(
            model.to(getattr(torch, settings["dtype"])), torch.tensor(settings["tokens"]), compiled=settings["compiled"]
        )
    )


def answer_calls(step):
    """Train as many steps as each line of standard input says, and print how long one took; a step before does not count."""
    step()
    for line in sys.stdin:
        count, wall, processor = int(line), time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps({"wall": wall / count, "processor": processor / count}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

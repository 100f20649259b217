"""Batch and rates by DeepSpeed itself: `settings_by_deepspeed.py GIVEN STEPS`. It imports nothing of mega.

GIVEN is JSON {name: {"file": a ds_config, "ranks": number}}; it prints {name: {"batch": rows of a step, "rates": [...]}}.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.append(os.environ["DEEPSPEED"])
import deepspeed.runtime.config as config_module
from deepspeed.runtime import lr_schedules


def rows_of_a_step(file, ranks):
    """Return DeepSpeed's train_batch_size, without the tensor ranks of AutoTP, which read the same rows."""
    config_module.dist.get_rank = lambda *_: 0
    config_module.dist.get_world_size = lambda *_: ranks
    stages = file.get("pipeline", {}).get("stages")
    mpu = stages and SimpleNamespace(get_data_parallel_world_size=lambda: ranks // stages)
    config = config_module.DeepSpeedConfig({key: value for key, value in file.items() if key != "pipeline"}, mpu)
    return config.train_batch_size // file.get("tensor_parallel", {}).get("autotp_size", 1)


def rates_of_steps(file, steps):
    """Return the rate of each optimizer step: the engine advances the scheduler after it."""
    lr = file.get("optimizer", {}).get("params", {}).get("lr", 1e-3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = file.get("scheduler")
    made = scheduler and getattr(lr_schedules, scheduler["type"])(optimizer, **scheduler["params"])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        if made:
            made.step()
    return rates


def main(given, steps):
    print("RESULT " + json.dumps({
        name: {"batch": rows_of_a_step(case["file"], case["ranks"]), "rates": rates_of_steps(case["file"], steps)}
        for name, case in json.loads(given.read_text()).items()
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)

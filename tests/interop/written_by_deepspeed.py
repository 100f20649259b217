"""A rank of DeepSpeed's own training: `written_by_deepspeed.py FOLDER`, started by torchrun.

Each ZeRO stage makes four steps of the small model of `test_foreign_optimizer`, and saves it after three of them and after four,
as FOLDER/STAGE/after-3 and after-4. It imports nothing of mega.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.append(os.environ["DEEPSPEED"])
import deepspeed

# the collectives of shared memory, which would be compiled for half a minute; without them gloo has all of them
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STAGES = (0, 1, 2, 3)


def main(folder):
    deepspeed.init_distributed("gloo")
    given = json.loads((folder / "given.json").read_text())
    tokens = torch.tensor(given["tokens"])
    for stage in STAGES:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given["sizes"]))
        optimizer = torch.optim.AdamW(model.parameters(), **given["adam"])
        config = {
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for number in range(4):
            sample = tokens[number : number + 1]  # the same on all ranks
            logits = engine(input_ids=sample[:, :-1]).logits
            engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten()))
            engine.step()
            if number >= 2:
                made = folder / str(stage) / f"after-{number + 1}"
                model.config.save_pretrained(made)
                engine.save_checkpoint(made)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    # all is written; native threads that a closing interpreter ends have aborted a rank (SIGABRT, once in a hundred)
    os._exit(0)

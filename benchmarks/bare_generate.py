"""transformers' own generation, for `generate.py` to be judged against: it imports nothing of mega.

    python benchmarks/bare_generate.py FOLDER WORKLOAD.json THREADS

Each line on standard input is a call to run the workload once: its requests in padded batches, as they come, each batch until
its longest request has all of its tokens. Prints wall and processor seconds and the tokens asked for, a JSON line a run.
Without arguments behind FOLDER it writes a random model of ten million weights there.
"""

import json
import resource
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def run(model, workload):
    found = []
    for start in range(0, len(workload["requests"]), workload["batch"]):
        requests = workload["requests"][start : start + workload["batch"]]
        longest = max(len(one["prompt"]) for one in requests)
        padding = [longest - len(one["prompt"]) for one in requests]
        out = model.generate(
            torch.tensor([[0] * pad + one["prompt"] for pad, one in zip(padding, requests, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
            max_new_tokens=max(one["new"] for one in requests),
            do_sample=False,
            pad_token_id=0,
        )
        found += [row[longest : longest + one["new"]].tolist() for row, one in zip(out, requests, strict=True)]
    return found


def main(folder, workload_file, threads):
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with open(workload_file) as file:
        workload = json.load(file)
    for _ in sys.stdin:
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        tokens = run(model, workload)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        print(json.dumps({"wall": time.perf_counter() - start, "cpu": cpu, "tokens": tokens}), flush=True)


def write_model(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    write_model(*sys.argv[1:]) if len(sys.argv) == 2 else main(*sys.argv[1:])

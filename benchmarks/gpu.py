"""One GPU, one call of at most eight minutes: training steps of mega beside transformers and bare products, and attention alone.

    python benchmarks/gpu.py [--minutes 7] [--tiny]

Steps: contestants interleaved, each alone on the device and built anew for each round; there is one round at least, and
another while there is time. Ratios are medians over rounds. Memory is the most that is allocated in a step, with weights and
optimizer. mega keeps fp32 gradients, moments and main weights; transformers has all of these in bf16. The models have the widths
of Llama-3's 1B, 3B and 8B and as many layers as fit with mega's fp32 state; `products` is the time of a step's matrix products
alone, by torch, at the shapes they have.

Attention: 8,192 tokens at 8B's heads, forward and backward, with each back end that is there: whole, in documents, in a window,
and a rank's part of a ring of two (twice that, for the whole ring's work), without its messages.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import record
import torch
from sides import spread
from torch import Tensor
from train_step import ours, seconds, settings, theirs

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.config.sections import KernelsConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.job.metrics_log import MfuCalculator, get_peak_allocated_bytes
from mega_trainer.kernels.attention_masks import CAUSAL, AttentionMaskSpec, BandMask, PackedDocumentMask
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, Kernels
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.parallel.context_parallel import BlockwiseAttention, RingKeyValueExchange
from mega_trainer.plan.flops import count_parameters_by_layer
from mega_trainer.run.build_components import choose_kernels, create_kernels, get_compute_dtype

Step = Callable[[], object]
Contestant = tuple[Callable[[RunConfig, torch.device], Step], RunConfig]


def llama(layers: int, width: int, ffn: int, heads: int, vocabulary: int = 128_256) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": ffn, "num_attention_heads": heads, "num_kv_heads": 8,
        "vocab_size": vocabulary, "max_position": 8192,
    }  # fmt: skip


MODELS = {"1B": llama(16, 2048, 8192, 32), "3B": llama(14, 3072, 8192, 24), "8B": llama(8, 4096, 14336, 32)}
EXPERTS = llama(4, 4096, 14336, 32, 32_000) | {"moe": {"num_experts": 16, "top_k": 2, "ffn_hidden_size": 3584}}
TINY = llama(2, 64, 128, 8, 512)
TINY_EXPERTS = TINY | {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}
EIGHT_BITS = "fp8" in get_args(RunConfig.model_fields["precision"].annotation)


def contestants(*, tiny: bool) -> dict[str, Contestant]:
    rows, length = (1, 64) if tiny else (1, 8192)
    models = {"1B": TINY} if tiny else MODELS
    out: dict[str, Contestant] = {}
    for name, model in models.items():
        config = partial(settings, model=model, rows=rows, length=length, compiled="auto")
        out[f"mega {name}"] = (ours, config("bf16"))
        out[f"transformers {name}"] = (theirs, config("bf16"))
        out[f"products {name}"] = (products, config("bf16"))
        if EIGHT_BITS:
            out[f"mega {name} fp8"] = (ours, config("fp8"))
    experts = settings("bf16", TINY_EXPERTS if tiny else EXPERTS, rows, length, compiled="auto")
    return out | {"mega experts": (ours, experts)}


def products(config: RunConfig, device: torch.device) -> Step:
    """Every matrix product of a step but attention's: forward, and the two of the backward."""
    model, n = config.model, config.batch.micro * config.data.seq_length
    width, heads = model.hidden_size, model.num_attention_heads * model.query_key_head_dim
    shapes = [
        (width, heads + 2 * model.key_value_heads * model.query_key_head_dim), (heads, width), (width, 2 * model.ffn_hidden_size),
        (model.ffn_hidden_size, width), (width, model.vocab_size),
    ]  # fmt: skip
    times = [model.num_layers] * 4 + [1]
    made = []
    for inner, columns in shapes:
        sizes = ((n, inner), (columns, inner), (n, columns))
        x, w, y = (torch.randn(size, dtype=get_compute_dtype(config), device=device) for size in sizes)
        made.append([(x, w.t()), (y, w), (y.t(), x)])

    def step() -> None:
        for number, three in zip(times, made, strict=True):
            for _ in range(number):
                for a, b in three:
                    a @ b

    return step


def measure(all_of_them: dict[str, Contestant], end: float, device: torch.device) -> dict[str, Any]:
    """Times and memory of each, and mega's speed over the others'; no round begins that would last beyond `end`."""
    times: dict[str, list[float]] = {name: [] for name in all_of_them}
    memory, begin, rounds = dict.fromkeys(all_of_them, 0), time.monotonic(), 0
    while rounds == 0 or begin + (time.monotonic() - begin) * (rounds + 1) / rounds < end:
        rounds += 1
        for name, (make, config) in all_of_them.items():
            step = make(config, device)
            step()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            times[name].append(seconds(step, device))
            memory[name] = max(memory[name], get_peak_allocated_bytes())
            del step
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"round {rounds}: {name}: {times[name][-1] * 1e3:.0f} ms", flush=True)
    found = {name: described(all_of_them[name][1], times[name], memory[name], device) for name in all_of_them}
    for name in all_of_them:
        if (mine := name.removeprefix("transformers ")) != name:
            found[f"speed over transformers, {mine}"] = ratio(times[name], times[f"mega {mine}"])
            found[f"share of products, {mine}"] = ratio(times[f"products {mine}"], times[f"mega {mine}"])
    return found


def described(config: RunConfig, times: list[float], memory: int, device: torch.device) -> dict[str, Any]:
    speed = MfuCalculator.for_run(config, device, get_compute_dtype(config), world_size=1)
    count = count_parameters_by_layer(config.model)
    rate = config.batch.micro * config.data.seq_length / statistics.median(times)
    achieved = rate * speed.exact
    return {
        "parameters": count.total,
        "active_parameters": count.active_parameters,
        "batch": [config.batch.micro, config.data.seq_length],
        "tokens_per_second": round(rate),
        "tflops": round(achieved / 1e12, 2),
        "mfu": round(achieved / speed.peak, 3),
        "peak_gb": round(memory / 1e9, 2),
    }


def ratio(these: list[float], those: list[float]) -> dict[str, float]:
    return spread([one / other for one, other in zip(these, those, strict=True)])


# ------------------------------------------------------------------------------------------------------ attention alone


def attention(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Milliseconds of each case with each back end; one that is not there is left out."""
    model, length = config.model, config.data.seq_length
    generator = torch.Generator(device).manual_seed(0)
    sizes = [
        (1, length, heads, model.query_key_head_dim)
        for heads in (model.num_attention_heads, *[model.key_value_heads] * 2)
    ]
    q, k, v = (torch.randn(size, dtype=get_compute_dtype(config), device=device, generator=generator) for size in sizes)
    documents = PackedDocumentMask.from_lengths([length // 8] * 8, CAUSAL, device)
    masks: dict[str, AttentionMaskSpec] = {
        "whole": CAUSAL,
        "documents": documents,
        "window": BandMask(left=length // 8 - 1, right=0),
    }
    found = {}
    for name in get_args(KernelsConfig.model_fields["attention"].annotation):
        if name == "auto":
            continue
        asked = config.model_copy(update={"kernels": KernelsConfig(attention=name)})
        try:
            choice = choose_kernels(asked, device)
        except ConfigError as error:
            print(error)
            continue
        kernels = create_kernels(choice, FusibleFunctionCompiler())
        cases: dict[str, Step] = {kind: partial(whole, kernels, q, k, v, mask) for kind, mask in masks.items()}
        cases["ring"] = partial(ring, kernels, q, k, v)
        found[choice.attention] = {kind: timed(step, device) for kind, step in cases.items()}
        print(choice.attention, found[choice.attention], flush=True)
    return found


def whole(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec) -> None:
    """Forward and backward."""
    given = [t.detach().requires_grad_() for t in (q, k, v)]
    y = kernels.attention(*given, mask, AttentionScoreTransform(q.shape[-1] ** -0.5))
    torch.autograd.grad(y, given, q)


def ring(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor) -> None:
    """What one of two ranks computes, twice: the work of both."""
    group, length, how = CommGroup("cp", (0, 1), 1), q.shape[1], AttentionScoreTransform(q.shape[-1] ** -0.5)
    see = partial(SequenceMask(length, q.device).list_mask_blocks, window=None)
    kind, half = BlockwiseAttention(RingKeyValueExchange(group), group, kernels), slice(0, length // 2)
    blocks = [block for _ in range(2) for rank in (0, 1) for block in kind.visible_blocks(length, rank, see)]
    for block in blocks:
        queries, keys, values = (
            t[:, half][:, part] for t, part in ((q, block.queries), (k, block.keys), (v, block.keys))
        )
        y, lse = kernels.attend_block(queries, keys, values, block.mask, how)
        kernels.attend_block_backward(queries, queries, keys, values, y.to(q.dtype), lse, block.mask, how)


def timed(step: Step, device: torch.device) -> float:
    """Milliseconds, after one that does not count."""
    step()
    return round(seconds(step, device) * 1e3, 3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7, help="of all; another round of steps while there is time")
    parser.add_argument("--tiny", action="store_true", help="try the script on a CPU; nothing is written")
    options = parser.parse_args(arguments)
    end = time.monotonic() + (0 if options.tiny else options.minutes * 60)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --tiny tries the script")
    device = torch.device("cpu" if options.tiny else "cuda")
    chosen = contestants(tiny=options.tiny)
    results: dict[str, Any] = {"attention ms": attention(chosen["mega 1B" if options.tiny else "mega 8B"][1], device)}
    results |= measure(chosen, end, device)
    for name, result in results.items():
        print(name, result)
    if not options.tiny:
        results = {"device": torch.cuda.get_device_name(device), **results}
        print("written to", record.write("gpu_steps", results, ["torch", "transformers"]))


if __name__ == "__main__":
    main()

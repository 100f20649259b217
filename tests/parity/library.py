"""The trainer as a library in any layout: log-probabilities, routes and a step by a loss of them, against one process;
and the weights that it streams, against the folder that is exported.

`python tests/parity/library.py [N]` holds every layout of up to eight ranks against one process, or N of them;
`--weights` does it with what they stream, and `--skip N` goes on where N layouts are done.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from parity.cases import MODELS, all_layouts, covering
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.families import find_family_expressing_model
from mega_common.errors import CheckpointError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.engine import TrainingEngine
from mega_trainer.run.build_components import connect_parallel_groups
from mega_trainer.verify.case_comparison import compute_largest_tensor_error
from mega_trainer.verify.case_trainer import copy_sharded_tensors_to_host, make_case_process_groups
from mega_trainer.verify.layout_case import LayoutCase, group_cases_by_rank_count

# whose attention draws dropout, too; which the library refuses; which has a decoder of the others beside its tower; which reads neighbors
SKIPPED = ("tied", "encoder", "t5", "vision", "retro")
# What makes of the models of these names some that HuggingFace has: Llama, Qwen3 (gqa, long), Gemma 2, Mixtral, DeepSeek-V3.
NAMED = {
    "dense": {
        "parallel_residual": False, "shared_norm": False, "norm": "rmsnorm", "norm_bias": True, "no_rope_layers": None,
        "num_kv_heads": 8, "logit_scale": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
        "attention_scale": None, "rope": {"theta": 100.0}, "position": "rope", "head_bias": False, "embedding_norm": False,
    },
    "gqa": {
        "qk_norm_after_rope": False, "head_bias": False,
        "qkv_bias": False, "activation": "swiglu", "rope": {"theta": 100.0}, "attention_gate": False,
        "zero_centered_norm": False,
    },
    "long": {"attention_softcap": None, "attention_sinks": False, "full_attention_layers": None},
    "gemma": {
        "attention_sinks": False, "mlp_bias": False, "activation_limit": None, "qk_norm": False, "activation": "geglu",
        "local_rope": None,
    },
    "moe": {
        "mlp_bias": False, "attention_sinks": False, "activation_limit": None, "full_attention_layers": None,
        "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24},
    },
    "deepseek": {
        "qkv_bias": False, "rope": {"theta": 100.0, "interleaved": True},
        "moe": {**MODELS["deepseek"]["moe"], "shared_ffn_hidden_size": 24},
    },
}  # fmt: skip


def sequences(vocab: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    sizes = [length + 1, 2, *rng.integers(2, length + 2, 9).tolist()]
    return [rng.integers(0, vocab, size).tolist() for size in sizes]


def policy_loss(given: list[Tensor]) -> Tensor:
    """A clipped ratio of probabilities, which is no sum over tokens that weights known before could make."""
    return -torch.stack(
        [torch.exp(each - each.detach() + 0.1 * each.tanh()).clamp(0.8, 1.3).mean() for each in given]
    ).mean()


def quiet(case: LayoutCase) -> LayoutCase:
    """The case without draws, and without what depends on which tokens stand in a row together: losses and biases of routers."""
    model, moe = {**case.model, "residual_dropout": 0.0, "embedding_dropout": 0.0}, case.model.get("moe")
    if moe:
        model["moe"] = {**moe, "aux_loss": 0.0, "z_loss": 0.0, "bias_rate": 0.0}
    return replace(case, model=model, clip=1.0)


def layouts(ranks: int) -> list[LayoutCase]:
    found = [quiet(case) for case in all_layouts() if case.ranks == ranks and case.name not in SKIPPED]
    return [case for case in found if not (case.model.get("moe") or {}).get("sinkhorn")]


def exportable(cases: Sequence[LayoutCase]) -> list[LayoutCase]:
    """Those whose names are in `NAMED`, with fields by which a HuggingFace family has the model."""
    named = [quiet(replace(one, model={**one.model, **NAMED[one.name]})) for one in cases if one.name in NAMED]
    return [one for one in named if _has_family(one)]


def _has_family(case: LayoutCase) -> bool:
    try:
        return bool(find_family_expressing_model(case.config.model))
    except CheckpointError:
        return False


def engine_of(case: LayoutCase, ranks: RankInfo, maker: Any = None) -> TrainingEngine:
    config = RunConfig.parse(case.raw, source=str(case))
    return TrainingEngine(config, connect_parallel_groups(config, ranks, maker))


def outcome(engine: TrainingEngine) -> tuple[list[Tensor], float, float, dict[str, Any]]:
    work = sequences(engine.config.model.vocab_size, engine.config.data.seq_length)
    told = engine.log_probs(work)
    if moe := engine.config.model.moe:  # the experts of all tokens, and log-probabilities by others
        routes = engine.routes(work)
        told += [each.double() for each in routes]
        told += engine.log_probs(work, routes=[(each + 1) % moe.num_experts for each in routes])
    result = engine.train_step(work, policy_loss, lr=1e-2)
    return told, result.loss, result.grad_norm, copy_sharded_tensors_to_host(engine._state.checkpoint_tensors())


def against_one_process(cases: Sequence[LayoutCase]) -> list[str]:
    rank, maker, wrong, alone = dist.get_rank(), make_case_process_groups(cases), [], {}
    for case in cases:
        key = str(case.single.raw)
        alone[key] = alone.get(key) or outcome(engine_of(case.single, RankInfo()))
        told, loss, norm, tensors = outcome(engine_of(case, RankInfo(rank, case.ranks), maker))
        one_told, one_loss, one_norm, one_tensors = alone[key]
        errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(told, one_told, strict=True)]
        errors += [
            abs(loss / one_loss - 1),
            abs(norm / one_norm - 1),
            compute_largest_tensor_error(tensors, one_tensors),
        ]
        if not max(errors) < 1e-10:
            wrong.append(f"{case}: {max(errors):.1e}")
    return wrong


def streamed(engine: TrainingEngine, size: int) -> dict[str, Tensor]:
    """What the engine streams, in buckets of `size` bytes, which only a single tensor may exceed."""
    found: dict[str, Tensor] = {}
    for bucket in engine.stream_weights(bucket_bytes=size):
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= size
        found |= {name: tensor.clone() for name, tensor in bucket}
    return found


def streams_its_export(engine: TrainingEngine, folder: Path) -> bool:
    """Whether what it streams is what is exported of its checkpoint, saved to `folder`, to the bit; rank 0 compares."""
    found = streamed(engine, 60_000)
    made = engine.save(folder / "mega")
    if dist.get_rank() != 0:
        return True
    convert_checkpoint(made, folder / "hf", "hf")
    there = {name: one for path in (folder / "hf").glob("*.safetensors") for name, one in load_file(path).items()}
    return there.keys() == found.keys() and all(
        one.dtype == found[name].dtype and torch.equal(one.view(torch.uint8), found[name].view(torch.uint8))
        for name, one in there.items()
    )


def against_the_export(cases: Sequence[LayoutCase], folder: Path) -> list[str]:
    rank, maker, wrong = dist.get_rank(), make_case_process_groups(cases), []
    for number, case in enumerate(cases):
        engine = engine_of(case, RankInfo(rank, case.ranks), maker)
        work = sequences(engine.config.model.vocab_size, engine.config.data.seq_length)
        engine.train_step(work[:3], policy_loss, lr=1e-2)
        wrong += [] if streams_its_export(engine, folder / str(number)) else [str(case)]
        if rank == 0:
            shutil.rmtree(folder / str(number))
    return wrong


def main() -> int:
    """All of them, or as many as asked for; 1 when one disagrees."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("count", type=int, nargs="?", help="a covering of so many layouts; all, when not given")
    asked.add_argument("--weights", action="store_true", help="compare streamed weights with the exported folder")
    asked.add_argument("--skip", type=int, default=0, help="go on where so many layouts are done")
    given = asked.parse_args()
    cases = [case for ranks in range(1, 9) for case in layouts(ranks)]
    if given.weights:
        cases = list({str(case.raw): case for case in exportable(all_layouts())}.values())
    if given.count:
        cases = covering(cases, given.count)
    wrong, done = [], 0
    for part in group_cases_by_rank_count(cases, 100):
        done += len(part)
        if done <= given.skip:
            continue
        with tempfile.TemporaryDirectory() as folder:
            work = (
                (against_the_export, part[0].ranks, part, Path(folder))
                if given.weights
                else (against_one_process, part[0].ranks, part)
            )
            found = run_ranks(*work, timeout=3600)
        wrong += sorted({problem for one in found for problem in one})
        print(f"{done} of {len(cases)} layouts, {len(part)} on {part[0].ranks} ranks", *wrong, sep="\n", flush=True)
    print(f"{len(cases) - given.skip} layouts, {len(wrong)} of them wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

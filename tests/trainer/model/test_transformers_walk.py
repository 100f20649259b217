"""All causal model types of transformers, tiny: two steps on two ranks equal one process in fp64, or a sentence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_modules import tiny_config

from mega_common.errors import MegaError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.data.micro_batch import DocumentBounds, MicroBatch
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.run.build_components import connect_parallel_groups
from mega_trainer.run.train_step import train_step
from mega_trainer.run.training_run import build_training_state_and_executor

pytest.importorskip("transformers")
LENGTH, SAMPLES = 16, 2
DOZEN = (
    "llama", "gpt2", "bloom", "opt", "mixtral", "qwen3_next", "mamba", "lfm2", "gemma2", "granitemoe", "deepseek_v3",
    "olmo_hybrid", "cpmant", "bert",
    "deepseek_v4",  # it has parameters of three elements, which two ranks cannot halve
)  # fmt: skip
# Types that do not train in this size: transformers cannot build or run them, or their attention is not causal.
REFUSED = {
    "axk1", "axk2", "bailing_hybrid", "bamba", "blt", "cohere_compass_text", "cpmant", "ctrl", "dbrx",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note", "dots3_note_text", "falcon_h1",
    "gemma3n", "gemma3n_text", "gemma4_assistant", "gemma4_unified_assistant", "git", "glm4_moe_lite",
    "glm_moe_dsa", "granitemoehybrid", "hunyuan_v1_dense", "hunyuan_v1_moe", "inkling2_text", "kimi_linear",
    "laguna", "lfm2", "lfm2_moe", "llama4", "llama4_text", "longcat_flash", "mamba2", "minicpm3", "ministral",
    "musicgen", "musicgen_melody", "nemotron", "nemotron_h", "qwen4_exp", "qwen4_exp_text", "reformer",
    "smollm3", "xglm", "xlm", "xmod", "youtu", "zamba", "zamba2",
}  # fmt: skip
Steps = list[tuple[float, float]]


def make_config(model_type: str, zero: int, folder: Path) -> RunConfig:
    """Return a run of two samples a step on a tiny model."""
    file = folder / f"{model_type}.json"
    file.write_text(json.dumps(tiny_config(model_type)))
    raw = {
        "model": {"from": str(file), "implementation": "transformers"}, "data": {"train": ["none"], "seq_length": LENGTH},
        "batch": {"micro": 1, "global": SAMPLES}, "precision": "fp64", "parallel": {"zero": zero}, "device": "cpu",
    }  # fmt: skip
    return RunConfig.parse(resolve_run_config(raw))


def make_micro_batch(sample: int, vocab: int) -> MicroBatch:
    """Return one sample, of which a third of the labels is masked."""
    stream = torch.Generator().manual_seed(sample)
    tokens = torch.randint(2, vocab, (1, LENGTH + 1), generator=stream)
    weights = (torch.rand(1, LENGTH, generator=stream) > 0.3).float()
    positions = torch.arange(LENGTH)[None]
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], weights, positions, DocumentBounds([LENGTH]), [sample])


def take_steps(config: RunConfig, ranks: RankInfo) -> Steps:
    """Return loss and gradient norm of two steps."""
    groups = connect_parallel_groups(config, ranks)
    state, executor = build_training_state_and_executor(config, groups, torch.device("cpu"))
    for stage in state.stages.values():
        initialize_weights(stage, 1)
    state.optimizer.load_main_from_model()
    found = []
    for step in range(2):
        samples = [make_micro_batch(SAMPLES * step + n, config.model.vocab_size) for n in range(SAMPLES)]
        tokens = sum(float(sample.weights.sum()) for sample in samples)
        own = samples[ranks.rank :: ranks.world_size]
        result = train_step(executor, state.optimizer, own, tokens=[tokens], lr=1e-3, clip=1.0)
        found.append((result.loss, result.grad_norm))
    return found


def try_type(model_type: str, zero: int, folder: Path) -> tuple[str, Any]:
    """Return ("steps", both results) of a type, ("sentence", message), or ("foreign", error)."""
    try:
        config = make_config(model_type, zero, folder)
        return "steps", (
            take_steps(config, RankInfo(dist.get_rank(), 2, dist.get_rank())),
            take_steps(config, RankInfo()),
        )
    except MegaError as error:
        return "sentence", str(error)
    except Exception as error:  # noqa: BLE001 - what the test looks for
        return "foreign", f"{type(error).__name__}: {error}"


def walk_types(model_types: list[str], zero: int, folder: Path) -> dict[str, tuple[str, Any]]:
    """Try each type on the ranks of a process group, and write the results to `folder`/results.jsonl as they come."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    own = folder / f"rank{dist.get_rank()}"
    own.mkdir()
    found = {}
    for name in model_types:
        found[name] = try_type(name, zero, own)
        with open(own / "results.jsonl", "a") as stream:
            stream.write(json.dumps([name, *found[name]]) + "\n")
    return found


def check_walk(results: dict[str, tuple[str, Any]]) -> None:
    """Check that there is no foreign error, that steps are equal, and that all types but those `REFUSED` trained."""
    foreign = {name: value for name, (kind, value) in results.items() if kind == "foreign"}
    assert not foreign
    steps = {name: value for name, (kind, value) in results.items() if kind == "steps"}
    for name, (ranks, alone) in steps.items():
        torch.testing.assert_close(ranks, alone, rtol=1e-10, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")
    assert results.keys() - steps.keys() == results.keys() & REFUSED
    assert all(len(value) > 40 for kind, value in results.values() if kind == "sentence")


@pytest.mark.parametrize("zero", [1, 3])
def test_a_dozen_types_train_on_two_ranks(tmp_path: Path, zero: int) -> None:
    check_walk(run_ranks(walk_types, 2, list(DOZEN), zero, tmp_path, timeout=600.0)[0])


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
def test_every_type_trains_or_is_refused(tmp_path: Path, zero: int) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    check_walk(run_ranks(walk_types, 2, sorted(NAMES), zero, tmp_path, timeout=3000.0)[0])

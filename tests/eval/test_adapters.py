"""Texts with different adapters in one batch: each as by the model that has its adapter put into its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import Numbers, run, tokens_of
from tiny_adapters import save_adapter
from tiny_models import BASE, LATENT, MOE, NEOX, V3, save_tiny

from mega_ckpt.families import find_family_by_name
from mega_common.errors import CheckpointError, DataError
from mega_common.lora_config import LoraConfig
from mega_common.model_config import ModelConfig
from mega_eval.drafters import ModelDrafter, NgramDrafter
from mega_eval.engine_requests import EngineRequest
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import LoraAdapterSet, load_inference_model
from mega_eval.paged_cache import PAGE
from mega_eval.text_stream import GenerationLimits
from mega_trainer.model.decoder import Decoder
from mega_trainer.parallel.lora_layers import LoraAdapterLayer, PerRowAdapters

EXPERTS = {"qk_norm": True, "head_dim": 6, "moe": MOE}
ATTENTION = LoraConfig(rank=3, alpha=8.0, modules=["q_proj", "v_proj", "o_proj"], ranks={".*1.*o_proj": 2})
ALL = LoraConfig(rank=2, alpha=4.0, rslora=True)
MODELS: Mapping[str, tuple[str, dict[str, Any], LoraConfig, LoraConfig]] = {
    "grouped": ("llama", {"num_kv_heads": 2}, ATTENTION, ALL),
    "magnitudes": ("phi3", {}, ALL.model_copy(update={"dora": True}), ATTENTION),
    "biases": ("gpt_neox", NEOX, ALL, ATTENTION),
    "latents": (
        "deepseek_v3", {**LATENT, "moe": V3}, LoraConfig(rank=2, modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]),
        LoraConfig(rank=2, modules=["o_proj", "shared_expert.*"]),
    ),
    "experts": ("qwen3_moe", EXPERTS, ATTENTION, LoraConfig(rank=2, modules=["k_proj"])),
}  # fmt: skip
SHARED = [(5 * i + 2) % 61 for i in range(PAGE + 3)]  # of which a page is full


def saved(path: Path, family: str, fields: Mapping[str, Any], *loras: LoraConfig) -> tuple[Path, dict[str, str]]:
    """A tiny model in fp64 and adapters beside it."""
    base = path / "base"
    save_tiny(base, find_family_by_name(family), ModelConfig.parse({**BASE, **fields}), dtype=torch.float64)
    folders = {
        name: str(save_adapter(path / name, base, lora, seed=seed, dtype=torch.float64))
        for seed, (name, lora) in enumerate(zip("ab", loras, strict=False))
    }
    return base, folders


def engine_of(model: Decoder, beside: LoraAdapterSet | None = None, **options: Any) -> InferenceEngine:
    given = {"cache_tokens": 24 * PAGE, "batch_size": 8, "chunk_tokens": 11, **options}
    return InferenceEngine(model, Numbers(), adapters=beside and beside.pool.selection, **given)


def run_requests(
    engine: InferenceEngine, requests: list[EngineRequest], every: int = 0
) -> list[tuple[list[int], list[float]]]:
    """Of each request its tokens and their log-probabilities."""
    found = run(engine, requests, every=every).values()
    return [(tokens_of(events), [one.logprob for event in events for one in event.scored]) for events in found]


@pytest.mark.parametrize("name", MODELS)
def test_each_row_of_a_mixed_batch_is_as_by_its_adapter_merged(name: str, tmp_path: Path) -> None:
    """Prompts that begin alike, in chunks, beside rows that come and go."""
    family, fields, *loras = MODELS[name]
    base, folders = saved(tmp_path, family, fields, *loras)
    beside = LoraAdapterSet.open_adapters(base, folders)
    model = load_inference_model(base, dtype=torch.float64, lora_adapters=beside)
    chosen = [None, "a", "b", "a", None]
    prompts = [SHARED, SHARED, SHARED, [7, 3], [60, 1, 1]]
    asked = [
        EngineRequest(prompt, GenerationLimits(9), logprobs=0, adapter=adapter)
        for prompt, adapter in zip(prompts, chosen, strict=True)
    ]
    mixed = run_requests(engine_of(model, beside, drafter=NgramDrafter()), asked, every=1)
    texts = set()
    for adapter in (None, "a", "b"):
        whole = load_inference_model(base, dtype=torch.float64, adapter=None if adapter is None else folders[adapter])
        for prompt, mine, (tokens, logprobs) in zip(prompts, chosen, mixed, strict=True):
            if mine == adapter:
                ((alone, expected),) = run_requests(
                    engine_of(whole), [EngineRequest(prompt, GenerationLimits(9), logprobs=0)]
                )
                assert tokens == alone
                assert logprobs == pytest.approx(expected, abs=1e-9)
                texts.add((tuple(prompt), round(logprobs[0], 6)))
    assert len(texts) == len(prompts)  # the adapters matter


def test_what_magnitudes_multiply_is_worked_out_once(tmp_path: Path) -> None:
    base, folders = saved(tmp_path, *MODELS["magnitudes"][:3])
    beside = LoraAdapterSet.open_adapters(base, folders)
    model = load_inference_model(base, lora_adapters=beside)
    layers = [layer for layer in model.modules() if isinstance(layer, PerRowAdapters)]
    with mock.patch.object(
        LoraAdapterLayer, "compute_dora_factors", autospec=True, side_effect=LoraAdapterLayer.compute_dora_factors
    ) as worked_out:
        run_requests(
            engine_of(model, beside),
            [EngineRequest(prompt, GenerationLimits(6), adapter="a") for prompt in (SHARED, [7])],
        )
    assert worked_out.call_count == len(layers) > 0


def test_rows_without_an_adapter_keep_their_bits(tmp_path: Path) -> None:
    base, folders = saved(tmp_path, "llama", {}, ATTENTION, ALL)
    beside = LoraAdapterSet.open_adapters(base, folders)
    without = [EngineRequest(prompt, GenerationLimits(6), logprobs=0) for prompt in (SHARED, [7], [9], [7, 3])]
    mixed = [
        without[0],
        EngineRequest([7], GenerationLimits(6), adapter="b"),
        EngineRequest([9], GenerationLimits(6), adapter="a"),
        without[3],
    ]
    found = run_requests(engine_of(load_inference_model(base, lora_adapters=beside), beside), mixed)
    plain = run_requests(engine_of(load_inference_model(base)), without)
    assert [found[0], found[3]] == [plain[0], plain[3]]


def test_a_drafting_model_guesses_for_texts_with_adapters_too(tmp_path: Path) -> None:
    base, folders = saved(tmp_path, "llama", {}, ALL)
    beside, asked = (
        LoraAdapterSet.open_adapters(base, folders),
        [EngineRequest(SHARED, GenerationLimits(12), adapter="a"), EngineRequest(SHARED, GenerationLimits(12))],
    )
    model = load_inference_model(base, dtype=torch.float64, lora_adapters=beside)
    drafter = ModelDrafter(engine_of(load_inference_model(base, dtype=torch.float64)))
    guessed = run_requests(engine_of(model, beside, drafter=drafter), asked)
    assert guessed == run_requests(engine_of(model, beside), asked)


def test_adapters_that_cannot_be_apart_are_refused(tmp_path: Path) -> None:
    whole = LoraConfig(rank=2, modules=["q_proj"], modules_to_save=["lm_head"])
    for number, (family, fields, lora, message) in enumerate(
        [
            ("llama", {}, whole, r"lm_head.weight, which is trained in full.*merge-adapter"),
            ("qwen3_moe", EXPERTS, ALL, r"mlp.experts.gate_up_proj, which belongs to experts.*merge-adapter"),
            (
                "deepseek_v3",
                {**LATENT, "moe": V3},
                LoraConfig(modules=["kv_b_proj"]),
                r"kv_b_proj, which expands a latent.*merge-adapter",
            ),
        ]
    ):
        base, folders = saved(tmp_path / str(number), family, fields, lora)
        with pytest.raises(CheckpointError, match=f"(?s){message}"):
            LoraAdapterSet.open_adapters(base, folders)
    base, folders = saved(tmp_path / "last", "llama", {}, ATTENTION)
    beside = LoraAdapterSet.open_adapters(base, folders)
    with pytest.raises(DataError, match="no adapter 'other'"):
        engine_of(load_inference_model(base, lora_adapters=beside), beside).add_request(
            EngineRequest([1], adapter="other")
        )

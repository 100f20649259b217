"""Peak memory of a step, as torch's allocator counts it for layers of real widths, against the prediction of `mega plan`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from mega_common.model_presets import load_model_preset
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.verify import case_trainer
from mega_trainer.verify.layout_case import LayoutCase

BOUND = 0.02
# Preset, layers of it, tokens of a sample, and fields of the case.
SHAPES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "dense": ("llama3-8b", 4, 4096, {}),
    "dense, selective": ("llama3-8b", 4, 4096, {"recompute": {"kind": "selective"}}),
    "dense, full": ("llama3-8b", 4, 8192, {"recompute": {"kind": "full"}}),
    "dense, Muon": ("llama3-8b", 2, 4096, {"optimizer": "muon"}),
    "norms of queries and keys": ("qwen3-4b", 6, 4096, {"micro": 2}),
    "learned positions": ("gpt3-1.3b", 24, 2048, {}),
    "sinks and biased experts": ("gpt-oss-20b", 2, 2048, {}),
    "large experts": ("mixtral-8x7b", 1, 4096, {}),
    "many experts": ("qwen3-30b-a3b", 2, 4096, {}),
    "windows": ("gemma3-1b", 26, 4096, {}),
    "Mamba-2": ("nemotron-h-8b", 8, 4096, {}),
    "gated delta": ("qwen3-next-80b", 1, 2048, {}),
}  # fmt: skip


def first_layers(preset: str, count: int) -> dict[str, Any]:
    """The first layers of a preset."""
    model = {**load_model_preset(preset), "num_layers": count}
    chosen = {"full_attention_layers": model.get("full_attention_layers"), "moe": model.get("moe")}
    if chosen["full_attention_layers"]:
        model["full_attention_layers"] = [layer for layer in chosen["full_attention_layers"] if layer < count]
    if chosen["moe"] and chosen["moe"].get("layers"):
        model["moe"] = {**chosen["moe"], "layers": [layer for layer in chosen["moe"]["layers"] if layer < count]}
    if model.get("layers"):
        layers = model["layers"]
        if not isinstance(layers, str):
            layers = [kind for block in layers for kind in block["of"] * block["times"]]
        model["layers"] = layers[:count]
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_the_plan_is_what_the_allocator_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_trainer, "initialize_weights", lambda *_: None)  # which is done on the host
    preset, layers, length, fields = SHAPES[name]
    case = LayoutCase(
        name, first_layers(preset, layers), length=length, precision="bf16", closed=False,
        batch=2 * fields.get("micro", 1), **{"micro": 1, **fields},
    )  # fmt: skip
    gc.collect()
    held = torch.cuda.memory_allocated()
    trainer = case_trainer.CaseTrainer.build(case, device=torch.device("cuda", 0))
    trainer.step()
    torch.cuda.reset_peak_memory_stats()
    trainer.step()
    peak = torch.cuda.max_memory_allocated() - held
    planned = sum(predict_memory(case.config.model, make_training_layout(case.config, 1))[0].values())
    print(f"{name}: allocated {peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB")
    assert abs(peak / planned - 1) <= BOUND

from __future__ import annotations

import json
from typing import Any

from mega_common.model_presets import load_model_preset
from mega_common.strict_config import apply_config_overrides
from mega_trainer.config.run_config import RunConfig, format_overrides
from mega_trainer.plan.automatic_layout import choose_parallel_layout
from mega_trainer.plan.layout_candidates import HIDDEN_EXCHANGE
from mega_trainer.plan.layout_search import find_best_layouts
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.memory_advice import apply_settings


def run(**sections: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "model": load_model_preset("tiny"), "data": {"train": ["x"], "seq_length": 512}, "batch": {"global": 32},
    }  # fmt: skip
    return RunConfig.parse(raw | sections)


def test_a_run_without_a_layout_has_the_fastest_that_fits() -> None:
    settings, told = choose_parallel_layout(run(), 4, "h100", None)
    chosen = RunConfig.parse(
        apply_config_overrides(run().model_dump(mode="json", by_alias=True), format_overrides(settings))
    )
    chosen.check_world_size(4)
    assert "4 ranks of h100" in told
    assert "\n" not in told


def test_expert_exchanges_are_hidden_only_by_a_search_that_is_asked_for() -> None:
    experts = {"num_experts": 64, "top_k": 8, "ffn_hidden_size": 4096}
    model = {
        "num_layers": 8,
        "hidden_size": 4096,
        "ffn_hidden_size": 2048,
        "num_attention_heads": 4,
        "vocab_size": 32_000,
        "max_position": 4096,
    }
    fixed = {
        "batch": {"global": 256, "micro": 1},
        "recompute": {"kind": "none"},
        "data": {"train": ["x"], "seq_length": 4096},
    }
    config = run(model={**model, "moe": experts}, **fixed)
    best = find_best_layouts(config, 16, load_machine("h100"), fixed=["batch.micro", "recompute"])[0]
    assert best.settings[HIDDEN_EXCHANGE]
    settings, _ = choose_parallel_layout(config, 16, "h100", None)
    assert settings["parallel.ep"] == 8
    assert not settings.get(HIDDEN_EXCHANGE)


def test_what_a_run_gives_stays() -> None:
    given = run(batch={"global": 32, "micro": 2}, recompute={"kind": "selective", "modules": ["mlp"]})
    settings, _ = choose_parallel_layout(given, 4, "h100", None)
    assert not {"batch.micro", "recompute"} & set(settings)
    chosen = apply_settings(given, settings)
    assert (chosen.batch.micro, chosen.recompute) == (2, given.recompute)


def test_a_run_that_goes_on_keeps_its_layout_while_that_fits_its_ranks() -> None:
    begun = run(parallel={"tp": 2, "sp": True, "pp": 2}, recompute={"kind": "full"})
    saved = json.loads(json.dumps(begun.model_dump(mode="json", by_alias=True)))
    settings, told = choose_parallel_layout(run(), 4, "h100", saved)
    again = apply_settings(run(), settings)
    assert (again.parallel, again.recompute, again.batch.micro) == (begun.parallel, begun.recompute, begun.batch.micro)
    assert "layout of the checkpoint" in told
    other, told = choose_parallel_layout(run(), 2, "h100", saved)
    apply_settings(run(), other).check_world_size(2)
    assert "2 ranks of h100" in told


def test_where_nothing_fits_as_planned_the_run_is_left_to_show_it() -> None:
    settings, told = choose_parallel_layout(
        run(model=load_model_preset("llama3-405b"), data={"train": ["x"], "seq_length": 8192}), 2, "h100", None
    )
    assert settings == {}
    assert "no layout of this run fits 2 GPUs" in told

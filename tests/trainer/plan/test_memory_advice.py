from __future__ import annotations

from typing import Any

from mega_common.model_presets import load_model_preset
from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan.memory_advice import find_memory_savings, make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory


def config(**sections: Any) -> RunConfig:
    raw = {
        "model": load_model_preset("llama3-8b"),
        "data": {"train": "tokens", "seq_length": 8192},
        "batch": {"micro": 2, "global": 64},
    }
    return RunConfig.parse({**raw, **sections})


def total(config: RunConfig, ranks: int) -> int:
    return max(sum(kinds.values()) for kinds in predict_memory(config.model, make_training_layout(config, ranks)))


def test_advice_says_what_the_planner_says_of_the_changed_run() -> None:
    now = config()
    freed = {advice.settings: advice.freed for advice in find_memory_savings(now, 8)}
    less = {
        ("recompute=selective",): config(recompute={"kind": "selective"}), ("batch.micro=1",): config(batch={"micro": 1, "global": 64}),
        ("parallel.zero=3",): config(parallel={"zero": 3}), ("optimizer.offload=true",): config(optimizer={"offload": True}),
        ("parallel.tp=2", "parallel.sp=true"): config(parallel={"tp": 2, "sp": True}),
        ("offload.activations=32",): config(offload={"activations": 32}),
    }  # fmt: skip
    assert {settings: total(now, 8) - total(changed, 8) for settings, changed in less.items()}.items() <= freed.items()
    assert list(freed.values()) == sorted(freed.values(), reverse=True)


def test_a_pipeline_s_own_layout_is_planned() -> None:
    uneven, even = (
        predict_memory(one.model, make_training_layout(one, 2))
        for one in (config(parallel={"pp": 2, "pipeline_layout": [30, 2]}), config(parallel={"pp": 2}))
    )
    assert uneven[0]["weights"] > 1.6 * even[0]["weights"]
    assert find_memory_savings(
        config(
            model={**load_model_preset("llama3-8b"), "num_layers": 1}, parallel={"pp": 2, "pipeline_layout": [0, 1]}
        ),
        2,
    )


def test_only_what_the_run_allows_is_advised() -> None:
    """Not what is set already, or what its ranks do not allow."""
    alone = {
        name
        for advice in find_memory_savings(config(recompute={"kind": "full"}, batch={"micro": 1, "global": 64}), 1)
        for name in advice.settings
    }
    assert alone == {"optimizer.offload=true"}
    piped = {name for advice in find_memory_savings(config(parallel={"pp": 4}), 8) for name in advice.settings}
    assert {"parallel.zero=2", "parallel.zero=3"} <= piped
    once = config(parallel={"pp": 4, "zero": 3, "zero3_gather": "step"})
    found = {name for advice in find_memory_savings(once, 8) for name in advice.settings}
    assert "parallel.zero3_gather=micro_batch" in found

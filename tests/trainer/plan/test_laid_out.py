from __future__ import annotations

import json
from typing import Any

from mega_common.config import apply_overrides
from mega_common.presets import preset
from mega_trainer.config import RunConfig
from mega_trainer.plan.laid_out import laid_out
from mega_trainer.plan.search import overrides, with_settings


def run(**sections: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "model": preset("tiny"), "data": {"train": ["x"], "seq_length": 512}, "batch": {"global": 32},
    }  # fmt: skip
    return RunConfig.parse(raw | sections)


def test_a_run_without_a_layout_has_the_fastest_that_fits() -> None:
    settings, told = laid_out(run(), 4, "h100", None)
    chosen = RunConfig.parse(apply_overrides(run().model_dump(mode="json", by_alias=True), overrides(settings)))
    chosen.check_ranks(4)
    assert "4 ranks of h100" in told
    assert "\n" not in told


def test_what_a_run_gives_stays() -> None:
    given = run(batch={"global": 32, "micro": 2}, recompute={"kind": "selective", "modules": ["mlp"]})
    settings, _ = laid_out(given, 4, "h100", None)
    assert not {"batch.micro", "recompute"} & set(settings)
    chosen = with_settings(given, settings)
    assert (chosen.batch.micro, chosen.recompute) == (2, given.recompute)


def test_a_run_that_goes_on_keeps_its_layout_while_that_fits_its_ranks() -> None:
    begun = run(parallel={"tp": 2, "sp": True, "pp": 2}, recompute={"kind": "full"})
    saved = json.loads(json.dumps(begun.model_dump(mode="json", by_alias=True)))
    settings, told = laid_out(run(), 4, "h100", saved)
    again = with_settings(run(), settings)
    assert (again.parallel, again.recompute, again.batch.micro) == (begun.parallel, begun.recompute, begun.batch.micro)
    assert "stays the checkpoint's" in told
    other, told = laid_out(run(), 2, "h100", saved)
    with_settings(run(), other).check_ranks(2)
    assert "2 ranks of h100" in told


def test_where_nothing_fits_as_planned_the_run_is_left_to_show_it() -> None:
    settings, told = laid_out(
        run(model=preset("llama3-405b"), data={"train": ["x"], "seq_length": 8192}), 2, "h100", None
    )
    assert settings == {}
    assert "no layout of this run fits 2 GPUs" in told

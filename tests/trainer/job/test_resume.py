"""Going on with other settings: what is told, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.job.resume import check_resume_settings, diff_run_settings, list_allowed_setting_changes

Settings = Callable[..., dict[str, Any]]


def test_changes_of_the_model_are_grave(settings: Settings) -> None:
    saved = RunConfig.parse(settings()).model_dump(mode="json", by_alias=True)
    raw = settings(optimizer={"lr": 2e-2})
    assert list_allowed_setting_changes(saved, RunConfig.parse(raw), "there") == ["optimizer.lr: 0.01 -> 0.02"]
    raw["model"] = {**raw["model"], "norm_eps": 1e-6}
    with pytest.raises(ConfigError, match=r"model\.norm_eps: 1e-05 -> 1e-06"):
        list_allowed_setting_changes(saved, RunConfig.parse(raw), "there")
    with pytest.raises(ConfigError, match=r"model\.norm_eps: 1e-05 -> 1e-06"):
        list_allowed_setting_changes({"model": saved["model"]}, RunConfig.parse(raw), "there")
    assert list_allowed_setting_changes({"model": saved["model"]}, RunConfig.parse(settings()), "a converted one") == []
    raw["checkpoint"] = {"allow_changes": True}
    assert any("norm_eps" in line for line in list_allowed_setting_changes(saved, RunConfig.parse(raw), "there"))


def test_a_setting_that_did_not_exist_when_it_was_saved_was_at_its_default(settings: Settings) -> None:
    config = RunConfig.parse(settings(optimizer={"decoupled_lr": 0.5}))
    saved = config.model_dump(mode="json", by_alias=True)
    del saved["model"]["qk_norm"], saved["lr_schedule"]["warmup_init"], saved["optimizer"]["decoupled_lr"]
    assert list_allowed_setting_changes(saved, config, "there") == ["optimizer.decoupled_lr: null -> 0.5"]
    saved["optimizer"]["of_another_version"] = 1
    assert "optimizer.of_another_version: 1 -> null" in diff_run_settings({"optimizer": saved["optimizer"]}, config)[1]
    corpus = settings(data={**settings()["data"], "train": "other"})
    changes = diff_run_settings(saved, RunConfig.parse(corpus))[1]
    assert any(re.fullmatch(r"data\.train: '[^']*' -> 'other'", line) for line in changes), changes


LONG: dict[str, Any] = {
    "train": {"steps": 100}, "batch": {"micro": 1, "global": 4}, "optimizer": {"lr": 1e-3},
    "lr_schedule": {"min_lr": 1e-4},
}  # fmt: skip


def resumed(settings: Settings, *, at: int = 80, **changed: dict[str, Any]) -> list[str]:
    """What is told of a run that goes on after step `at` with changed settings."""
    before, after = (RunConfig.parse(settings(**sections)) for sections in (LONG, _joined(changed)))
    saved = before.model_dump(mode="json", by_alias=True)
    return check_resume_settings({"settings": saved, "consumed_samples": 4 * at}, at, after, "there")


def _joined(changed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: {**LONG.get(name, {}), **changed.get(name, {})} for name in {**LONG, **changed}}


@pytest.mark.parametrize(
    ("changed", "keeps"),
    [
        ({"train": {"steps": 400}}, 100), ({"batch": {"global": 8}}, 50), ({"batch": {"global": 16}}, 25),
        ({"lr_schedule": {"decay_steps": 1000}}, 100), ({"lr_schedule": {"name": "constant"}}, 100),
    ],
)  # fmt: skip
def test_a_jump_of_the_learning_rate_is_refused_with_both_rates_unless_asked_for(
    settings: Settings, changed: dict[str, Any], keeps: int
) -> None:
    with pytest.raises(ConfigError, match=r"a jump of the learning rate of the next step: 0\.000186 -> 0\.\d+") as told:
        resumed(settings, **changed)
    assert f"lr_schedule.decay_steps={keeps} " in str(told.value)
    (section, values), *_ = changed.items()
    assert str(told.value).startswith(f"{section}.{next(iter(values))}: ")
    lines = resumed(settings, **changed, checkpoint={"allow_lr_jump": True})
    assert lines[-1].startswith("the learning rate of the next step: 0.000186 -> ")
    if changed.get("lr_schedule", {}).get("name") is None:  # what the hint says keeps the rate
        kept = {**changed, "lr_schedule": {**LONG["lr_schedule"], "decay_steps": keeps}}
        assert not any("learning rate" in line for line in resumed(settings, **kept))


def test_a_small_change_of_the_rate_and_one_that_was_asked_for_are_told(settings: Settings) -> None:
    assert resumed(settings) == []
    assert resumed(settings, train={"steps": 105})[-1] == "the learning rate of the next step: 0.000186 -> 0.00022"
    assert "0.000186 -> 0.00" in resumed(settings, optimizer={"lr": 5e-3})[-1]
    converted = {"settings": {"model": settings()["model"]}, "consumed_samples": 320}
    assert check_resume_settings(converted, 80, RunConfig.parse(settings(**LONG)), "a converted one") == []


def test_what_changes_the_order_is_told(settings: Settings) -> None:
    for changed in ({"data": {"seq_length": 8}}, {"data": {"split": [8, 2, 0]}}, {"train": {"seed": 5}}):
        (section, ((key, _),)) = next((name, tuple(fields.items())) for name, fields in changed.items())
        told = resumed(settings, **changed)[-1]
        assert told.startswith(f"{section}.{key} changed the order of samples, which is read from sample 320 on")
    assert not any("order" in line for line in resumed(settings, optimizer={"weight_decay": 0.3}))


def test_an_optimizer_with_other_state_is_refused(settings: Settings) -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer.name = lion conflicts with that of the resumed checkpoint there, adamw"
    ):
        resumed(settings, optimizer={"name": "lion"}, checkpoint={"allow_changes": True})
    assert "optimizer.name: 'adamw' -> 'adamw8bit'" in resumed(settings, optimizer={"name": "adamw8bit"})
    converted = {"settings": {"model": settings()["model"]}, "consumed_samples": 320}
    lion = RunConfig.parse(settings(**_joined({"optimizer": {"name": "lion"}})))
    assert check_resume_settings(converted, 80, lion, "a converted one") == []


def test_a_finished_run_is_refused_nothing(settings: Settings) -> None:
    assert resumed(settings, train={"steps": 40}) == ["train.steps: 100 -> 40"]

"""Coordinate check of muP: the change of activations over widths, and widths that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.verify.coordinate_check import LOGITS, STEEPEST, CoordinateCheck, check_coordinates


def parse(**raw: Any) -> RunConfig:
    model = {
        "num_layers": 2, "hidden_size": 96, "ffn_hidden_size": 192, "num_attention_heads": 6, "num_kv_heads": 3, "vocab_size": 1000,
        **raw.pop("model", {}),
    }  # fmt: skip
    return RunConfig.parse(
        resolve_run_config({"data": {"train": "none"}, "model": model, "optimizer": {"lr": 4e-3, **raw}})
    )


@pytest.fixture(scope="module")
def checked() -> CoordinateCheck:
    return check_coordinates(parse(mup={"base_width": 32}), [128, 32])


def test_only_with_mup_the_change_does_not_depend_on_the_width(checked: CoordinateCheck) -> None:
    assert (checked.base_width, checked.widths) == (32, [32, 128])
    assert checked.problem == ""
    for name in checked.names:
        if name != "model.embeddings":
            assert abs(checked.fit_exponent(name, mup=True)) < 0.4, name
            assert checked.fit_exponent(name, mup=False) > 0.6, name
    assert checked.names[:2] == ["model.embeddings", "model.layers.0.attention"]
    assert checked.names[-2:] == ["model.layers.1.mlp", LOGITS]


def test_at_the_base_width_mup_changes_nothing(checked: CoordinateCheck) -> None:
    for name in checked.names:
        assert checked.changes[True, name][0] == checked.changes[False, name][0], name


def test_the_page_and_the_table_have_every_activation(checked: CoordinateCheck) -> None:
    page = checked.render_page("run.yaml")
    assert page.count('class="line') == 2 * len(checked.names)
    assert len(checked.list_rows()) == 1 + 2 * len(checked.names)
    assert checked.as_json()["mup"][LOGITS]["change"] == list(checked.changes[True, LOGITS])


def test_logits_that_grow_with_the_width_are_a_problem() -> None:
    changes = {(mup, LOGITS): [1.0, 4.0**0.5] for mup in (True, False)}
    problem = CoordinateCheck(32, 1e-3, [32, 128], changes).problem
    assert (
        problem == f"with muP the change of the logits is as width^0.50, whose exponent must be within {STEEPEST} of 0"
    )


@pytest.mark.parametrize(
    ("raw", "widths", "words"),
    [
        ({}, [64], "must be at least two different multiples of 16, found 64"),
        ({}, [64, 100], "must be at least two different multiples of 16, found 64, 100"),
        ({"name": "muon"}, [32, 64], "requires optimizer.name = adamw"),
        ({"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}}, [32, 64], "the model has moe"),
    ],
)
def test_what_cannot_be_checked(raw: dict[str, Any], widths: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_coordinates(parse(**raw), widths)

"""`mega train --check` names the files, folders and modules that a run refers to and that do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mega_cli.train import check_run_inputs_exist
from mega_common.errors import ConfigError
from mega_common.strict_config import apply_config_overrides
from mega_trainer.config.run_config import RunConfig

RUN: Mapping[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64, "vocab_size": 64},
    "data": {"train": ["corpus"], "seq_length": 16},
}


def _check(overrides: list[str], *, data: bool = True) -> None:
    config = RunConfig.parse(apply_config_overrides(RUN, overrides))
    check_run_inputs_exist(config, Path("run.yaml"), data=data)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder with an (empty) data set `corpus`, a file `file` and a folder `base`."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus.bin", "corpus.idx", "alone.idx", "file"):
        (tmp_path / name).touch()
    (tmp_path / "base").mkdir()


MISSING: list[tuple[list[str], list[str]]] = [
    (["init_from=nowhere"], ["init_from = 'nowhere': must be an existing file or folder"]),
    (["checkpoint.load=nowhere"], ["checkpoint.load = 'nowhere'"]),
    (["data.tokenizer=nowhere"], ["data.tokenizer = 'nowhere'"]),
    (
        ["data.train=nowhere"],
        ["data.train = 'nowhere': must have the files .idx and .bin, found no nowhere.idx and no nowhere.bin"],
    ),
    (
        ["data.train=alone.idx"],
        ["data.train = 'alone.idx': must have the files .idx and .bin, found no alone.bin"],
    ),
    (["data.train=none/*"], ["data.train: none/*: no data set matches"]),
    (["data.valid=[corpus, nowhere]", "train.eval_every=1"], ["data.valid.1.path = 'nowhere'"]),
    (["data.image_folder=nowhere"], ["data.image_folder = 'nowhere': must be an existing folder"]),
    (["data.image_folder=file"], ["data.image_folder = 'file': must be a folder, found a file"]),
    (["eval.tasks=[mine.yaml]"], ["eval.tasks = 'mine.yaml': must be an existing file"]),
    (["eval.include_path=nowhere"], ["eval.include_path = 'nowhere'"]),
    (["machine=h1000"], ["machine: h1000 is unknown"]),
    (["machine=nowhere.yaml"], ["machine: nowhere.yaml"]),
    (["init_from=base", "lora={init_from: nowhere}"], ["lora.init_from = 'nowhere'"]),
    (["init_from=base", "lora={modules: [query]}"], ["lora.modules = 'query': must match a projection of the model"]),
    (["init_from=base", "lora={modules: [q_proj, layers.7..*]}"], ["lora.modules = 'layers.7..*'", "q_proj"]),
    (["init_from=base", "lora={ranks: {query: 2}}"], ["lora.ranks = 'query'"]),
    (["init_from=base", "lora={alphas: {query: 2}}"], ["lora.alphas = 'query'"]),
    (["init_from=base", "lora={modules_to_save: [head]}"], ["lora.modules_to_save = 'head'"]),
    (["train.freeze=[layers.0]"], ["train.freeze = 'layers.0': must match a tensor of the model"]),
    (["optimizer.lr_factors={embed: 2}"], ["optimizer.lr_factors = 'embed': must match a tensor"]),
    (["objective={kind: distill, teacher: nowhere}"], ["objective.teacher = 'nowhere'"]),
    (
        ["objective={kind: dpo, reference_model: nowhere}", "data.kind=pairs", "init_from=base"],
        ["objective.reference_model = 'nowhere'"],
    ),
    (
        ["init_from=a", "checkpoint.load=b", "lora={modules: [c], init_from: d}", "data.train=e", "data.tokenizer=f"],
        ["6 problems", "init_from = 'a'", "'b'", "'c'", "'d'", "'e'", "'f'"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), MISSING)
def test_missing_inputs_are_named(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as found:
        _check(overrides)
    assert found.value.message.startswith("run.yaml: ")
    for word in words:
        assert word in found.value.message


THERE = [
    ["init_from=base", "lora={}"],
    ["init_from=base", "lora={modules: [q_proj, mlp.*], modules_to_save: [lm_head]}", "train.freeze=['*lora_A*']"],
    ["checkpoint.load=base"],
    ["data.train=[{path: corpus}, cor*]"],
    ["data.train=s3://bucket/corpus", "init_from=s3://bucket/step"],
    ["train.freeze=[model.embed_tokens.*, model.layers.0.*]", "optimizer.lr_factors={'model.*': 0.5}"],
    ["machine=h100-ib"],
    ["eval.tasks=[arc_easy]", "eval.include_path=base"],
]


@pytest.mark.parametrize("overrides", THERE)
def test_inputs_that_exist_or_are_remote_pass(overrides: list[str]) -> None:
    _check(overrides, data="init_from=base" not in overrides)  # which is no model


def test_data_is_left_out_on_request() -> None:
    _check(["data.train=nowhere", "data.tokenizer=nowhere"], data=False)

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch.distributed as dist
from ranks import run_ranks

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_common.errors import ConfigError, DataError
from mega_common.lora_config import LoraConfig
from mega_data.data_config import DataConfig
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.tokenizer import train_tokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import find_run_tokenizer, find_tokenizer_files
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tokenizers, `one` and `two`, and a data set of each."""
    for name, text in (("one", "to be or not to be " * 20), ("two", "all work and no play " * 20)):
        train_tokenizer([text], 300, tmp_path / name)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
        preprocess_corpus([tmp_path / f"{name}.jsonl"], tmp_path / name, tmp_path / f"{name}-tokens", append_eod=True)
    return tmp_path


def config(folder: Path, *names: str, tokenizer: str | None = None) -> DataConfig:
    train = [{"path": str(folder / f"{name}-tokens")} for name in names]
    return DataConfig.parse({"train": train, "tokenizer": str(folder / tokenizer) if tokenizer else None})


def test_the_tokenizer_of_the_data_is_found(folder: Path) -> None:
    found = find_run_tokenizer(config(folder, "one"), 300)
    assert found is not None
    assert found.eos_id is not None
    template = folder / "one" / "additional_chat_templates" / "tools.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    names = ["tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tools.jinja"]
    assert find_tokenizer_files(found) == {name: folder / "one" / name for name in names}


def test_data_of_two_tokenizers_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="two-tokens was made with another tokenizer"):
        find_run_tokenizer(config(folder, "one", "two"), 300)


def test_another_tokenizer_than_the_named_one_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"one-tokens was made with another tokenizer .* than data.tokenizer"):
        find_run_tokenizer(config(folder, "one", tokenizer="two"), 300)


@pytest.fixture
def tuning(folder: Path) -> Callable[..., RunConfig]:
    """A run on data of a tokenizer from a run's weights, whose `assets` hold the tokenizer `one`."""
    model = {
        "num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 300,
    }  # fmt: skip

    def make(data: str, **more: Any) -> RunConfig:
        return RunConfig.parse({
            "model": model, "data": {"train": str(folder / f"{data}-tokens"), "seq_length": 8, "split": [1, 0, 0], **more},
            "batch": {"global": 1}, "train": {"steps": 1}, "log": {"tensorboard": False}, "device": "cpu",
            "output": str(folder / f"run-{data}"),
        })  # fmt: skip

    run_training(make("one"), RankInfo())
    shutil.move(folder / "run-one", folder / "first")
    return lambda data, **more: make(data, **more).model_copy(update={"init_from": str(folder / "first")})


def test_weights_that_came_with_another_tokenizer_are_refused(tuning: Callable[..., RunConfig], folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"init_from = .*first requires data of its own tokenizer, found that of .*two"
    ) as told:
        run_training(tuning("two"), RankInfo())
    assert "data.allow_other_tokenizer=true" in str(told.value)
    assert not (folder / "run-two" / "run.yaml").exists()
    shutil.move(folder / "two", folder / "gone")  # the data set's description is enough to know
    with pytest.raises(DataError, match="requires data of its own tokenizer"):
        run_training(tuning("two"), RankInfo())
    shutil.move(folder / "gone", folder / "two")
    run_training(tuning("two", allow_other_tokenizer=True), RankInfo())
    assert (folder / "run-two/assets/tokenizer.json").read_bytes() == (folder / "two/tokenizer.json").read_bytes()


def test_a_tokenizer_that_differs_in_form_only_is_the_same(tuning: Callable[..., RunConfig], folder: Path) -> None:
    convert_checkpoint(folder / "first", folder / "hf", "hf")
    path = folder / "hf" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    assert run_training(tuning("one").model_copy(update={"init_from": str(folder / "hf")}), RankInfo()).step == 1


@pytest.fixture
def extended_dataset(folder: Path) -> Path:
    """A data set by the tokenizer `one` with two tokens more."""
    shutil.copytree(folder / "one", folder / "more")
    backend = tokenizers.Tokenizer.from_file(str(folder / "one" / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ("<user>", "<bot>")])
    backend.save(str(folder / "more" / "tokenizer.json"))
    (folder / "more.jsonl").write_text(json.dumps({"text": "<user>to be <bot>or not " * 9}) + "\n")
    preprocess_corpus([folder / "more.jsonl"], folder / "more", folder / "more-tokens", append_eod=True)
    return folder


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def train_as(config: RunConfig) -> None:
    run_training(config, RankInfo(dist.get_rank(), dist.get_world_size()))


def test_new_tokens_get_rows(tuning: Callable[..., RunConfig], extended_dataset: Path) -> None:
    """As if they had been added to the weights first, in any layout; they travel with the run."""
    config = tuning("more")
    held = tokenizers.Tokenizer.from_file(str(extended_dataset / "one" / "tokenizer.json")).get_vocab_size()
    for name, size in (("larger", held + 10), ("spare", 300)):  # the old vocabulary has rows to spare for them
        model = config.model.model_copy(update={"vocab_size": size})
        options = ConvertOptions(tokens=("<user>", "<bot>"), vocab_size=max(size, 300))
        convert_checkpoint(extended_dataset / "first", extended_dataset / f"{name}-first", "hf", options=options)
        wide = config.model_copy(
            update={"model": model.model_copy(update={"vocab_size": max(size, 300)}), "precision": "fp64"}
        )
        once = wide.model_copy(
            update={
                "init_from": str(extended_dataset / f"{name}-first"),
                "output": str(extended_dataset / f"{name}-once"),
            }
        )
        run_training(once, RankInfo())
        run_training(wide.model_copy(update={"output": str(extended_dataset / f"{name}-at-start")}), RankInfo())
        assert losses(extended_dataset / f"{name}-at-start") == losses(extended_dataset / f"{name}-once")
        assets = extended_dataset / f"{name}-at-start" / "assets" / "tokenizer.json"
        assert assets.read_bytes() == (extended_dataset / "more" / "tokenizer.json").read_bytes()
    split = wide.model_copy(
        update={"parallel": wide.parallel.model_copy(update={"tp": 2}), "output": str(extended_dataset / "split")}
    )
    run_ranks(train_as, 2, split)
    assert losses(extended_dataset / "split") == pytest.approx(losses(extended_dataset / "spare-once"), rel=1e-12)


def test_an_adapter_beside_new_tokens_is_refused(tuning: Callable[..., RunConfig], extended_dataset: Path) -> None:
    with pytest.raises(ConfigError, match=r"requires base weights with rows for all tokens"):
        run_training(tuning("more").model_copy(update={"lora": LoraConfig()}), RankInfo())


def test_a_vocabulary_that_is_too_small_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"set model\.vocab_size="):
        find_run_tokenizer(config(folder, "one"), 100)

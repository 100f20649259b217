"""`mega data retrieve`, and a run that reads what it found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from commands import typed
from masked_data import save_word_pieces
from tiny_models import save_tiny, variant
from typer.testing import Result

from mega_ckpt.families import find_family_expressing_model
from mega_cli.data import app
from mega_common.errors import DataError, MegaError
from mega_common.strict_config import load_yaml_mapping
from mega_data.retrieval.neighbor_files import read_neighbors_info
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.data.data_check import check_datasets


def mega(*args: object, fails: type[MegaError] | None = None) -> Result:
    whole = typer.Typer()
    whole.add_typer(app, name="data")
    return typed(whole, *args, fails=fails)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set `d` of 24 documents, an encoder `bert`, and a run of a decoder that retrieves."""
    folder = tmp_path_factory.mktemp("retrieve")
    save_word_pieces(folder / "bert", around=True)
    config = variant("bert").model_copy(update={"vocab_size": 207})
    save_tiny(folder / "bert", find_family_expressing_model(config), config)
    texts = [" ".join(f"w{word}" for word in row) for row in np.random.default_rng(1).integers(0, 60, (24, 20))]
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ("--input", folder / "d.jsonl", "--tokenizer", folder / "bert", "--append-eod")
    mega("data", "preprocess", *options, "--output", folder / "d")
    (folder / "run.yaml").write_text(
        "model: {preset: llama3-8b, vocab_size: 207, num_layers: 2, hidden_size: 32, num_attention_heads: 2,"
        " num_kv_heads: 2, head_dim: 16, ffn_hidden_size: 32, retro: {chunk_length: 8, layers: [1]}}\n"
        f"data: {{train: {folder / 'd'}, kind: retro, seq_length: 32}}\n"
        f"batch: {{micro: 1, global: 6}}\ntrain: {{steps: 23}}\noutput: {folder / 'runs'}\n"
    )
    mega("data", "retrieve", folder / "d", "--encoder", folder / "bert", "--chunk-length", 8)
    return folder


def test_a_run_reads_what_was_found_beside_its_data(folder: Path) -> None:
    info = read_neighbors_info(folder / "d.neighbors")
    assert (info.chunk_length, info.neighbors, info.index, info.data.last) == (8, 2, "Flat", 72)
    assert info.database.last == 69  # of 23 documents: those that 969 of 1,000 are
    found = np.load(folder / "d.neighbors/neighbors.npy")
    assert (found >= 0).all()
    assert not (found // 3 == np.arange(72)[:, None] // 3).any()
    shown = json.loads(mega("data", "show", "--run", folder / "run.yaml", "--json").stdout)
    names = [part["name"] for part in shown if part["name"].startswith("neighbor")]
    assert len(names) == 8
    config = RunConfig.parse(resolve_run_config(load_yaml_mapping(folder / "run.yaml")), source="run.yaml")
    (use,) = [use for use in check_datasets(config) if use.split == "train"]
    assert (use.samples, use.epochs) == (138, pytest.approx(8))


def test_what_is_there_is_kept_and_another_database_may_be_named(folder: Path, tmp_path: Path) -> None:
    command = ("data", "retrieve", folder / "d", "--encoder", folder / "bert", "--chunk-length", 8)
    assert "d.neighbors: exists already" in str(mega(*command, fails=DataError).exception)
    options = ("--database", folder / "d", "-k", 1, "--pooling", "cls", "--index", "IVF2,Flat", "--probes", 2)
    mega(*command, *options, "--output", tmp_path / "other")
    info = read_neighbors_info(tmp_path / "other")
    assert (info.database.last, info.neighbors, info.index, info.probes) == (72, 1, "IVF2,Flat", 2)


def test_text_is_asked_for_by_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"d.{suffix}").write_bytes((folder / f"d.{suffix}").read_bytes())
    command = ("data", "retrieve", tmp_path / "d", "--encoder", folder / "bert", "--chunk-length", 8)
    assert "the data set cannot be decoded" in str(mega(*command, fails=DataError).exception)
    mega(*command, "--tokenizer", folder / "bert")
    for name in ("d", tmp_path / "d"):
        assert len(np.load(folder / f"{name}.neighbors" / "neighbors.npy")) == 72

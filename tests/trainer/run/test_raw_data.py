"""Raw, streamed and preprocessed data give the same run to the last bit, in any layout, killed and resumed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from chat_templates import CONVERSATIONS, chat_tokenizer
from ranks import run_ranks

from mega_common.errors import TrainingInterrupted
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.tokenizer import train_tokenizer
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.resume import read_saved_state
from mega_trainer.run.training_run import run_training

pytest.importorskip("transformers", reason="what renders templates")
MODEL = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "vocab_size": 400, "max_position": 256,
}  # fmt: skip
LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"dp": 2}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Chats, raw and as token files, with their tokenizer."""
    train_tokenizer(["the cat sat on the mat, 2 + 2 is 4\n"], 270, tmp_path / "base")
    chat_tokenizer(tmp_path / "base", tmp_path / "tok", "qwen", marks=True)
    chats = [json.dumps(CONVERSATIONS[name]) for name in ("one", "turns", "system")] * 4
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    preprocess_corpus([tmp_path / "chats.jsonl"], tmp_path / "tok", tmp_path / "by-hand", chat=ChatOptions())
    return tmp_path


def make_run(
    folder: Path, name: str, train: str, layout: dict[str, Any], order: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """A run on `train`, whose last quarter validates; with the settings of an `order`, all of the token files does."""
    data = {
        "train": str(folder / train), "kind": "conversations", "seq_length": 200, "tokenizer": str(folder / "tok"),
        "cache": str(folder / "cache"), **({"split": "75,25"} if order is None else order),
    }  # fmt: skip
    return {
        "model": MODEL, "data": data, "parallel": layout, "batch": {"micro": 1, "global": 2},
        "train": {"steps": 4, "eval_every": 2, "eval_steps": 1, "eval_first": True, **settings}, "precision": "fp32",
        "checkpoint": {"async": False}, "log": {"tensorboard": False}, "device": "cpu", "output": str(folder / name),
    }  # fmt: skip


def train(raw: dict[str, Any]) -> tuple[int, str, list[Any]]:
    """Train to the end, with a new start after each interruption: number of starts, digest of this rank's state, losses."""
    ranks, starts = RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank()), 1
    while True:
        try:
            state = run_training(RunConfig.parse(raw), ranks)
            break
        except TrainingInterrupted:
            starts += 1
    digest = hashlib.sha256()
    for name, held in sorted(state.checkpoint_tensors().items()):
        digest.update(name.encode())
        for box in held.boxes:
            digest.update(box.tensor.detach().contiguous().numpy().tobytes())
    lines = [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "valid_loss", "initial_valid_loss")
    return starts, digest.hexdigest(), [[line.get(key) for key in keys] for line in lines]


def compare_layouts(folder: Path, order: dict[str, Any] | None, streamed: dict[str, Any] | None) -> list[list[str]]:
    """What differs on this rank, per layout, between token files straight on and raw data in two starts."""
    found = []
    for layout in LAYOUTS:
        name = "-".join(f"{key}{value}" for key, value in layout.items())
        expected = train(make_run(folder, f"{name}-tokens", "by-hand", layout, order))
        raw = train(make_run(folder, f"{name}-raw", "chats.jsonl", layout, streamed, exit_interval=2))
        first = [each for each in expected[2] if each[0] == 1]
        complete = bool(first) and first[0][4] is not None and len(expected[2]) == 4
        found.append([str(each) for each in (expected, raw) if not complete or raw[0] != 2 or expected[1:] != raw[1:]])
    return found


def test_raw_data_trains_as_token_files_do(folder: Path) -> None:
    assert run_ranks(compare_layouts, 2, folder, None, None, timeout=400) == [[[]] * 3] * 2
    assert len(list((folder / "cache").glob("chats-*"))) == 1


def test_streamed_data_trains_as_token_files_do(folder: Path) -> None:
    """In blocks of about a step, through the end of the data; the checkpoint has the position in the stream."""
    valid = {"split": "1", "valid": str(folder / "by-hand"), "block_tokens": 300}
    order, streamed = {**valid, "order": "blocks"}, {**valid, "stream": True}
    assert run_ranks(compare_layouts, 2, folder, order, streamed, timeout=400) == [[[]] * 3] * 2
    (state,) = (folder / "tp2-raw").glob("checkpoints/*2/*.json")
    assert read_saved_state(state.parent)["streamed"][str(folder / "chats.jsonl")]["block"] > 0


def test_the_tokenizer_is_that_of_the_model(folder: Path) -> None:
    """If its folder has one, and no other is named."""
    raw = make_run(folder, "run", "chats.jsonl", {})
    del raw["data"]["tokenizer"]
    for name, given, found in (("tok", {}, "tok"), ("tok", {"tokenizer": "own"}, "own"), ("base-without", {}, None)):
        settings = {**raw, "init_from": str(folder / name), "data": {**raw["data"], **given}}
        tokenizer = resolve_run_config(settings)["data"].get("tokenizer")
        assert tokenizer == (str(folder / found) if found == "tok" else found)
    tokens = {**raw, "init_from": str(folder / "tok"), "data": {"train": str(folder / "by-hand")}}
    assert "tokenizer" not in resolve_run_config(tokens)["data"]

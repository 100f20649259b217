from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import save_tiny, variant

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_common.errors import CheckpointError, DataError
from mega_data.blended_dataset import open_sequential_dataset
from mega_data.token_files.dataset_info import TokenizerInfo, write_dataset_info
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.dataset_scores import compute_window_losses, evaluate_perplexity
from mega_eval.model_loading import load_inference_model

LENGTHS = [50, 1, 33, 0, 120]


def write_tokens(prefix: Path, *documents: np.ndarray) -> Path:
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    return write_tokens(tmp_path / "held-out", *(rng.integers(61, size=length) for length in LENGTHS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", find_family_by_name("mistral"), variant("window"))
    return tmp_path / "hf"


@pytest.mark.parametrize("seq_length", [1, 10, 13, 203, 1000])
def test_loss_is_that_of_transformers(tmp_path: Path, data: Path, seq_length: int):
    pytest.importorskip("transformers", reason="the reference implementation")
    config = variant("llama3").model_copy(update={"max_position": 1000})
    reference = save_tiny(tmp_path / "hf", find_family_by_name("llama"), config)
    tokens = torch.from_numpy(np.fromfile(f"{data}.bin", np.uint16).astype(np.int64))
    losses = []
    for start in range(0, len(tokens) - 1, seq_length):
        window = tokens[start : start + seq_length + 1]
        with torch.no_grad():
            scores = reference(window[None, :-1]).logits[0].double()
        losses += torch.nn.functional.cross_entropy(scores, window[1:], reduction="none").tolist()
    result = evaluate_perplexity(load_inference_model(tmp_path / "hf"), data, seq_length)
    assert result.tokens == sum(LENGTHS) - 1 == len(losses)
    assert result.windows == math.ceil(len(losses) / seq_length)
    assert result.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.loss))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seq_length", [9, 16, 21])
def test_scores_do_not_depend_on_the_batch(
    tmp_path: Path, folder: Path, data: Path, dtype: torch.dtype, seq_length: int
):
    model, found = load_inference_model(folder, dtype=dtype), set()
    for batch_size in (1, 2, 3, 8, 50):
        file = tmp_path / f"{batch_size}.jsonl"
        result = evaluate_perplexity(model, data, seq_length, batch_size=batch_size, per_sample=file)
        found.add((result, file.read_text()))
    assert len(found) == 1


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_windows_computed_together_differ_by_rounding_alone(folder: Path, data: Path, dtype: torch.dtype, rel: float):
    model, windows = load_inference_model(folder, dtype=dtype), open_sequential_dataset(data, 21)
    alone, together = (list(compute_window_losses(model, windows, batch_size)) for batch_size in (1, 4))
    assert [count for _, count in together] == [count for _, count in alone]
    assert [loss for loss, _ in together] == pytest.approx([loss for loss, _ in alone], rel=rel)


def test_a_checkpoint_and_its_export_score_the_same_sample_by_sample(tmp_path: Path, folder: Path, data: Path):
    convert_checkpoint(folder, tmp_path / "step-00000000", "mega")
    convert_checkpoint(tmp_path / "step-00000000", tmp_path / "export", "hf")
    found = set()
    for path in (folder, tmp_path / "step-00000000", tmp_path / "export"):
        result = evaluate_perplexity(load_inference_model(path), data, 20, per_sample=tmp_path / "samples.jsonl")
        found.add((result, (tmp_path / "samples.jsonl").read_text()))
    assert len(found) == 1


def test_per_sample_losses_add_up(tmp_path: Path, folder: Path, data: Path):
    result = evaluate_perplexity(load_inference_model(folder), data, 32, per_sample=tmp_path / "samples.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines] == list(range(result.windows))
    assert sum(line["tokens"] for line in lines) == result.tokens
    assert sum(line["tokens"] * line["loss"] for line in lines) / result.tokens == pytest.approx(result.loss)


def test_padding_is_no_text(folder: Path, data: Path):
    """A window that the data ends in has the loss of the same tokens in a window that they fill."""
    model, tokens = load_inference_model(folder, dtype=torch.float64), sum(LENGTHS) - 1
    assert evaluate_perplexity(model, data, tokens).loss == pytest.approx(
        evaluate_perplexity(model, data, tokens + 57).loss, rel=1e-13
    )


def describe(prefix: Path, tokenizer: Tokenizer, text_bytes: int) -> None:
    write_dataset_info(
        prefix, tokenizer=TokenizerInfo.from_tokenizer(tokenizer), append_eod=True, dtype="uint16", documents=1, tokens=1,
        text_bytes=text_bytes, bin_sha256="0",
    )  # fmt: skip


def test_bits_per_byte(tmp_path: Path, folder: Path, data: Path):
    model = load_inference_model(folder)
    assert evaluate_perplexity(model, data, 32).bits_per_byte is None
    describe(data, train_tokenizer(["text"], 257, tmp_path / "tokenizer"), 1000)
    result = evaluate_perplexity(model, data, 32)
    assert result.bits_per_byte == pytest.approx(result.loss * result.tokens / math.log(2) / 1000)


def test_data_of_another_tokenizer(tmp_path: Path, folder: Path, data: Path):
    model = load_inference_model(folder)
    ours, theirs = (train_tokenizer([t], 260, tmp_path / t) for t in ("ours ours", "theirs theirs"))
    describe(data, theirs, 1000)
    with pytest.raises(DataError, match=r"held-out: the tokenizer of the data set.*theirs.*differs.*ours"):
        evaluate_perplexity(model, data, 32, tokenizer=ours)
    assert evaluate_perplexity(model, data, 32, tokenizer=theirs) == evaluate_perplexity(model, data, 32)


def test_tokens_outside_the_vocabulary(tmp_path: Path, folder: Path):
    prefix = write_tokens(tmp_path / "big", np.array([1, 2, 3]), np.array([4, 61, 70]))
    with pytest.raises(DataError, match=r"big: token 61 at index 4 is outside the model's vocabulary of 61"):
        evaluate_perplexity(load_inference_model(folder), prefix, 8)


def test_windows_longer_than_learned_positions(tmp_path: Path, data: Path):
    save_tiny(tmp_path / "hf", find_family_by_name("gpt2"), variant("gpt2"))
    model = load_inference_model(tmp_path / "hf")
    assert evaluate_perplexity(model, data, 64).windows == 4
    with pytest.raises(DataError, match=r"windows of 65 tokens.*64 positions"):
        evaluate_perplexity(model, data, 65)


def test_loss_that_is_no_number_leaves_no_file(tmp_path: Path, folder: Path, data: Path):
    model = load_inference_model(folder)
    model.output_weight[3, 0] = float("nan")
    with pytest.raises(CheckpointError, match="window 0 is nan"):
        evaluate_perplexity(model, data, 32, per_sample=tmp_path / "samples.jsonl")
    assert not (tmp_path / "samples.jsonl").exists()


def test_nothing_to_predict(tmp_path: Path, folder: Path):
    prefix = write_tokens(tmp_path / "one", np.array([1]))
    with pytest.raises(DataError, match="requires at least two tokens"):
        evaluate_perplexity(load_inference_model(folder), prefix, 8)

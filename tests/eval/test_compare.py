"""Whether two folders hold one model, by their logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import save_tiny, variant

from mega_ckpt.convert import Options, convert
from mega_ckpt.families import family_named
from mega_common.errors import CheckpointError, DataError
from mega_data.files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer
from mega_eval.compare import compare_logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", family_named("llama"), variant("attention-bias"))
    return tmp_path / "hf"


def vocabulary(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def test_what_was_only_converted_gives_the_same_to_the_bit(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "mega", "mega")
    found = compare_logits(folder, tmp_path / "mega")
    assert (found.difference, found.what) == (0.0, "random numbers")
    assert found.tolerance < 1e-3


def test_the_text_is_encoded_by_the_tokenizer_that_travels(folder: Path, tmp_path: Path) -> None:
    train_tokenizer(["some text"], 257, folder)
    convert(folder, tmp_path / "mega", "mega")
    found = compare_logits(folder, tmp_path / "mega")
    expected = "text" if vocabulary(folder) >= 257 else "random numbers"
    assert found.what == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_may_differ_as_much_as_it_rounds(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    convert(folder, tmp_path / "mega", "mega", options=Options(dtype=dtype))
    found = compare_logits(folder, tmp_path / "mega")
    assert 0 < found.difference <= found.tolerance


def test_another_setting_is_noticed_though_every_tensor_is_the_same(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    raw = json.loads((other / "config.json").read_text())
    raw["rope_theta"] = 77.0
    raw.pop("rope_parameters", None)
    (other / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        CheckpointError, match=r"hf: what is compared with it is not the same model: .*largest difference"
    ):
        compare_logits(folder, other)


def test_tokens_of_a_data_set(folder: Path, tmp_path: Path) -> None:
    for name, tokens in {"good": [1, 2, 3, 4], "bad": [1, vocabulary(folder)]}.items():
        with IndexedWriter(tmp_path / name, np.int32) as writer:
            writer.add_document(np.array(tokens))
    found = compare_logits(folder, folder, tmp_path / "good")
    assert (found.tokens, found.what) == (4, str(tmp_path / "good"))
    with pytest.raises(DataError, match="outside the model's vocabulary"):
        compare_logits(folder, folder, tmp_path / "bad")

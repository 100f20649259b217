"""`mega train --check` looks at the data: is it there, is it the model's, how often is it read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mega_cli.main import main
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer, `with` and `without` end tokens, and `foreign`, which has no description and larger tokens."""
    text = "to be or not to be, that is the question " * 20
    train_tokenizer([text], 300, tmp_path / "tokenizer")
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": text}) + "\n") * 30)
    for name, ends in (("with", True), ("without", False)):
        preprocess_corpus([tmp_path / "text.jsonl"], tmp_path / "tokenizer", tmp_path / name, append_eod=ends)
    with IndexedWriter(tmp_path / "foreign", "int32") as writer:
        writer.add_document(np.arange(1000))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(
    capsys: pytest.CaptureFixture[str], *options: str, vocab_size: int = 300, **data: Any
) -> tuple[int, str, str]:
    run = {
        "model": {"preset": "tiny", "vocab_size": vocab_size},
        "data": {"seq_length": 16, "split": [1], **data},
        "train": {"steps": 100},
    }
    Path("run.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(SystemExit) as end:
        main(["train", "run.yaml", "--check", *options])
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


@pytest.mark.parametrize(
    ("data", "vocab_size", "said"),
    [
        ({"train": "nowhere"}, 300, "found no nowhere.idx and no nowhere.bin"),
        ({"train": "with", "valid": "gone"}, 300, None),  # which is not asked for
        ({"train": "with", "tokenizer": "gone"}, 300, "data.tokenizer = 'gone'"),
        ({"train": "with"}, 200, "model.vocab_size = 200 must be at least"),
        ({"train": "foreign"}, 300, "foreign must have tokens below model.vocab_size = 300, found 999"),
        ({"train": "foreign"}, 1000, None),
        ({"train": "without", "reset_attention_mask": True}, 300, "without: data.reset_attention_mask requires"),
        ({"train": ["with", "without"], "reset_position_ids": True}, 300, "without: data.reset_position_ids requires"),
        ({"train": "with", "reset_attention_mask": True}, 300, None),
        (
            {"train": "foreign", "reset_attention_mask": True},
            1000,
            "requires a tokenizer with an end-of-document token",
        ),
    ],
)
def test_data_that_will_not_do_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], data: dict[str, Any], vocab_size: int, said: str | None
) -> None:
    status, out, error = check(capsys, vocab_size=vocab_size, **data)
    if said is None:
        assert (status, error) == (0, "")
    else:
        assert status == 2
        assert said in error
        assert not out
        assert check(capsys, "--no-data", vocab_size=vocab_size, **data)[0] == 0


def test_epochs_are_told_for_each_data_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for one that is named by one of its files, as a blend in a run.yaml may."""
    blend = [{"path": "with.bin", "weight": 3}, {"path": "without.idx", "weight": 1}]
    status, out, _ = check(capsys, train=blend)
    assert status == 0
    assert yaml.safe_load(out)["train"]["steps"] == 100
    one, two = (line for line in out.splitlines() if line.startswith("# train "))
    tokens = (folder / "with.bin").stat().st_size // 2
    assert one == f"# train with: 30 documents, {tokens:,} tokens; 600 samples, {600 * 16 / tokens:.2f} epochs"
    assert two.startswith("# train without: 30 documents, ")


def test_looking_at_data_needs_no_torch() -> None:
    code = "import sys, mega_trainer.data.data_check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0

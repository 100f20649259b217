"""Engines make parts, and of them what one run makes; what cannot be made is told when the rest is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mega_common.errors import DataError, MissingPackageError
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus

TEXT = "the cat sat on the mat "


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        records = [json.dumps({"text": f"document {name} {i} " + TEXT * (i * 37 % 11)}) for i in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(records))
    return folder


def files(prefix: Path) -> dict[str, bytes]:
    found = [path for path in prefix.parent.iterdir() if prefix.name in path.name]
    return {path.name.replace(prefix.name, "", 1): path.read_bytes() for path in found}


def test_processes_make_what_one_run_makes_and_go_on_when_a_file_is_mended(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    preprocess_corpus([corpus], tokenizer_folder, tmp_path / "straight", append_eod=True)
    good = (corpus / "b.jsonl").read_bytes()
    (corpus / "b.jsonl").write_bytes(good.replace(b"{", b"[", 1))

    def run() -> None:
        preprocess_corpus(
            [corpus], tokenizer_folder, tmp_path / "parts", append_eod=True, engine="processes", shards=3, workers=2
        )

    with pytest.raises(DataError, match=r"1 of 3 shards failed(?s:.*)b.jsonl:1: not JSON(?s:.*)the missing shards"):
        run()
    assert len(list(tmp_path.glob("parts.shard-*.idx"))) == 2
    (corpus / "b.jsonl").write_bytes(good)
    run()
    preprocess_corpus([corpus], tokenizer_folder, tmp_path / "straight", append_eod=True, overwrite=True)
    assert files(tmp_path / "parts") == files(tmp_path / "straight")


def test_ray_is_asked_for_by_name(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"--engine ray requires the package ray(?s:.*)mega-data\[ray\]"):
        preprocess_corpus([corpus], tokenizer_folder, tmp_path / "d", engine="ray")


@pytest.mark.long
def test_ray_makes_what_one_run_makes(corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    preprocess_corpus([corpus], tokenizer_folder, tmp_path / "straight", append_eod=True)
    try:
        preprocess_corpus([corpus], tokenizer_folder, tmp_path / "parts", append_eod=True, engine="ray", shards=5)
    finally:
        ray.shutdown()
    assert files(tmp_path / "parts") == files(tmp_path / "straight")

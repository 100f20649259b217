"""Data sets by URL are those that lie there: fetched once, whole, and anew when they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import DataError
from mega_common.object_store import RemotePath
from mega_data.data_config import DataConfig
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.sampling.dataset_parts import DatasetPartitioner
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.remote_copies import resolve_local_prefix


def upload_files(store: Any, prefix: Path) -> None:
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        store.pipe(f"/bucket/{path.name}", path.read_bytes())


def write(prefix: Path, store: Any, documents: int) -> None:
    with IndexedWriter(prefix, "uint16") as writer:
        for number in range(documents):
            writer.add_document(np.arange(number + 1))
    upload_files(store, prefix)


def test_it_is_fetched_once_and_anew_when_it_changed(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = RemotePath.open

    def open_told(place: RemotePath) -> Any:
        opened.append(place.name)
        return real(place)

    monkeypatch.setattr(RemotePath, "open", open_told)
    for documents in (50, 60):
        write(tmp_path / "wiki", store, documents)
        for where in ("memory://bucket/wiki", Path("memory://bucket/wiki"), Path("memory://bucket/wiki.bin")):
            reader = IndexedReader(resolve_local_prefix(where, tmp_path / "cache"))  # type: ignore[arg-type]
            assert reader.tokens.tolist() == IndexedReader(tmp_path / "wiki").tokens.tolist()
        assert opened == ["wiki.bin", "wiki.idx"]
        opened.clear()
    assert not list((tmp_path / "cache").rglob(".*"))


def test_a_fetch_that_was_ended_goes_on(tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "wiki", store, 100)
    with monkeypatch.context() as patch:
        patch.setattr("mega_data.token_files.remote_copies.BLOCK", 1000)
        patch.setattr("mega_data.token_files.remote_copies.ProgressBar.advance", lambda bar, amount: ended(bar, amount))

        def ended(bar: Any, amount: float) -> None:
            bar.done += amount
            if bar.done > 3000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            resolve_local_prefix(Path("memory://bucket/wiki"), tmp_path / "cache")
    (left,) = (tmp_path / "cache").rglob("bin")
    at = left.stat().st_size
    assert at >= 3000
    blocks: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            "mega_data.token_files.remote_copies.ProgressBar.advance", lambda _, amount: blocks.append(amount)
        )
        reader = IndexedReader(resolve_local_prefix(Path("memory://bucket/wiki"), tmp_path / "cache"))
    assert blocks[0] == at  # what was there already
    assert reader.tokens.tolist() == IndexedReader(tmp_path / "wiki").tokens.tolist()


def test_a_run_trains_on_a_url(tmp_path: Path, tokenizer_folder: Path, store: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 50)
    preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, tmp_path / "wiki", append_eod=True)
    upload_files(store, tmp_path / "wiki")
    config = DataConfig.parse({"train": "memory://bucket/wiki", "cache": str(tmp_path / "cache")}, source="run.yaml")
    (part,) = DatasetPartitioner(config, 0).build_split_parts("train")
    assert part.reader.tokens.tolist() == IndexedReader(tmp_path / "wiki").tokens.tolist()
    assert read_dataset_info(part.reader.prefix) == read_dataset_info(tmp_path / "wiki")


def test_what_is_not_there(tmp_path: Path, store: Any) -> None:
    write(tmp_path / "wiki", store, 3)
    with pytest.raises(DataError, match=r"memory://bucket/none.idx: no such object"):
        resolve_local_prefix(Path("memory://bucket/none"), tmp_path / "cache")
    store.rm("/bucket/wiki.bin")
    with pytest.raises(DataError, match=r"memory://bucket/wiki.bin: no such object"):
        resolve_local_prefix(Path("memory://bucket/wiki"), tmp_path / "cache")
    assert resolve_local_prefix(tmp_path / "wiki") == tmp_path / "wiki"

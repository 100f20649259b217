"""Data sets by URL are those that lie there: fetched once, whole, and anew when they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import DataError
from mega_common.remote import Remote
from mega_data.config import DataConfig
from mega_data.files.fetch import local_prefix
from mega_data.files.indexed import IndexedReader
from mega_data.files.indexed_writer import IndexedWriter
from mega_data.files.info import read_info
from mega_data.making.preprocess import preprocess
from mega_data.order.parts import Parts


def put(store: Any, prefix: Path) -> None:
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        store.pipe(f"/bucket/{path.name}", path.read_bytes())


def write(prefix: Path, store: Any, documents: int) -> None:
    with IndexedWriter(prefix, "uint16") as writer:
        for number in range(documents):
            writer.add_document(np.arange(number + 1))
    put(store, prefix)


def test_it_is_fetched_once_and_anew_when_it_changed(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = Remote.open

    def open_told(place: Remote) -> Any:
        opened.append(place.name)
        return real(place)

    monkeypatch.setattr(Remote, "open", open_told)
    for documents in (50, 60):
        write(tmp_path / "wiki", store, documents)
        for where in ("memory://bucket/wiki", Path("memory://bucket/wiki"), Path("memory://bucket/wiki.bin")):
            reader = IndexedReader(local_prefix(where, tmp_path / "cache"))  # type: ignore[arg-type]
            assert reader.tokens.tolist() == IndexedReader(tmp_path / "wiki").tokens.tolist()
        assert opened == ["wiki.bin", "wiki.idx"]
        opened.clear()
    assert not list((tmp_path / "cache").rglob(".*"))


def test_a_fetch_that_was_ended_goes_on(tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "wiki", store, 100)
    with monkeypatch.context() as patch:
        patch.setattr("mega_data.files.fetch.BLOCK", 1000)
        patch.setattr("mega_data.files.fetch.ProgressBar.advance", lambda bar, amount: ended(bar, amount))

        def ended(bar: Any, amount: float) -> None:
            bar.done += amount
            if bar.done > 3000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            local_prefix(Path("memory://bucket/wiki"), tmp_path / "cache")
    (left,) = (tmp_path / "cache").rglob("bin")
    at = left.stat().st_size
    assert at >= 3000
    blocks: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("mega_data.files.fetch.ProgressBar.advance", lambda _, amount: blocks.append(amount))
        reader = IndexedReader(local_prefix(Path("memory://bucket/wiki"), tmp_path / "cache"))
    assert blocks[0] == at  # what was there already
    assert reader.tokens.tolist() == IndexedReader(tmp_path / "wiki").tokens.tolist()


def test_a_run_trains_on_a_url(tmp_path: Path, tokenizer_folder: Path, store: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 50)
    preprocess([tmp_path / "a.jsonl"], tokenizer_folder, tmp_path / "wiki", append_eod=True)
    put(store, tmp_path / "wiki")
    config = DataConfig.parse({"train": "memory://bucket/wiki", "cache": str(tmp_path / "cache")}, source="run.yaml")
    (part,) = Parts(config, 0).of("train")
    assert part.reader.tokens.tolist() == IndexedReader(tmp_path / "wiki").tokens.tolist()
    assert read_info(part.reader.prefix) == read_info(tmp_path / "wiki")


def test_what_is_not_there(tmp_path: Path, store: Any) -> None:
    write(tmp_path / "wiki", store, 3)
    with pytest.raises(DataError, match=r"memory://bucket/none.idx: no such object"):
        local_prefix(Path("memory://bucket/none"), tmp_path / "cache")
    store.rm("/bucket/wiki.bin")
    with pytest.raises(DataError, match=r"memory://bucket/wiki.bin: no such object"):
        local_prefix(Path("memory://bucket/wiki"), tmp_path / "cache")
    assert local_prefix(tmp_path / "wiki") == tmp_path / "wiki"

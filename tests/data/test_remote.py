"""Text and token files by URL: the same data sets as from files, and nothing mistaken for damage that is the store's."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from mega_common.errors import ConfigError, DataError, MissingPackageError
from mega_common.object_store import ObjectStoreError, RemotePath
from mega_common.progress_logging import ProgressBar
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.sharding import EngineName, InputShard
from mega_data.reading.corpus_sources import SkippedFiles, find_corpus_sources

TEXT = "the cat sat on the mat "


def records(name: str, count: int = 30) -> bytes:
    return b"".join(json.dumps({"text": f"{name} {i} " + TEXT * (i * 7 % 11)}).encode() + b"\n" for i in range(count))


def fill(folder: Path, store: Any) -> None:
    """The same files in a folder and below memory://bucket/in."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(records("a") + b"oops\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(records("b")))
    parquet.write_table(
        pyarrow.table({"text": [f"row {i}" for i in range(40)]}), folder / "c.parquet", row_group_size=9
    )
    (folder / "deep" / "d.json").write_bytes(records("d"))
    for name in ("README.md", ".hidden.jsonl", "deep/test.jsonl", "deep/train.jsonl"):
        (folder / name).write_bytes(records("e"))
    for path in filter(Path.is_file, folder.rglob("*")):
        store.pipe(f"/bucket/in/{path.relative_to(folder)}", path.read_bytes())


def content(prefix: Path) -> dict[str, bytes]:
    names = {path.name.removeprefix(prefix.name): path for path in prefix.parent.glob(f"{prefix.name}.*")}
    return {name: path.read_bytes() for name, path in names.items() if name in (".bin", ".idx")}


def test_a_url_is_read_as_the_folder_is(tmp_path: Path, tokenizer_folder: Path, store: Any) -> None:
    fill(tmp_path / "in", store)
    for name, where in (("files", str(tmp_path / "in")), ("objects", "memory://bucket/in")):
        preprocess_corpus([where], tokenizer_folder, tmp_path / name, on_bad_line="skip")
    assert content(tmp_path / "objects") == content(tmp_path / "files")
    bad = json.loads((tmp_path / "objects.quarantine.jsonl").read_text())
    assert (bad["file"], bad["line"]) == ("memory://bucket/in/a.jsonl", 31)
    skipped_files = SkippedFiles()
    find_corpus_sources(["memory://bucket/in"], skipped_files=skipped_files)
    assert {Path(name).name for names in skipped_files.names.values() for name in names} == {"README.md", "test.jsonl"}


@pytest.mark.parametrize(
    "where", ["memory://bucket/in/a.jsonl", "memory://bucket/in/*.jsonl", "memory://bucket/in/**/a*"]
)
def test_an_object_and_globs(tmp_path: Path, tokenizer_folder: Path, store: Any, where: str) -> None:
    fill(tmp_path / "in", store)
    preprocess_corpus([tmp_path / "in" / "a.jsonl"], tokenizer_folder, tmp_path / "file", on_bad_line="skip")
    preprocess_corpus([where], tokenizer_folder, tmp_path / "objects", on_bad_line="skip")
    assert content(tmp_path / "objects") == content(tmp_path / "file")


def test_shards_of_objects(tmp_path: Path, tokenizer_folder: Path, store: Any) -> None:
    fill(tmp_path / "in", store)
    preprocess_corpus(["memory://bucket/in"], tokenizer_folder, tmp_path / "one", on_bad_line="skip")
    for shard in InputShard(1, 5).all_shards:
        preprocess_corpus(["memory://bucket/in"], tokenizer_folder, tmp_path / "d", on_bad_line="skip", shard=shard)
    assert content(tmp_path / "d") == content(tmp_path / "one")
    assert (tmp_path / "d.info").read_bytes() == (tmp_path / "one.info").read_bytes()


def test_progress_of_a_small_range_ends_at_all_of_it(
    tmp_path: Path, tokenizer_folder: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is read reaches beyond the range."""
    told: list[float] = []
    monkeypatch.setattr(ProgressBar, "advance", lambda _, amount: told.append(amount))
    store.pipe("/bucket/a.jsonl", records("a", 300))
    size = len(records("a", 300))
    preprocess_corpus(["memory://bucket/a.jsonl"], tokenizer_folder, tmp_path / "d", shard=InputShard(2, 3))
    assert sum(told) == pytest.approx(size / 3, abs=300)  # a line more or less


def test_file_urls_are_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(records("a"))
    assert find_corpus_sources([f"file://{tmp_path}/*.jsonl"]) == find_corpus_sources([tmp_path / "a.jsonl"])


def test_a_store_that_fails_is_no_damaged_file(
    tmp_path: Path, tokenizer_folder: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad lines would be put aside; here the run ends, and goes on when the store is back."""
    store.pipe("/bucket/a.jsonl", records("a", 2000))
    preprocess_corpus(["memory://bucket/a.jsonl"], tokenizer_folder, tmp_path / "straight")

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 50_000:
                raise OSError("connection reset")
            return super().read(min(size or 0, 20_000))

    with monkeypatch.context() as patch:
        patch.setattr("mega_data.preprocessing.dataset_output.RECORD_INTERVAL", 0.0)
        patch.setattr("mega_data.preprocessing.text_batches.BATCH", 4000)
        patch.setattr(RemotePath, "open", lambda place: Failing(place.read_bytes()))
        with pytest.raises(
            ObjectStoreError, match=r"memory://bucket/a.jsonl: cannot be accessed \(OSError: connection reset"
        ):
            preprocess_corpus(["memory://bucket/a.jsonl"], tokenizer_folder, tmp_path / "d", on_bad_line="skip")
    assert (tmp_path / ".d.partial" / "progress.json").exists()
    preprocess_corpus(["memory://bucket/a.jsonl"], tokenizer_folder, tmp_path / "d", on_bad_line="skip")
    assert content(tmp_path / "d") == content(tmp_path / "straight")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_outputs_go_to_a_store(
    tmp_path: Path, tokenizer_folder: Path, store: Any, home: Path, engine: EngineName
) -> None:
    """What lies there is what is made in files, and nothing is left here."""
    (tmp_path / "a.jsonl").write_bytes(records("a") + b"{\n")
    url = Path("memory://bucket/d")
    preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, tmp_path / "d", on_bad_line="skip")
    preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, url, on_bad_line="skip", engine=engine)
    names = ["d.bin", "d.idx", "d.info", "d.quarantine.jsonl"]
    assert sorted(Path(name).name for name in store.find("/bucket")) == names
    assert all(store.cat(f"/bucket/{name}") == (tmp_path / name).read_bytes() for name in names)
    assert not [path for path in home.rglob("*") if path.is_file()]
    with pytest.raises(DataError, match=r"memory://bucket/d.idx: exists already"):
        preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, url, on_bad_line="skip")
    (tmp_path / "a.jsonl").write_bytes(records("b"))
    preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, url, overwrite=True)
    assert sorted(Path(name).name for name in store.find("/bucket")) == names[:3]
    with pytest.raises(DataError, match="not supported with --shard or --engine ray"):
        preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, Path("memory://bucket/e"), shard=InputShard(1, 2))


def test_a_store_that_fails_gets_what_is_made_already(
    tmp_path: Path, tokenizer_folder: Path, store: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(records("a"))
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put_file", lambda *_, **__: 1 / 0)
        with pytest.raises(ObjectStoreError, match=r"memory://bucket/d.info: cannot be accessed \(ZeroDivisionError"):
            preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, Path("memory://bucket/d"))
    with monkeypatch.context() as patch:
        patch.setattr(
            "mega_data.preprocessing.preprocess_corpus.encode_document_batches", lambda *_: 1 / 0
        )  # nothing is done again
        preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, Path("memory://bucket/d"))
    preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, tmp_path / "d")
    assert store.cat("/bucket/d.idx") == (tmp_path / "d.idx").read_bytes()


def test_what_is_not_there(store: Any) -> None:
    with pytest.raises(DataError, match=r"memory://bucket/none: no object has this name"):
        find_corpus_sources(["memory://bucket/none"])
    with pytest.raises(ConfigError, match=r"the protocol s4:// is not supported"):
        find_corpus_sources(["s4://bucket/a.jsonl"])
    with pytest.raises(MissingPackageError, match=r"gs://bucket/a.jsonl(?s:.*)gcsfs"):
        find_corpus_sources(["gs://bucket/a.jsonl"])

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import DataError, MissingPackageError
from mega_data.reading.corpus_sources import find_corpus_sources, get_content_suffix, split_hub_dataset_name
from mega_data.reading.documents import Document, RejectedItem
from mega_data.reading.source_readers import iterate_document_texts, read_documents


def items(*inputs: str | Path, key: str = "text") -> list[Document | RejectedItem]:
    return [item for source in find_corpus_sources(inputs) for item in read_documents(source, key)]


def good(*inputs: str | Path, key: str = "text") -> list[str]:
    return [item.text for item in items(*inputs, key=key) if isinstance(item, Document)]


def read_only_item(path: Path) -> RejectedItem:
    [item] = items(path)
    assert isinstance(item, RejectedItem)
    return item


def jsonl(path: Path, *values: str) -> Path:
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


@given(values=st.lists(st.text(st.characters(codec="utf-8"))))
def test_json_lines_keep_every_text(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    assert good(jsonl(tmp_path_factory.mktemp("lines") / "a.jsonl", *values)) == values


def test_a_document_knows_its_place_and_size(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('\n{"text": "é"}\r\n   \n{"text": "b"}'.encode())
    first, second = items(tmp_path / "a.jsonl")
    assert first == Document("é", 2, str(tmp_path / "a.jsonl"), 2)
    assert isinstance(second, Document)
    assert second.location == f"{tmp_path / 'a.jsonl'}:4"


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst"])
def test_json_lines_by_any_name(tmp_path: Path, suffix: str) -> None:
    if suffix.endswith("zst"):
        pytest.importorskip("pyarrow", reason="reads .zst")
    plain = jsonl(tmp_path / "plain.jsonl", "a", "b" * 100_000, "c").read_bytes()
    path = tmp_path / f"packed{suffix}"
    path.write_bytes(packed(plain, suffix))
    assert good(path) == ["a", "b" * 100_000, "c"]


def packed(raw: bytes, suffix: str) -> bytes:
    if suffix.endswith(".zst"):
        import pyarrow

        return bytes(pyarrow.Codec("zstd").compress(raw))
    return gzip.compress(raw) if suffix.endswith(".gz") else raw


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "changed", "not one"])
def test_damaged_archives_are_named(tmp_path: Path, suffix: str, damage: str) -> None:
    if suffix.endswith("zst"):
        pytest.importorskip("pyarrow", reason="reads .zst")
    lines = b"".join(b'{"text": "%d"}\n' % (i * i * i) for i in range(20_000))
    whole = bytearray(packed(lines, suffix))
    if damage == "changed":
        whole[len(whole) // 2 :] = bytes(len(whole) - len(whole) // 2)
    broken = {"cut": whole[:-20], "changed": whole, "not one": b"hello"}[damage]
    (tmp_path / f"a{suffix}").write_bytes(broken)
    *documents, damage_told = items(tmp_path / f"a{suffix}")
    assert isinstance(damage_told, RejectedItem)
    assert damage_told.reason.startswith("not JSON" if damage == "not one" else "cannot be read to its end")
    assert damage_told.line == len(documents) + 1
    assert documents or damage == "not one" or suffix.endswith("zst")  # which is unpacked in large blocks


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "\xff"}', "not UTF-8 (byte 10 of the line)"),
        (b'["a"]', "the record is a list, not an object"),
        (b'{"body": "a", "id": 1}', "no key 'text'; the keys are body, id"),
        (b"{}", "no key 'text'; the keys are none"),
        (b'{"text": 3}', "'text' is a number, not a string"),
        (b'{"text": null}', "'text' is null, not a string"),
        (b'{"text": "\\ud800"}', "'text' is not valid Unicode (lone surrogate at character 0)"),
    ],
)
def test_bad_lines_tell_why(tmp_path: Path, raw: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + raw + b'\n{"text": "fine too"}\n')
    first, bad, last = items(tmp_path / "a.jsonl")
    assert isinstance(bad, RejectedItem)
    assert bad.reason.startswith(reason)
    assert (bad.file, bad.line, bad.content) == (str(tmp_path / "a.jsonl"), 2, raw.decode("utf-8", "backslashreplace"))
    assert isinstance(first, Document)
    assert isinstance(last, Document)


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb")
    assert good(tmp_path / "a.jsonl", tmp_path / "b.txt") == ["a", "b"]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three\n"))
    assert good(tmp_path / "a.txt", tmp_path / "b.txt.gz") == ["one\ntwo\n", "three\n"]
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    assert read_only_item(tmp_path / "c.txt").reason == "not UTF-8 (byte 3 of the file)"
    assert not read_only_item(tmp_path / "c.txt").skipped


def test_a_folder_of_code(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.c", "a/b/x.json", ".git/config", "a/.cache/y", ".hidden", "a-b/n.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    jsonl(tmp_path / "a" / "lines.jsonl", "first", "second")
    (tmp_path / "a" / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "a" / "zeros.o").write_bytes(b"\0\0")
    (tmp_path / "a" / "broken.gz").write_bytes(b"\x1f\x8b\xff")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "a" / "pipe")
    assert good(tmp_path) == ["b.py", "first", "second", "a/z.c", "a/b/x.json", "a-b/n.py"]
    rejected = [item for item in items(tmp_path) if isinstance(item, RejectedItem)]
    assert [Path(item.file).name for item in rejected] == ["broken.gz", "image.png", "zeros.o"]
    assert all(item.skipped for item in rejected)


def test_globs_and_order(tmp_path: Path) -> None:
    for name in ("2", "10", "1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    assert good(f"{tmp_path}/*/a.txt") == good(f"{tmp_path}/**") == ["1", "10", "2"]
    assert good(f"{tmp_path}/1*") == ["1", "10"]
    assert good(tmp_path / "2", f"{tmp_path}/1*") == ["2", "1", "10"]


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.jsonl: no such file or folder"):
        find_corpus_sources([tmp_path / "a.jsonl"])
    with pytest.raises(DataError, match=r"\*.jsonl: no file matches"):
        find_corpus_sources([f"{tmp_path}/*.jsonl"])
    with pytest.raises(DataError, match="no files to read in this folder"):
        find_corpus_sources([tmp_path])
    for ending in (".bin", ".idx"):
        (tmp_path / f"corpus{ending}").write_bytes(b"MMIDIDX\x00\x00" if ending == ".idx" else b"")
    with pytest.raises(DataError, match=rf"only mega data sets\n.*without its ending: {tmp_path}/corpus$"):
        find_corpus_sources([tmp_path])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", "a")
    path.chmod(0)
    with pytest.raises(DataError, match=r"a.jsonl: cannot be read \(Permission denied\)"):
        items(path)


def test_the_bytes_of_each_file_are_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="reads .zst")
    raw = jsonl(tmp_path / "a.jsonl", *"abc" * 100).read_bytes()
    for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(packed(raw, suffix))
        [source] = find_corpus_sources([path])
        told: list[int] = []
        assert len(list(read_documents(source, "text", told.append))) == 300
        assert sum(told) == source.size == path.stat().st_size


def test_texts_for_training_pass_over_binaries_only(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "b.o").write_bytes(b"\0")
    assert list(iterate_document_texts([tmp_path])) == ["a"]
    (tmp_path / "c.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"c.jsonl:1: no key 'text'"):
        list(iterate_document_texts([tmp_path]))


class TestParquet:
    def table(self, path: Path, **columns: list[object]) -> Path:
        arrow = pytest.importorskip("pyarrow", reason="reads Parquet")
        import pyarrow.parquet

        pyarrow.parquet.write_table(arrow.table(columns), path, row_group_size=2)
        return path

    def test_rows(self, tmp_path: Path) -> None:
        path = self.table(tmp_path / "a.parquet", body=["a", None, "é"], n=[1, 2, 3])
        assert good(path, key="body") == ["a", "é"]
        assert items(path, key="body")[1] == RejectedItem("'body' is null, not a string", "None", str(path), 2)

    def test_no_such_column(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"a.parquet: no column 'text'(?s:.*)the columns are body, n"):
            items(self.table(tmp_path / "a.parquet", body=["a"], n=[1]))

    def test_damage(self, tmp_path: Path) -> None:
        path = self.table(tmp_path / "a.parquet", text=["a"] * 100)
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(DataError, match=r"a.parquet: cannot be read as Parquet"):
            items(path)

    def test_package_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.table(tmp_path / "a.parquet", text=["a"])
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(MissingPackageError, match="reading Parquet files requires the package pyarrow"):
            items(path)


class TestDatasets:
    @pytest.fixture(autouse=True)
    def datasets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = pytest.importorskip("datasets", reason="reads hf: inputs")
        monkeypatch.setattr(self.module.config, "HF_HUB_OFFLINE", True, raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def test_a_saved_data_set(self, tmp_path: Path) -> None:
        self.module.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "saved"))
        assert good(tmp_path / "saved") == good(f"hf:{tmp_path / 'saved'}") == ["a", "b"]
        with pytest.raises(DataError, match=r"no column 'body'(?s:.*)the columns are text"):
            items(tmp_path / "saved", key="body")

    def test_a_saved_data_set_with_splits(self, tmp_path: Path) -> None:
        splits = {name: self.module.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
        self.module.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
        assert good(tmp_path / "saved") == ["train"]
        assert good(f"hf:{tmp_path / 'saved'}@test") == ["test"]
        with pytest.raises(DataError, match=r"no split 'dev'(?s:.*)@SPLIT with one of train, test"):
            items(f"hf:{tmp_path / 'saved'}@dev")

    def test_a_folder_that_datasets_understands(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text("text\nhello\nworld\n")
        assert good(f"hf:{tmp_path}") == ["hello", "world"]

    def test_a_name_that_is_not_there(self) -> None:
        with pytest.raises(DataError, match="hf:nobody/nothing: cannot be loaded by the package datasets"):
            items("hf:nobody/nothing")

    def test_package_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MissingPackageError, match="reading hf: inputs requires the package datasets"):
            items("hf:wikitext")


def test_the_parts_of_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_hub_dataset_name("hf:user/data") == ("user/data", "", "")
    assert split_hub_dataset_name("hf:user/data:en@train[:10%]") == ("user/data", "en", "train[:10%]")
    assert split_hub_dataset_name("hf:data:v1@dev") == ("data", "v1", "dev")
    (tmp_path / "data:v1").mkdir()
    assert split_hub_dataset_name("hf:data:v1@dev") == ("data:v1", "", "dev")


@pytest.mark.parametrize(
    ("name", "suffix"), [("a.JSONL.gz", ".jsonl"), ("a.b.csv", ".csv"), ("a.gz", ""), ("a", ""), ("a.zst.txt", ".txt")]
)
def test_the_suffix_of_a_compressed_file_is_that_of_its_content(name: str, suffix: str) -> None:
    assert get_content_suffix(Path("v1.0") / name) == suffix

"""Texts too long to be held are those that reading at once gives, from whatever they are read."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mega_common.errors import DataError
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.sharding import InputShard
from mega_data.reading.corpus_sources import CorpusSource, find_corpus_sources
from mega_data.reading.documents import SHOWN, DiskBackedText, Document, RejectedItem
from mega_data.reading.source_readers import read_documents

TEXT = st.text(alphabet=st.sampled_from('a\\"\n\t/é日😀\ud83d\ude00u0{}[],: '), max_size=40)
VALUES = TEXT | st.integers() | st.none() | st.lists(TEXT, max_size=2) | st.dictionaries(TEXT, TEXT, max_size=2)
RECORDS = st.dictionaries(st.sampled_from(["text", "id", "a"]), VALUES, max_size=3)


@pytest.fixture(autouse=True)
def little_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("documents", "source_readers", "record_readers"):
        monkeypatch.setattr(f"mega_data.reading.{module}.LONG", 16)
    for module in ("documents", "record_readers"):
        monkeypatch.setattr(f"mega_data.reading.{module}.BLOCK", 5)


def found(source: CorpusSource, folder: Path | None) -> Iterator[tuple[Any, ...]]:
    """Texts with their sizes and places; of what is rejected why, in short: a parser that stops earlier says other words."""
    for item in read_documents(source, "text", folder=folder):
        if isinstance(item, RejectedItem):
            yield re.split("[:(;]", item.reason)[0], item.line
        elif item.long is None:
            yield item.text, item.size, item.line
        else:
            with item.long:
                yield "".join(item.long.read_blocks()), item.size, item.line


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(records=st.lists(RECORDS, max_size=4), ascii_only=st.booleans(), cut=st.integers(0, 40), array=st.booleans())
@example([{"text": "\ud83d" + "a" * 40}, {"text": "\ud83d\ude00" * 9 + "\ud83d"}], True, 0, False)
@example([{"a": "x" * 40, "text": "y" * 40, "id": ["z" * 40, 1.5]}], True, 0, True)
@example([{"text": "", "id": None}, {"text": "a" * 11 + '""'}], False, 2, False)
def test_json_of_any_length_gives_what_reading_at_once_gives(
    tmp_path: Path, records: list[Any], ascii_only: bool, cut: int, array: bool
) -> None:
    """Also cut off somewhere, so that it is no JSON."""
    lines = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    text = "[" + ",\n".join(lines) + "]" if array else "\n".join(lines)
    raw = text[: len(text) - cut].encode("utf-8", "replace")
    for kind in ("json", "jsonl"):
        path = tmp_path / f"a.{kind}"
        path.write_bytes(raw)
        source = CorpusSource(str(path), kind)
        assert list(found(source, tmp_path)) == list(found(source, None))
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "a.jsonl"}


@pytest.mark.parametrize("packed", [False, True])
def test_a_text_file_of_any_length(tmp_path: Path, packed: bool) -> None:
    for number, raw in enumerate(
        [b"\xef\xbb\xbfthe c\xc3\xa4t " * 9, b"the cat \xff sat on the mat", b"the mat\0" * 9]
    ):
        path = tmp_path / f"{number}"
        path.write_bytes(gzip.compress(raw) if packed else raw)
    for source in find_corpus_sources([tmp_path]):
        assert list(found(source, tmp_path)) == list(found(source, None))


def test_bad_lines_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [b'{"text": "' + b"a" * 50 + b"\xff" + b"a" * 50 + b'"}', b'{"text": "' + b"a" * 50 + b'"', b"a" * 50,
           b'{"text": "' + b"a\tb" * 50 + b'"}', b'{"text": "' + b"a" * 50 + b'\\x"}', b'{"a": "' + b"a" * 50 + b'"}',
           b'["' + b"a" * 50 + b'"]', b'{"text": "\\ud800' + b"a" * 50 + b'"}']  # fmt: skip
    fine = b'{"text": "fine"}'
    path.write_bytes(b"".join(line + b"\n" + fine + b"\n" for line in bad))
    items = list(read_documents(CorpusSource(str(path), "jsonl"), "text", folder=tmp_path))
    assert [item.text for item in items[1::2] if isinstance(item, Document)] == ["fine"] * len(bad)
    end = f"; the first {SHOWN} bytes of a long line are shown"
    assert [item.reason.removesuffix(end) for item in items[::2] if isinstance(item, RejectedItem)] == [
        "not UTF-8 (byte 60 of the line)", "not JSON (Expecting ',' delimiter)", "not JSON (Expecting value)",
        "not JSON (Invalid control character at)", "not JSON (Invalid \\escape)", "no key 'text'; the keys are a",
        "the record is a list, not an object", "'text' is not valid Unicode (lone surrogate at character 0)",
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["json", "jsonl", "txt"])
def test_a_full_disk_is_no_damaged_file(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open("/dev/full", "w+b"))  # noqa: SIM115
    (tmp_path / f"a.{form}").write_text(json.dumps({"text": "the cat " * 9}))
    with pytest.raises(DataError, match=r".d.partial: cannot be written \(No space left on device\)"):
        preprocess_corpus([tmp_path / f"a.{form}"], tokenizer_folder, tmp_path / "d", on_bad_line="skip")
    assert {path.name for path in tmp_path.iterdir()} == {f"a.{form}"}


def test_a_word_is_found_across_blocks(tmp_path: Path) -> None:
    with DiskBackedText.from_blocks(["the c", "at sat ", "on the mat"], tmp_path) as text:
        assert [word in text for word in ("cat", "the cat sat on", "mat", "t s", "dog")] == [True] * 4 + [False]


@pytest.mark.parametrize("url", [False, True])
def test_ranges_have_long_lines_too(tmp_path: Path, tokenizer_folder: Path, store: Any, url: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "the cat " * (number * 7 % 11)}) + "\n" for number in range(30)))
    store.pipe("/bucket/a.jsonl", path.read_bytes())
    where = "memory://bucket/a.jsonl" if url else path
    preprocess_corpus([where], tokenizer_folder, tmp_path / "whole", append_eod=True)
    for shard in InputShard(1, 4).all_shards:
        preprocess_corpus([where], tokenizer_folder, tmp_path / "parts", append_eod=True, shard=shard)
    for suffix in (".bin", ".idx", ".info"):
        assert (tmp_path / f"whole{suffix}").read_bytes() == (tmp_path / f"parts{suffix}").read_bytes()


def test_memory_does_not_grow_with_a_document(tmp_path: Path, tokenizer_folder: Path) -> None:
    """12 MB of one document take hardly more than 1 does, of text and of JSON."""
    for megabytes in (1, 12):
        text = "the cat sat on the mat, \\u00e9" * (megabytes * 33_333)
        (tmp_path / f"{megabytes}.txt").write_text(text)
        (tmp_path / f"{megabytes}.jsonl").write_text(f'{{"id": 1, "text": "{text}"}}')
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from mega_data.preprocessing import text_batches as batches, text_encoder as encoder\n"
        "from mega_data.reading import documents, record_readers, source_readers\n"
        "from mega_data.preprocessing.preprocess_corpus import preprocess_corpus\n"
        "batches.PIECE = documents.LONG = source_readers.LONG = record_readers.LONG = 1 << 17\n"
        "documents.BLOCK = record_readers.BLOCK = 1 << 17\n"
        "encoder.COMPARED_FIRST = 1\n"
        "tokenizer, folder = map(Path, sys.argv[1:])\n"
        "for name in ('1.txt', '1.jsonl', '1.txt', '1.jsonl', '12.txt', '12.jsonl'):\n"
        "    preprocess_corpus([folder / name], tokenizer, folder / 'd' / name, workers=1, encoder='fastokens', overwrite=True)\n"
        "    print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, tokenizer_folder, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    most = [int(kib) << 10 for kib in done.stdout.split()]
    assert most[5] - most[3] < 15e6

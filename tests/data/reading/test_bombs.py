"""Small files that expand to any size are read in bounded memory, and a record that is too large is a bad line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

MEMORY = 1 << 30  # bytes of address space, libraries included
BLOCK = 1 << 21
COPIES = 160  # of the block: 320 MiB

# With smaller limits, to be quick: reads a file, in a folder for long texts or with "" in none, and prints the bad lines and the number of documents.
READ = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
from pathlib import Path
from mega_data.reading import documents as records, record_readers, source_readers
from mega_data.reading.documents import RejectedItem
for module in (records, record_readers, source_readers):
    module.MAX_RECORD_BYTES, module.MAX_TEXT_BYTES = 4 << 20, 16 << 20
record_readers.MAX_GROUP_BYTES = 64 << 20
from mega_data.reading.source_readers import read_documents
from mega_data.reading.corpus_sources import find_corpus_sources
bad, documents, advanced = [], 0, []
for source in find_corpus_sources([sys.argv[1]], sys.argv[4]):
    for item in read_documents(source, sys.argv[4], advanced.append, folder=Path(sys.argv[2]) if sys.argv[2] else None):
        if isinstance(item, RejectedItem):
            assert len(item.content) <= 1 << 18
            bad.append(item.reason)
        else:
            documents += 1
            if item.long:
                item.long.__exit__(None, None, None)
print(json.dumps([bad, documents, len(advanced)]))
"""


def _packed(compress: Callable[[bytes], bytes], start: bytes, block: bytes, end: bytes = b"") -> bytes:
    """A packed file of one begin, many equal blocks and an end, each packed by itself."""
    return compress(start) + compress(block) * COPIES + (compress(end) if end else b"")


def _zst(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def _gz(start: bytes, block: bytes, end: bytes = b"") -> bytes:
    return _packed(lambda content: gzip.compress(content, 1), start, block, end)


NUMBERS = b"0," * (BLOCK // 2)
SOUND = b'\n{"text": "a"}\n'
CASES: dict[str, tuple[str, bytes, str, int]] = {  # name: (file name, content, reason, documents)
    "NUL bytes": ("a.jsonl.gz", _gz(b'{"text": "a"}\n', bytes(BLOCK), SOUND), "4 MiB", 2),
    "spaces": ("a.jsonl.gz", _gz(b'{"text": ', b" " * BLOCK, SOUND), "4 MiB", 1),
    "numbers": ("a.jsonl.gz", _gz(b'{"text": "a", "n": [', NUMBERS, SOUND), "4 MiB", 1),
    "brackets": ("a.jsonl.gz", _gz(b'{"text": ', b"[" * BLOCK, SOUND), "4 MiB", 1),
    "bzip2": ("a.jsonl.bz2", _packed(bz2.compress, b"[", NUMBERS, SOUND), "4 MiB", 1),
    "xz": ("a.jsonl.xz", _packed(lambda content: lzma.compress(content, preset=0), b"[", NUMBERS, SOUND), "4 MiB", 1),
    "JSON": ("a.json.gz", _gz(b'[{"text": "a"}, {"text": [', NUMBERS), "4 MiB", 1),
    "JSON of one string": ("a.json.gz", _gz(b'[{"text": "a"}, {"text": "', NUMBERS), "", 1),
    "CSV line": ("a.csv.gz", _gz(b"text\na\n", b"a" * BLOCK), "16 MiB", 1),
    "CSV field": ("a.csv.gz", _gz(b'text\na\n"', b"a" * (BLOCK - 1) + b"\n"), "field limit", 1),
    "text of NUL bytes": ("a.txt.gz", _gz(b"a", bytes(BLOCK)), "NUL", 0),
}
WITHOUT_FOLDER = ["NUL bytes", "spaces", "numbers", "JSON", "JSON of one string"]


def _read(path: Path, folder: Path | str = "", key: str = "text") -> tuple[list[str], int, int]:
    words = [sys.executable, "-c", READ, str(path), str(folder), str(MEMORY), key]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    bad, documents, advanced = json.loads(done.stdout)
    return bad, documents, advanced


@pytest.mark.parametrize(
    ("case", "on_disk"), [*((case, True) for case in CASES), *((case, False) for case in WITHOUT_FOLDER)]
)
def test_packed_text_is_read_in_bounded_memory(case: str, on_disk: bool, tmp_path: Path) -> None:
    name, content, reason, documents = CASES[case]
    path = tmp_path / name
    path.write_bytes(content)
    bad, found, advanced = _read(path, tmp_path if on_disk else "")
    assert (len(bad), found) == (1, documents), bad
    assert reason in bad[0]
    assert advanced  # progress


def _with_lzma_dictionary(content: bytes, code: int) -> bytes:
    """The .xz file with another dictionary size in the header of its block."""
    data = bytearray(content)
    size = 4 * (data[12] + 1)
    data[16] = code
    data[8 + size : 12 + size] = zlib.crc32(data[12 : 8 + size]).to_bytes(4, "little")
    return bytes(data)


def _with_zstd_window(content: bytes, exponent: int) -> bytes:
    """A zstd frame of one raw block, without its size, whose window has 2**exponent bytes."""
    header = (len(content) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([0, (exponent - 10) << 3]) + header + content


ALONE = lzma.compress(SOUND, lzma.FORMAT_ALONE)
DICTIONARIES: dict[str, tuple[str, bytes, str | None]] = {  # name: (file name, content, reason, None if it is read)
    "xz of 4 GiB": ("a.jsonl.xz", _with_lzma_dictionary(lzma.compress(SOUND), 40), "512 MiB.*xz -d"),
    "xz of 1 GiB": ("a.jsonl.xz", _with_lzma_dictionary(lzma.compress(SOUND), 36), "512 MiB.*xz -d"),
    "xz of 4 GiB in a second stream": (
        "a.jsonl.xz", lzma.compress(SOUND) + bytes(8) + _with_lzma_dictionary(lzma.compress(SOUND), 40), "512 MiB",
    ),
    "xz -9": ("a.jsonl.xz", lzma.compress(SOUND, preset=9), None),
    "xz, padded streams": ("a.jsonl.xz", lzma.compress(SOUND) + bytes(1 << 17) + lzma.compress(b"") + bytes(4), None),
    "lzma of 2 GiB": ("a.jsonl.lzma", ALONE[:1] + (1 << 31).to_bytes(4, "little") + ALONE[5:], "512 MiB"),
    "lzma": ("a.jsonl.lzma", ALONE, None),
    "xz, cut off": ("a.jsonl.xz", lzma.compress(SOUND)[:-20], "damaged or truncated"),
    "zstd --long=31": ("a.jsonl.zst", _with_zstd_window(SOUND, 31), "128 MiB.*zstd -d --long=31"),
    "zstd --long=27": ("a.jsonl.zst", _with_zstd_window(SOUND, 27), None),
}  # fmt: skip


@pytest.mark.parametrize("case", DICTIONARIES)
def test_a_dictionary_beyond_the_memory_limit_is_refused(case: str, tmp_path: Path) -> None:
    name, content, reason = DICTIONARIES[case]
    (tmp_path / name).write_bytes(content)
    bad, documents, _ = _read(tmp_path / name)
    if reason is None:
        assert (bad, documents) == ([], 1)
    else:
        assert re.search(reason, bad[0])
        assert len(bad) == 1


def _table(path: Path, values: pa.Array, **options: object) -> Path:
    parquet.write_table(pa.table({"text": values}), path, compression="zstd", **options)
    return path


def test_repeated_values_of_parquet_are_not_expanded_together(tmp_path: Path) -> None:
    large = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array(["a" * (4 * BLOCK)]))
    path = _table(tmp_path / "a.parquet", large, dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 1 << 20
    assert _read(path)[:2] == ([], 200)


@pytest.mark.parametrize("rows", [1, 300])
def test_a_parquet_page_that_expands_without_measure_is_a_bad_line(rows: int, tmp_path: Path) -> None:
    values = ["a" * (20 << 20)] if rows == 1 else ["a" * (1 << 18)] * rows
    path = _table(tmp_path / "a.parquet", pa.array(values, pa.large_string()), use_dictionary=False)
    assert path.stat().st_size < 1 << 20
    bad, documents, _ = _read(path)
    assert (len(bad), documents) == (1, 0)
    assert ("16 MiB" if rows == 1 else "times its size") in bad[0]

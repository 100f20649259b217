from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from mega_common.errors import DataError
from mega_data.preprocessing import preprocess_corpus as module
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.text_batches import TextBatch
from mega_data.token_files.dataset_info import DatasetInfo, SkippedCounts, read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.verify_dataset import verify_dataset
from mega_data.tokenizer import Tokenizer, train_tokenizer

FINE = "the cat sat\n"


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def numbered(path: Path, count: int) -> Path:
    return jsonl(path, *({"text": f"document {i} " + "the cat sat " * (i * 37 % 60)} for i in range(count)))


def documents(prefix: Path) -> list[list[int]]:
    reader = IndexedReader(prefix)
    return [reader.read_sequence(i).tolist() for i in range(len(reader))]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_data.preprocessing.text_batches.BATCH", 500)
    monkeypatch.setattr("mega_data.preprocessing.document_encoding.READ_AHEAD", 2000)


class Failing:
    """In place of `Tokenizer.encode_batch`: fails on texts with the word `fail`."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.real = error, Tokenizer.encode_batch

    def __get__(self, tokenizer: Tokenizer, _: type) -> Any:
        def encode_batch(texts: list[str], dtype: Any = np.int32) -> Any:
            if any("fail" in text for text in texts):
                raise self.error
            return self.real(tokenizer, texts, dtype)

        return encode_batch


class Panic(BaseException):
    """As PyO3's PanicException, which is no Exception."""


def test_tokens_are_those_of_the_tokenizer(tmp_path: Path, tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer(tokenizer_folder)
    values = ["the cat", "naïve café\n", "x" * 1000, "日本語"]
    source = jsonl(tmp_path / "a.jsonl", *({"text": value} for value in values))
    info = preprocess_corpus([source], tokenizer_folder, tmp_path / "out" / "plain")
    assert documents(tmp_path / "out" / "plain") == [tokenizer.encode(value) for value in values]
    assert info.text_bytes == sum(len(value.encode()) for value in values)
    preprocess_corpus([source], tokenizer_folder, tmp_path / "ended", append_eod=True)
    assert documents(tmp_path / "ended") == [[*tokenizer.encode(value), 0] for value in values]


def test_the_description(tmp_path: Path, tokenizer_folder: Path) -> None:
    info = preprocess_corpus([numbered(tmp_path / "a.jsonl", 20)], tokenizer_folder, tmp_path / "d", append_eod=True)
    assert read_dataset_info(tmp_path / "d") == verify_dataset(tmp_path / "d", Tokenizer(tokenizer_folder)) == info
    assert files(tmp_path) == {"a.jsonl", "d.bin", "d.idx", "d.info"}
    assert info.documents == 20
    assert info.tokens == IndexedReader(tmp_path / "d").num_tokens
    assert info.bin_sha256 == hashlib.sha256((tmp_path / "d.bin").read_bytes()).hexdigest()
    assert (info.append_eod, info.dtype, info.skipped) == (True, "uint16", SkippedCounts())
    assert info.tokenizer is not None
    assert info.tokenizer.path == str(tokenizer_folder / "tokenizer.json")
    assert (info.tokenizer.vocab_size, info.tokenizer.eos_id) == (300, 0)


@pytest.mark.usefixtures("small_batches")
def test_files_do_not_depend_on_the_number_of_workers(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = numbered(tmp_path / "a.jsonl", 300)
    for workers in (1, 2, 7):
        preprocess_corpus([source], tokenizer_folder, tmp_path / str(workers), append_eod=True, workers=workers)
    for suffix in (".bin", ".idx", ".info"):
        one, two, seven = ((tmp_path / f"{workers}{suffix}").read_bytes() for workers in (1, 2, 7))
        assert one == two == seven


def test_a_long_document_is_encoded_in_pieces(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = Tokenizer.encode_batch

    def watched(self: Tokenizer, texts: list[str], dtype: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return real(self, texts, dtype)

    long = "the cat sät on the mat\n" * 3000
    source = jsonl(tmp_path / "a.jsonl", {"text": FINE}, {"text": long}, {"text": FINE})
    preprocess_corpus([source], tokenizer_folder, tmp_path / "whole", append_eod=True)
    monkeypatch.setattr("mega_data.preprocessing.text_batches.PIECE", 1000)
    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    info = preprocess_corpus([source], tokenizer_folder, tmp_path / "pieces", append_eod=True)
    assert max(sizes) < 2000
    assert len(IndexedReader(tmp_path / "pieces")) == 3
    assert info == read_dataset_info(tmp_path / "whole")


def test_the_lead_of_a_piece_is_no_part_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(models.BPE({"▁": 0, "a": 1, "b": 2, "\n": 3, "▁a": 4}, [("▁", "a")]))
    backend.normalizer = normalizers.Prepend("▁")
    backend.save(str(tmp_path / "tokenizer.json"))
    source = jsonl(tmp_path / "a.jsonl", {"text": "ab\n" * 1000}, {"text": "ab"})
    preprocess_corpus([source], tmp_path, tmp_path / "whole")
    monkeypatch.setattr("mega_data.preprocessing.text_batches.PIECE", 100)
    preprocess_corpus([source], tmp_path, tmp_path / "pieces")
    assert documents(tmp_path / "pieces") == documents(tmp_path / "whole")


def test_progress_is_of_what_is_encoded(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of many pieces advances piece by piece, up to the size of the file."""
    told: list[float] = []
    monkeypatch.setattr("mega_data.preprocessing.text_batches.PIECE", 1000)
    monkeypatch.setattr(module.ProgressBar, "advance", lambda _, amount: told.append(amount))
    source = jsonl(tmp_path / "a.jsonl", {"text": "the cat sat on the mat\n" * 1000})
    preprocess_corpus([source], tokenizer_folder, tmp_path / "d")
    assert sum(told) == pytest.approx(source.stat().st_size)
    assert max(told) < source.stat().st_size / 10


@pytest.mark.usefixtures("small_batches")
def test_little_text_is_under_way_at_once(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, begun, most = threading.Lock(), [0], [0]
    real_add = module.DatasetOutput.add_batch

    def added(self: Any, batch: TextBatch, arrays: Any) -> None:
        with lock:
            begun[0] -= batch.size
        real_add(self, batch, arrays)

    real_batches = module.build_text_batches

    def batches(*args: Any, **options: Any) -> Any:
        for batch in real_batches(*args, **options):
            with lock:
                begun[0] += batch.size
                most[0] = max(most[0], begun[0])
            yield batch

    monkeypatch.setattr(module, "build_text_batches", batches)
    monkeypatch.setattr(module.DatasetOutput, "add_batch", added)
    info = preprocess_corpus([numbered(tmp_path / "a.jsonl", 300)], tokenizer_folder, tmp_path / "d", workers=2)
    assert most[0] <= 2 * 2000 + 1000  # what may be under way, and a batch of up to a document more
    assert info.text_bytes > 10 * most[0]


def test_dtype_follows_the_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    for size, dtype in ((65_499, "uint16"), (65_500, "int32"), (200_000, "int32")):
        backend = Backend(models.WordLevel({"a": 0, "b": size - 1}, unk_token="a"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.save(str(tmp_path / "tokenizer.json"))
        info = preprocess_corpus(
            [jsonl(tmp_path / "a.jsonl", {"text": "a b"})], tmp_path / "tokenizer.json", tmp_path / "d", overwrite=True
        )
        assert info.dtype == dtype
        assert documents(tmp_path / "d") == [[0, size - 1]]


class TestBadInput:
    def test_error_names_file_and_line(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", {"text": FINE}, "{oops", {"text": FINE})
        with pytest.raises(DataError, match=r"a.jsonl:2: not JSON(?s:.*)--on-bad-line skip"):
            preprocess_corpus([source], tokenizer_folder, tmp_path / "d")
        assert files(tmp_path) == {"a.jsonl"}

    def test_skip_keeps_them_apart(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", {"text": FINE}, "{oops é", {"body": 1}, {"text": FINE})
        info = preprocess_corpus([source], tokenizer_folder, tmp_path / "d", on_bad_line="skip")
        assert (info.documents, info.skipped.bad) == (2, 2)
        kept = [json.loads(line) for line in (tmp_path / "d.quarantine.jsonl").read_text().splitlines()]
        assert [(line["file"], line["line"], line["content"]) for line in kept] == [
            (str(source), 2, "{oops é"),
            (str(source), 3, '{"body": 1}'),
        ]
        assert [line["reason"][:8] for line in kept] == ["not JSON", "no key '"]

    def test_skip_without_bad_lines_leaves_no_file(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        source = tmp_path / "a.jsonl"
        for records in ([{"text": FINE}, "oops"], [{"text": FINE}]):
            jsonl(source, *records)
            preprocess_corpus([source], tokenizer_folder, tmp_path / "d", on_bad_line="skip", overwrite=True)
        assert files(tmp_path) == {"a.jsonl", "d.bin", "d.idx", "d.info"}

    @pytest.mark.parametrize("records", [[], [{"text": ""}], ["oops"], ["", "  "]])
    def test_nothing_to_tokenize(self, tmp_path: Path, tokenizer_folder: Path, records: list[object]) -> None:
        source = jsonl(tmp_path / "a.jsonl", *records)
        with pytest.raises(DataError, match=r"a.jsonl: (no document with text|the file is empty)"):
            preprocess_corpus([source], tokenizer_folder, tmp_path / "d", on_bad_line="skip", append_eod=True)
        assert files(tmp_path) == {"a.jsonl"}

    def test_empty_documents_are_left_out_and_counted(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": FINE}, {"text": ""})
        (tmp_path / "empty.jsonl").touch()
        info = preprocess_corpus([source, tmp_path / "empty.jsonl"], tokenizer_folder, tmp_path / "d", append_eod=True)
        assert (info.documents, info.skipped.empty) == (1, 2)

    def test_binary_files_of_a_folder_are_counted(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a.py").write_text(FINE)
        (tmp_path / "in" / "a.pyc").write_bytes(b"\0\xff")
        info = preprocess_corpus([tmp_path / "in"], tokenizer_folder, tmp_path / "d")
        assert (info.documents, info.skipped.binary) == (1, 1)

    def test_no_end_token_to_append(self, tmp_path: Path) -> None:
        train_tokenizer(["abc"], 257, tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path = tmp_path / name
            path.write_text(path.read_text().replace("<|endoftext|>", "<other>").replace("eos_token", "none"))
        with pytest.raises(DataError, match="requires a tokenizer with an end-of-text token"):
            preprocess_corpus([tmp_path / "tokenizer.json"], tmp_path, tmp_path / "d", append_eod=True)

    @pytest.mark.usefixtures("small_batches")
    @pytest.mark.parametrize("error", [ValueError("odd bytes"), Panic("odd bytes")])
    def test_the_tokenizer_fails(
        self, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        records: list[object] = [{"text": FINE * 3}] * 200
        records[120] = {"text": "fail"}
        source = jsonl(tmp_path / "a.jsonl", *records)
        monkeypatch.setattr(Tokenizer, "encode_batch", Failing(error))
        with pytest.raises(DataError, match=r"a.jsonl:121: the tokenizer .* fails on this document \(odd bytes\)"):
            preprocess_corpus([source], tokenizer_folder, tmp_path / "d", workers=3)
        assert files(tmp_path) == {"a.jsonl"}

    @pytest.mark.parametrize("workers", [1, 2])
    def test_ctrl_c_while_it_encodes_is_no_failure_of_it(
        self, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, workers: int
    ) -> None:
        monkeypatch.setattr(Tokenizer, "encode_batch", Failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            preprocess_corpus(
                [jsonl(tmp_path / "a.jsonl", {"text": "fail"})], tokenizer_folder, tmp_path / "d", workers=workers
            )
        assert files(tmp_path) == {"a.jsonl"}


class TestOutput:
    def test_nothing_is_overwritten_unasked(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", {"text": FINE})
        preprocess_corpus([source], tokenizer_folder, tmp_path / "d")
        with pytest.raises(DataError, match=r"d.idx: exists already(?s:.*)--overwrite"):
            preprocess_corpus([source], tokenizer_folder, tmp_path / "d")
        jsonl(source, {"text": FINE}, {"text": FINE})
        preprocess_corpus([source], tokenizer_folder, tmp_path / "d", overwrite=True)
        info = verify_dataset(tmp_path / "d")
        assert isinstance(info, DatasetInfo)
        assert info.documents == 2

    def test_a_failed_overwrite_leaves_the_old_one(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", {"text": FINE})
        before = preprocess_corpus([source], tokenizer_folder, tmp_path / "d")
        jsonl(source, {"text": FINE}, "oops")
        with pytest.raises(DataError, match="not JSON"):
            preprocess_corpus([source], tokenizer_folder, tmp_path / "d", overwrite=True)
        assert verify_dataset(tmp_path / "d") == before

    def test_a_folder_is_no_prefix(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        with pytest.raises(DataError, match="must be a prefix"):
            preprocess_corpus([jsonl(tmp_path / "a.jsonl", {"text": FINE})], tokenizer_folder, tmp_path)

    @pytest.mark.parametrize("limit", [1000, 20_000, 40_000, 60_000])
    def test_a_full_disk_is_one_error(self, tmp_path: Path, tokenizer_folder: Path, limit: int) -> None:
        """A limit on the size of files stands for the disk: it hits the tokens early, late, and the quarantine."""
        source = jsonl(tmp_path / "a.jsonl", *({"text": FINE * 30} for _ in range(300)), *["x" * 50] * 500)
        code = (
            "import resource, signal\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
            "from mega_common.errors import DataError\n"
            "from mega_data.preprocessing.preprocess_corpus import preprocess_corpus\n"
            "try:\n"
            f"    preprocess_corpus([{str(source)!r}], {str(tokenizer_folder)!r}, {str(tmp_path / 'd')!r}, on_bad_line='skip')\n"
            "except DataError as error:\n"
            "    print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
        assert done.returncode == 0, done.stderr
        assert "cannot be written (File too large)" in done.stdout
        assert files(tmp_path) == {"a.jsonl"}

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_an_ended_run_leaves_nothing_that_looks_whole(
        self, tmp_path: Path, tokenizer_folder: Path, number: signal.Signals
    ) -> None:
        os.mkfifo(tmp_path / "a.jsonl")
        shutil.copytree(tokenizer_folder, tmp_path / "tok")
        code = (
            "import mega_data.reading.corpus_sources as sources\n"
            "from pathlib import Path\n"
            "import mega_data.preprocessing.preprocess_corpus as module\n"
            f"path = {str(tmp_path / 'a.jsonl')!r}\n"
            "module.find_corpus_sources = lambda *_: [sources.CorpusSource(path, 'jsonl')]\n"  # a pipe, to stop half-way
            f"module.preprocess_corpus([path], Path({str(tmp_path / 'tok')!r}), Path({str(tmp_path / 'd')!r}), workers=2)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        with open(tmp_path / "a.jsonl", "w") as pipe:
            for _ in range(5000):
                pipe.write(json.dumps({"text": FINE * 20}) + "\n")
            pipe.flush()
            wait_for(lambda: ".d.partial" in files(tmp_path))
            process.send_signal(number)
            _, told = process.communicate(timeout=60)
        assert process.returncode != 0
        assert not any(name.startswith("d.") for name in files(tmp_path))
        if number == signal.SIGINT:
            assert told.rstrip().endswith("KeyboardInterrupt")
            assert files(tmp_path) == {"a.jsonl", "tok"}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

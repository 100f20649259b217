"""Parts made apart, in any order and however often killed, join to what one run makes."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError, DataError
from mega_data.preprocessing import dataset_output as output
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.sharding import InputShard, select_shard_sources
from mega_data.reading.corpus_sources import find_corpus_sources
from mega_data.token_files.dataset_commit import READY, finish_interrupted_commit
from mega_data.token_files.partial_folder import get_partial_folder
from mega_data.token_files.verify_dataset import verify_dataset

TEXT = "the cat sät on the mat "


def lines(first: int, count: int) -> str:
    """JSON lines with bad, empty and blank ones among them, and a long one."""
    records = [json.dumps({"text": f"document {i} " + TEXT * (i * 37 % 11)}) for i in range(first, first + count)]
    records[count // 2], records[count // 3], records[count // 4] = "oops é", "", '{"text": ""}'
    records[3 * count // 4] = json.dumps({"text": TEXT * 100})
    return "\n".join(records) + "\n"


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    """Large and small files, that can be cut and that cannot, one without a line end, an empty one."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(0, 90).encode() + b"oops")
    (folder / "b.txt").write_text(TEXT * 40)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines(100, 60).encode()))
    (folder / "d").write_text(lines(200, 40))  # known by what it says
    (folder / "e.jsonl").touch()
    table = pyarrow.table({"text": [f"row {i} {TEXT * (i % 9)}" for i in range(60)] + [None]})
    parquet.write_table(table, folder / "f.parquet", row_group_size=7, compression="none")
    return sorted(folder.iterdir())


def run(corpus: list[Path], tokenizer: Path, output: Path, shard: str | None = None, **options: object) -> object:
    part = InputShard.parse(shard) if shard else None
    return preprocess_corpus(corpus, tokenizer, output, append_eod=True, on_bad_line="skip", shard=part, **options)  # type: ignore[arg-type]


def files(prefix: Path) -> dict[str, bytes]:
    """All files beside a data set's that begin with its name, or are hidden, by what follows the name."""
    return {
        path.name.replace(prefix.name, "", 1): path.read_bytes() if path.is_file() else b""
        for path in prefix.parent.iterdir()
        if prefix.name in path.name
    }


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_parts_join_to_what_one_run_makes(
    corpus: list[Path], tokenizer_folder: Path, tmp_path: Path, count: int
) -> None:
    run(corpus, tokenizer_folder, tmp_path / "straight")
    order = sorted(range(1, count + 1), key=lambda number: number * 31 % 41)
    for number in order:
        assert not (tmp_path / "parts.idx").exists()
        run(corpus, tokenizer_folder, tmp_path / "parts", f"{number}/{count}", workers=1)
    assert files(tmp_path / "parts") == files(tmp_path / "straight")
    assert set(files(tmp_path / "parts")) == {".bin", ".idx", ".info", ".quarantine.jsonl"}
    verify_dataset(tmp_path / "parts")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), count=st.integers(1, 12))
def test_every_line_is_in_one_shard(tmp_path: Path, sizes: list[int], count: int) -> None:
    """Whatever the sizes of files and lines: shards read all of the lines once, in order."""
    from mega_data.reading.documents import Document
    from mega_data.reading.source_readers import read_documents

    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    number = 0
    for index, size in enumerate(sizes):
        texts = [str(number + i) * (1 + i % 5) for i in range(size)]
        number += size
        (tmp_path / f"{index}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    sources = find_corpus_sources([tmp_path])
    shards = InputShard(1, count).all_shards
    found = [
        item
        for shard in shards
        for source in select_shard_sources(sources, shard, "text")
        for item in read_documents(source, "text")
    ]
    assert [item.text for item in found if isinstance(item, Document)] == [
        item.text for source in sources for item in read_documents(source, "text") if isinstance(item, Document)
    ]


def test_a_part_that_is_made_is_not_made_again(corpus: list[Path], tokenizer_folder: Path, tmp_path: Path) -> None:
    prefix = InputShard(2, 3).get_output_prefix(tmp_path / "d")
    run(corpus, tokenizer_folder, tmp_path / "d", "2/3")
    before = prefix.with_name(f"{prefix.name}.bin").stat()
    run(corpus, tokenizer_folder, tmp_path / "d", "2/3")
    assert prefix.with_name(f"{prefix.name}.bin").stat() == before
    with corpus[0].open("a") as stream:
        stream.write('\n{"text": "more"}\n')
    run(corpus, tokenizer_folder, tmp_path / "d", "2/3")
    assert prefix.with_name(f"{prefix.name}.bin").stat() != before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_part_asked_for_after_the_join_is_done(
    corpus: list[Path], tokenizer_folder: Path, tmp_path: Path, overwrite: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        whole = run(corpus, tokenizer_folder, tmp_path / "d", f"{number}/2")
    before = files(tmp_path / "d")
    with caplog.at_level("INFO", "mega"):
        assert run(corpus, tokenizer_folder, tmp_path / "d", "1/2", overwrite=overwrite) == whole
    told = f"{tmp_path / 'd'}: is complete already, with equal inputs and settings"
    assert caplog.messages[-1] == told
    assert files(tmp_path / "d") == before
    with corpus[0].open("a") as stream:
        stream.write('\n{"text": "more"}\n')
    with pytest.raises(DataError, match=r"d.idx: exists already"):
        run(corpus, tokenizer_folder, tmp_path / "d", "1/2")


def test_a_failed_part_says_why_and_the_others_are_made(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.jsonl").write_text(json.dumps({"text": TEXT}) + "\n" + '{"text": "x"}\n' * 9)
    bad = tmp_path / "in" / "b.jsonl"
    good = bad.read_text()
    bad.write_text(good.replace("{", "[", 1))
    os.utime(bad, ns=(1, 1))
    whole, failed = tmp_path / "whole", tmp_path / "whole.shard-00002-of-00003.failed"

    def part(number: int) -> object:
        return preprocess_corpus([tmp_path / "in"], tokenizer_folder, whole, shard=InputShard(number, 3))

    with pytest.raises(DataError, match=r"b.jsonl:1: not JSON"):
        part(2)
    part(1)
    part(3)
    assert "b.jsonl:1: not JSON" in json.loads(failed.read_text())["reason"]
    assert not (tmp_path / "d.idx").exists()
    preprocess_corpus([tmp_path / "in"], tokenizer_folder, whole, shard=InputShard(2, 3), on_bad_line="skip")
    assert set(files(whole)) == {".bin", ".idx", ".info", ".quarantine.jsonl"}


def test_a_bad_line_of_a_part_is_told_with_the_byte_it_counts_from(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 30 + "oops\n")
    with pytest.raises(DataError, match=r"a.jsonl\[224:\]:15: not JSON"):
        preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, tmp_path / "d", shard=InputShard(2, 2))
    assert (tmp_path / "a.jsonl").read_bytes()[224:].split(b"\n")[14] == b"oops"


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "a/b", "3/8/2", "-1/8"])
def test_no_such_shard(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard must be I/N(?s:.*)1/8 to the first and --shard 8/8"):
        InputShard.parse(text)


def test_standard_input_has_no_parts(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="standard input"):
        preprocess_corpus(["-"], tokenizer_folder, tmp_path / "d", shard=InputShard(1, 2))


def killed_at(change: int, corpus: list[Path], tokenizer: Path, whole: Path) -> bool:
    """Make the last part in a process that is killed before its `change`-th change of the disk; False if it has fewer."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = [change]

    def counted(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in ("replace", "unlink", "rmdir", "mkdir", "truncate"):
        setattr(os, name, counted(getattr(os, name)))
    output.RECORD_INTERVAL = 0.0
    run(corpus, tokenizer, whole, "1/2", overwrite=True, workers=1)
    os._exit(0)


def test_killed_before_any_change_of_the_disk_it_goes_on_to_the_same(
    corpus: list[Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    corpus, straight = corpus[:2], tmp_path / "straight"
    run(corpus, tokenizer_folder, straight)
    change = 0
    for change in range(99):
        whole = tmp_path / str(change) / "whole"
        run(corpus[:1], tokenizer_folder, whole)  # an older one, to be replaced
        run(corpus, tokenizer_folder, whole, "2/2", overwrite=True)
        if not killed_at(change, corpus, tokenizer_folder, whole):
            break
        if files(straight).items() <= files(whole).items() and not (get_partial_folder(whole) / READY).exists():
            finish_interrupted_commit(whole)  # all is there, but for a folder to remove
        else:
            run(corpus, tokenizer_folder, whole, "1/2", overwrite=True)
        assert files(whole) == files(straight)
    assert 20 < change < 99

"""Data sets built in shards by independent jobs or an engine: `--shard 3/8` reads the third eighth of all bytes.

Each shard is a separate data set, `wiki.shard-00003-of-00008`. The process that builds the last one joins them in the
order of the inputs, so the result equals that of a single run byte for byte. A killed shard resumes; a failed one
leaves its error in a `.failed` file. Running the same command again builds the missing shards.

An engine calls `build` for each shard, in as many workers as it has, and yields the results as they arrive. A killed
worker yields an error for its shard, and the other shards continue.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mega_common.atomic_files import write_json_atomically
from mega_common.errors import ConfigError, MegaError, MissingPackageError
from mega_data.reading.corpus_sources import CorpusSource, FileFormat, detect_file_format, no_text_error
from mega_data.reading.decompression import is_uncompressed, open_decompressed, peek_first_bytes
from mega_data.token_files.dataset_commit import finish_interrupted_commit
from mega_data.token_files.dataset_info import DatasetInfo, get_quarantine_path, list_dataset_files, read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader, get_idx_path
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.merge_datasets import append_datasets
from mega_data.token_files.partial_folder import convert_write_errors_to_data_error


@dataclass(frozen=True)
class InputShard:
    """One of the shards into which the input of a preprocessing run is divided by bytes.
    There are `of` shards; this is number `number`, counted from 1.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> InputShard:
        """Return the shard that a text such as `3/8` (NUMBER/COUNT) names; a ConfigError for other texts.

        Raises:
            ConfigError: if it has another form, or its number is out of range.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            count = int(match[2]) if match and int(match[2]) else 8
            raise ConfigError(
                f"--shard must be I/N, part I of N with I from 1 to N, found {text}",
                hint=f"for {count} jobs, pass --shard 1/{count} to the first and --shard {count}/{count} to the last",
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def get_output_prefix(self, whole: Path) -> Path:
        """Return the prefix of this shard's data set, such as `PREFIX.shard-00003-of-00008`, where `whole` is PREFIX."""
        return whole.with_name(f"{whole.name}.shard-{self.number:05}-of-{self.of:05}")

    @property
    def all_shards(self) -> list[InputShard]:
        """All shards of the division of the input that this shard belongs to, in order."""
        return [InputShard(number, self.of) for number in range(1, self.of + 1)]


def select_shard_sources(sources: Sequence[CorpusSource], shard: InputShard, key: str) -> list[CorpusSource]:
    """Return the sources, or byte ranges of divisible ones, that begin in a shard's byte range of the whole input.

    Uncompressed JSON lines are divided at lines, Parquet between row groups; other formats are not divided.
    """
    total = sum(_source_size(source) for source in sources)
    low, high = (total * number // shard.of for number in (shard.number - 1, shard.number))
    selected: list[CorpusSource] = []
    for source in sources:
        selected += _select_range(source, low, high, key)
        low, high = low - _source_size(source), high - _source_size(source)
    return selected


def _source_size(source: CorpusSource) -> int:
    return max(source.size, 1)  # an empty file, and one of unknown size, belong to a shard too


def _select_range(source: CorpusSource, low: int, high: int, key: str) -> list[CorpusSource]:
    """Return the range of a source from byte `low` to `high`, counted from its beginning."""
    if high <= 0 or low >= _source_size(source):
        return []
    if low > 0 or high < _source_size(source):
        with open_decompressed(source.name, lambda _: None) as stream:
            if kind := _detect_divisible_format(source, stream, key):
                begin = max(low, 0) if kind == "parquet" else _find_line_start(stream, max(low, 0))
                return [replace(source, kind=kind, begin=begin, end=high if high < _source_size(source) else None)]
    return [source] if low <= 0 else []


def _detect_divisible_format(source: CorpusSource, stream: io.BufferedReader, key: str) -> FileFormat | None:
    """Return the format in which a source can be read from its middle, or None."""
    if source.kind not in (None, "jsonl", "parquet") or not source.is_rereadable or not is_uncompressed(stream):
        return None
    kind = source.kind or detect_file_format(peek_first_bytes(stream), key, Path(source.name))
    return kind if kind in ("jsonl", "parquet") else None


def _find_line_start(stream: io.BufferedReader, at: int) -> int:
    """Return the first byte from `at` on at which a line begins."""
    if at:
        stream.seek(at - 1)
        at += len(stream.readline()) - 1
    return at


@contextlib.contextmanager
def record_shard_failure(prefix: Path) -> Iterator[None]:
    """Context manager that records an error of its block in the shard's failure file, and removes that file on success.
    The file is `PREFIX.failed`; the error is raised again.
    """
    try:
        yield
    except MegaError as error:
        with convert_write_errors_to_data_error(prefix):
            write_json_atomically(_get_failure_path(prefix), {"reason": str(error)})
        raise
    _get_failure_path(prefix).unlink(missing_ok=True)


def _get_failure_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".failed")


def read_finished_shard(prefix: Path, made_from: str) -> DatasetInfo | None:
    """Return the description of the shard's data set at `prefix` if it is complete and current, else None.
    Current means built from the inputs and settings with digest `made_from`.
    """
    info = read_dataset_info(prefix) if finish_interrupted_commit(prefix) or get_idx_path(prefix).exists() else None
    return info if info and info.shard and info.shard.made_from == made_from else None


def join_shards(
    whole: Path, sources: Sequence[CorpusSource], shard: InputShard, key: str, made_from: str
) -> DatasetInfo | None:
    """Join all shards' data sets to `whole`, remove them, and return its description; None if a shard is not finished.

    Raises:
        DataError: if a shard is damaged, or no document has text.
    """
    prefixes = [part.get_output_prefix(whole) for part in shard.all_shards]
    if not all(read_finished_shard(prefix, made_from) for prefix in reversed(prefixes)):  # most are made in order
        return None
    infos = [info for prefix in prefixes if (info := read_dataset_info(prefix))]
    if not sum(info.documents for info in infos):
        raise no_text_error(sources, "all documents of all parts are empty or were rejected")
    with IndexedWriter(whole, infos[0].dtype, wait=True, masked=infos[0].chat is not None) as writer:
        if not all(get_idx_path(prefix).exists() for prefix in prefixes):  # another process has joined them meanwhile
            writer.abort()
            return read_dataset_info(whole)
        _join_bad_lines(
            writer, infos, [select_shard_sources(sources, part, key) for part in shard.all_shards], prefixes
        )
        obsolete = [path for prefix in prefixes for path in (*list_dataset_files(prefix), _get_failure_path(prefix))]
        size = sum(info.tokens for info in infos) * writer.dtype.itemsize
        readers = map(IndexedReader, prefixes)
        first = infos[0]
        return append_datasets(
            writer, readers, size, infos, first.tokenizer, first.append_eod, made_from, obsolete, chat=first.chat
        )


def _join_bad_lines(
    writer: IndexedWriter,
    infos: Sequence[DatasetInfo],
    read: Sequence[Sequence[CorpusSource]],
    prefixes: Sequence[Path],
) -> None:
    """Join the bad lines of all shards in order, with the line numbers of the whole files.

    In a shard that begins inside a file, lines were counted from there.
    """
    if not any(info.skipped.bad for info in infos):
        return
    before = 0  # lines in earlier shards of the file that continues into the next one
    with convert_write_errors_to_data_error(writer.prefix), open(writer.folder / "quarantine.jsonl", "wb") as joined:
        for prefix, info, sources in zip(prefixes, infos, read, strict=True):
            for record in _read_bad_lines(prefix):
                if sources[0].begin and record["file"] == sources[0].display_name:
                    record |= {"file": sources[0].name, "line": record["line"] + before}
                joined.write(json.dumps(record).encode() + b"\n")
            if sources and info.shard:
                inherited = before if len(sources) == 1 and sources[0].begin else 0
                before = inherited + info.shard.lines if sources[-1].end is not None else 0
        joined.flush()
        os.fsync(joined.fileno())


def _read_bad_lines(prefix: Path) -> Iterator[dict[str, Any]]:
    if get_quarantine_path(prefix).exists():
        with open(get_quarantine_path(prefix), "rb") as stream:
            yield from map(json.loads, stream)


EngineName = Literal["threads", "processes", "ray"]
ShardFunction = Callable[[InputShard], str | None]  # builds a shard; returns the reason of a failure, else None
ShardResults = Generator[tuple[InputShard, str | None], None, None]


def build_shards_in_processes(build: ShardFunction, shards: Sequence[InputShard], workers: int) -> ShardResults:
    """Build shards of a data set in `workers` local processes; yield (shard, error message or None) as each ends."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_initialize_worker)
    try:
        pending = {pool.submit(build, shard): shard for shard in shards}
        for future in as_completed(pending):
            error = future.exception()
            yield pending[future], _format_reason(error) if error else future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _initialize_worker() -> None:
    """Silence a worker process, and end it when its parent is killed."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process lives
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def build_shards_on_ray(build: ShardFunction, shards: Sequence[InputShard], workers: int | None) -> ShardResults:
    """Build shards of a data set on a Ray cluster, one CPU each; yield (shard, error message or None) as each ends.
    The cluster is that of RAY_ADDRESS or of this machine, else a new local one.

    All machines of the cluster need `mega_data`, and the inputs, tokenizer and output under the same paths.

    Raises:
        MissingPackageError: if Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise MissingPackageError(
            "--engine ray requires the package ray", hint="pip install 'mega-data[ray]'"
        ) from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    folder = os.getcwd()

    def build_in_folder(shard: InputShard) -> str | None:
        os.chdir(folder)  # relative paths resolve here, wherever Ray starts its processes
        return build(shard)

    remote = ray.remote(num_cpus=1)(build_in_folder)
    waiting = list(reversed(shards))
    running: dict[Any, InputShard] = {}
    while waiting or running:
        while waiting and len(running) < (workers or len(shards)):
            shard = waiting.pop()
            running[remote.remote(shard)] = shard
        done, _ = ray.wait(list(running), num_returns=1)
        for reference in done:
            try:
                reason = ray.get(reference)
            except ray.exceptions.RayError as error:
                reason = _format_reason(error)
            yield running.pop(reference), reason


def _format_reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

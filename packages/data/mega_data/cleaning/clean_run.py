"""Process pool whose results come in the order of the work."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from mega_common.atomic_files import lock_folder, rename_folder_into_place, write_json_atomically
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.cleaning.append_files import (
    SUFFIXES,
    AppendJournal,
    append_earlier_cleaning_fingerprints,
    write_kept_fingerprints,
)
from mega_data.cleaning.clean_config import RULES, CleanConfig
from mega_data.cleaning.document_judge import (
    CleanedBatch,
    CleaningBatch,
    CleaningTally,
    CleaningWorkerSettings,
    DocumentAndByteCounts,
    DocumentCleaner,
    clean_batch,
    sum_document_and_byte_counts,
)
from mega_data.cleaning.duplicate_removal import (
    FirstPassOutputFile,
    SourceNameTables,
    find_duplicates,
    remove_part_duplicates,
)
from mega_data.cleaning.rule_builder import hash_evaluation_ngrams
from mega_data.preprocessing.preprocess_corpus import count_usable_cores
from mega_data.preprocessing.text_batches import PreprocessProgress, ResumableReader
from mega_data.reading.corpus_sources import CorpusSource, SkippedFiles, find_corpus_sources
from mega_data.reading.documents import Document, RejectedItem

READ_AHEAD = 4  # items per process that are queued or in progress

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map_in_order(
    call: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yield (item, result of `call` on it) in input order, computed in `workers` processes (1: in this process).

    Raises:
        DataError: if a process was killed; and any error of `call`.
    """
    if workers == 1:
        yield from ((item, call(item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _initialize_worker)
    try:
        for item in items:
            if len(pending) >= READ_AHEAD * workers:
                yield _await_first(pending)
            pending.append((item, pool.submit(call, item)))
        while pending:
            yield _await_first(pending)
    finally:
        pool.shutdown(cancel_futures=True)


def _await_first(pending: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    item, future = pending.popleft()
    try:
        return item, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, possibly because memory ran out", hint="use fewer --workers"
        ) from error


def _initialize_worker() -> None:
    """Ignore Ctrl-C in a worker, which the parent handles, and end the worker with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # no process is left to take a result


BATCH = 1 << 20  # bytes of text judged at once
PART = 1 << 28  # bytes of text in a file of the output
ORDER = ("unreadable", *RULES, "exact", "minhash")  # order of rules in the summary
RECORD_INTERVAL = 5.0  # seconds between two progress records of the first pass


@dataclass
class CleaningState:
    """Saved state of a cleaning run's first pass: position in the input and the resulting counts.
    The position is `items` items of source number `source`, after all earlier sources.

    Attributes:
        starts: number of the first document of each part; kept documents are numbered in order.
        part_bytes: bytes of text in the last part.
    """

    made_from: str
    source: int = 0
    items: int = 0
    documents: int = 0
    starts: list[int] = field(default_factory=lambda: [0])
    part_bytes: int = 0
    finished: bool = False
    tally: CleaningTally = field(default_factory=CleaningTally)
    sizes: dict[str, int] = field(default_factory=dict)


def clean_corpus(
    inputs: Sequence[str | Path],
    config: CleanConfig,
    output: Path,
    *,
    json_key: str = "text",
    folder: Path | None = None,
    workers: int | None = None,
    on_bad_line: Literal["error", "skip"] = "error",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Clean the text corpus `inputs` by the rules of `config` into the folder `output`; return the summary of counts.
    Inputs are corpus files, folders and globs. The summary is also written to `summary.json`.

    As JSON lines, `kept/` has the kept documents, `dropped/` the dropped ones with rule and reason, and `changed/` the
    originals of changed ones; `fingerprints/` is read by later runs (`duplicates.against`). `folder` may have the
    module for `filter`. The result does not depend on the number of `workers`.

    Memory: 100 MB per worker, plus up to 60 bytes per byte of the longest document; about ten MB for each pending
    batch (`READ_AHEAD` batches of `BATCH` bytes per worker); 50 bytes per document during the search for duplicates.

    Raises:
        DataError: naming file and line of a bad document, or a file that cannot be read or written.
        MissingPackageError: if a rule or a format requires a package that is not installed.
    """
    if output.exists() and not overwrite:
        raise DataError(f"{output}: exists already", hint="choose another --output, or pass --overwrite")
    skipped_files = SkippedFiles()
    sources = [
        (str(item), source) for item in inputs for source in find_corpus_sources([item], json_key, skipped_files)
    ]
    for _, source in sources:
        if output.resolve() in Path(source.name).resolve().parents:
            raise DataError(f"{source.name}: is both an input and the output", hint="choose another --output")
    work = output.parent / f".{output.name}.partial"
    with _lock_work_folder(work):
        run = CleaningRun(
            work, sources, config, json_key, (folder or Path()).resolve(), workers or count_usable_cores()
        )
        run.resume_or_start()
        run.run_first_pass(skipped_files, on_bad_line)
        run.run_second_pass()
        summary = run.write_summary()
        rename_folder_into_place(work / "result", output)
    shutil.rmtree(work)
    return summary


@contextlib.contextmanager
def _lock_work_folder(work: Path) -> Iterator[None]:
    """Lock the folder of a run; after an error it is kept if progress was recorded."""
    work.mkdir(parents=True, exist_ok=True)
    try:
        with lock_folder(work):
            yield
    except BaseException:
        if (work / "progress.json").exists():
            logger.info("%s: progress is kept; run the same command again to resume", work)
        else:
            shutil.rmtree(work)
        raise


def _compute_run_identity(config: CleanConfig, key: str, folder: Path, sources: list[tuple[str, CorpusSource]]) -> str:
    """Return a digest of everything that the result of a run depends on, with names, sizes and times of files."""
    files = [(name, s.name, s.kind, s.size, s.changed) for name, s in sources]
    if config.decontaminate is not None:
        against = find_corpus_sources(config.decontaminate.against, config.decontaminate.json_keys[0])
        files += [("", s.name, s.kind, s.size, s.changed) for s in against]
    read = [earlier / "summary.json" for earlier in config.duplicates.against] if config.duplicates else []
    read += [config.c4.bad_words] if config.c4 and config.c4.bad_words else []
    read += [config.language.model] if config.language and config.language.model else []
    read += [folder / f"{config.filter.partition(':')[0]}.py"] if config.filter else []
    times = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in read if path.exists()]
    return hashlib.sha256(json.dumps([config.model_dump_json(), key, files, times]).encode()).hexdigest()


class CleaningRun:
    """One cleaning run of a text corpus in the temporary folder `work`.
    A first pass applies the rules and a second one removes duplicates.
    """

    def __init__(
        self,
        work: Path,
        sources: list[tuple[str, CorpusSource]],
        config: CleanConfig,
        key: str,
        folder: Path,
        workers: int,
    ) -> None:
        self.work, self.sources, self.config, self.workers = work, sources, config, workers
        self.inputs = list(dict.fromkeys(name for name, _ in sources))
        self.state = CleaningState(_compute_run_identity(config, key, folder, sources))
        self.settings = CleaningWorkerSettings(
            config.model_dump_json(exclude_none=True), key, str(folder), str(work / "ngrams.npy"), self.state.made_from
        )
        self.journal = AppendJournal(work)

    def resume_or_start(self) -> None:
        """Resume an interrupted cleaning run with equal inputs and settings, or start a new one.
        It is resumed from its recorded state.

        Raises:
            MegaError: if a rule cannot be built; raised here, before any work.
        """
        previous, record = None, self.work / "progress.json"
        with contextlib.suppress(OSError, ValidationError):  # missing, or written by another version
            previous = TypeAdapter(CleaningState).validate_json(record.read_bytes())
        result = self.work / "result"  # missing if it was already renamed to the output
        same = previous is not None and previous.made_from == self.state.made_from and result.is_dir()
        if previous is not None and same and all(source.is_rereadable for _, source in self.sources):
            self.state = previous
            self.journal.resume_from_sizes(previous.sizes)
            logger.info("resuming an interrupted run after %s kept documents", f"{previous.documents:,}")
        else:
            self.journal.clear_folder()
            if self.config.duplicates is not None:
                self.state.documents = append_earlier_cleaning_fingerprints(self.config.duplicates, self.journal)
                self.state.starts = [self.state.documents]
        result.mkdir(exist_ok=True)
        if self.config.decontaminate is not None:
            np.save(self.settings.ngrams, hash_evaluation_ngrams(self.config.decontaminate))
        DocumentCleaner(self.settings)

    def run_first_pass(self, skipped_files: SkippedFiles, on_bad_line: str) -> None:
        """Apply every rule except deduplication to every document, or to those that a resumed run has left.
        Raises DataError if the inputs have no document.
        """
        if self.state.finished:
            return
        sources = [source for _, source in self.sources]
        done = PreprocessProgress("", self.state.source, self.state.items)
        recorded = time.monotonic()
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(ProgressBar("cleaning", total=sum(s.size for s in sources) or None, unit="bytes"))
            stack.callback(self.journal.close)
            reading = ResumableReader(sources, self.settings.json_key, skipped_files, done, bar, whole=True)
            judged = parallel_map_in_order(
                partial(clean_batch, settings=self.settings), self._build_batches(reading, on_bad_line), self.workers
            )
            for batch, result in stack.enter_context(contextlib.closing(judged)):
                self._add_batch(batch, result)
                reading.advance_progress(batch.read)
                if time.monotonic() - recorded > RECORD_INTERVAL:
                    self._record_progress()
                    recorded = time.monotonic()
            if not self.state.tally.read:
                raise DataError(f"{', '.join(self.inputs)}: no document in the inputs")
            self.state.finished = True
            self._record_progress()
        reading.log_summary()

    def _record_progress(self) -> None:
        self.journal.commit_state(asdict(self.state))

    def _build_batches(self, reading: ResumableReader, on_bad_line: str) -> Iterator[CleaningBatch]:
        batch, source = CleaningBatch(""), -1
        for position, item in reading.read_items():
            if isinstance(item, RejectedItem) and not item.skipped and on_bad_line == "error":
                raise DataError(
                    f"{item.file}:{item.line}: {item.reason}",
                    hint=item.hint or "pass --on-bad-line skip to move bad lines to the dropped documents",
                )
            if batch.items and (position[0] != source or batch.size >= BATCH):
                yield batch
                batch = CleaningBatch("")
            source, batch.input = position[0], self.sources[position[0]][0]
            if isinstance(item, Document) or not item.skipped:
                batch.items.append(item)
            batch.size += item.size if isinstance(item, Document) else len(item.content)
            batch.end_position, batch.read = position, reading.read
        if batch.items:
            yield batch

    def _add_batch(self, batch: CleaningBatch, judged: CleanedBatch) -> None:
        state, suffix = self.state, SUFFIXES[self.config.compression]
        if state.part_bytes >= PART:
            for name in ("kept", "dropped", "changed"):
                self.journal.close_file(self._get_part_name(name, suffix))
            state.starts.append(state.documents)
            state.part_bytes = 0
        for name, lines in judged.lines.items():
            self.journal.append_bytes(self._get_part_name(name, suffix), lines)
        positions = judged.positions
        positions["input"], positions["source"] = self.inputs.index(batch.input), batch.end_position[0]
        for name, data in (("exact", judged.exact), ("minhash", judged.minhash), ("places", positions.tobytes())):
            self.journal.append_bytes(f"{name}.bin", data)
        state.documents += len(positions)
        state.part_bytes += int(positions["size"].sum())
        state.tally.add_tally(judged.tally, self.config.samples)
        state.source, state.items = batch.end_position

    def _get_part_name(self, name: str, suffix: str) -> str:
        folder = "first" if name == "kept" and self.config.duplicates else f"result/{name}"
        return f"{folder}/{len(self.state.starts) - 1:05}{suffix}"

    def run_second_pass(self) -> None:
        """Divide the first pass's documents into kept ones and duplicates, file by file, if `duplicates` is set."""
        state, rule = self.state, self.config.duplicates
        if rule is None:
            return
        find_duplicates(self.work, rule)
        bounds = [*state.starts, state.documents]
        parts = [FirstPassOutputFile(number, *bounds[number : number + 2]) for number in range(len(state.starts))]
        names = SourceNameTables(
            [source.name for _, source in self.sources],
            self.inputs,
            list(map(str, rule.against)),
            self.settings.json_key,
        )
        task = partial(remove_part_duplicates, work=self.work, config=self.config, names=names)
        with (
            ProgressBar("removing duplicates", total=bounds[-1] - bounds[0] or None, unit="documents") as bar,
            contextlib.closing(parallel_map_in_order(task, parts, self.workers)) as results,
        ):
            for part, tally in results:
                state.tally.add_tally(tally, self.config.samples)
                bar.advance(part.end - part.start)

    def write_summary(self) -> dict[str, Any]:
        """Write and return the results of the cleaning run (`summary.json`); write the fingerprints of the kept documents."""
        tally, rule = self.state.tally, self.config.duplicates
        dropped = [rule.dropped for rule in tally.rules.values()]
        summary = {
            "version": 1,
            "config": self.config.model_dump(mode="json", exclude_none=True),
            "read": asdict(sum_document_and_byte_counts(tally.read.values())),
            "kept": asdict(sum_document_and_byte_counts(tally.kept.values())),
            "dropped": asdict(sum_document_and_byte_counts(dropped)),
            "inputs": {
                name: {
                    "read": asdict(tally.read.get(name, DocumentAndByteCounts())),
                    "kept": asdict(tally.kept.get(name, DocumentAndByteCounts())),
                }
                for name in self.inputs
            },
            "rules": {name: asdict(tally.rules[name]) for name in ORDER if name in tally.rules},
            "languages": dict(sorted(tally.languages.items(), key=lambda item: -item[1])),
            "fingerprints": None if rule is None else write_kept_fingerprints(self.work, rule, self.state.starts[0]),
        }
        write_json_atomically(self.work / "result" / "summary.json", summary)
        return summary

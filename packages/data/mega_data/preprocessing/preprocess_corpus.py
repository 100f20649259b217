"""Preprocessing of documents to token files, limited by the speed of the tokenizer.

One thread reads and writes, `workers` threads encode: the tokenizer's Rust code releases the GIL, so threads scale like
processes, without copies of the text and without the start of interpreters. Batches are written in the order of the
documents, so the files do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mega_common.errors import DataError, MegaError
from mega_common.progress_logging import ProgressBar, format_with_decimal_unit, logger
from mega_data.chat.chat_preparation import ChatOptions, ChatRecordConverter, RecordConverter, log_chat_warnings
from mega_data.chat.labeled_records import LabeledRecordConverter
from mega_data.preprocessing.dataset_output import DatasetOutput, Sequences
from mega_data.preprocessing.dataset_upload import create_upload_prefix, resolve_upload_target, upload_dataset
from mega_data.preprocessing.document_encoding import DocumentEncoder, SentenceEncoder, encode_document_batches
from mega_data.preprocessing.sharding import (
    EngineName,
    InputShard,
    build_shards_in_processes,
    build_shards_on_ray,
    join_shards,
    read_finished_shard,
    record_shard_failure,
    select_shard_sources,
)
from mega_data.preprocessing.text_batches import PreprocessProgress, ResumableReader, TextBatch, build_text_batches
from mega_data.preprocessing.text_encoder import BatchEncoder, EncoderChoice, EncoderMismatch, choose_text_encoder
from mega_data.reading.corpus_sources import WHOLE, CorpusSource, SkippedFiles, find_corpus_sources, no_text_error
from mega_data.reading.decompression import STDIN
from mega_data.token_files.dataset_commit import finish_interrupted_commit
from mega_data.token_files.dataset_info import (
    DatasetInfo,
    DatasetShardInfo,
    check_output_prefix,
    get_quarantine_path,
    list_dataset_files,
    read_dataset_info,
    reject_input_as_output,
)
from mega_data.token_files.indexed_reader import get_idx_path, strip_data_suffix
from mega_data.tokenizer import LEADS, Tokenizer, disable_encoder_threads

SHARD_SIZE = 1 << 28  # bytes of input per shard of an engine: a minute or two of one core
MAX_SHARDS = 1000  # each is a few files until they are joined


def preprocess_corpus(
    inputs: Sequence[str | Path],
    tokenizer_path: Path,
    output_prefix: Path,
    *,
    json_key: str = "text",
    append_eod: bool = False,
    parse_special_tokens: bool = False,
    workers: int | None = None,
    on_bad_line: Literal["error", "skip"] = "error",
    overwrite: bool = False,
    encoder: EncoderChoice = "auto",
    chat: ChatOptions | None = None,
    shard: InputShard | None = None,
    engine: EngineName = "threads",
    shards: int | None = None,
    sentences: str | None = None,
) -> DatasetInfo:
    """Tokenize files, folders and globs into the token data set at `output_prefix`, and return its description.
    The data set is `PREFIX.bin` (tokens), `PREFIX.idx` (index) and `PREFIX.info` (description).

    No file has its final name before all are written. An interrupted run resumes when it is started again, if its
    inputs are files and unchanged, and yields the same data set.

    Args:
        output_prefix: a URL uploads the complete files to that object store (`mega_data.preprocessing.dataset_upload`).
        workers: number of encoding threads, by default the usable cores; with an engine, of shards built at once.
        shard: build only this shard (see `mega_data.preprocessing.sharding`), and join all if it is the last one.
        engine: "processes" or "ray" builds all shards.
        shards: number of shards of an engine, by default one per `SHARD_SIZE` bytes of input.

    The other arguments are those of `PreprocessJob`.

    Returns:
        Description of the data set, or of `shard` if other shards are missing.

    Raises:
        DataError: naming file and line of a bad document, or a file that cannot be read or written; for an engine with
            the reason of a failed shard, after all others are built.
        MissingPackageError: if an input's format, or the engine, requires a package that is not installed.
    """
    remote = resolve_upload_target(Path(output_prefix), overwrite=overwrite)
    if remote is not None and (shard is not None or engine == "ray"):
        raise DataError(
            f"{remote}: --output on an object store is not supported with --shard or --engine ray",
            hint="use --engine processes, or a shared folder as --output",
        )
    local = create_upload_prefix(remote) if remote else strip_data_suffix(Path(output_prefix))
    job = PreprocessJob(
        tuple(inputs), Path(tokenizer_path), local, WHOLE if chat else json_key, append_eod,
        parse_special_tokens or chat is not None, on_bad_line, overwrite or remote is not None, encoder, chat, sentences,
    )  # fmt: skip
    accept_finished = remote is not None or shard is not None or engine != "threads"
    info = job.check_output(accept_finished=accept_finished) or _build_dataset(job, shard, engine, shards, workers)
    if remote is not None:
        upload_dataset(job.whole, remote)
    return info


def _build_dataset(
    job: PreprocessJob, shard: InputShard | None, engine: EngineName, shards: int | None, workers: int | None
) -> DatasetInfo:
    """Build a shard or the whole data set of a job."""
    if shard is not None:
        part = job.build_shard(shard, workers or count_usable_cores())
        return job.join_shards(shard) or part
    if engine == "threads":
        return job.build_dataset(job.whole, job.sources, job.made_from, workers or count_usable_cores())
    return _build_by_engine(job, engine, shards, workers)


@dataclass(frozen=True)
class PreprocessJob:
    """Job that tokenizes a corpus into one data set: the inputs, settings and output prefix.

    Documents without a token are left out and counted.

    Attributes:
        whole: prefix of the data set.
        json_key: field of a record that has the text.
        append_eod: end each document with the tokenizer's end token.
        parse_special_tokens: encode a special token that a text spells as that token, not as text.
        on_bad_line: "skip" moves bad lines to `PREFIX.quarantine.jsonl` instead of ending the run.
        encoder: encoding library, which affects only the speed (see `choose_text_encoder`).
        chat: read whole records as conversations or pairs of them (`mega_data.chat.chat_records`), and write the loss
            weights of their tokens (`PREFIX.mask.bin`, `PREFIX.mask.idx`). A special token that a conversation spells
            is that token, as in transformers. Conversations without a trained token within the length limit are left
            out and counted as empty.
        sentences: language such as `en`: each sentence is one sequence of the data set, instead of each document.
        content_key: digest that identifies the data set instead of the names and states of its inputs.
    """

    inputs: tuple[str | Path, ...]
    tokenizer_path: Path
    whole: Path
    json_key: str
    append_eod: bool
    parse_special_tokens: bool
    on_bad_line: Literal["error", "skip"]
    overwrite: bool
    encoder: EncoderChoice = "auto"
    chat: ChatOptions | None = None
    sentences: str | None = None
    content_key: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the preprocessing job, loaded on first access.
        Raises DataError if `append_eod` is set and it has no end token.
        """
        tokenizer = Tokenizer(self.tokenizer_path, specials_as_text=not self.parse_special_tokens)
        if tokenizer.extension is not None and self.parse_special_tokens:
            asked = f"--kind {self.chat.kind}" if self.chat else "--parse-special-tokens"
            raise DataError(
                f"{tokenizer.path}: {asked} is not supported with a tokenizer of an extension",
                hint="use a tokenizer with tokenizer.json",
            )
        if self.append_eod and tokenizer.eos_id is None:
            raise DataError(
                f"{tokenizer.path}: --append-eod requires a tokenizer with an end-of-text token",
                hint="add `eos_token` to tokenizer_config.json in the same folder",
            )
        return tokenizer

    @cached_property
    def record_converter(self) -> RecordConverter | None:
        """Converter of JSON records to conversations by the chat template, or to labeled texts; None for plain text."""
        if self.chat is None:
            return None
        if self.chat.kind in ("conversations", "pairs"):
            return ChatRecordConverter(self.chat, self.tokenizer)
        return LabeledRecordConverter(self.chat, self.tokenizer)

    @cached_property
    def skipped_files(self) -> SkippedFiles:
        """Input files found in folders that are not read, by reason; filled while inputs are searched and read."""
        return SkippedFiles()

    @cached_property
    def sources(self) -> list[CorpusSource]:
        """Files, streams and `datasets` splits to read, in order, found from the job's inputs."""
        return find_corpus_sources(self.inputs, self.json_key, self.skipped_files)

    @cached_property
    def made_from(self) -> str:
        """Digest of the tokenizer, settings and input files, on which all tokens depend.
        It identifies the run for a resume.
        """
        if self.content_key is not None:
            return self.content_key
        tokenizer = self.tokenizer
        settings: list[Any] = [
            tokenizer.fingerprint, tokenizer.eos_id, self.append_eod, self.parse_special_tokens, self.json_key,
        ]  # fmt: skip
        settings += [self.record_converter.info.model_dump()] if self.record_converter else []
        settings += [dict(self.chat.columns)] if self.chat and self.chat.columns else []
        settings += [self.sentence_encoder.language] if self.sentence_encoder else []
        files = [(source.name, source.kind, source.size, source.changed) for source in self.sources]
        return hashlib.sha256(json.dumps([settings, files]).encode()).hexdigest()

    def check_output(self, *, accept_finished: bool) -> DatasetInfo | None:
        """Return the output's description if a run of this job has completed it, None if it can be built.

        With `accept_finished`, a complete data set of the same job is accepted as well: a shard's process is restarted
        without knowing that another one has joined all shards, or that only the upload is missing.

        Raises:
            DataError: if the output exists or cannot be written, or is also an input.
        """
        if finish_interrupted_commit(self.whole) == self.made_from and (info := read_dataset_info(self.whole)):
            return info
        info = read_dataset_info(self.whole) if accept_finished and get_idx_path(self.whole).exists() else None
        if info and info.made_from == self.made_from:
            logger.info("%s: is complete already, with equal inputs and settings", self.whole)
            return info
        check_output_prefix(self.whole, self.overwrite)
        reject_input_as_output(
            list_dataset_files(self.whole), [self.tokenizer.path, *(Path(source.name) for source in self.sources)]
        )
        return None

    def build_dataset(
        self,
        prefix: Path,
        sources: Sequence[CorpusSource],
        made_from: str,
        workers: int,
        shard: DatasetShardInfo | None = None,
    ) -> DatasetInfo:
        """Read and encode all of `sources` and write the token data set at `prefix`; return its description.
        An interrupted run continues where it stopped.
        """
        choice = self.encoder
        if self.record_converter:
            if choice == "fastokens":
                logger.warning(
                    "encoder: tokenizers (fastokens does not return the character offsets that chats require)"
                )
            choice = "tokenizers"
        try:
            return self._build_with_encoder(prefix, sources, made_from, workers, shard, choice)
        except EncoderMismatch as error:
            if not all(source.is_rereadable for source in sources):
                raise DataError(
                    f"{error.where}: fastokens and tokenizers differ on this text, and the input cannot be read again",
                    hint="use --encoder tokenizers",
                ) from None
            logger.warning("%s: fastokens and tokenizers differ on this text; starting from zero without fastokens",
                           error.where)  # fmt: skip
            return self._build_with_encoder(prefix, sources, made_from, workers, shard, "tokenizers")

    def _build_with_encoder(
        self,
        prefix: Path,
        sources: Sequence[CorpusSource],
        made_from: str,
        workers: int,
        shard: DatasetShardInfo | None,
        choice: EncoderChoice,
    ) -> DatasetInfo:
        tokenizer, chats = self.tokenizer, self.record_converter
        lasting = all(source.is_rereadable for source in sources)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(
                DatasetOutput(
                    prefix,
                    tokenizer,
                    self.append_eod,
                    made_from,
                    lasting=lasting,
                    chat=chats.info if chats else None,
                    shard=shard,
                )
            )
            size = sum(source.num_bytes for source in sources)
            bar = stack.enter_context(ProgressBar("tokenizing", total=size or None, unit="bytes"))
            done = output.resume_or_start()
            done.encoder = done.encoder if choice == "auto" else choice  # a rejected fastokens is not tried again
            encoder = choose_text_encoder(done.encoder, tokenizer, size, rereadable=lasting)
            reading = self.open_document_reader(sources, done, bar, output)
            stack.enter_context(disable_encoder_threads())
            encoded = self.encode_documents(reading, encoder, output, workers)
            for batch, documents in stack.enter_context(contextlib.closing(encoded)):
                output.add_batch(batch, documents)
                reading.advance_progress(batch.read)
            if shard is not None:
                output.shard = shard.model_copy(update={"lines": reading.lines})
            elif not done.documents:
                counts = f"{done.bad} bad lines, {done.empty} empty documents and {done.left_out} binary files"
                raise no_text_error(sources, counts)
        reading.log_summary()
        _log_result(output.info, output, tokenizer)
        return output.info

    def open_document_reader(
        self, sources: Sequence[CorpusSource], done: PreprocessProgress, bar: ProgressBar, output: DatasetOutput
    ) -> ResumableReader:
        """Return the reader of the documents of `sources` after those that are `done`, for writing them to `output`."""
        folder = output.writer.folder if self.chat is None else None  # a conversation is parsed as a whole
        return ResumableReader(sources, self.json_key, self.skipped_files, done, bar, folder=folder)

    def encode_documents(
        self, reading: ResumableReader, encoder: BatchEncoder, output: DatasetOutput, workers: int
    ) -> Generator[tuple[TextBatch, list[Sequences]], None, None]:
        """Yield batches of the documents of `reading`, in order, each with the token sequences of its documents."""
        good = build_text_batches(
            reading,
            self.tokenizer,
            refuse=None if self.on_bad_line == "skip" else get_quarantine_path(output.prefix),
            end=None if self.parse_special_tokens else self.tokenizer.eos_token,
            prepare=self.record_converter.prepare_record if self.record_converter else None,
            leads=LEADS[:1] if self.sentence_encoder else LEADS,  # the others look like space between sentences
        )
        encoding = DocumentEncoder(encoder, self.record_converter, self.sentence_encoder)
        return encode_document_batches(good, encoding, output.dtype, workers)

    @cached_property
    def sentence_encoder(self) -> SentenceEncoder | None:
        """Encoder of documents by sentences if the job splits sentences, else None."""
        return SentenceEncoder(self.tokenizer, self.sentences) if self.sentences else None

    def build_shard(self, shard: InputShard, workers: int) -> DatasetInfo:
        """Build the token data set of one shard, unless it is finished, and return its description.
        The message of a failure is written to `PREFIX.failed`. Raises DataError for standard input, which has no
        shards.
        """
        if any(source.name == STDIN for source in self.sources):
            raise DataError("standard input is not supported with --shard", hint="give files, globs or folders")
        prefix = shard.get_output_prefix(self.whole)
        if finished := read_finished_shard(prefix, self.made_from):
            return finished
        about = DatasetShardInfo(number=shard.number, of=shard.of, made_from=self.made_from)
        with record_shard_failure(prefix):
            sources = select_shard_sources(self.sources, shard, self.json_key)
            return self.build_dataset(prefix, sources, f"{self.made_from} {shard}", workers, about)

    def try_build_shard(self, shard: InputShard) -> str | None:
        """Build one shard's data set in this process; return the error message of a failure, else None."""
        try:
            self.build_shard(shard, workers=1)
        except MegaError as error:
            return str(error)
        return None

    def join_shards(self, shard: InputShard) -> DatasetInfo | None:
        """Join the data sets of all shards to the whole one and return its description; None if a shard is not finished."""
        return join_shards(self.whole, self.sources, shard, self.json_key, self.made_from)


def _build_by_engine(job: PreprocessJob, engine: EngineName, count: int | None, workers: int | None) -> DatasetInfo:
    """Build all shards by an engine, and join them."""
    size = sum(source.num_bytes for source in job.sources)
    shards = InputShard(1, count or min(max(-(-size // SHARD_SIZE), 1), MAX_SHARDS)).all_shards
    missing = [shard for shard in shards if not read_finished_shard(shard.get_output_prefix(job.whole), job.made_from)]
    build = dataclasses.replace(job).try_build_shard  # a copy without cached properties can be pickled
    results = (
        build_shards_in_processes(build, missing, workers or count_usable_cores())
        if engine == "processes"
        else build_shards_on_ray(build, missing, workers)
    )
    reasons: dict[InputShard, str] = {}
    with ProgressBar("building shards", total=len(shards), unit="shards") as bar, contextlib.closing(results):
        bar.advance(len(shards) - len(missing))
        for shard, reason in results:
            bar.advance(1)
            if reason is not None:
                reasons[shard] = reason
                logger.warning("%s, shard %s: %s", job.whole, shard, reason)
    if reasons:
        raise DataError(
            f"{job.whole}: {len(reasons)} of {len(shards)} shards failed: {min(reasons.values())}",
            hint="the others are kept: run the same command again to build only the missing shards",
        )
    info = job.join_shards(shards[0])
    if info is None:
        raise DataError(f"{job.whole}: finished shards are missing", hint="run one command at a time on this --output")
    if info.chat is not None:
        log_chat_warnings(info.chat.notes)
    return info


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may run on; in a container it can be smaller than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _log_result(info: DatasetInfo, output: DatasetOutput, tokenizer: Tokenizer) -> None:
    logger.info(
        "%s: %s documents, %s tokens",
        output.prefix,
        format_with_decimal_unit(info.documents),
        format_with_decimal_unit(info.tokens),
    )
    if info.skipped.bad:
        logger.warning("%d bad lines are in %s", info.skipped.bad, get_quarantine_path(output.prefix))
    if info.skipped.empty:
        noun = "conversations without an answer within the length limit" if info.chat else "empty documents"
        logger.warning("%d %s were left out", info.skipped.empty, noun)
    if info.chat is not None and info.chat.cut:
        logger.warning("%d answers were truncated to %d tokens", info.chat.cut, info.chat.max_length)
    if info.chat is not None:
        log_chat_warnings(info.chat.notes)
    if output.done.ends and tokenizer.extension is None:
        logger.warning(
            "%d documents spell the end token %r as text; pass --parse-special-tokens to encode it as the token",
            output.done.ends,
            tokenizer.eos_token,
        )

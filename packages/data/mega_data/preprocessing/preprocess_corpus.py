"""Preprocessing of documents to token files, limited by the speed of the tokenizer.

One thread reads and writes, `workers` threads encode: the tokenizer's Rust code runs without the interpreter's lock, so
threads do what processes would without copying the text or starting interpreters. Batches go out and come back in the
order of the documents, so the files do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mega_common.errors import DataError, MegaError
from mega_common.progress_logging import ProgressBar, format_number, logger
from mega_data.chat.chat_preparation import ChatOptions, ChatPreparation, log_chat_notes
from mega_data.preprocessing.dataset_commit import finish_commit
from mega_data.preprocessing.dataset_output import DatasetOutput
from mega_data.preprocessing.dataset_upload import create_local_prefix, resolve_upload_target, upload_dataset
from mega_data.preprocessing.document_encoding import DocumentEncoder, SentenceEncoder, encode_batches
from mega_data.preprocessing.sharding import (
    EngineName,
    InputShard,
    build_in_processes,
    build_on_ray,
    join_shards,
    read_finished_shard,
    record_failure,
    select_shard_sources,
)
from mega_data.preprocessing.text_batches import ResumableReader, build_text_batches
from mega_data.preprocessing.text_encoder import EncoderChoice, EncoderMismatch, choose_text_encoder
from mega_data.reading.corpus_sources import WHOLE, CorpusSource, SkippedFiles, find_corpus_sources
from mega_data.reading.decompression import STDIN
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

PART = 1 << 28  # bytes of input that an engine makes a part of: a minute or two of one core
MOST_PARTS = 1000  # each is a few files, until they are joined


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
    """Tokenize `inputs` (see `find_corpus_sources`) into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.info`.

    A document is one sequence of the data set, or with `sentences`, a language such as `en`, as many as it has
    sentences; documents without a token are left out and counted. `append_eod` ends
    each with the tokenizer's end token; a special token that a text spells stays text without `parse_special_tokens`.
    `workers` is the number of encoding threads, by default the usable cores. With `on_bad_line="skip"` bad lines go
    into `PREFIX.quarantine.jsonl` instead of stopping the run. The `encoder` decides about speed alone (see
    `choose_text_encoder`).

    Until everything is written no file has its final name, whatever ends the run. A run that was ended goes on where it
    was when it is started again, if its inputs are files and they did not change; the data set is the same then.

    With `chat` whole records are read, as conversations or pairs of them (`mega_data.chat.chat_records`), and their tokens'
    weights in the loss are written too (`PREFIX.mask.bin`, `PREFIX.mask.idx`). A special token that the text of a
    conversation spells is that token, as for transformers. Conversations of which nothing that counts is left within
    the length limit are left out and counted as empty.

    A `shard` makes only its part (see `mega_data.preprocessing.sharding`); what is returned describes that, or the whole if it was the
    last part that was missing. With the `engine` processes or ray this makes all parts, as many as `shards` says and by
    default one for each `PART` bytes of input; `workers` is the number of parts that are made at once.

    With an `output_prefix` that is a URL the files go to that object store when all are made (see `mega_data.preprocessing.dataset_upload`).

    Raises:
        DataError: naming file and line of a bad document, or what cannot be read or written; with the reason of each
            part that could not be made, when all others are.
        MissingPackageError: when an input's format, or the engine, needs a package that is not installed.
    """
    where = resolve_upload_target(Path(output_prefix), overwrite=overwrite)
    if where is not None and (shard is not None or engine == "ray"):
        raise DataError(
            f"{where}: parts of several machines are joined in a folder that all see", hint="--engine processes"
        )
    job = PreprocessJob(
        tuple(inputs), Path(tokenizer_path), create_local_prefix(where) if where else strip_data_suffix(Path(output_prefix)),
        WHOLE if chat else json_key, append_eod, parse_special_tokens or chat is not None, on_bad_line,
        overwrite or where is not None, encoder, chat, sentences,
    )  # fmt: skip
    goes_on = where is not None or shard is not None or engine != "threads"
    made = job.check_output(accept_finished=goes_on) or _build_dataset(job, shard, engine, shards, workers)
    if where is not None:
        upload_dataset(job.whole, where)
    return made


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
    """Job that builds one data set: its inputs, settings and output."""

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

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded tokenizer of the job."""
        tokenizer = Tokenizer(self.tokenizer_path, specials_as_text=not self.parse_special_tokens)
        if self.append_eod and tokenizer.eos_id is None:
            raise DataError(
                f"{tokenizer.path}: names no end-of-text token to append",
                hint="put `eos_token` into tokenizer_config.json beside it",
            )
        return tokenizer

    @cached_property
    def chat_preparation(self) -> ChatPreparation | None:
        """Preparation of conversations (`ChatPreparation`), or None."""
        return ChatPreparation(self.chat, self.tokenizer) if self.chat else None

    @cached_property
    def skipped_files(self) -> SkippedFiles:
        """Input files that are not read."""
        return SkippedFiles()

    @cached_property
    def sources(self) -> list[CorpusSource]:
        """All sources of the input."""
        return find_corpus_sources(self.inputs, self.json_key, self.skipped_files)

    @cached_property
    def made_from(self) -> str:
        """Digest of everything that the tokens depend on, which identifies the run."""
        tokenizer = self.tokenizer
        settings: list[Any] = [
            tokenizer.fingerprint, tokenizer.eos_id, self.append_eod, self.parse_special_tokens, self.json_key,
        ]  # fmt: skip
        settings += [self.chat_preparation.info.model_dump()] if self.chat_preparation else []
        settings += [self.sentence_encoder.language] if self.sentence_encoder else []
        files = [(source.name, source.kind, source.size, source.changed) for source in self.sources]
        return hashlib.sha256(json.dumps([settings, files]).encode()).hexdigest()

    def check_output(self, *, accept_finished: bool) -> DatasetInfo | None:
        """Check that the data set may be built; return its description if it is complete, for example after a kill
        during the commit.

        Or, if what is made `accept_finished` to be joined or copied: who makes a part cannot know that another has joined them, and
        starts again after that, too.
        """
        if finish_commit(self.whole) == self.made_from and (info := read_dataset_info(self.whole)):
            return info
        info = read_dataset_info(self.whole) if accept_finished and get_idx_path(self.whole).exists() else None
        if info and info.made_from == self.made_from:
            logger.info(
                "%s: is made already, of these inputs and with these settings: nothing is left to do", self.whole
            )
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
        """Read, encode and write all of `sources`, from where an interrupted run stopped."""
        choice = self.encoder
        if self.chat_preparation:
            if choice == "fastokens":
                logger.warning("tokenizers encodes: fastokens does not tell where in a conversation a token stands")
            choice = "tokenizers"
        try:
            return self._build_with_encoder(prefix, sources, made_from, workers, shard, choice)
        except EncoderMismatch as error:
            if not all(source.is_rereadable for source in sources):
                raise DataError(
                    f"{error.where}: fastokens makes other tokens than tokenizers, and what is read cannot be read again",
                    hint="--encoder tokenizers",
                ) from None
            logger.warning("%s: fastokens makes other tokens than tokenizers: starting over without it", error.where)
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
        tokenizer, chats = self.tokenizer, self.chat_preparation
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
            done.encoder = done.encoder if choice == "auto" else choice  # what was given up stays so
            encoder = choose_text_encoder(done.encoder, tokenizer, size, rereadable=lasting)
            folder = output.writer.folder if chats is None else None  # a conversation is parsed as a whole
            reading = ResumableReader(sources, self.json_key, self.skipped_files, done, bar, folder=folder)
            good = build_text_batches(
                reading,
                tokenizer,
                refuse=None if self.on_bad_line == "skip" else get_quarantine_path(prefix),
                end=None if self.parse_special_tokens else tokenizer.eos_token,
                prepare=chats.prepare_record if chats else None,
                leads=LEADS[:1] if self.sentence_encoder else LEADS,  # which would be taken for white space between two
            )
            stack.enter_context(disable_encoder_threads())
            encoded = encode_batches(
                good, DocumentEncoder(encoder, chats, self.sentence_encoder), output.dtype, workers
            )
            for batch, documents in stack.enter_context(contextlib.closing(encoded)):
                output.add_batch(batch, documents)
                reading.advance_progress(batch.read)
            if shard is not None:
                output.shard = shard.model_copy(update={"lines": reading.lines})
            elif not done.documents:
                raise DataError(
                    f"{sources[0].name}: not one document with text in {len(sources)} file(s)",
                    hint=f"{done.bad} bad lines, {done.empty} empty documents, {done.left_out} files that are no text",
                )
        reading.log_summary()
        _log_result(output.info, output, tokenizer)
        return output.info

    @cached_property
    def sentence_encoder(self) -> SentenceEncoder | None:
        """Encoder of sentences, or None."""
        return SentenceEncoder(self.tokenizer, self.sentences) if self.sentences else None

    def build_shard(self, shard: InputShard, workers: int) -> DatasetInfo:
        """Build the data set of one shard, unless it is finished."""
        if any(source.name == STDIN for source in self.sources):
            raise DataError("standard input cannot be read in parts", hint="give files, globs or folders")
        prefix = shard.get_output_prefix(self.whole)
        if made := read_finished_shard(prefix, self.made_from):
            return made
        about = DatasetShardInfo(number=shard.number, of=shard.of, made_from=self.made_from)
        with record_failure(prefix):
            sources = select_shard_sources(self.sources, shard, self.json_key)
            return self.build_dataset(prefix, sources, f"{self.made_from} {shard}", workers, about)

    def try_build_shard(self, shard: InputShard) -> str | None:
        """Build one shard in this thread; return the reason of a failure, else None."""
        try:
            self.build_shard(shard, workers=1)
        except MegaError as error:
            return str(error)
        return None

    def join_shards(self, shard: InputShard) -> DatasetInfo | None:
        """Join the shards to the whole, if all are finished."""
        return join_shards(self.whole, self.sources, shard, self.json_key, self.made_from)


def _build_by_engine(job: PreprocessJob, engine: EngineName, count: int | None, workers: int | None) -> DatasetInfo:
    """Build all shards by an engine, and join them."""
    size = sum(source.num_bytes for source in job.sources)
    shards = InputShard(1, count or min(max(-(-size // PART), 1), MOST_PARTS)).all_shards
    left = [shard for shard in shards if not read_finished_shard(shard.get_output_prefix(job.whole), job.made_from)]
    make = dataclasses.replace(job).try_build_shard  # without what was loaded here
    answers = (
        build_in_processes(make, left, workers or count_usable_cores())
        if engine == "processes"
        else build_on_ray(make, left, workers)
    )
    reasons: dict[InputShard, str] = {}
    with ProgressBar("making parts", total=len(shards), unit="parts") as bar, contextlib.closing(answers):
        bar.advance(len(shards) - len(left))
        for shard, reason in answers:
            bar.advance(1)
            if reason is not None:
                reasons[shard] = reason
                logger.warning("%s, part %s: %s", job.whole, shard, reason)
    if reasons:
        raise DataError(
            f"{job.whole}: {len(reasons)} of {len(shards)} parts could not be made, {min(reasons.values())}",
            hint="the others are kept: the same command makes only what is missing",
        )
    info = job.join_shards(shards[0])
    if info is None:
        raise DataError(f"{job.whole}: parts are gone that were made", hint="was another run removing them?")
    if info.chat is not None:
        log_chat_notes(info.chat.notes)
    return info


def count_usable_cores() -> int:
    """Return the number of cores that this process may run on, which in a container is smaller than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _log_result(info: DatasetInfo, output: DatasetOutput, tokenizer: Tokenizer) -> None:
    logger.info("%s: %s documents, %s tokens", output.prefix, format_number(info.documents), format_number(info.tokens))
    if info.skipped.bad:
        logger.warning("%d bad lines are in %s", info.skipped.bad, get_quarantine_path(output.prefix))
    if info.skipped.empty:
        what = "conversations without an answer within the limit" if info.chat else "empty documents"
        logger.warning("%d %s were left out", info.skipped.empty, what)
    if info.chat is not None and info.chat.cut:
        logger.warning("%d answers were cut by the limit of %d tokens", info.chat.cut, info.chat.max_length)
    if info.chat is not None:
        log_chat_notes(info.chat.notes)
    if output.done.ends:
        logger.warning(
            "%d documents spell the end token %r: it is text there; --parse-special-tokens takes it for the token",
            output.done.ends,
            tokenizer.eos_token,
        )

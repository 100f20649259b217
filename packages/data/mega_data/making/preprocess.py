"""Documents to token files, as fast as the tokenizer goes.

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
from mega_common.log import ProgressBar, human, logger
from mega_data.chat.prepare import ChatOptions, Chats, log_notes
from mega_data.files.indexed import data_prefix, idx_path
from mega_data.files.info import (
    DataInfo,
    ShardInfo,
    data_files,
    prepare_output,
    quarantine_path,
    read_info,
    refuse_inputs,
)
from mega_data.making.batches import Reading, batches
from mega_data.making.commit import settle
from mega_data.making.encoder import Choice, Differs, choose_encoder
from mega_data.making.encoding import Encoding, encode_all
from mega_data.making.engines import Engine, in_processes, on_ray
from mega_data.making.output import Output
from mega_data.making.put import place_of, put, workplace
from mega_data.making.shards import Shard, cut, failure_noted, finished, join
from mega_data.reading.sources import WHOLE, LeftOut, Source, find_sources
from mega_data.reading.split_sentences import SentenceEncoder
from mega_data.reading.unpack import STDIN
from mega_data.tokenizer import LEADS, Tokenizer, one_thread_per_call

PART = 1 << 28  # bytes of input that an engine makes a part of: a minute or two of one core
MOST_PARTS = 1000  # each is a few files, until they are joined


def preprocess(
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
    encoder: Choice = "auto",
    chat: ChatOptions | None = None,
    shard: Shard | None = None,
    engine: Engine = "threads",
    shards: int | None = None,
    sentences: str | None = None,
) -> DataInfo:
    """Tokenize `inputs` (see `find_sources`) into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.info`.

    A document is one sequence of the data set, or with `sentences`, a language such as `en`, as many as it has
    sentences; documents without a token are left out and counted. `append_eod` ends
    each with the tokenizer's end token; a special token that a text spells stays text without `parse_special_tokens`.
    `workers` is the number of encoding threads, by default the usable cores. With `on_bad_line="skip"` bad lines go
    into `PREFIX.quarantine.jsonl` instead of stopping the run. The `encoder` decides about speed alone (see
    `choose_encoder`).

    Until everything is written no file has its final name, whatever ends the run. A run that was ended goes on where it
    was when it is started again, if its inputs are files and they did not change; the data set is the same then.

    With `chat` whole records are read, as conversations or pairs of them (`mega_data.chat.records`), and their tokens'
    weights in the loss are written too (`PREFIX.mask.bin`, `PREFIX.mask.idx`). A special token that the text of a
    conversation spells is that token, as for transformers. Conversations of which nothing that counts is left within
    the length limit are left out and counted as empty.

    A `shard` makes only its part (see `mega_data.making.shards`); what is returned describes that, or the whole if it was the
    last part that was missing. With the `engine` processes or ray this makes all parts, as many as `shards` says and by
    default one for each `PART` bytes of input; `workers` is the number of parts that are made at once.

    With an `output_prefix` that is a URL the files go to that object store when all are made (see `mega_data.making.put`).

    Raises:
        DataError: naming file and line of a bad document, or what cannot be read or written; with the reason of each
            part that could not be made, when all others are.
        MissingPackageError: when an input's format, or the engine, needs a package that is not installed.
    """
    where = place_of(Path(output_prefix), overwrite=overwrite)
    if where is not None and (shard is not None or engine == "ray"):
        raise DataError(
            f"{where}: parts of several machines are joined in a folder that all see", hint="--engine processes"
        )
    job = Job(
        tuple(inputs), Path(tokenizer_path), workplace(where) if where else data_prefix(Path(output_prefix)),
        WHOLE if chat else json_key, append_eod, parse_special_tokens or chat is not None, on_bad_line,
        overwrite or where is not None, encoder, chat, sentences,
    )  # fmt: skip
    goes_on = where is not None or shard is not None or engine != "threads"
    made = job.check(goes_on=goes_on) or _made(job, shard, engine, shards, workers)
    if where is not None:
        put(job.whole, where)
    return made


def _made(job: Job, shard: Shard | None, engine: Engine, shards: int | None, workers: int | None) -> DataInfo:
    """What a job makes: a part, or the whole."""
    if shard is not None:
        part = job.make_part(shard, workers or usable_cores())
        return job.join(shard) or part
    if engine == "threads":
        return job.make(job.whole, job.sources, job.made_from, workers or usable_cores())
    return _spread(job, engine, shards, workers)


@dataclass(frozen=True)
class Job:
    """A data set to make: from what, how, and where it goes."""

    inputs: tuple[str | Path, ...]
    tokenizer_path: Path
    whole: Path
    json_key: str
    append_eod: bool
    parse_special_tokens: bool
    on_bad_line: Literal["error", "skip"]
    overwrite: bool
    encoder: Choice = "auto"
    chat: ChatOptions | None = None
    sentences: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded."""
        tokenizer = Tokenizer(self.tokenizer_path, specials_as_text=not self.parse_special_tokens)
        if self.append_eod and tokenizer.eos_id is None:
            raise DataError(
                f"{tokenizer.path}: names no end-of-text token to append",
                hint="put `eos_token` into tokenizer_config.json beside it",
            )
        return tokenizer

    @cached_property
    def chats(self) -> Chats | None:
        """What makes texts of conversations."""
        return Chats(self.chat, self.tokenizer) if self.chat else None

    @cached_property
    def left_out(self) -> LeftOut:
        """What of the inputs is not read."""
        return LeftOut()

    @cached_property
    def sources(self) -> list[Source]:
        """All that is read."""
        return find_sources(self.inputs, self.json_key, self.left_out)

    @cached_property
    def made_from(self) -> str:
        """What tells one run from another: a digest of all that decides about its tokens."""
        tokenizer = self.tokenizer
        settings: list[Any] = [
            tokenizer.fingerprint, tokenizer.eos_id, self.append_eod, self.parse_special_tokens, self.json_key,
        ]  # fmt: skip
        settings += [self.chats.info.model_dump()] if self.chats else []
        settings += [self.by_sentence.language] if self.by_sentence else []
        files = [(source.name, source.kind, source.size, source.changed) for source in self.sources]
        return hashlib.sha256(json.dumps([settings, files]).encode()).hexdigest()

    def check(self, *, goes_on: bool) -> DataInfo | None:
        """Whether the data set may be made; it is, already, if a kill left nothing to do but its names.

        Or, if what is made `goes_on` to be joined or copied: who makes a part cannot know that another has joined them, and
        starts again after that, too.
        """
        if settle(self.whole) == self.made_from and (info := read_info(self.whole)):
            return info
        info = read_info(self.whole) if goes_on and idx_path(self.whole).exists() else None
        if info and info.made_from == self.made_from:
            logger.info(
                "%s: is made already, of these inputs and with these settings: nothing is left to do", self.whole
            )
            return info
        prepare_output(self.whole, self.overwrite)
        refuse_inputs(data_files(self.whole), [self.tokenizer.path, *(Path(source.name) for source in self.sources)])
        return None

    def make(
        self, prefix: Path, sources: Sequence[Source], made_from: str, workers: int, shard: ShardInfo | None = None
    ) -> DataInfo:
        """Read, encode and write all of `sources`, from where an interrupted run was."""
        choice = self.encoder
        if self.chats:
            if choice == "fastokens":
                logger.warning("tokenizers encodes: fastokens does not tell where in a conversation a token stands")
            choice = "tokenizers"
        try:
            return self._make(prefix, sources, made_from, workers, shard, choice)
        except Differs as error:
            if not all(source.again for source in sources):
                raise DataError(
                    f"{error.where}: fastokens makes other tokens than tokenizers, and what is read cannot be read again",
                    hint="--encoder tokenizers",
                ) from None
            logger.warning("%s: fastokens makes other tokens than tokenizers: starting over without it", error.where)
            return self._make(prefix, sources, made_from, workers, shard, "tokenizers")

    def _make(
        self,
        prefix: Path,
        sources: Sequence[Source],
        made_from: str,
        workers: int,
        shard: ShardInfo | None,
        choice: Choice,
    ) -> DataInfo:
        tokenizer, chats = self.tokenizer, self.chats
        lasting = all(source.again for source in sources)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(
                Output(
                    prefix,
                    tokenizer,
                    self.append_eod,
                    made_from,
                    lasting=lasting,
                    chat=chats.info if chats else None,
                    shard=shard,
                )
            )
            size = sum(source.bytes for source in sources)
            bar = stack.enter_context(ProgressBar("tokenizing", total=size or None, unit="bytes"))
            done = output.begin()
            done.encoder = done.encoder if choice == "auto" else choice  # what was given up stays so
            encoder = choose_encoder(done.encoder, tokenizer, size, again=lasting)
            folder = output.writer.folder if chats is None else None  # a conversation is parsed as a whole
            reading = Reading(sources, self.json_key, self.left_out, done, bar, folder=folder)
            good = batches(
                reading,
                tokenizer,
                refuse=None if self.on_bad_line == "skip" else quarantine_path(prefix),
                end=None if self.parse_special_tokens else tokenizer.eos_token,
                prepare=chats.prepare if chats else None,
                leads=LEADS[:1] if self.by_sentence else LEADS,  # which would be taken for white space between two
            )
            stack.enter_context(one_thread_per_call())
            encoded = encode_all(good, Encoding(encoder, chats, self.by_sentence), output.dtype, workers)
            for batch, documents in stack.enter_context(contextlib.closing(encoded)):
                output.add(batch, documents)
                reading.show(batch.read)
            if shard is not None:
                output.shard = shard.model_copy(update={"lines": reading.lines})
            elif not done.documents:
                raise DataError(
                    f"{sources[0].name}: not one document with text in {len(sources)} file(s)",
                    hint=f"{done.bad} bad lines, {done.empty} empty documents, {done.left_out} files that are no text",
                )
        reading.tell()
        _tell(output.info, output, tokenizer)
        return output.info

    @cached_property
    def by_sentence(self) -> SentenceEncoder | None:
        """What encodes sentences, where they are asked for."""
        return SentenceEncoder(self.tokenizer, self.sentences) if self.sentences else None

    def make_part(self, shard: Shard, workers: int) -> DataInfo:
        """Make the part of one shard, unless it is made already."""
        if any(source.name == STDIN for source in self.sources):
            raise DataError("standard input cannot be read in parts", hint="give files, globs or folders")
        prefix = shard.prefix(self.whole)
        if made := finished(prefix, self.made_from):
            return made
        about = ShardInfo(number=shard.number, of=shard.of, made_from=self.made_from)
        with failure_noted(prefix):
            sources = cut(self.sources, shard, self.json_key)
            return self.make(prefix, sources, f"{self.made_from} {shard}", workers, about)

    def attempt(self, shard: Shard) -> str | None:
        """Make the part of one shard by this thread; why it cannot be made, if so."""
        try:
            self.make_part(shard, workers=1)
        except MegaError as error:
            return str(error)
        return None

    def join(self, shard: Shard) -> DataInfo | None:
        """Make the whole of the parts, if all are made."""
        return join(self.whole, self.sources, shard, self.json_key, self.made_from)


def _spread(job: Job, engine: Engine, count: int | None, workers: int | None) -> DataInfo:
    """Make all parts by an engine, and the whole of them."""
    size = sum(source.bytes for source in job.sources)
    shards = Shard(1, count or min(max(-(-size // PART), 1), MOST_PARTS)).all
    left = [shard for shard in shards if not finished(shard.prefix(job.whole), job.made_from)]
    make = dataclasses.replace(job).attempt  # without what was loaded here
    answers = (
        in_processes(make, left, workers or usable_cores()) if engine == "processes" else on_ray(make, left, workers)
    )
    reasons: dict[Shard, str] = {}
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
    info = job.join(shards[0])
    if info is None:
        raise DataError(f"{job.whole}: parts are gone that were made", hint="was another run removing them?")
    if info.chat is not None:
        log_notes(info.chat.notes)
    return info


def usable_cores() -> int:
    """Cores that this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tell(info: DataInfo, output: Output, tokenizer: Tokenizer) -> None:
    logger.info("%s: %s documents, %s tokens", output.prefix, human(info.documents), human(info.tokens))
    if info.skipped.bad:
        logger.warning("%d bad lines are in %s", info.skipped.bad, quarantine_path(output.prefix))
    if info.skipped.empty:
        what = "conversations without an answer within the limit" if info.chat else "empty documents"
        logger.warning("%d %s were left out", info.skipped.empty, what)
    if info.chat is not None and info.chat.cut:
        logger.warning("%d answers were cut by the limit of %d tokens", info.chat.cut, info.chat.max_length)
    if info.chat is not None:
        log_notes(info.chat.notes)
    if output.done.ends:
        logger.warning(
            "%d documents spell the end token %r: it is text there; --parse-special-tokens takes it for the token",
            output.done.ends,
            tokenizer.eos_token,
        )

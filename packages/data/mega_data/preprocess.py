"""Documents to token files, as fast as the tokenizer goes.

One thread reads and writes, `workers` threads encode: the tokenizer's Rust code runs without the interpreter's lock, so
threads do what processes would without copying the text or starting interpreters. Batches go out and come back in the
order of the documents, so the files do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mega_common.errors import DataError
from mega_common.log import ProgressBar, human, logger
from mega_data.batches import Batch, Reading, batches
from mega_data.commit import settle
from mega_data.indexed import data_prefix
from mega_data.info import DataInfo, ShardInfo, data_files, prepare_output, quarantine_path, read_info, refuse_inputs
from mega_data.output import Arrays, Output
from mega_data.shards import Shard, cut, failure_noted, finished, join
from mega_data.sources import LeftOut, Source, find_sources
from mega_data.tokenizer import Tokenizer, one_thread_per_call
from mega_data.unpack import STDIN

AHEAD = 1 << 22  # bytes of text per worker that may wait or be under way


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
    shard: Shard | None = None,
) -> DataInfo:
    """Tokenize `inputs` (see `find_sources`) into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.info`.

    A document is one sequence of the data set; documents without a token are left out and counted. `append_eod` ends
    each with the tokenizer's end token; a special token that a text spells stays text without `parse_special_tokens`.
    `workers` is the number of encoding threads, by default the usable cores. With `on_bad_line="skip"` bad lines go
    into `PREFIX.quarantine.jsonl` instead of stopping the run.

    Until everything is written no file has its final name, whatever ends the run. A run that was ended goes on where it
    was when it is started again, if its inputs are files and they did not change; the data set is the same then.

    A `shard` makes only its part (see `mega_data.shards`); what is returned describes that, or the whole if it was the
    last part that was missing.

    Raises:
        DataError: naming file and line of a bad document, or what cannot be read or written.
        MissingPackageError: when an input's format needs a package that is not installed.
    """
    whole = data_prefix(Path(output_prefix))
    recipe = _Recipe(
        Tokenizer(tokenizer_path, specials_as_text=not parse_special_tokens),
        json_key, append_eod, parse_special_tokens, workers or usable_cores(), on_bad_line,
    )  # fmt: skip
    left_out = LeftOut()
    sources = find_sources(inputs, json_key, left_out)
    made_from = recipe.made_from(sources)
    if settle(whole) == made_from and (settled := read_info(whole)):
        return settled
    prepare_output(whole, overwrite)
    refuse_inputs(data_files(whole), [recipe.tokenizer.path, *(Path(source.name) for source in sources)])
    if shard is None:
        return _make(recipe, sources, left_out, whole, made_from)
    part = _make_part(recipe, sources, left_out, whole, shard)
    return join(whole, sources, shard, json_key, made_from) or part


@dataclass(frozen=True)
class _Recipe:
    """How documents become tokens."""

    tokenizer: Tokenizer
    json_key: str
    append_eod: bool
    parse_special_tokens: bool
    workers: int
    on_bad_line: Literal["error", "skip"]

    def __post_init__(self) -> None:
        if self.append_eod and self.tokenizer.eos_id is None:
            raise DataError(
                f"{self.tokenizer.path}: names no end-of-text token to append",
                hint="put `eos_token` into tokenizer_config.json beside it",
            )

    def made_from(self, sources: Sequence[Source]) -> str:
        """What tells one run from another: a digest of all that decides about its tokens."""
        tokenizer = self.tokenizer
        settings = [tokenizer.fingerprint, tokenizer.eos_id, self.append_eod, self.parse_special_tokens, self.json_key]
        files = [(source.name, source.kind, source.size, source.changed) for source in sources]
        return hashlib.sha256(json.dumps([settings, files]).encode()).hexdigest()


def _make(
    recipe: _Recipe,
    sources: Sequence[Source],
    left_out: LeftOut,
    prefix: Path,
    made_from: str,
    shard: ShardInfo | None = None,
) -> DataInfo:
    """Read, encode and write all of `sources`, from where an interrupted run was."""
    tokenizer = recipe.tokenizer
    lasting = all(source.again for source in sources)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(
            Output(prefix, tokenizer, recipe.append_eod, made_from, lasting=lasting, shard=shard)
        )
        size = sum(source.bytes for source in sources)
        bar = stack.enter_context(ProgressBar("tokenizing", total=size or None, unit="bytes"))
        reading = Reading(sources, recipe.json_key, left_out, output.begin(), bar)
        good = batches(
            reading,
            tokenizer,
            refuse=None if recipe.on_bad_line == "skip" else quarantine_path(prefix),
            end=None if recipe.parse_special_tokens else tokenizer.eos_token,
        )
        stack.enter_context(one_thread_per_call())
        encoded = _encoded(good, tokenizer, output.dtype, recipe.workers)
        for batch, arrays in stack.enter_context(contextlib.closing(encoded)):
            output.add(batch, arrays)
            reading.show(batch.read)
        done = output.done
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


def _make_part(recipe: _Recipe, sources: Sequence[Source], left_out: LeftOut, whole: Path, shard: Shard) -> DataInfo:
    """The part of one shard, unless it is made already."""
    if any(source.name == STDIN for source in sources):
        raise DataError("standard input cannot be read by several jobs", hint="give --shard files, globs or folders")
    prefix, made_from = shard.prefix(whole), recipe.made_from(sources)
    if made := finished(prefix, made_from):
        return made
    with failure_noted(prefix):
        about = ShardInfo(number=shard.number, of=shard.of, made_from=made_from)
        mine = cut(sources, shard, recipe.json_key)
        return _make(recipe, mine, left_out, prefix, f"{made_from} {shard}", about)


def usable_cores() -> int:
    """Cores that this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _encoded(
    batches: Iterable[Batch], tokenizer: Tokenizer, dtype: np.dtype[Any], workers: int
) -> Generator[tuple[Batch, Arrays], None, None]:
    """Each batch with its tokens, in order; at most `AHEAD` bytes per worker (or one batch) are under way."""
    if workers == 1:  # a thread of its own would cost more, in memory arenas, than it saves
        yield from ((batch, _encode(batch, tokenizer, dtype)) for batch in batches)
        return
    pending: deque[tuple[Batch, Future[Arrays]]] = deque()
    under_way = 0
    failure: DataError | None = None
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    try:
        try:
            for batch in batches:
                while pending and under_way + batch.size > workers * AHEAD:
                    under_way -= pending[0][0].size
                    yield _finished(*pending.popleft())
                pending.append((batch, pool.submit(_encode, batch, tokenizer, dtype)))
                under_way += batch.size
                while pending and pending[0][1].done():
                    under_way -= pending[0][0].size
                    yield _finished(*pending.popleft())
        except DataError as error:  # of the batch that would come next: what is under way is worth keeping
            failure = error
        while pending:
            yield _finished(*pending.popleft())
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(batch: Batch, future: Future[Arrays]) -> tuple[Batch, Arrays]:
    return batch, future.result()


def _encode(batch: Batch, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Arrays:
    if not batch.documents:
        return []
    try:
        return tokenizer.encode_batch([document.text for document in batch.documents], dtype)
    except BaseException as error:  # a panic in Rust is no Exception
        raise _blame(batch, tokenizer, dtype, error) from error


def _blame(batch: Batch, tokenizer: Tokenizer, dtype: np.dtype[Any], error: BaseException) -> DataError:
    """Find the document of a batch that the tokenizer fails on."""
    for document in batch.documents:
        try:
            tokenizer.encode_batch([document.text], dtype)
        except BaseException as own:  # noqa: BLE001 - as above; it is told, not lost
            return DataError(f"{document.where}: the tokenizer {tokenizer.path} fails on this document ({own})")
    first, last = batch.documents[0], batch.documents[-1]
    return DataError(f"{first.where} to {last.where}: the tokenizer {tokenizer.path} fails on this batch ({error})")


def _tell(info: DataInfo, output: Output, tokenizer: Tokenizer) -> None:
    logger.info("%s: %s documents, %s tokens", output.prefix, human(info.documents), human(info.tokens))
    if info.skipped.bad:
        logger.warning("%d bad lines are in %s", info.skipped.bad, quarantine_path(output.prefix))
    if info.skipped.empty:
        logger.warning("%d empty documents were left out", info.skipped.empty)
    if output.done.ends:
        logger.warning(
            "%d documents spell the end token %r: it is text there; --parse-special-tokens takes it for the token",
            output.done.ends,
            tokenizer.eos_token,
        )

"""Token files of raw data: made once, at the start of a run, in a cache that runs share.

    CACHE/chats-5f3a1c.../chats.bin, chats.idx, chats.info, ...     named by content, tokenizer and settings
    CACHE/chats-5f3a1c....stream/1-0-0/...                          blocks of streamed data (`token_stream`)
    CACHE/digests/5f3a1c....json                                    content digest of input files, by path and state

Processes that need the same token files wait for the one that makes them; after a kill, the next one resumes its work.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from mega_common.bounded_parsing import parse_json_text
from mega_common.errors import DataError
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.chat.chat_records import detect_record_form
from mega_data.data_config import DataConfig, DatasetSource
from mega_data.preprocessing.content_digest import compute_content_digest, compute_stream_digest, digest_tokenizer_files
from mega_data.preprocessing.preprocess_corpus import PreprocessJob, count_usable_cores
from mega_data.preprocessing.token_stream import TokenStream
from mega_data.raw_data_config import LABELED_KINDS, RECORD_KINDS, RawDataConfig
from mega_data.reading.corpus_sources import WHOLE, CorpusSource, find_corpus_sources
from mega_data.reading.documents import Document
from mega_data.reading.source_readers import read_documents
from mega_data.token_files.dataset_info import RecordKind, read_dataset_info
from mega_data.token_files.indexed_reader import get_idx_path
from mega_data.token_files.partial_folder import convert_write_errors_to_data_error, hold_partial_folder
from mega_data.token_files.remote_copies import default_cache_folder, resolve_local_prefix

# Terms of the command line in messages of preprocessing, and the settings of run.yaml that they are.
_KEYS_OF_KIND = {
    "conversations": "messages, or prompt and completion", "pairs": "prompt, chosen and rejected",
    "labels": "text and label", "token_labels": "tokens and tags", "groups": "query, positive and negatives",
}  # fmt: skip
SETTING_OF_OPTION = (
    ("pass --on-bad-line skip", "set data.raw.on_bad_line: skip"),
    ("pass --parse-special-tokens", "set data.raw.parse_special_tokens: true"),
    (
        "--json-key KEY selects the key that has the text",
        "map: {text: KEY} beside the path reads the text from another key",
    ),
    ("and --json-key the key or column of their text", "and that their records have the key text"),
    ("--input names", "data.train names"),
    ("--json-key KEY selects another key", "map: {text: KEY} beside the path reads the text from another key"),
    (
        "--map label=COLUMN names the column of the labels",
        "map: {label: COLUMN} beside the path names the column of the labels",
    ),
    ("--append-eod", "data.raw.append_eod: true"),
    ("pass --turn-weights", "set data.raw.turn_weights: true"),
    ("pass --loss-on", "set data.raw.loss_on:"),
    ("--loss-on", "data.raw.loss_on:"),
    ("--language", "data.raw.language"),
    ("pass it as --chat-template FILE", "set data.raw.chat_template to its file"),
    ("pass --chat-template FILE", "set data.raw.chat_template=FILE"),
    ("--template-option", "data.raw.template_options"),
    ("pass --kind ", "set data.kind: "),
    ("--kind", "data.kind:"),
    ("read images with --images FOLDER", "make token files with mega data preprocess --images FOLDER"),
)


class RawRecord(NamedTuple):
    """First record of raw data, its detected form, and the dataset kind that reads this form, or None.

    A form is for example `messages (OpenAI)` or `plain text`.
    """

    form: str
    kind: str | None
    record: dict[str, Any] | str


def resolve_source_prefix(source: DatasetSource, path: Path, config: DataConfig) -> Path:
    """Return the local prefix of a configured data set's token files, after tokenizing raw data or downloading a URL.
    Both are made in the cache unless they are there.

    Args:
        path: one of the paths that `source` names.

    Raises:
        DataError: if the data set does not exist, or raw data cannot be tokenized.
        RemoteError: if the object store cannot be read.
    """
    return tokenize_raw_source(source, config) if source.is_raw else resolve_local_prefix(path, config.cache)


def tokenize_raw_data(config: DataConfig) -> None:
    """Tokenize the raw data of a run that is not in the cache yet, with progress.
    Raises DataError as `resolve_source_prefix` does.
    """
    for source in config.raw_sources:
        tokenize_raw_source(source, config)


def tokenize_raw_source(source: DatasetSource, config: DataConfig) -> Path:
    """Tokenize raw data (of streamed data the first block) into the cache, unless it is there; return the prefix.
    One process makes the files, and others wait for it.

    For streamed data these are the token files of the first block. One process makes them, and others wait for it.

    Raises:
        DataError: naming the bad record or the missing file, in the terms of run.yaml.
    """
    if config.is_streamed(source):
        first = open_token_stream(source, config).open_block(ahead=False)
        assert first is not None, "open_block raises an error if there is no first block"
        return first.prefix
    with _in_terms_of_settings(source, config):
        job = build_raw_data_job(source, config)
        if not _is_complete(job):
            waiting = f"{job.whole}: waiting for another process that tokenizes it"
            with (
                convert_write_errors_to_data_error(job.whole),
                hold_partial_folder(job.whole.parent / ".making", waiting),
            ):
                if job.check_output(accept_finished=True) is None:
                    workers = config.raw.workers or count_usable_cores()
                    job.build_dataset(job.whole, job.sources, job.made_from, workers)
    return job.whole


def open_token_stream(source: DatasetSource, config: DataConfig) -> TokenStream:
    """Return the blocks of token files of streamed raw data; nothing is tokenized yet.

    Raises:
        DataError: if the input or the tokenizer does not exist.
    """
    with _in_terms_of_settings(source, config):
        job = build_raw_data_job(source, config)
        workers = config.raw.workers or max(1, count_usable_cores() // 2)
        return TokenStream(job, config.block_tokens, workers, partial(_in_terms_of_settings, source, config))


def build_raw_data_job(source: DatasetSource, config: DataConfig) -> PreprocessJob:
    """Return the job that tokenizes raw data into the cache; nothing is tokenized yet.

    Raises:
        DataError: if the input or the tokenizer does not exist.
    """
    assert config.tokenizer is not None, "DataConfig.problems requires it"
    raw, kind, cache = config.raw, source.kind or config.kind, config.cache or default_cache_folder()
    chat = None
    if kind in RECORD_KINDS:
        chat = ChatOptions(
            kind=cast(RecordKind, kind), loss_on=raw.loss_on,
            max_length=raw.max_length or (config.seq_length if kind in LABELED_KINDS else None),
            template=raw.chat_template, template_options=raw.template_options, turn_weights=raw.turn_weights,
            columns=dict[str, str](source.map.items()), labels=raw.labels, negatives=raw.negatives,
        )  # fmt: skip
    by_sentence = kind == "bert" or (kind == "t5" and config.sample_order == "megatron")
    json_key = WHOLE if chat else source.map.get("text", "text")
    sources = find_corpus_sources([source.input_name], json_key)
    digests = digest_tokenizer_files(config.tokenizer, raw.chat_template)
    append_eod = raw.append_eod
    if append_eod is None:
        append_eod = chat is None and not by_sentence and digests.eos_id is not None
    settings = [
        kind if chat else "text", source.map, append_eod, by_sentence and raw.language, raw.on_bad_line,
        chat and _describe_chat_settings(raw, chat),
        raw.parse_special_tokens,
    ]  # fmt: skip
    streamed = config.is_streamed(source)
    content: list[Any] = [compute_stream_digest(sources, cache), config.block_tokens] if streamed else []
    key = hashlib.sha256(
        json.dumps([digests.files, settings, content or compute_content_digest(sources, cache)]).encode()
    ).hexdigest()
    name = _choose_name(source)
    folder = cache / f"{name}-{key[:16]}{'.stream' if streamed else ''}"
    return PreprocessJob(
        (source.input_name,), config.tokenizer, folder / name, json_key, append_eod,
        raw.parse_special_tokens or chat is not None, raw.on_bad_line, overwrite=False, chat=chat,
        sentences=raw.language if by_sentence else None, content_key=key,
    )  # fmt: skip


def _describe_chat_settings(raw: RawDataConfig, chat: ChatOptions) -> dict[str, Any]:
    """Return the settings that the tokens of whole records depend on, without defaults that earlier versions lacked."""
    settings = raw.model_dump(
        mode="json", exclude={"append_eod", "workers", "language", "chat_template", "labels", "negatives"}
    )
    own = {"max_length": chat.max_length, "labels": list(chat.labels), "negatives": chat.negatives}
    return settings | (own if chat.kind in LABELED_KINDS else {})


def _choose_name(source: DatasetSource) -> str:
    """Return a readable file name for the token files of raw data."""
    stem = Path(source.input_name.rstrip("/")).name.partition(".")[0]
    return re.sub(r"[^\w-]+", "-", stem).strip("-")[:60] or "data"


def _is_complete(job: PreprocessJob) -> bool:
    if not get_idx_path(job.whole).exists():
        return False
    info = read_dataset_info(job.whole)
    return info is not None and info.made_from == job.made_from


@contextmanager
def _in_terms_of_settings(source: DatasetSource, config: DataConfig) -> Iterator[None]:
    """Express errors of preprocessing by settings of run.yaml; an error of records of another kind names the kind."""
    try:
        yield
    except DataError as error:
        kind = source.kind or config.kind
        found = _read_first_or_none(source)
        if found and not source.map and _reads_other_kind(kind, found):
            hint = (
                f"give records of {kind} ({_KEYS_OF_KIND.get(kind, 'text')}), or set data.kind: {found.kind}"
                if found.kind
                else f"records of {kind} have {_KEYS_OF_KIND.get(kind, 'text')}; name other columns next to the path: "
                "map: {KEY: COLUMN}"
            )
            raise DataError(
                f"{source.input_name}: data.kind = {kind} does not read records of the form {found.form}", hint=hint
            ) from error
        raise DataError(
            translate_options_to_run_yaml(error.message), hint=translate_options_to_run_yaml(error.hint or "") or None
        ) from error


def _reads_other_kind(kind: str, found: RawRecord) -> bool:
    needed = kind if kind in RECORD_KINDS else "text"
    return found.kind != needed


def translate_options_to_run_yaml(text: str) -> str:
    """Return a message of preprocessing with settings of run.yaml in place of options of `mega data preprocess`."""
    for term, setting in SETTING_OF_OPTION:
        text = text.replace(term, setting)
    return text


def _read_first_or_none(source: DatasetSource) -> RawRecord | None:
    try:
        return read_first_record(find_corpus_sources([source.input_name], WHOLE))
    except DataError:
        return None


def read_first_record(sources: Sequence[CorpusSource]) -> RawRecord:
    """Return the first record of raw data with its form; a DataError if none can be read.

    Raises:
        DataError: if there is none that can be read.
    """
    for source in sources:
        for item in read_documents(source, WHOLE):
            if isinstance(item, Document):
                if source.kind in (None, "text"):
                    return RawRecord("plain text", "text", item.text)
                record = parse_json_text(item.text)
                form, kind = detect_record_form(record)
                return RawRecord(form, kind, record)
            if not item.skipped:
                raise DataError(f"{item.file}:{item.line}: {item.reason}")
    raise DataError(f"{sources[0].name}: has no records")

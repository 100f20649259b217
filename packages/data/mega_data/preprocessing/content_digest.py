"""Digests of the inputs of a tokenization: raw data by content, wherever its files are, and tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mega_common.atomic_files import compute_file_sha256, write_json_atomically
from mega_common.bounded_parsing import explain_read_error, read_json_file
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.reading.corpus_sources import CorpusSource, split_hub_dataset_name
from mega_data.reading.decompression import STDIN, import_optional_package
from mega_data.token_files.partial_folder import convert_write_errors_to_data_error
from mega_data.tokenizer import Tokenizer

# Globs of files on which tokens depend in addition to tokenizer.json: the end token, chat templates and their variables.
TOKEN_SETTING_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


class TokenizerDigest(NamedTuple):
    """Digests of a tokenizer's files, and the id of its end token, or None."""

    files: list[str]
    eos_id: int | None


def digest_tokenizer_files(path: Path, chat_template: Path | None) -> TokenizerDigest:
    """Return the digests of all files of a tokenizer that tokens depend on, and the id of its end token.

    Raises:
        DataError: if there is no tokenizer at `path`, or no file `chat_template`.
    """
    tokenizer = Tokenizer(path)
    folder = tokenizer.path.parent
    globs = TOKEN_SETTING_FILES if tokenizer.extension is None else ()
    files = [file for glob in globs for file in sorted(folder.glob(glob)) if file.is_file()]
    if chat_template is not None and not chat_template.is_file():
        raise DataError(f"data.raw.chat_template = {chat_template}: no such file")
    digests = [f"{file.relative_to(folder)} {compute_file_sha256(file)}" for file in files]
    digests += [compute_file_sha256(chat_template)] if chat_template else []
    return TokenizerDigest([tokenizer.fingerprint, *digests], tokenizer.eos_id)


def compute_content_digest(sources: Sequence[CorpusSource], cache: Path) -> str:
    """Return a digest (hex) of the content of `sources`, in order, independent of their names.

    The digest of local files is kept in `cache`/digests as long as their paths, sizes and modification times stay. Objects
    of a store count by name and state, data sets of the HuggingFace Hub by name and commit.

    Raises:
        DataError: for standard input, a file that cannot be read, or a data set of the hub without a known commit.
    """
    _reject_standard_input(sources)
    parts: list[object] = []
    local: list[Path] = []
    for source in sources:
        files = _list_local_files(source)
        hub = split_hub_dataset_name(source.name) if source.kind == "datasets" else None
        parts.append([source.kind, hub.split if hub else "", len(files)])
        if files and hub and hub.config:
            parts.append(hub.config)
        if not files and source.kind == "datasets":
            parts.append(_identify_hub_dataset(source.name, cache))
        elif not files:
            parts.append([source.name, source.size, source.changed])
        local += files
    return hashlib.sha256(json.dumps([parts, _digest_files(local, cache)]).encode()).hexdigest()


def compute_stream_digest(sources: Sequence[CorpusSource], cache: Path) -> str:
    """Return a digest (hex) of the names and states of `sources`, for inputs that are too large to hash.
    Local files count by name in their folder and size, objects of a store and data sets of the hub as in
    `compute_content_digest`.

    Raises:
        DataError: as `compute_content_digest`.
    """
    _reject_standard_input(sources)
    parts: list[object] = []
    for source in sources:
        files = _list_local_files(source)
        if not files and source.kind == "datasets":
            parts.append([*_identify_hub_dataset(source.name, cache), source.name])
        elif not files:
            parts.append([source.name, source.size, source.changed])
        else:
            name = split_hub_dataset_name(source.name)[1:] if source.kind == "datasets" else ()
            parts.append([source.kind, name, [(path.name, path.stat().st_size) for path in files]])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _reject_standard_input(sources: Sequence[CorpusSource]) -> None:
    if any(source.name == STDIN for source in sources):
        raise DataError("data.train: standard input is not supported", hint="name files, a folder or hf:NAME")


def _list_local_files(source: CorpusSource) -> list[Path]:
    """Return the files of a local source: itself, or all of a folder that `datasets` reads."""
    if "://" in source.name:
        return []
    if source.kind != "datasets":
        return [Path(source.name)]
    folder = Path(split_hub_dataset_name(source.name).repository)
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _digest_files(files: Sequence[Path], cache: Path) -> list[str]:
    """Return the SHA-256 of each file, kept in the cache by the states of all."""
    try:
        states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        kept = cache / "digests" / f"{hashlib.sha256(json.dumps(states).encode()).hexdigest()[:32]}.json"
        if kept.exists() and len(digests := read_json_file(kept, DataError)["files"]) == len(files):
            return [str(digest) for digest in digests]
        with ProgressBar("hashing raw data", total=sum(size for _, size, _ in states) or None, unit="bytes") as bar:
            digests = [compute_file_sha256(path, advance=bar.advance) for path in files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
    _keep_json(kept, {"files": digests})
    return digests


def _keep_json(path: Path, value: object) -> None:
    with convert_write_errors_to_data_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, value)


def _identify_hub_dataset(name: str, cache: Path) -> list[str]:
    """Return the name of a data set and its newest commit on the HuggingFace Hub; offline, that of the last use."""
    hub = import_optional_package("huggingface_hub", "reading hf: inputs")
    repository = split_hub_dataset_name(name).repository
    kept = cache / "digests" / f"hub-{hashlib.sha256(repository.encode()).hexdigest()[:32]}.json"
    try:
        commit = str(hub.HfApi().dataset_info(repository).sha)
    except Exception as error:
        if not kept.exists():
            raise DataError(f"{name}: cannot be found on the HuggingFace Hub ({explain_read_error(error)})") from error
        commit = str(read_json_file(kept, DataError)["commit"])
        logger.warning("%s: the HuggingFace Hub cannot be reached; using its commit %s of the last use", name, commit)
    else:
        _keep_json(kept, {"name": repository, "commit": commit})
    return [name, commit]

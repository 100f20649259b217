"""Description file `PREFIX.info` of a data set: its tokenizer, counts, checksums and origin."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mega_common.atomic_files import compute_file_sha256, write_json_atomically
from mega_common.bounded_parsing import parse_json_text, read_json_file
from mega_common.errors import DataError
from mega_common.strict_config import StrictConfig
from mega_common.vision_config import Resolution
from mega_data.token_files.indexed_reader import get_bin_path, get_idx_path, list_companion_files, strip_data_suffix
from mega_data.token_files.remote_copies import resolve_local_prefix, restore_url_slashes
from mega_data.tokenizer import Tokenizer

UNPAIRED = "have one rated answer instead of a pair, which objective.kind = kto alone trains on"  # in `ChatInfo.notes`
MAX_INFO_BYTES = 1 << 16  # of a description; avoids reading a whole corpus of the same name


class TokenizerInfo(StrictConfig):
    """Tokenizer that made a data set, as recorded in the data set's description.
    It has its `path` at that time, and the `fingerprint` that identifies it.
    """

    path: str
    fingerprint: str
    vocab_size: int
    eos_id: int | None = None
    extension: str | None = Field(None, description="name and version of the extension that has the tokenizer")

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenizerInfo:
        """Return the description of a loaded tokenizer for a data set's `PREFIX.info`."""
        extension = tokenizer.extension and tokenizer.extension.extension
        return cls(
            path=str(tokenizer.path if extension else tokenizer.path.resolve()),
            extension=f"{extension.name} {extension.version}" if extension else None,
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
        )


class SkippedCounts(StrictConfig):
    """Counts of inputs that yielded no tokens: bad lines, empty documents, files in folders that are not text."""

    bad: int = 0
    empty: int = 0
    binary: int = 0


RecordKind = Literal["conversations", "pairs", "labels", "token_labels", "groups"]


class ChatInfo(StrictConfig):
    """Description of the tokenization of a data set's conversations and of their loss mask.
    The loss mask is `PREFIX.mask`, the bytes that weight tokens in the loss.

    Attributes:
        kind: conversations are a sequence each; pairs are two in a document, the chosen one first; for the others see
            `mega_data.chat.labeled_records`.
        loss_on: turns that contribute to the loss.
        one: mask byte of weight 1; weights are stored in units of it.
        template: fingerprint of the chat template.
        marked: whether the template marks the answers itself.
        max_length: maximum number of tokens of each conversation.
        cut: number of answers truncated to `max_length`.
        notes: number of conversations by reported note, such as a part that the chat template does not render.
        mask_sha256: SHA-256 of `PREFIX.mask.bin`, hex.
        labels: names of the labels, for kinds `labels` and `token_labels`.
        negatives: number of negatives of a group.
    """

    kind: RecordKind
    loss_on: Literal["answers", "last", "all"]
    one: int
    template: str
    marked: bool
    max_length: int | None = None
    cut: int = 0
    notes: dict[str, int] = {}
    mask_sha256: str = ""
    labels: list[str] = []
    negatives: int = 0


class ImagesInfo(StrictConfig):
    """Description of how a data set's images became placeholder tokens.

    Attributes:
        folder: base of image paths.
        token: id of the placeholder.
        tokens: number of placeholders per image; with `pinpoints` of the whole image, before those of its tiles.
        pinpoints: see `VisionConfig`.
        sizes: see `VisionConfig`; the number of placeholders then depends on the image.
    """

    folder: str
    token: int
    tokens: int
    pinpoints: tuple[Resolution, ...] | None = None
    sizes: tuple[int, int, int] | None = None


class DatasetShardInfo(StrictConfig):
    """Shard number of a data set that is one shard of a larger one (`mega_data.preprocessing.sharding`).

    Attributes:
        made_from: digest of all inputs and settings, equal in all shards.
        lines: number of lines read of the file that continues in the next shard.
    """

    number: int
    of: int
    made_from: str
    lines: int = 0


class DatasetInfo(StrictConfig):
    """Description of a token data set (`PREFIX.info`).
    `tokenizer` and `append_eod` are None if differing data sets were merged.

    `text_bytes` counts the UTF-8 bytes of all documents kept; checksums are SHA-256, hex. `made_from` is a digest of
    all inputs and settings of preprocessing; a restarted shard uses it to find that the whole exists. `license` is
    written by the owner of the data, and copied to the data card of an exported model.
    """

    version: Literal[1] = 1
    tokenizer: TokenizerInfo | None
    append_eod: bool | None
    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    skipped: SkippedCounts = SkippedCounts()
    bin_sha256: str
    idx_sha256: str
    chat: ChatInfo | None = None
    images: ImagesInfo | None = None
    shard: DatasetShardInfo | None = None
    made_from: str | None = None
    license: str | None = None


def get_info_path(prefix: Path) -> Path:
    """Return the path of a data set's description: `PREFIX.info`, or earlier versions' `PREFIX.json` if only that exists.

    The suffix differs from those of corpora, so that `wiki.json` can become the data set `wiki`.
    """
    path, earlier = _info_paths(prefix)
    return earlier if not path.exists() and is_dataset_info(earlier) else path


def _info_paths(prefix: Path) -> tuple[Path, Path]:
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".info"), prefix.with_name(prefix.name + ".json")


def is_dataset_info(path: Path) -> bool:
    """Return whether a file is, by its content, the description of a token data set."""
    try:
        raw = parse_json_text(path.read_bytes()) if path.stat().st_size <= MAX_INFO_BYTES else None
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and "bin_sha256" in raw


def get_quarantine_path(prefix: Path) -> Path:
    """Return `PREFIX.quarantine.jsonl`, the file of bad input lines of a data set."""
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".quarantine.jsonl")


def read_dataset_info(prefix: Path) -> DatasetInfo | None:
    """Return the description of a data set, by its prefix or URL; None if it has none (other tools write none).

    Raises:
        DataError, ConfigError: if `PREFIX.info` exists and is not a description.
    """
    path = get_info_path(resolve_local_prefix(prefix))
    if not path.exists():
        return None
    raw: Any = read_json_file(path, DataError)
    if not isinstance(raw, dict):
        raise DataError(f"{path}: is not a data set description (JSON object expected)")
    return DatasetInfo.parse(raw, source=str(path))


def write_dataset_info(prefix: Path, *, folder: Path | None = None, **fields: Any) -> DatasetInfo:
    """Write the description of a data set whose `.bin` and `.idx` are finished, and return it.
    It has `fields` and the computed checksum of the index.

    Before a commit, `folder` is the partial folder with the file `idx`, and the description becomes its file `info`.

    Raises:
        DataError: if the file cannot be written.
    """
    path, index = (folder / "info", folder / "idx") if folder else (get_info_path(prefix), get_idx_path(prefix))
    try:
        info = DatasetInfo(idx_sha256=compute_file_sha256(index), **fields)
        absent = {name for name in ("chat", "images", "shard", "made_from", "license") if getattr(info, name) is None}
        write_json_atomically(path, info.model_dump(exclude=absent))
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    return info


def check_output_prefix(prefix: Path, overwrite: bool) -> None:
    """Raise DataError if an output data set cannot be written at `prefix`.

    A description without a data set is accepted.

    Raises:
        DataError: if the data set exists and `overwrite` is not set, a file there is not a description of mega, or
            `prefix` is a folder, a URL or has no name.
    """
    if "://" in (url := restore_url_slashes(prefix)):
        raise DataError(
            f"{url}: --output must be a local path, because an object store has no atomic rename",
            hint="choose a local --output and copy its files, .idx last; only mega data preprocess uploads by itself",
        )
    if prefix.is_dir() or not prefix.name:
        raise DataError(
            f"{prefix}: --output must be a prefix, not a folder", hint=f"choose a name such as {prefix / 'wiki'}"
        )
    existing = [path for path in (get_idx_path(prefix), get_bin_path(prefix)) if path.exists()]
    if existing and not overwrite:
        raise DataError(f"{existing[0]}: exists already", hint="choose another --output, or pass --overwrite")
    info = get_info_path(prefix)
    if info.exists() and not is_dataset_info(info):
        raise DataError(
            f"{info}: exists and is not a data set description", hint="move the file, or choose another --output"
        )


def list_dataset_files(prefix: Path) -> list[Path]:
    """Return the paths of all files that a data set may have, existing or not."""
    tokens = [get_bin_path(prefix), get_idx_path(prefix)]
    return [*tokens, get_info_path(prefix), get_quarantine_path(prefix), *list_companion_files(prefix).values()]


def reject_input_as_output(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Raise DataError if a file of `outputs` is also one of `inputs`, under any name or link."""
    existing = {get_file_identity(path): path for path in outputs if path.exists()}
    for path in inputs if existing else ():
        if path.exists() and get_file_identity(path) in existing:
            output = existing[get_file_identity(path)]
            shown = f"{output}" if output == path else f"{output} (the same file as {path})"
            raise DataError(f"{shown}: is both an input and the output", hint="choose another --output")


def get_file_identity(path: Path) -> tuple[int, int]:
    """Return (device, inode) of a file, which are equal for all links to it."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def remove_dataset_info(prefix: Path) -> None:
    """Remove the description and the quarantine file of an earlier data set at `prefix`, before it is replaced."""
    path, earlier = _info_paths(prefix)
    path.unlink(missing_ok=True)
    if is_dataset_info(earlier):
        earlier.unlink()
    get_quarantine_path(prefix).unlink(missing_ok=True)


def get_dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a token dtype as in a data set's description: `uint16`, `int32`."""
    return dtype.newbyteorder("=").name


def count_unpaired_answers(prefix: Path) -> int:
    """Return the number of records of a preference data set that have one rated answer instead of a pair.

    It is read from the data set's description; 0 without one.
    """
    info = read_dataset_info(prefix)
    return info.chat.notes.get(UNPAIRED, 0) if info and info.chat else 0

"""Description file `PREFIX.info` of a data set: its tokenizer, counts, checksums and origin."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mega_common.atomic_files import compute_file_sha256, write_json_atomically
from mega_common.bounded_parsing import parse_json_text, read_json_file
from mega_common.errors import DataError
from mega_common.strict_config import StrictConfig
from mega_common.vision_config import Resolution
from mega_data.token_files.indexed_reader import get_bin_path, get_idx_path, list_companion_files, strip_data_suffix
from mega_data.token_files.remote_copies import resolve_local_prefix, restore_url
from mega_data.tokenizer import Tokenizer

UNPAIRED = "have one rated answer instead of a pair, which objective.kind = kto alone trains on"  # a note of `ChatInfo`
LARGEST = 1 << 16  # bytes that a description may have; a corpus of the same name is not read to find out


class TokenizerInfo(StrictConfig):
    """Tokenizer of a data set. `path` is its path at that time; `fingerprint` identifies it."""

    path: str
    fingerprint: str
    vocab_size: int
    eos_id: int | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenizerInfo:
        """Return the description of a loaded tokenizer."""
        return cls(
            path=str(tokenizer.path.resolve()),
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
        )


class SkippedCounts(StrictConfig):
    """Counts of inputs without tokens: bad lines, empty documents, files of folders that are not text."""

    bad: int = 0
    empty: int = 0
    binary: int = 0


class ChatInfo(StrictConfig):
    """Conversion of conversations to tokens and to the bytes of `PREFIX.mask`, the weights of tokens in the loss.

    Attributes:
        kind: conversations are a sequence each; pairs are two in a document, the chosen one first.
        loss_on: what counts.
        one: the byte that stands for weight 1; others are shares and multiples of it.
        template: fingerprint of the chat template; `marked`: whether it says itself what an answer is.
        max_length: tokens that were kept of each; `cut`: answers that lost something to that.
        notes: conversations by what was reported of them, as what the chat template does not render.
        mask_sha256: of `PREFIX.mask.bin`, hex.
    """

    kind: Literal["conversations", "pairs"]
    loss_on: Literal["answers", "last", "all"]
    one: int
    template: str
    marked: bool
    max_length: int | None = None
    cut: int = 0
    notes: dict[str, int] = {}
    mask_sha256: str = ""


class ImagesInfo(StrictConfig):
    """Conversion of images to placeholders: `token` is their id, `tokens` their number per image; `folder` is the base
    of image paths.

    With `pinpoints` (`VisionConfig`) `tokens` are those of the whole image, and those of its tiles follow; with `sizes`
    (likewise) each image has its own.
    """

    folder: str
    token: int
    tokens: int
    pinpoints: tuple[Resolution, ...] | None = None
    sizes: tuple[int, int, int] | None = None


class DatasetShardInfo(StrictConfig):
    """Position of a data set among the shards of a whole (`mega_data.preprocessing.sharding`), and the data needed to
    join them.

    Attributes:
        made_from: a digest of all inputs and settings, which all parts share.
        lines: lines read of the file that the next part goes on with.
    """

    number: int
    of: int
    made_from: str
    lines: int = 0


class DatasetInfo(StrictConfig):
    """Description of a data set. `tokenizer` and `append_eod` are None if differing data sets were merged.

    `text_bytes` counts the UTF-8 bytes of all documents kept; checksums are SHA-256, hex. `made_from` is a digest of all
    inputs and settings, of what preprocessing made; by that one who makes a part sees that the whole is there. `license` is
    what its owner writes there of its terms; the data card of an exported model passes it on.
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
    """Return the path of the description: `PREFIX.info`, or `PREFIX.json` of earlier versions if that exists.

    The name is of no format that corpora come in, so that `wiki.json` can become the data set `wiki`.
    """
    path, earlier = _info_paths(prefix)
    return earlier if not path.exists() and is_dataset_info(earlier) else path


def _info_paths(prefix: Path) -> tuple[Path, Path]:
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".info"), prefix.with_name(prefix.name + ".json")


def is_dataset_info(path: Path) -> bool:
    """Return whether a file, by its content, is the description of a data set."""
    try:
        raw = parse_json_text(path.read_bytes()) if path.stat().st_size <= LARGEST else None
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and "bin_sha256" in raw


def get_quarantine_path(prefix: Path) -> Path:
    """Return `PREFIX.quarantine.jsonl`."""
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".quarantine.jsonl")


def read_dataset_info(prefix: Path) -> DatasetInfo | None:
    """Return the description of a data set, by its prefix or URL; None if it has none (other tools write none).

    Raises:
        DataError, ConfigError: when `PREFIX.info` is there and is not one.
    """
    path = get_info_path(resolve_local_prefix(prefix))
    if not path.exists():
        return None
    raw: Any = read_json_file(path, DataError)
    if not isinstance(raw, dict):
        raise DataError(f"{path}: not the description of a data set")
    return DatasetInfo.parse(raw, source=str(path))


def write_dataset_info(prefix: Path, *, folder: Path | None = None, **fields: Any) -> DatasetInfo:
    """Write and return the description of a finished `.bin` and `.idx`; the checksum of the index is computed here.

    `folder`: where they are while they have no names yet, as `idx` and what is written here as `info`.

    Raises:
        DataError: when the disk refuses.
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
    """Reject an output that exists (unless `overwrite` is set), or whose description file is not from mega.

    A description whose data set is gone stops nobody.

    Raises:
        DataError: when the data set exists, or `prefix` is a folder, a URL or has no name.
    """
    if "://" in (url := restore_url(prefix)):
        raise DataError(
            f"{url}: made in files of this machine, by renames that an object store lacks",
            hint="give another --output, and copy its files there, .idx last; mega data preprocess does so itself",
        )
    if prefix.is_dir() or not prefix.name:
        raise DataError(f"{prefix}: a folder; the output is a prefix, such as {prefix / 'wiki'}")
    there = [path for path in (get_idx_path(prefix), get_bin_path(prefix)) if path.exists()]
    if there and not overwrite:
        raise DataError(f"{there[0]}: exists already", hint="choose another --output, or say --overwrite")
    described = get_info_path(prefix)
    if described.exists() and not is_dataset_info(described):
        raise DataError(f"{described}: is in the way, and no description of a data set", hint="move it away")


def list_dataset_files(prefix: Path) -> list[Path]:
    """Return all files that a data set may have."""
    beside = [get_info_path(prefix), get_quarantine_path(prefix), *list_companion_files(prefix).values()]
    return [get_bin_path(prefix), get_idx_path(prefix), *beside]


def reject_input_as_output(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Reject outputs with any file that is also an input, under any name or link.

    Raises:
        DataError: naming the file.
    """
    made = {_file_identity(path): path for path in outputs if path.exists()}
    for path in inputs if made else ():
        if path.exists() and _file_identity(path) in made:
            output = made[_file_identity(path)]
            shown = f"{output}" if output == path else f"{output}, which is {path},"
            raise DataError(f"{shown}: both an input and the output", hint="choose another --output")


def _file_identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def remove_dataset_info(prefix: Path) -> None:
    """Remove the description files of an earlier data set of this name, before its files are replaced."""
    path, earlier = _info_paths(prefix)
    path.unlink(missing_ok=True)
    if is_dataset_info(earlier):
        earlier.unlink()
    get_quarantine_path(prefix).unlink(missing_ok=True)


def get_dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype as in the description: `uint16`, `int32`."""
    return dtype.newbyteorder("=").name


def count_unpaired_answers(prefix: Path) -> int:
    """Return the number of pairs of a data set that miss an answer, by its description."""
    info = read_dataset_info(prefix)
    return info.chat.notes.get(UNPAIRED, 0) if info and info.chat else 0

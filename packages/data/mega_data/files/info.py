"""`PREFIX.info`, which stands beside `PREFIX.bin` and `PREFIX.idx` and tells what they were made from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mega_common.config import Config
from mega_common.errors import DataError
from mega_common.files import sha256_file, write_json
from mega_common.parsing import parse_json
from mega_common.vision import Resolution
from mega_data.files.fetch import as_given, local_prefix
from mega_data.files.indexed import bin_path, data_prefix, idx_path, names_beside
from mega_data.tokenizer import Tokenizer

UNPAIRED = "have one rated answer instead of a pair, which objective.kind = kto alone trains on"  # a note of `ChatInfo`
LARGEST = 1 << 16  # bytes that a description may have; a corpus of the same name is not read to find out


class TokenizerInfo(Config):
    """Which tokenizer made the tokens. `path` is where it was then; `fingerprint` is what says that it is the same."""

    path: str
    fingerprint: str
    vocab_size: int
    eos_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerInfo:
        """The description of a loaded tokenizer."""
        return cls(
            path=str(tokenizer.path.resolve()),
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
        )


class Skipped(Config):
    """What was read and gave no tokens: bad lines, empty documents, files of folders that are no text."""

    bad: int = 0
    empty: int = 0
    binary: int = 0


class ChatInfo(Config):
    """How conversations became tokens and, beside them, the bytes of `PREFIX.mask`: the weights of tokens in the loss.

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


class ImagesInfo(Config):
    """How images became placeholders: `token` is theirs, `tokens` how many an image has; `folder` is what paths begin at.

    With `pinpoints` (`VisionConfig`) `tokens` are those of the whole image, and those of its tiles follow; with `sizes`
    (likewise) each image has its own.
    """

    folder: str
    token: int
    tokens: int
    pinpoints: tuple[Resolution, ...] | None = None
    sizes: tuple[int, int, int] | None = None


class ShardInfo(Config):
    """Of which whole a data set is one part (`mega_data.making.shards`), and what joining them needs.

    Attributes:
        made_from: a digest of all inputs and settings, which all parts share.
        lines: lines read of the file that the next part goes on with.
    """

    number: int
    of: int
    made_from: str
    lines: int = 0


class DataInfo(Config):
    """What a data set is. `tokenizer` and `append_eod` are None where data sets that differ were merged.

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
    skipped: Skipped = Skipped()
    bin_sha256: str
    idx_sha256: str
    chat: ChatInfo | None = None
    images: ImagesInfo | None = None
    shard: ShardInfo | None = None
    made_from: str | None = None
    license: str | None = None


def info_path(prefix: Path) -> Path:
    """Where a data set is described: `PREFIX.info`, or the `PREFIX.json` that earlier versions wrote if that is there.

    The name is of no format that corpora come in, so that `wiki.json` can become the data set `wiki`.
    """
    path, earlier = _info_paths(prefix)
    return earlier if not path.exists() and is_info(earlier) else path


def _info_paths(prefix: Path) -> tuple[Path, Path]:
    prefix = data_prefix(prefix)
    return prefix.with_name(prefix.name + ".info"), prefix.with_name(prefix.name + ".json")


def is_info(path: Path) -> bool:
    """Whether a file, by what it says, is the description of a data set."""
    try:
        raw = parse_json(path.read_bytes()) if path.stat().st_size <= LARGEST else None
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and "bin_sha256" in raw


def quarantine_path(prefix: Path) -> Path:
    """`PREFIX.quarantine.jsonl`."""
    prefix = data_prefix(prefix)
    return prefix.with_name(prefix.name + ".quarantine.jsonl")


def read_info(prefix: Path) -> DataInfo | None:
    """The description of a data set, by its prefix or URL; None when it has none (other people's tools write none).

    Raises:
        DataError, ConfigError: when `PREFIX.info` is there and is not one.
    """
    path = info_path(local_prefix(prefix))
    if not path.exists():
        return None
    try:
        raw: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if not isinstance(raw, dict):
        raise DataError(f"{path}: not the description of a data set")
    return DataInfo.parse(raw, source=str(path))


def write_info(prefix: Path, *, folder: Path | None = None, **fields: Any) -> DataInfo:
    """Describe a finished `.bin` and `.idx`, whose checksum is taken here, and return the description.

    `folder`: where they are while they have no names yet, as `idx` and what is written here as `info`.

    Raises:
        DataError: when the disk refuses.
    """
    path, index = (folder / "info", folder / "idx") if folder else (info_path(prefix), idx_path(prefix))
    try:
        info = DataInfo(idx_sha256=sha256_file(index), **fields)
        absent = {name for name in ("chat", "images", "shard", "made_from", "license") if getattr(info, name) is None}
        write_json(path, info.model_dump(exclude=absent))
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    return info


def prepare_output(prefix: Path, overwrite: bool) -> None:
    """Refuse to write over a data set unless told to, and over a description that is none of ours at all.

    A description whose data set is gone stops nobody.

    Raises:
        DataError: when the data set exists, or `prefix` is a folder, a URL or has no name.
    """
    if "://" in (url := as_given(prefix)):
        raise DataError(
            f"{url}: made in files of this machine, by renames that an object store lacks",
            hint="give another --output, and copy its files there, .idx last; mega data preprocess does so itself",
        )
    if prefix.is_dir() or not prefix.name:
        raise DataError(f"{prefix}: a folder; the output is a prefix, such as {prefix / 'wiki'}")
    there = [path for path in (idx_path(prefix), bin_path(prefix)) if path.exists()]
    if there and not overwrite:
        raise DataError(f"{there[0]}: exists already", hint="choose another --output, or say --overwrite")
    described = info_path(prefix)
    if described.exists() and not is_info(described):
        raise DataError(f"{described}: is in the way, and no description of a data set", hint="move it away")


def data_files(prefix: Path) -> list[Path]:
    """Every file that a data set may have."""
    beside = [info_path(prefix), quarantine_path(prefix), *names_beside(prefix).values()]
    return [bin_path(prefix), idx_path(prefix), *beside]


def refuse_inputs(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Refuse outputs any file of which, by whatever name or link, is also read.

    Raises:
        DataError: naming the file.
    """
    made = {_identity(path): path for path in outputs if path.exists()}
    for path in inputs if made else ():
        if path.exists() and _identity(path) in made:
            output = made[_identity(path)]
            shown = f"{output}" if output == path else f"{output}, which is {path},"
            raise DataError(f"{shown}: both an input and the output", hint="choose another --output")


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def forget(prefix: Path) -> None:
    """Remove what describes an earlier data set of this name, before its files are replaced."""
    path, earlier = _info_paths(prefix)
    path.unlink(missing_ok=True)
    if is_info(earlier):
        earlier.unlink()
    quarantine_path(prefix).unlink(missing_ok=True)


def little_endian(dtype: np.dtype[Any]) -> str:
    """The name of a dtype as the description has it: `uint16`, `int32`."""
    return dtype.newbyteorder("=").name


def count_unpaired(prefix: Path) -> int:
    """Return how many pairs of a data set miss an answer, as its description says."""
    info = read_info(prefix)
    return info.chat.notes.get(UNPAIRED, 0) if info and info.chat else 0

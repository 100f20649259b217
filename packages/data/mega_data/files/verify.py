"""Is a token data set what it says it is?"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from mega_common.errors import DataError
from mega_common.files import sha256_file
from mega_common.log import ProgressBar
from mega_data.files.indexed import CHUNK, IndexedReader, bin_path, idx_path, mask_prefix
from mega_data.files.info import DataInfo, info_path, little_endian, read_info
from mega_data.files.mask import open_mask
from mega_data.tokenizer import Tokenizer


def verify(prefix: Path, tokenizer: Tokenizer | None = None) -> DataInfo | None:
    """Check structure, checksums and token ids against `PREFIX.info`, and that `tokenizer` is the one that made it.

    Returns the description; None when there is no `PREFIX.info`, and then only the structure was checked and, with a
    tokenizer, that no id is beyond its vocabulary.

    Raises:
        DataError: naming the file and what is wrong with it.
    """
    reader = IndexedReader(Path(prefix))
    info = read_info(reader.prefix)
    if info is not None:
        _check_counts(reader, info)
        if tokenizer is not None:
            check_tokenizer(reader.prefix, info, tokenizer)
    made_by = info.tokenizer if info else None
    vocab_size = tokenizer.vocab_size if tokenizer else made_by.vocab_size if made_by else None
    digest = _check_tokens(reader, vocab_size)
    if info is not None and digest != info.bin_sha256:
        raise DataError(_differs(bin_path(reader.prefix), reader.prefix, digest, info.bin_sha256))
    if info is not None and info.chat is not None:
        open_mask(reader)
        mask = bin_path(mask_prefix(reader.prefix))
        if (digest := sha256_file(mask)) != info.chat.mask_sha256:
            raise DataError(_differs(mask, reader.prefix, digest, info.chat.mask_sha256))
    return info


def check_tokenizer(prefix: Path, info: DataInfo, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the one a data set was made with.

    Raises:
        DataError: naming both.
    """
    if info.tokenizer is not None and info.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{prefix} was made with the tokenizer {info.tokenizer.path} ({info.tokenizer.fingerprint[:12]}),"
            f" which is not {tokenizer.path} ({tokenizer.fingerprint[:12]})"
        )


def _check_counts(reader: IndexedReader, info: DataInfo) -> None:
    found = {
        "dtype": little_endian(reader.dtype),
        "documents": reader.document_index.size - 1,
        "tokens": reader.num_tokens,
    }
    for name, value in found.items():
        if value != getattr(info, name):
            raise DataError(
                f"{reader.prefix}: {name} {value}, but {info_path(reader.prefix)} says {getattr(info, name)}"
            )
    digest = sha256_file(idx_path(reader.prefix))
    if digest != info.idx_sha256:
        raise DataError(_differs(idx_path(reader.prefix), reader.prefix, digest, info.idx_sha256))


def _differs(path: Path, prefix: Path, found: str, expected: str) -> str:
    return f"{path}: changed since it was written: SHA-256 {found[:12]}..., {info_path(prefix)} says {expected[:12]}..."


def _check_tokens(reader: IndexedReader, vocab_size: int | None) -> str:
    """Check every id; returns the SHA-256 of the `.bin`, read at the same time."""
    digest = hashlib.sha256()
    with ProgressBar(f"verifying {reader.prefix}", total=reader.tokens.nbytes or None, unit="bytes") as bar:
        for start in range(0, reader.num_tokens, CHUNK):
            tokens = np.ascontiguousarray(reader.tokens[start : start + CHUNK])
            digest.update(tokens.data)
            bar.advance(tokens.nbytes)
            for wrong in (int(tokens.min()), int(tokens.max())):
                if wrong < 0 or (vocab_size is not None and wrong >= vocab_size):
                    at = start + int(np.argmax(tokens == wrong))
                    raise DataError(
                        f"{bin_path(reader.prefix)}: token {at:,} is {wrong}, outside the vocabulary of {vocab_size or '?'}"
                    )
    return digest.hexdigest()

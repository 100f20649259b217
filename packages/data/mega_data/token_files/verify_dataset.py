"""Verification of token data sets against their descriptions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from mega_common.atomic_files import compute_file_sha256
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar
from mega_data.token_files.dataset_info import DatasetInfo, get_dtype_name, get_info_path, read_dataset_info
from mega_data.token_files.indexed_reader import CHUNK, IndexedReader, get_bin_path, get_idx_path, get_loss_mask_prefix
from mega_data.token_files.loss_mask import open_loss_mask
from mega_data.tokenizer import Tokenizer


def verify_dataset(prefix: Path, tokenizer: Tokenizer | None = None) -> DatasetInfo | None:
    """Check a data set's structure, checksums and token ids (DataError if wrong); return its description, or None.
    It is also checked that `tokenizer` is the one that produced it.

    Returns:
        The description. None without a `PREFIX.info`; only the structure was checked then, and token ids against the
        vocabulary of `tokenizer`, if given.

    Raises:
        DataError: naming the file and the problem.
    """
    reader = IndexedReader(Path(prefix))
    info = read_dataset_info(reader.prefix)
    if info is not None:
        _check_counts(reader, info)
        if tokenizer is not None:
            check_dataset_tokenizer(reader.prefix, info, tokenizer)
    original = info.tokenizer if info else None
    vocab_size = tokenizer.vocab_size if tokenizer else original.vocab_size if original else None
    digest = _check_tokens(reader, vocab_size)
    if info is not None and digest != info.bin_sha256:
        raise DataError(_format_difference(get_bin_path(reader.prefix), reader.prefix, digest, info.bin_sha256))
    if info is not None and info.chat is not None:
        open_loss_mask(reader)
        mask = get_bin_path(get_loss_mask_prefix(reader.prefix))
        if (digest := compute_file_sha256(mask)) != info.chat.mask_sha256:
            raise DataError(_format_difference(mask, reader.prefix, digest, info.chat.mask_sha256))
    return info


def check_dataset_tokenizer(prefix: Path, info: DatasetInfo, tokenizer: Tokenizer) -> None:
    """Raise DataError if `tokenizer` is not the one that made the data set, by fingerprint."""
    if info.tokenizer is not None and info.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{prefix}: requires the tokenizer {info.tokenizer.path} ({info.tokenizer.fingerprint[:12]}),"
            f" not {tokenizer.path} ({tokenizer.fingerprint[:12]})"
        )


def _check_counts(reader: IndexedReader, info: DatasetInfo) -> None:
    found = {
        "dtype": get_dtype_name(reader.dtype),
        "documents": reader.document_index.size - 1,
        "tokens": reader.num_tokens,
    }
    for name, value in found.items():
        if value != getattr(info, name):
            raise DataError(
                f"{reader.prefix}: has {name} = {value}, but {get_info_path(reader.prefix)} has {getattr(info, name)}"
            )
    digest = compute_file_sha256(get_idx_path(reader.prefix))
    if digest != info.idx_sha256:
        raise DataError(_format_difference(get_idx_path(reader.prefix), reader.prefix, digest, info.idx_sha256))


def _format_difference(path: Path, prefix: Path, found: str, expected: str) -> str:
    return (
        f"{path}: was changed after it was written: its SHA-256 is {found[:12]}..., not {expected[:12]}... as in"
        f" {get_info_path(prefix)}"
    )


def _check_tokens(reader: IndexedReader, vocab_size: int | None) -> str:
    """Check every token id and return the SHA-256 of the `.bin`, computed in the same pass."""
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
                        f"{get_bin_path(reader.prefix)}: token {at:,} has id {wrong}, outside the vocabulary of"
                        f" {vocab_size or 'unknown'} ids"
                    )
    return digest.hexdigest()

"""Duplicate detection: text hashes and MinHash signatures, grouped to clusters whose first document is kept.

The search sorts one band of the signatures at a time, so memory is about 50 bytes per document, independent of the
length of the documents and the number of bands; the fingerprints themselves stay on disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.progress_logging import ProgressBar
from mega_data.cleaning.clean_config import MinHashConfig
from mega_data.cleaning.text_words import FACTOR, AnalyzedText, Hashes, hash_ngrams
from mega_data.reading.decompression import import_optional_package

Signatures = npt.NDArray[np.uint32]

NONE = np.uint32(0xFFFFFFFF)  # every hash of the signature of a text without words


def hash_texts(texts: Sequence[AnalyzedText]) -> Hashes:
    """Return the 128-bit XXH3 hash of each text as two halves, uint64 [texts, 2]."""
    digests = b"".join(xxhash.xxh3_128_digest(text.text.encode()) for text in texts)
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def compute_text_minhash_signatures(texts: Sequence[AnalyzedText], settings: MinHashConfig) -> Signatures:
    """Return the MinHash signatures of texts, uint32 [documents, bands * rows].

    A shingle is a run of `ngram` words. A text of fewer words is one shingle; the signature of a text without words is
    all `NONE`.

    Raises:
        MissingPackageError: if rensa is not installed.
    """
    return compute_minhash_signatures([hash_shingles(text.word_hashes, settings) for text in texts], settings)


def hash_shingles(hashes: Hashes, settings: MinHashConfig) -> Hashes:
    """Return the hash of each run of `settings.ngram` consecutive item hashes of a document; a shorter one has one run."""
    return hash_ngrams(hashes, min(settings.ngram, max(1, len(hashes))))


def compute_minhash_signatures(sets: Sequence[Hashes], settings: MinHashConfig) -> Signatures:
    """Return the MinHash signature of each set of shingle hashes, by the package rensa, uint32 [sets, bands * rows].

    Raises:
        MissingPackageError: if rensa is not installed.
    """
    rensa = import_optional_package("rensa", "near-duplicate detection")
    offsets = np.cumsum([0, *map(len, sets)], dtype=np.uint64)
    flat = np.concatenate([np.zeros(0, np.uint64), *sets])
    hashes = settings.bands * settings.rows
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, hashes, settings.seed)
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, hashes)


def get_rensa_version() -> int:
    """Return the version of rensa's MinHash algorithm; signatures of different versions are not comparable.

    Raises:
        MissingPackageError: if rensa is not installed.
    """
    return int(import_optional_package("rensa", "near-duplicate detection").RMinHash.ALGORITHM_VERSION)


Numbers = npt.NDArray[np.int64]

CHUNK = 1 << 15  # documents whose signatures are in memory at once


def find_first_exact_duplicates(hashes: Hashes, dataset_numbers: Numbers | None = None) -> Numbers:
    """Return for each of N documents the index of the first document with equal text, possibly itself: int64 [N].

    Args:
        hashes: uint64 [N, 2], the two halves of each text's hash.
        dataset_numbers: [N], data sets that are not compared with each other.
    """
    leaders = np.arange(len(hashes))
    documents, firsts = _group_by_key(_separate_keys(np.ascontiguousarray(hashes[:, 0]), dataset_numbers))
    same = hashes[documents, 1] == hashes[firsts, 1]
    leaders[documents[same]] = firsts[same]
    return leaders


def find_first_near_duplicates(
    signatures: Signatures, settings: MinHashConfig, leaders: Numbers, dataset_numbers: Numbers | None = None
) -> Numbers:
    """Return for each of N documents the index of the first document of its near-duplicate cluster.
    The result is int64 [N]. `leaders` are clusters to begin with, such as of exact duplicates.

    A document joins the first one that shares a band with it, if the share of equal hashes is at least `threshold`.

    Args:
        signatures: uint32 [N, bands * rows], possibly memory-mapped.
        dataset_numbers: [N], data sets that are not compared with each other.
    """
    leaders = leaders.copy()
    with ProgressBar("comparing signatures", total=settings.bands, unit="bands") as bar:
        for band in range(settings.bands):
            columns = slice(band * settings.rows, (band + 1) * settings.rows)
            documents, firsts = _group_by_key(_separate_keys(_hash_band(signatures, columns), dataset_numbers))
            for start in range(0, len(documents), CHUNK):
                a, b = documents[start : start + CHUNK], firsts[start : start + CHUNK]
                new = leaders[a] != leaders[b]
                a, b = a[new], b[new]
                similar = estimate_jaccard_similarity(signatures, a, b) >= settings.threshold
                _join_clusters(leaders, a[similar], b[similar])
            bar.advance(1)
    return _find_roots(leaders, np.arange(len(leaders)))


def estimate_jaccard_similarity(signatures: Signatures, a: Numbers, b: Numbers) -> npt.NDArray[np.float64]:
    """Return an estimate of the Jaccard similarity of each document pair (`a[i]`, `b[i]`).
    It is the share of equal MinHash values.

    It is 0 for documents without words.
    """
    first = signatures[a]
    return np.where((first == NONE).all(axis=1), 0.0, (first == signatures[b]).mean(axis=1))


def _hash_band(signatures: Signatures, columns: slice) -> Hashes:
    """Return a hash of each document's hashes of one band, uint64 [N]."""
    keys = np.zeros(len(signatures), np.uint64)
    for start in range(0, len(signatures), CHUNK):
        rows = signatures[start : start + CHUNK, columns].astype(np.uint64)
        for column in rows.T:
            keys[start : start + CHUNK] = keys[start : start + CHUNK] * FACTOR + column
    return keys


def _separate_keys(keys: Hashes, sets: Numbers | None) -> Hashes:
    return keys if sets is None else keys ^ (sets.astype(np.uint64) << np.uint64(40))


def _group_by_key(keys: Hashes) -> tuple[Numbers, Numbers]:
    """Return each document with the key of an earlier one, and the first document with that key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(keys)]
    again = np.flatnonzero(~begins)
    begin = np.flatnonzero(begins)
    return order[again], order[begin[np.searchsorted(begin, again) - 1]]


def _join_clusters(leaders: Numbers, a: Numbers, b: Numbers) -> None:
    """Join the clusters of `a[i]` and `b[i]`; the smaller leader leads."""
    while a.size:
        a, b = _find_roots(leaders, a), _find_roots(leaders, b)
        low, high = np.minimum(a, b), np.maximum(a, b)
        np.minimum.at(leaders, high, low)
        different = low != high
        a, b = low[different], high[different]


def _find_roots(leaders: Numbers, documents: Numbers) -> Numbers:
    while True:
        above = leaders[documents]
        if (above == documents).all():
            return documents
        documents = above

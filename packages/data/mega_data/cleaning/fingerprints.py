"""By what duplicates are known: a hash of the text, and a MinHash signature of its shingles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from mega_data.cleaning.config import MinHash
from mega_data.cleaning.words import Hashes, Text, ngrams
from mega_data.reading.unpack import package

Signatures = npt.NDArray[np.uint32]

NONE = np.uint32(0xFFFFFFFF)  # every hash of a signature of no word


def exact_hashes(texts: Sequence[Text]) -> Hashes:
    """The 128 bits of XXH3 of each text, uint64 [documents, 2]."""
    digests = b"".join(xxhash.xxh3_128_digest(text.text.encode()) for text in texts)
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def signatures(texts: Sequence[Text], settings: MinHash) -> Signatures:
    """The MinHash signatures of texts, uint32 [documents, bands * rows].

    A shingle is a run of `ngram` words; a text of fewer words is one shingle, and one without words has no signature
    (`NONE` throughout).

    Raises:
        MissingPackageError: when rensa is not installed.
    """
    return sketched([shingles(text.hashes, settings) for text in texts], settings)


def shingles(hashes: Hashes, settings: MinHash) -> Hashes:
    """The runs of `ngram` of a document's items (words, tokens), whose hashes are given; all of them if there are fewer."""
    return ngrams(hashes, min(settings.ngram, max(1, len(hashes))))


def sketched(sets: Sequence[Hashes], settings: MinHash) -> Signatures:
    """The MinHash signatures of sets of shingles by rensa, uint32 [sets, bands * rows].

    Raises:
        MissingPackageError: when rensa is not installed.
    """
    rensa = package("rensa", "near duplicates")
    offsets = np.cumsum([0, *map(len, sets)], dtype=np.uint64)
    flat = np.concatenate([np.zeros(0, np.uint64), *sets])
    hashes = settings.bands * settings.rows
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, hashes, settings.seed)
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, hashes)


def algorithm() -> int:
    """Which version of its algorithm rensa has: signatures of another cannot be compared.

    Raises:
        MissingPackageError: when rensa is not installed.
    """
    return int(package("rensa", "near duplicates").RMinHash.ALGORITHM_VERSION)

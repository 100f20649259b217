"""Which documents are duplicates of which: groups of equal fingerprints, joined to clusters whose first document stays.

All is done by sorting, one band of the signatures at a time, so that memory grows by about 50 bytes a document, whatever
the length of the documents and the number of bands; the fingerprints themselves stay on disk.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mega_common.log import ProgressBar
from mega_data.cleaning.config import MinHash
from mega_data.cleaning.fingerprints import NONE, Signatures
from mega_data.cleaning.words import FACTOR, Hashes

Numbers = npt.NDArray[np.int64]

CHUNK = 1 << 15  # documents whose signatures are in memory at once


def exact_leaders(hashes: Hashes, apart: Numbers | None = None) -> Numbers:
    """For each document the first with its text, itself where it is that: int64 [N].

    Args:
        hashes: uint64 [N, 2], the two halves of each text's hash.
        apart: [N], data sets that are not compared with each other.
    """
    leaders = np.arange(len(hashes))
    documents, firsts = _groups(_apart(np.ascontiguousarray(hashes[:, 0]), apart))
    same = hashes[documents, 1] == hashes[firsts, 1]
    leaders[documents[same]] = firsts[same]
    return leaders


def near_leaders(signatures: Signatures, settings: MinHash, leaders: Numbers, apart: Numbers | None = None) -> Numbers:
    """For each document the first of its cluster, int64 [N]; `leaders` are the clusters to begin with.

    A document joins the first of those that share a band with it, if so many of their hashes agree as `threshold` says.

    Args:
        signatures: uint32 [N, bands * rows], which may lie on disk.
        apart: [N], data sets that are not compared with each other.
    """
    leaders = leaders.copy()
    with ProgressBar("comparing signatures", total=settings.bands, unit="bands") as bar:
        for band in range(settings.bands):
            columns = slice(band * settings.rows, (band + 1) * settings.rows)
            documents, firsts = _groups(_apart(_band(signatures, columns), apart))
            for start in range(0, len(documents), CHUNK):
                a, b = documents[start : start + CHUNK], firsts[start : start + CHUNK]
                new = leaders[a] != leaders[b]
                a, b = a[new], b[new]
                alike = similarity(signatures, a, b) >= settings.threshold
                _join(leaders, a[alike], b[alike])
            bar.advance(1)
    return _roots(leaders, np.arange(len(leaders)))


def similarity(signatures: Signatures, a: Numbers, b: Numbers) -> npt.NDArray[np.float64]:
    """The share of equal hashes of documents `a` and `b`, [n] each: an estimate of their Jaccard similarity; of none, 0."""
    one = signatures[a]
    return np.where((one == NONE).all(axis=1), 0.0, (one == signatures[b]).mean(axis=1))


def _band(signatures: Signatures, columns: slice) -> Hashes:
    """A hash of each document's hashes of one band, uint64 [N]."""

    keys = np.zeros(len(signatures), np.uint64)
    for start in range(0, len(signatures), CHUNK):
        rows = signatures[start : start + CHUNK, columns].astype(np.uint64)
        for column in rows.T:
            keys[start : start + CHUNK] = keys[start : start + CHUNK] * FACTOR + column
    return keys


def _apart(keys: Hashes, sets: Numbers | None) -> Hashes:
    return keys if sets is None else keys ^ (sets.astype(np.uint64) << np.uint64(40))


def _groups(keys: Hashes) -> tuple[Numbers, Numbers]:
    """Each document whose key an earlier one has, and the first that has it."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(keys)]
    again = np.flatnonzero(~begins)
    begin = np.flatnonzero(begins)
    return order[again], order[begin[np.searchsorted(begin, again) - 1]]


def _join(leaders: Numbers, a: Numbers, b: Numbers) -> None:
    """Make the clusters of `a[i]` and `b[i]` one each, whose leader is the smaller of theirs."""
    while a.size:
        a, b = _roots(leaders, a), _roots(leaders, b)
        low, high = np.minimum(a, b), np.maximum(a, b)
        np.minimum.at(leaders, high, low)
        apart = low != high
        a, b = low[apart], high[apart]


def _roots(leaders: Numbers, documents: Numbers) -> Numbers:
    while True:
        above = leaders[documents]
        if (above == documents).all():
            return documents
        documents = above
